"""The native decode kernels with several threads, of torch and of their callers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvcache_plugins.attention.native import attend_handles
from kvcache_plugins.attention.reference import AttentionOptions
from tests.kernels.decode_cases import CASES, build_layer, check, isa, library, step

__all__ = ["isa", "library"]  # fixtures


@pytest.mark.parametrize("batch_size", [1, 3])
def test_threads_change_nothing_but_rounding(isa: str, batch_size: int) -> None:
    layer = build_layer(CASES["kivi-default"], 5000, batch_size=batch_size)
    query, key, value = step(layer, 1, 4)
    torch.set_num_threads(2)
    check(query, key, value, AttentionOptions())
    check(query, key, value, AttentionOptions(sliding_window=2000))


def test_many_threads_at_once(isa: str) -> None:
    """Callers share nothing but the library; torch's threads serve whoever comes first."""
    torch.set_num_threads(2)
    cases = [step(build_layer(CASES["kivi-default"], 600 + 64 * i), 1, 4) for i in range(4)]
    expected = [attend_handles(*case, AttentionOptions()) for case in cases]

    def work(i: int) -> bool:
        return all(
            torch.allclose(attend_handles(*cases[i % 4], AttentionOptions()), expected[i % 4], atol=1e-5)
            for _ in range(20)
        )

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))
