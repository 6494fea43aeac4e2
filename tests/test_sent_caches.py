"""Caches that are given to other processes: neither process changes what the other holds."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from multiprocessing import get_all_start_methods, get_context, resource_sharer
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

import kvcache_plugins as kvp
from kvcache_plugins.encoder_decoder import layers_of
from kvcache_plugins.layers.counting import owned_tensors
from kvcache_plugins.testing import tiny_model
from tests.models.encoders import decoded, encoder_decoder, source, target
from tests.test_copies import CACHES, logits, made

KIVI = {"backend": "kivi", "residual_length": 32}


@pytest.fixture
def _no_files_wait() -> Iterator[None]:
    """The thread that hands over files, for as long as a test sends to its own process."""
    yield
    resource_sharer.stop(10)


def is_in_shared_memory(cache: Any) -> bool:
    """Whether another process may hold some of it."""
    return any(tensor.is_shared() for layer in layers_of(cache) for tensor in owned_tensors(layer))


@pytest.mark.usefixtures("_no_files_wait")
@pytest.mark.parametrize("name", CACHES)
def test_what_is_sent_is_what_was_held_then(name: str) -> None:
    family, config = CACHES[name]
    model = made(family)
    cache = kvp.build_cache(model, config)
    logits(model, cache, 300)
    undisturbed, expected = copy.deepcopy(cache), logits(model, copy.deepcopy(cache), 70, seed=1)
    parcel = ForkingPickler.dumps(cache)
    assert torch.equal(logits(model, cache, 70), logits(model, undisturbed, 70))  # before it arrives
    received = pickle.loads(parcel)
    assert type(received) is type(cache) and not is_in_shared_memory(cache)
    assert torch.equal(logits(model, received, 70, seed=1), expected)
    assert torch.equal(logits(model, cache, 70), logits(model, undisturbed, 70))


@pytest.mark.usefixtures("_no_files_wait")
def test_both_halves_are_sent() -> None:
    model, given, text = encoder_decoder("bart"), source("bart"), target(200)
    read, more, other = text[:, :100], text[:, 100:150], text[:, 150:]
    cache = kvp.build_cache(model, KIVI).bind(model, encoder_attention_mask=given["attention_mask"])
    decoded(model, given, cache, read, [100])
    expected = [decoded(model, given, copy.deepcopy(cache), tokens, [1] * 50) for tokens in (more, other)]
    received = pickle.loads(ForkingPickler.dumps(cache))
    assert not is_in_shared_memory(cache) and not is_in_shared_memory(received)
    assert torch.equal(decoded(model, given, received, more, [1] * 50), expected[0])
    assert torch.equal(decoded(model, given, cache, other, [1] * 50), expected[1])


def _go_on(connection: Connection) -> None:
    torch.set_num_threads(1)
    model = tiny_model("llama")
    while (cache := connection.recv()) is not None:
        found = logits(model, cache, 70, seed=1)
        connection.send((found.tolist(), is_in_shared_memory(cache)))


SENT = {
    "int4": {"backend": "int4"},
    "kivi": KIVI,
    "kvquant": {"backend": "kvquant", "calibration": "normal_float"},
    "knorm": {"backend": "knorm", "budget": 60, "evict_at_decode": True},
    "locret": CACHES["locret"][1],
}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_another_process_goes_on_by_itself(method: str) -> None:
    if method not in get_all_start_methods():
        pytest.skip(f"this system starts no processes by {method}")
    context, model = get_context(method), tiny_model("llama")
    here, there = context.Pipe()
    worker = context.Process(target=_go_on, args=(there,), daemon=True)
    worker.start()
    there.close()  # the worker's own is the last one, so that nobody waits for a worker that has failed
    for name, config in SENT.items():
        cache = kvp.build_cache(model, config)
        logits(model, cache, 300)
        expected = [logits(model, copy.deepcopy(cache), 70, seed=seed) for seed in range(2)]
        here.send(cache)
        found, is_shared = here.recv()
        assert torch.equal(torch.tensor(found), expected[1]), name
        assert not is_shared and not is_in_shared_memory(cache), name
        assert torch.equal(logits(model, cache, 70), expected[0]), name
    here.send(None)
    worker.join(60)
    assert worker.exitcode == 0
