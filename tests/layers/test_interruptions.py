"""A step that is interrupted anywhere leaves a cache as it was, or as it was to be, or one that says so."""

from __future__ import annotations

import copy
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcache_plugins
from kvcache_plugins import KVCache, build_cache
from kvcache_plugins.layers.nonuniform import NonUniformCodec
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing import tiny_model

PACKAGE = str(Path(kvcache_plugins.__file__).parent)
PROMPT, AFTERWARDS = 96, 24
BACKENDS: dict[str, dict[str, Any]] = {
    "int8": {"backend": "int8"},
    "kivi": {"backend": "kivi", "residual_length": 32},
    "torch": {"backend": "int4", "residual_length": 16, "kernel": "torch"},
    "knorm": {"backend": "knorm", "budget": 64, "chunk_size": 32, "evict_at_decode": True},
    "h2o": {"backend": "h2o", "budget": 64, "evict_at_decode": True, "storage": {"backend": "int8"}},
    "heads": {"backend": "snapkv", "budget": 64, "evict_at_decode": True, "head_floor": 0.2},
}
EVERY = 29
"""Lines of the package from one interruption to the next, so that a backend's take a second or two."""


class Interrupting:
    """Traces the package, and interrupts it at a line; counts them."""

    def __init__(self, line: int = 0) -> None:
        self.line, self.count = line, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.line:
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> Interrupting:
        self._before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)


def fed(model: Any, cache: KVCache, tokens: Tensor) -> Tensor:
    """Logits of tokens that come one by one."""
    with torch.no_grad():
        return torch.cat([model(t, past_key_values=cache).logits for t in tokens.split(1, dim=1)], dim=1)


def refusal(model: Any, cache: KVCache) -> str | None:
    """What a cache says that is not to go on."""
    try:
        cache.bind(model)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", BACKENDS)
def test_an_interrupted_step(name: str) -> None:
    model: Any = tiny_model("llama").eval()
    ids = torch.randint(3, 120, (1, PROMPT + 1 + AFTERWARDS), generator=torch.Generator().manual_seed(0))
    before = build_cache(model, BACKENDS[name]).bind(model, prompt_length=PROMPT)
    for chunk in ids[:, :PROMPT].split(32, dim=1):
        with torch.no_grad():
            model(chunk, past_key_values=before)
    step, rest = ids[:, PROMPT : PROMPT + 1], ids[:, PROMPT + 1 :]
    done = copy.deepcopy(before)
    with Interrupting() as counting:
        fed(model, done, step)
    expected = {PROMPT: fed(model, copy.deepcopy(before), torch.cat([step, rest[:, :-1]], dim=1))}
    expected[PROMPT + 1] = fed(model, done, rest)
    whole = torn = 0
    for line in range(1, counting.count + 1, EVERY):
        cache = copy.deepcopy(before)
        with suppress(KeyboardInterrupt), Interrupting(line):
            fed(model, cache, step)
        if (said := refusal(model, cache)) is not None:
            assert "interrupted" in said
            torn += 1
            continue
        seen = cache.get_seq_length()
        assert torch.equal(fed(model, cache, ids[:, seen : seen + AFTERWARDS]), expected[seen])
        whole += 1
    assert whole > 0 and torn > 0


@pytest.mark.parametrize("failing", [1, 2])
def test_a_codec_that_raises(failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first layer, so that all have seen as many tokens; keys are encoded first, then values."""
    model: Any = tiny_model("llama").eval()
    options = {"backend": "kvquant", "calibration": "normal_float", "residual_length": 64, "kernel": "torch"}
    cache = build_cache(model, options)
    ids = torch.randint(3, 120, (1, 320), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids[:, :180], past_key_values=cache)
    cache.save_pretrained(tmp_path)
    calls, encode = 0, NonUniformCodec._encode

    def raising(self: NonUniformCodec, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise MemoryError("no room for codes")
        return encode(self, *args)

    monkeypatch.setattr(NonUniformCodec, "_encode", raising)
    with torch.no_grad(), pytest.raises(MemoryError, match="no room for codes"):
        model(ids[:, 180:], past_key_values=cache)
    for use in (
        lambda: cache.bind(model),
        lambda: cache.save_pretrained(tmp_path),
        lambda: model.generate(ids, **as_argument(cache), max_new_tokens=2),
        lambda: model(ids[:, 180:], past_key_values=cache),
    ):
        with torch.no_grad(), pytest.raises(ValueError, match=r"Layer 0 .* was interrupted .*`reset\(\)`"):
            use()
    saved = KVCache.from_pretrained(tmp_path, model)
    assert saved.get_seq_length() == 180
    cache.reset()
    with torch.no_grad():
        again = model(ids, past_key_values=cache).logits
        expected = model(ids, past_key_values=build_cache(model, options)).logits
    assert torch.equal(again, expected)


@pytest.mark.parametrize("backend", ["kvzip", "sirllm"])
def test_a_forward_that_did_not_come_to_its_end(backend: str) -> None:
    model: Any = tiny_model("llama").eval()
    cache = build_cache(model, {"backend": backend, "budget": 48, "chunk_size": 32})
    ids = torch.randint(3, 120, (1, 96), generator=torch.Generator().manual_seed(0))

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = (model.lm_head if backend == "sirllm" else model.model.norm).register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, **as_argument(cache), max_new_tokens=2, do_sample=False)
    hook.remove()
    with pytest.raises(ValueError, match="interrupted before its end"):
        model.generate(ids, **as_argument(cache), max_new_tokens=2, do_sample=False)


def test_what_is_refused_leaves_a_layer_whole() -> None:
    model: Any = tiny_model("llama").eval()
    for options in (BACKENDS["int8"], BACKENDS["knorm"]):
        cache = build_cache(model, options)
        ids = torch.randint(3, 120, (1, 96), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            model(ids, past_key_values=cache)
        states = torch.zeros(2, 2, 1, 16)
        with pytest.raises(ValueError, match="batch"):
            cache.update(states, states, 0)
        for verb in (cache.crop, cache.layers[0].crop):
            with pytest.raises(ValueError, match="negative integer"):
                verb(3)
        cache.bind(model)
        fed(model, cache, ids[:, :4])
