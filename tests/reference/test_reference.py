"""The fidelity oracle, and the independence of this folder."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from .caches import oracle_cache
from .fidelity import block_logits, fidelity

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
)


def test_oracles_do_not_import_the_package() -> None:
    for path in Path(__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                # A relative import of one level stays in this folder.
                assert node.level <= 1, f"{path.name}: line {node.lineno}"
                names = [node.module or ""]
            assert not any(name.split(".")[0] == "kvcache_plugins" for name in names), f"{path.name}: {names}"


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # random weights attend to everything alike; sharpen them
            parameter.mul_(4 if parameter.dim() == 2 else 1)
    return model


class TestFidelity:
    def test_dense_against_itself(self, model: LlamaForCausalLM) -> None:
        ids = torch.randint(64, (300,))
        result = fidelity(model, ids, DynamicCache, window=96, prefill=32, block=16)
        assert result["kl"] == 0.0
        assert result["top1"] == 1.0
        assert result["nll"] == result["dense_nll"]

    def test_every_token_after_the_prefill_is_predicted_once(self, model: LlamaForCausalLM) -> None:
        ids = torch.randint(64, (200,))
        result = fidelity(model, ids, DynamicCache, window=90, prefill=32, block=16)
        nll = 0.0
        for window in (ids[:90], ids[90:180]):
            with torch.no_grad():
                logp = model(window[None]).logits[0].log_softmax(-1)
            nll -= sum(float(logp[position - 1, window[position]]) for position in range(32, 90))
        assert result["nll"] == pytest.approx(nll / (2 * 58), rel=1e-5)
        assert block_logits(model, ids[None, :90], DynamicCache(), prefill=32, block=16).shape == (58, 64)

    def test_fewer_bits_lose_more(self, model: LlamaForCausalLM) -> None:
        ids = torch.randint(64, (192,))
        losses = []
        for nbits in (8, 4, 2):
            options: dict[str, Any] = {"key_bits": nbits, "value_bits": nbits, "residual_length": 0}
            make_cache = functools.partial(oracle_cache, model.config, "int4", **options)
            losses.append(fidelity(model, ids, make_cache, window=96, prefill=32, block=16)["kl"])
        assert 0 < losses[0] < losses[1] / 10
        assert losses[1] < losses[2] / 3

    def test_a_text_shorter_than_a_window(self, model: LlamaForCausalLM) -> None:
        with pytest.raises(ValueError, match=r"at least one window \(96 tokens\), got 95"):
            fidelity(model, torch.zeros(95, dtype=torch.long), DynamicCache, window=96)
