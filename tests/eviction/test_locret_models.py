"""Retaining heads beside other models, other caches and other threads: nobody sees what is not theirs."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcache_plugins.backends.locret import LocretCache
from kvcache_plugins.models.cache_argument import cache_of
from kvcache_plugins.retaining import projections
from kvcache_plugins.testing.models import tiny_model
from tests.eviction.feeding import chunks_of, feed, ids, model_of
from tests.eviction.locret_feeding import bound_locret, locret

PROMPT, NEW = 77, 20
OPTIONS: dict[str, dict[str, Any]] = {"absolute": {}, "compact": {"positions": "compact"}}


def _generate(model: Any, seed: int, config: dict[str, Any] | None) -> tuple[Tensor, Tensor, Any]:
    arguments = {} if config is None else {"cache_implementation": "quantized", "cache_config": config}
    output = model.generate(
        ids(PROMPT, seed=seed), max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True,
        output_logits=True, **arguments,
    )  # fmt: skip
    return output.sequences, torch.stack(output.logits, dim=1), cache_of(output)


# --- models and caches side by side


@pytest.mark.parametrize("name", OPTIONS)
def test_two_models_at_once(name: str) -> None:
    models = [model_of(), model_of("phi3")]
    counts = [*chunks_of(PROMPT, 16), *[1] * 5]
    tokens = [ids(sum(counts), seed=seed) for seed in (1, 2)]

    def cache_of(index: int) -> Any:
        return bound_locret(models[index], PROMPT, seed=index, **OPTIONS[name])

    caches, start = [cache_of(0), cache_of(1)], 0
    got: list[list[Tensor]] = [[], []]
    for count in counts:  # by turns
        for index in (0, 1):
            part = tokens[index][:, start : start + count]
            got[index].append(feed(models[index], caches[index], part, [count]))
        start += count
    for index in (0, 1):
        alone = cache_of(index)
        assert torch.equal(torch.cat(got[index], 1), feed(models[index], alone, tokens[index], counts))
        for layer, other in zip(caches[index].evicting_layers, alone.evicting_layers, strict=True):
            assert torch.equal(layer.ledger.positions, other.ledger.positions)
            assert torch.equal(layer.ledger.scores, other.ledger.scores)


def test_two_caches_with_different_heads_on_one_model() -> None:
    model, counts = model_of(), chunks_of(PROMPT, 16)
    caches = [bound_locret(model, PROMPT, seed=seed) for seed in (0, 1)]
    for count in counts:
        for cache in caches:
            seen = cache.get_seq_length()
            feed(model, cache, ids(PROMPT)[:, seen : seen + count], [count])
    for seed, cache in enumerate(caches):
        alone = bound_locret(model, PROMPT, seed=seed)
        feed(model, alone, ids(PROMPT), counts)
        for layer, other in zip(cache.evicting_layers, alone.evicting_layers, strict=True):
            assert torch.equal(layer.ledger.scores, other.ledger.scores)
    assert (caches[0].evicting_layers[0].ledger.scores != caches[1].evicting_layers[0].ledger.scores).any()


@pytest.mark.parametrize("name", OPTIONS)
def test_other_caches_of_the_model_are_left_alone(name: str) -> None:
    untouched = model_of()
    model = copy.deepcopy(untouched)
    expected = {str(config): _generate(untouched, 3, config)[:2] for config in (None, {"backend": "int8"})}
    first = _generate(model, 3, locret(model, **OPTIONS[name]))
    for config in (None, {"backend": "int8"}):
        for got, wanted in zip(_generate(model, 3, config), expected[str(config)], strict=False):
            assert torch.equal(got, wanted)
    again = _generate(model, 3, locret(model, **OPTIONS[name]))
    assert torch.equal(first[1], again[1])
    assert model.state_dict().keys() == untouched.state_dict().keys()


# --- what is kept alive


@pytest.mark.parametrize("backend", ["dense", "locret"])
def test_no_projection_outlives_its_layer(backend: str) -> None:
    model: Any = tiny_model("llama", vocab_size=512)
    bound_locret(model, PROMPT)  # hooks are there
    caught: list[weakref.ref[Tensor]] = []
    attention = model.model.layers[1].self_attn
    attention.q_proj.register_forward_hook(lambda module, args, output: caught.append(weakref.ref(output)))
    alive = []
    model.model.layers[1].mlp.register_forward_pre_hook(
        lambda module, args: alive.append(caught[-1]() is not None)
    )
    _, _, cache = _generate(model, 3, locret(model) if backend == "locret" else None)
    assert len(alive) >= NEW and not any(alive)  # gone as soon as attention is done
    assert cache is not None and projections._open_slots() == {}


def test_caches_and_models_can_go() -> None:
    model: Any = tiny_model("llama", vocab_size=512)
    _, _, cache = _generate(model, 3, locret(model))
    references = [weakref.ref(cache), *map(weakref.ref, cache.layers)]
    del cache
    gc.collect()
    assert not any(reference() for reference in references)  # the hooks of the model know no cache

    _, _, cache = _generate(model, 3, locret(model))
    reference, tokens = weakref.ref(model), cache.get_seq_length()
    del model
    gc.collect()
    assert reference() is None  # nor does a cache keep its model
    assert cache.get_seq_length() == tokens
    with pytest.raises(NotImplementedError, match="Layer 0 was not told which model"):
        cache.layers[0].update(*[torch.zeros(1, 2, 1, 16)] * 2)
    other = tiny_model("llama", vocab_size=512)
    feed(other, cache.bind(other), ids(3), [1, 1, 1])
    assert cache.get_seq_length() == tokens + 3


def test_a_failure_in_the_middle_leaves_nothing_behind() -> None:
    model: Any = tiny_model("llama", vocab_size=512)
    cache, counts = bound_locret(model, PROMPT), chunks_of(PROMPT, 16)
    expected = feed(model, bound_locret(model, PROMPT), ids(PROMPT), counts)

    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    handle = model.model.layers[0].self_attn.v_proj.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        feed(model, cache, ids(PROMPT), counts)
    handle.remove()
    assert projections._open_slots() == {} and cache.get_seq_length() == 0
    assert torch.equal(feed(model, cache, ids(PROMPT), counts), expected)


# --- threads


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def _at_once(*tasks: Callable[[], Any]) -> list[Any]:
    """Results of tasks that are begun together, each in a thread of its own."""
    barrier = threading.Barrier(len(tasks))

    def run(task: Callable[[], Any]) -> Any:
        barrier.wait()
        return task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(run, tasks))


def _same_answers(served: Any, configs: list[dict[str, Any] | None], expected: list[Any]) -> None:
    """Texts read at once, each through its own cache, are answered as they were one after the other."""
    tasks = [partial(_generate, served, seed, config) for seed, config in enumerate(configs)]
    for got, (sequences, logits, cache) in zip(_at_once(*tasks), expected, strict=True):
        assert torch.equal(got[0], sequences)
        assert torch.equal(got[1], logits)
        if isinstance(cache, LocretCache):
            for layer, other in zip(got[2].evicting_layers, cache.evicting_layers, strict=True):
                assert torch.equal(layer.ledger.positions, other.ledger.positions)
                assert torch.equal(layer.ledger.scores, other.ledger.scores)


@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.parametrize("name", OPTIONS)
def test_threads_with_one_model(name: str) -> None:
    model = copy.deepcopy(model_of())
    configs = [locret(model, 0, **OPTIONS[name]), locret(model, 1, **OPTIONS[name]), None]
    expected = [_generate(model, seed, config) for seed, config in enumerate(configs)]
    for _ in range(3):
        _same_answers(model, configs, expected)


def test_a_thread_waits_for_the_hooks_that_another_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    register, is_registering = nn.Module.register_forward_hook, threading.Event()

    def register_slowly(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if isinstance(module, nn.Linear):  # a projection
            is_registering.set()
            time.sleep(0.1)
        return register(module, *args, **kwargs)

    model, config = model_of(), locret(model_of())
    expected = _generate(model, 0, config)[1]
    served = tiny_model("llama", attn_implementation="sdpa", vocab_size=512)  # without hooks
    monkeypatch.setattr(nn.Module, "register_forward_hook", register_slowly)

    def follow() -> Any:
        assert is_registering.wait(timeout=10)
        return _generate(served, 0, config)

    for _, logits, _ in _at_once(partial(_generate, served, 0, config), follow):
        assert torch.equal(logits, expected)
