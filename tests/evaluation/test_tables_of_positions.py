"""Commands over a model that looks its positions up in a table: what goes beyond its end is told."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from kvcache_plugins.cli import main
from tests.evaluation.longbench.rows import write_data

BUNDLED_MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books"
POSITIONS = 332


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random GPT-2 with the bundled model's tokens and a chat template that says much."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    tokenizer.chat_template = "{{ 'Answer well. ' * 40 }}{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": POSITIONS}
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(**sizes, **tokens)).save_pretrained(folder)
    return str(folder)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return capsys.readouterr().err


TABLE = f"must be at most {POSITIONS}, got {{}}: the model looks its {POSITIONS} positions up in a table"


@pytest.mark.filterwarnings("ignore:--context_length")
def test_perplexity(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "book.txt"
    text.write_text(topics["specialnames"], encoding="utf-8")
    asked = ("eval", "perplexity", "--model", model, "--dataset", "text", "--text_files", str(text))
    of_int8 = ("--cache_config", '{"backend": "int8"}', "--max_windows", "1", "--no_plots")
    said = refused(capsys, *asked, *of_int8, "--output", str(tmp_path / "out"), "--context_length", "333")
    assert f"--context_length {TABLE.format(333)}" in said
    assert main([*asked, *of_int8, "--output", str(tmp_path / "out"), "--context_length", "332"]) == 0


def test_longbench(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_data(tmp_path / "data")
    files = ("--data_dir", str(data), "--prompts", str(data / "prompts.json"))
    asked = ("eval", "longbench", "--model", model, *files, "--output", str(tmp_path / "out"))
    said = refused(capsys, *asked, "--cache_config", '{"backend": "int8"}', "--max_length", "300")
    assert "Row 1 of hotpotqa, cut to --max_length 300, in its chat template and with its answer" in said
    assert f"must be at most {POSITIONS}, got " in said


def test_benchmark(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("bench", "generate", "--model", model, "--max_new_tokens", "17", "--output", str(tmp_path))
    said = refused(capsys, *asked, "--cache_config", '{"backend": "int8"}', "--lengths", "317")
    assert f"--lengths plus --max_new_tokens less one {TABLE.format(333)}" in said
