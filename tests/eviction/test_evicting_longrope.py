"""Phi-3's long RoPE: transformers drops the cache of a prompt it is shown at once; ours must not go so."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvcache_plugins.eviction.cache import EvictingCache
from kvcache_plugins.models.cache_argument import cache_of
from kvcache_plugins.testing.models import tiny_model
from tests.eviction.feeding import bound_cache, chunks_of, feed, ids

ORIGINAL = 40
_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0, "long_factor": [2.0] * 8,
    "short_factor": [1.0] * 8, "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip


@functools.cache
def _model() -> PreTrainedModel:
    return tiny_model(
        "phi3", attn_implementation="sdpa", vocab_size=512, max_position_embeddings=320,
        original_max_position_embeddings=ORIGINAL, rope_parameters=_ROPE, sliding_window=None,
    )  # fmt: skip


def _generate(length: int, chunk: int | None, backend: str = "knorm", new: int = 5) -> Any:
    return _model().generate(  # type: ignore[operator]
        ids(length), max_new_tokens=new, do_sample=False, cache_implementation="quantized",
        cache_config={"backend": backend, "budget": 24, "chunk_size": chunk}, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip


@pytest.mark.parametrize("chunk", [16, ORIGINAL])
@pytest.mark.parametrize("backend", ["expected_attention", "knorm", "h2o", "kvzip"])
def test_a_long_prompt_in_chunks(backend: str, chunk: int) -> None:
    output = _generate(77, chunk, backend)
    assert isinstance(cache_of(output), EvictingCache)
    assert cache_of(output).get_seq_length() == 81
    assert cache_of(output).num_held() == 24 + 4
    cache = bound_cache(_model(), {"backend": backend, "budget": 24}, 77)
    logits = feed(_model(), cache, output.sequences[:, :-1], [*chunks_of(77, chunk), *[1] * 4])
    torch.testing.assert_close(torch.stack(output.logits, 1), logits[:, 76:], atol=1e-5, rtol=0.0)


def test_a_prompt_and_an_answer_within_the_short_range() -> None:
    output = _generate(30, 16)
    assert isinstance(cache_of(output), EvictingCache)
    assert cache_of(output).num_held() == 24 + 4


@pytest.mark.parametrize("chunk", [None, ORIGINAL + 1], ids=["whole", "chunks-too-long"])
def test_a_long_prompt_is_read_in_chunks_of_the_short_range(chunk: int | None) -> None:
    output = _generate(77, chunk)
    assert isinstance(cache_of(output), EvictingCache)
    assert cache_of(output).get_seq_length() == 81


def test_a_cache_that_is_dropped_while_generating_is_not_dropped_silently() -> None:
    with pytest.warns(UserWarning, match=f"frequencies at {ORIGINAL} tokens"):
        _generate(ORIGINAL - 1, 16)


def test_a_repetition_beyond_the_switch_goes_on_with_the_frequencies_of_the_text() -> None:
    twin: Any = _model.__wrapped__()  # of one set of frequencies
    rotary = twin.model.rotary_emb
    rotary.rope_type, rotary.inv_freq = "default", rotary.original_inv_freq.clone()
    kept = []
    for model in (_model(), twin):
        cache = bound_cache(model, {"backend": "kvzip", "budget": 20}, ORIGINAL - 2)
        feed(model, cache, ids(ORIGINAL - 2), [16, 16, 6])
        kept.append([layer.ledger.positions.tolist() for layer in cache.evicting_layers])
    assert kept[0] == kept[1]
