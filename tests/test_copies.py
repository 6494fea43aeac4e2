"""Copies and pickles of caches go on by themselves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcache_plugins as kvp
from kvcache_plugins.layers.gradients import copies_to_take
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing import tiny_model
from tests.eviction.locret_feeding import locret

COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
}
EVICTING = {"budget": 60, "chunk_size": 48}
CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("llama", {"backend": name}) for name in ("float8", "int4", "int8", "kivi")},
    "kvquant": ("llama", {"backend": "kvquant", "calibration": "normal_float"}),
    "compact": ("llama", {**EVICTING, "backend": "h2o", "positions": "compact"}),
    "sirllm": ("llama", {**EVICTING, "backend": "sirllm", "storage": {"backend": "int8"}}),
    "kvzip": ("llama", {**EVICTING, "backend": "kvzip", "head_floor": 0.4}),
    "locret": ("llama", locret(tiny_model("llama"))),
    "windows": ("gemma2", {"backend": "int8"}),
    "windows-that-evict": ("gemma2", {**EVICTING, "backend": "knorm", "storage": {"backend": "int8"}}),
    "branches": ("falcon_h1", {"backend": "int8"}),
    "latents": ("deepseek_v3", {"backend": "int8"}),
}


def made(family: str) -> Any:
    return tiny_model(family, **({"sliding_window": 256} if family == "gemma2" else {}))


def logits(model: Any, cache: Any, count: int, seed: int = 0) -> Tensor:
    """Of generated tokens after a prompt, which the cache is told of by `generate()`."""
    seen = cache.get_seq_length()
    tokens = torch.randint(3, 120, (1, seen + count), generator=torch.Generator().manual_seed(seed))
    output = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), **as_argument(cache), max_new_tokens=4,
        do_sample=False, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return torch.stack(output.logits)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", CACHES)
def test_a_copied_cache_goes_on_by_itself(name: str, how: str) -> None:
    family, config = CACHES[name]
    model = made(family)
    cache = kvp.build_cache(model, config)
    logits(model, cache, 300)
    copied = COPIES[how](cache)
    assert [type(layer) for layer in copied.layers] == [type(layer) for layer in cache.layers]
    expected = logits(model, cache, 70)
    assert torch.equal(logits(model, copied, 70), expected)


def test_what_is_deep_copied_needs_no_bind_and_what_is_pickled_does() -> None:
    model = tiny_model("llama")
    cache = kvp.build_cache(model, locret(model))
    logits(model, cache, 40)
    token = torch.full((1, 1), 5)
    copied, pickled = (copying(cache) for copying in COPIES.values())
    with torch.no_grad():
        expected = model(token, **as_argument(cache)).logits
        assert torch.equal(model(token, **as_argument(copied)).logits, expected)
        with pytest.raises(kvp.UnsupportedOperationError, match=r"cache.bind\(model\)"):
            model(token, **as_argument(pickled))


GRADIENTS = {
    "int8": {"backend": "int8"},
    "kvzip": {"backend": "kvzip", "budget": 48, "chunk_size": 32},  # which copies what reads a passage again
}


@pytest.mark.parametrize("backend", GRADIENTS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next", "falcon_h1"])
def test_copies_of_what_was_computed_with_gradients(family: str, backend: str) -> None:
    """Such as forwards outside of `torch.no_grad()` make; a backward pass through a copy is refused."""
    model = tiny_model(family)
    tokens = torch.randint(3, 120, (1, 70), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        untouched = kvp.build_cache(model, GRADIENTS[backend])
        model(tokens, **as_argument(untouched))
        expected = model(tokens[:, :5], **as_argument(untouched)).logits
    cache = kvp.build_cache(model, GRADIENTS[backend])
    model(tokens, **as_argument(cache))
    with torch.inference_mode():
        kept = copy.deepcopy(cache)
    with torch.no_grad():
        assert torch.equal(model(tokens[:, :5], **as_argument(kept)).logits, expected)
    for copied in (copy.deepcopy(copy.deepcopy(cache)), cache):
        got = model(tokens[:, :5], **as_argument(copied)).logits
        assert torch.equal(got, expected)
        with pytest.raises(kvp.UnsupportedOperationError, match="A gradient was asked for"):
            got.sum().backward()


def test_a_copy_of_a_computed_tensor_can_be_written_to_and_refuses_gradients() -> None:
    computed = torch.randn(3, 2, requires_grad=True) * 2
    copied = copy.deepcopy({"states": computed}, copies_to_take([computed]))["states"]
    assert torch.equal(copied, computed) and copied.data_ptr() != computed.data_ptr()
    copied[:1].copy_(torch.zeros(1, 2))
    with pytest.raises(kvp.UnsupportedOperationError, match="A gradient was asked for"):
        copied.sum().backward()
    with torch.no_grad():
        assert not copies_to_take([computed])[id(computed)].requires_grad
    assert not copies_to_take([torch.randn(2, requires_grad=True)])
