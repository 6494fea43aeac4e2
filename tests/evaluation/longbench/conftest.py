"""A small random model with the bundled tokenizer, and rows of two tasks with short answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.evaluation.longbench.rows import write_data

BUNDLED_MODEL = Path(__file__).resolve().parents[3] / "examples" / "models" / "tiny-llama-books"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random model of two layers that reads the bundled model's tokens."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, folder / name)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Folder of the data."""
    return write_data(tmp_path / "data")
