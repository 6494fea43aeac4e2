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
from kvcache_plugins.layers.checking import changing
from kvcache_plugins.layers.nonuniform import NonUniformCodec
from kvcache_plugins.layers.rows import num_rows
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing import tiny_model

PACKAGE = str(Path(kvcache_plugins.__file__).parent)
PROMPT, AFTERWARDS = 96, 24
BACKENDS: dict[str, dict[str, Any]] = {
    "int8": {"backend": "int8"},
    "skipped": {"backend": "int8", "skip_layers": [1]},
    "kivi": {"backend": "kivi", "residual_length": 32},
    "torch": {"backend": "int4", "residual_length": 16, "kernel": "torch"},
    "knorm": {"backend": "knorm", "budget": 64, "chunk_size": 32, "evict_at_decode": True},
    "h2o": {"backend": "h2o", "budget": 64, "evict_at_decode": True, "storage": {"backend": "int8"}},
    "heads": {"backend": "snapkv", "budget": 64, "evict_at_decode": True, "head_floor": 0.2},
}
EVERY = 29
"""Lines of a step from one interruption to the next, so that a backend's take a second or two."""
UNTRACED = f"{PACKAGE}/layers/lazy.py"
"""Switches torch functions off and on, which is nothing that a layer holds."""
VERBS = tuple(
    f"{PACKAGE}/{name}.py" for name in ("layers/verbs", "eviction/headwise", "eviction/layer", "layers/base")
)
"""Where verbs are done, of which every line is interrupted."""


class Interrupting:
    """Traces the package, and interrupts it at a line; counts them."""

    def __init__(self, line: int = 0, files: tuple[str, ...] = (PACKAGE,)) -> None:
        self.line, self.files, self.count = line, files, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(self.files) or file == UNTRACED:
            return self if file.startswith(PACKAGE) else None
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


