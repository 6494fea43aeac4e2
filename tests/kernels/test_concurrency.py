"""Whole generations at the same time, and on both sides of a fork: each in a process of its own."""

from __future__ import annotations

import textwrap

import pytest

from kvcache_plugins.kernels import loader
from tests.kernels import fresh_process

# 600 tokens of two heads of 64 channels are enough for the kernels to share the work among OpenMP's threads.
RUNS = """
    import os, signal, threading, time, torch
    from kvcache_plugins import build_cache
    from kvcache_plugins.models.cache_argument import as_argument
    from kvcache_plugins.testing import tiny_model
    from kvcache_plugins.testing.conformance import decoded
    from kvcache_plugins.testing.generation import padded_prompt

    CONFIGS = [
        {"backend": "kivi", "nbits": 2},
        {"backend": "kivi", "nbits": 3, "rope_mode": "block", "q_group_size": 64},
        {"backend": "kivi", "nbits": 4, "q_group_size": 128},
        {"backend": "int4"},
        {"backend": "int4", "smooth": 0.5, "sink_length": 4},
        {"backend": "int8"},
        {"backend": "int8", "granularity": "group", "q_group_size": 16},
        {"backend": "float8"},
    ]
    MODELS = [tiny_model(name, head_dim=64) for name in ("llama", "qwen2")]  # without, and with biased keys

    def run(index, threads=2):
        torch.set_num_threads(threads)
        model, prompt = MODELS[index % 2], padded_prompt((600, 570), seed=index)
        cache = build_cache(model, CONFIGS[index // 2])
        tokens = model.generate(**prompt, do_sample=False, max_new_tokens=24, **as_argument(cache))
        layers = cache.packed_layers
        assert len(layers) == 2 and all(layer.kernel == "cpu" for layer in layers)
        assert all(stream.packed_length >= 448 for layer in layers for stream in layer.streams)
        return [tokens, *(states for layer in layers for states in decoded(layer))]

    def are_equal(one, other):
        return all(map(torch.equal, one, other))
"""

THREADS = """
    together = [None] * 16
    barrier = threading.Barrier(16)

    def start(index):
        barrier.wait()
        together[index] = run(index)

    threads = [threading.Thread(target=start, args=(index,)) for index in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    alone = [run(index) for index in range(16)]
    assert len({tuple(result[0].flatten().tolist()) for result in alone}) == 16
    print([index for index in range(16) if not are_equal(together[index], alone[index])])
"""

FORK = """
    indices = (0, 3, 11)
    before = [run(index) for index in indices]
    child = os.fork()
    if child == 0:
        status = 2
        try:
            # torch's own operators wait for threads that a forked process does not have, unless told not to
            status = int(any(not torch.equal(run(i, 1)[0], b[0]) for i, b in zip(indices, before)))
        finally:
            os._exit(status)
    deadline = time.monotonic() + 120
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    print("child", ended[1])
    print("parent", all(are_equal(run(index), result) for index, result in zip(indices, before)))
"""


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    if not loader.try_load():
        pytest.skip("no native library can be built here")


def python(code: str) -> list[str]:
    """Lines a script prints that begins with `RUNS`."""
    done = fresh_process.run(textwrap.dedent(RUNS) + textwrap.dedent(code), timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_threads_generate_as_if_alone() -> None:
    """16 threads meet the library, its tables and every cached value for the first time together."""
    assert python(THREADS)[-1] == "[]"


def test_generation_goes_on_after_a_fork() -> None:
    """In the child, which has one thread left, with the same tokens; in the parent, with the same states."""
    assert python(FORK)[-2:] == ["child 0", "parent True"]
