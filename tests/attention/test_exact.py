"""Exact tokens in half precision: read by the native kernel where the model's attention lets it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache_plugins import build_cache
from kvcache_plugins.attention.exact import TorchAttention, reads_exact_tokens_faster
from kvcache_plugins.kernels import loader
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing import tiny_model

CONFIG = {"backend": "streaming_llm", "budget": 40, "chunk_size": 16, "sink_length": 2}


def run(dtype: torch.dtype, kernel: str = "auto", attention: str = "sdpa") -> tuple[list[torch.Tensor], Any]:
    model = tiny_model("llama", dtype=dtype)
    model.set_attn_implementation(attention)
    cache = build_cache(model, {**CONFIG, "kernel": kernel})
    cache.bind(model, prompt_length=64)
    ids = torch.randint(3, 120, (2, 72), generator=torch.Generator().manual_seed(1))
    logits = []
    with torch.no_grad():
        for start, stop in [*((i, i + 16) for i in range(0, 64, 16)), *((i, i + 1) for i in range(64, 72))]:
            logits.append(model(ids[:, start:stop], **as_argument(cache)).logits.float())
    return logits, cache


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_half_precision_is_read_by_the_kernel(dtype: torch.dtype) -> None:
    if not loader.try_load():
        pytest.skip("there are no CPU kernels")
    (fast, cache), (plain, other) = run(dtype), run(dtype, kernel="torch")
    assert set(cache.report().kernel) == {"cpu"} and set(other.report().kernel) == {"dense"}
    exact, _ = run(torch.float32)
    # both are as near to single precision as that dtype is
    for ours, theirs, reference in zip(fast, plain, exact, strict=True):
        norm = reference.norm()
        assert (ours - reference).norm() / norm < 1.5 * (theirs - reference).norm() / norm + 1e-3


def test_single_precision_is_read_by_the_kernel() -> None:
    if not loader.try_load():
        pytest.skip("there are no CPU kernels")
    (fast, cache), (plain, other) = run(torch.float32), run(torch.float32, kernel="torch")
    is_vector = loader.instruction_set() != "portable"
    assert set(cache.report().kernel) == {"cpu" if is_vector else "dense"}
    assert set(other.report().kernel) == {"dense"}
    for ours, theirs in zip(fast, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("has_amx", [False, True])
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_many_queries(dtype: torch.dtype, has_amx: bool, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are read by the kernel of the widest vectors, where torch has nothing faster."""
    monkeypatch.setattr(loader, "instruction_set", lambda: isa)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    states = torch.zeros(1, 2, 9, 16, dtype=dtype)
    is_served, is_half = loader.try_load(), dtype != torch.float32
    is_faster = isa == "avx512" and (not is_half or (dtype == torch.bfloat16 and not has_amx))
    assert reads_exact_tokens_faster(states, "auto") is (is_served and is_faster)
    few = is_served and (is_half or isa != "portable")
    assert reads_exact_tokens_faster(states[:, :, :8], "auto") is few
    assert not reads_exact_tokens_faster(states, "torch")
    assert not reads_exact_tokens_faster(states[:, :, :1], "torch")


@pytest.mark.parametrize("has_amx", [False, True])
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_many_queries_of_models_that_make_all_logits_at_once(
    dtype: torch.dtype, isa: str, has_amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not loader.try_load():
        pytest.skip("there are no CPU kernels")
    monkeypatch.setattr(loader, "instruction_set", lambda: isa)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    states = torch.zeros(1, 2, 9, 16, dtype=dtype)
    is_served = dtype != torch.float64
    has_kernel = isa != "portable" and not has_amx
    assert reads_exact_tokens_faster(states, "auto", TorchAttention.WHOLE) is is_served
    of_eager = reads_exact_tokens_faster(states, "auto", TorchAttention.EAGER)
    assert of_eager is (is_served and (dtype != torch.bfloat16 or has_kernel))
    for way in TorchAttention:
        assert not reads_exact_tokens_faster(states, "torch", way)
        few = reads_exact_tokens_faster(states[:, :, :8], "auto", way)
        is_half = dtype in (torch.bfloat16, torch.float16)
        assert few is (is_half or (dtype == torch.float32 and isa != "portable"))


@pytest.mark.parametrize("way", list(TorchAttention))
def test_without_kernels(way: TorchAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's tiles serve where the model would make all logits, except in bf16 what is written out."""
    monkeypatch.setattr(loader, "try_load", lambda: False)
    found = {
        dtype: reads_exact_tokens_faster(torch.zeros(1, 2, 9, 16, dtype=dtype), "auto", way)
        for dtype in (torch.float32, torch.bfloat16)
    }
    neither = False, False
    expected = {
        TorchAttention.FLASH: neither,
        TorchAttention.SPARSE: neither,
        TorchAttention.EAGER: (True, False),
    }
    assert tuple(found.values()) == expected.get(way, (True, True))