def fed_rows(model: Any, cache: KVCache, tokens: Tensor) -> Tensor:
    """The same, of as many rows as the cache holds."""
    rows = num_rows(cache.packed_layers[0]) // len(tokens)
    return fed(model, cache, tokens.repeat_interleave(rows, dim=0))


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
    modes = torch._C._is_torch_function_enabled(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
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
    assert modes == (
        torch._C._is_torch_function_enabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
    )


@pytest.mark.parametrize("verb", ["crop", "reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
@pytest.mark.parametrize("name", ["int8", "skipped", "knorm", "heads"])
def test_an_interrupted_verb(name: str, verb: str) -> None:
    """At every line where it is done: what is not whole says so, all else is as before or as it was to be."""
    model: Any = tiny_model("llama").eval()
    ids = torch.randint(3, 120, (2, PROMPT + AFTERWARDS), generator=torch.Generator().manual_seed(0))
    before = build_cache(model, BACKENDS[name]).bind(model, prompt_length=PROMPT)
    with torch.no_grad():
        for chunk in ids[:, : PROMPT + 4].split(32, dim=1):
            model(chunk, past_key_values=before)
    argument: Any = {"crop": -2, "batch_repeat_interleave": 2}.get(verb, torch.tensor([1, 0]))
    further = ids[:, PROMPT + 4 :]

    def changed(cache: KVCache) -> KVCache:
        getattr(cache, verb)(argument)
        return cache

    with Interrupting(files=VERBS) as counting:
        after = changed(copy.deepcopy(before))
    allowed = [fed_rows(model, copy.deepcopy(cache), further) for cache in (before, after)]
    torn = 0
    for line in range(1, counting.count + 1):
        cache = copy.deepcopy(before)
        with suppress(KeyboardInterrupt), Interrupting(line, VERBS):
            changed(cache)
        if (said := refusal(model, cache)) is not None:
            assert "interrupted" in said
            torn += 1
            continue
        got = fed_rows(model, cache, further)
        assert any(torch.equal(got, logits) for logits in allowed), f"line {line}"
    assert 0 < torn < counting.count


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
        for shape, said in (((2, 2, 1, 16), "batch"), ((1, 2, 1, 24), r"holds .* \(16, 16\) channels, got")):
            with pytest.raises(ValueError, match=said):
                cache.update(torch.zeros(shape), torch.zeros(shape), 0)
        for verb in (cache.crop, cache.layers[0].crop):
            with pytest.raises(ValueError, match="negative integer"):
                verb(3)
        cache.bind(model)
        fed(model, cache, ids[:, :4])


def test_a_first_call_that_was_interrupted_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model("llama").eval()
    ids = torch.randint(3, 120, (1, 96), generator=torch.Generator().manual_seed(0))
    cache = build_cache(model, BACKENDS["int8"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(cache.packed_layers[0]), "_append", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.generate(ids, **as_argument(cache), max_new_tokens=2, do_sample=False)
    got = model.generate(ids, **as_argument(cache), max_new_tokens=8, do_sample=False)
    fresh = as_argument(build_cache(model, BACKENDS["int8"]))
    assert torch.equal(got, model.generate(ids, **fresh, max_new_tokens=8, do_sample=False))


def test_a_layer_that_was_emptied_is_whole() -> None:
    model: Any = tiny_model("llama").eval()
    ids = torch.randint(3, 120, (1, 60), generator=torch.Generator().manual_seed(0))
    for name in ("int8", "knorm"):
        cache = build_cache(model, BACKENDS[name])
        with torch.no_grad():
            model(ids, past_key_values=cache)
        cache.layers[0].is_torn = True
        cache.crop(-60)
        cache.bind(model)
        fed(model, cache, ids[:, :4])


@pytest.mark.parametrize("backend", ["snapkv", "h2o"])
def test_nothing_was_missed_where_nothing_had_to_go(backend: str, tmp_path: Path) -> None:
    """Filled without a model, which shows no queries: of these only a sum over all of them misses some."""
    model: Any = tiny_model("llama").eval()
    cache = build_cache(model, {"backend": backend, "budget": 128})
    states = torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    for layer in range(2):
        cache.update(states, states, layer)
    if backend == "snapkv":
        cache.save_pretrained(tmp_path)
        cache.bind(model)
        fed(model, cache, torch.arange(3, 9)[None])
    else:
        with pytest.raises(ValueError, match="have not been shown what their newest tokens are worth"):
            cache.save_pretrained(tmp_path)


def test_a_torn_layer_stays_torn_until_it_is_emptied() -> None:
    # Changes are made within others, of which the outer one may yet be interrupted.
    layer = build_cache(tiny_model("llama"), BACKENDS["int8"]).packed_layers[0]
    states = torch.randn(1, 2, 70, 16)
    layer.update(states, states)
    with changing(layer):
        with changing(layer):
            pass
        assert layer.is_torn
        with pytest.raises(ValueError, match="Layer 0 of this cache was interrupted"):
            layer.update(states, states)
        with changing(layer):
            layer._forget()
            layer.is_torn = True
        assert not layer.is_torn


def test_a_torn_group_of_heads_is_noticed() -> None:
    model: Any = tiny_model("llama", num_key_value_heads=4).eval()
    cache = build_cache(model, {**BACKENDS["heads"], "budget": 24})
    ids = torch.randint(3, 120, (1, 60), generator=torch.Generator().manual_seed(0))
    model.generate(ids, **as_argument(cache), max_new_tokens=2, do_sample=False)
    part = cache.packed_layers[0].uniform_layers[-1]
    assert part is not cache.packed_layers[0]
    part.is_torn = True
    with pytest.raises(ValueError, match="was interrupted while it took tokens"):
        cache.bind(model)


def test_a_step_that_not_all_groups_of_heads_took_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model("llama", num_key_value_heads=4).eval()
    cache = build_cache(model, {**BACKENDS["heads"], "budget": 24})
    ids = torch.randint(3, 120, (1, 60), generator=torch.Generator().manual_seed(0))
    model.generate(ids, **as_argument(cache), max_new_tokens=2, do_sample=False)
    layer = cache.packed_layers[0]
    *_, last = layer.uniform_layers
    monkeypatch.setattr(last, "update", lambda *states: 1 / 0)
    states = torch.randn(1, 4, 1, 16)
    with pytest.raises(ZeroDivisionError):
        layer.update(states, states)
    with pytest.raises(ValueError, match="was interrupted while it took tokens"):
        cache.bind(model)
