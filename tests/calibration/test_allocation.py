"""Bits are divided as well as trying everything would."""

from __future__ import annotations

import itertools
import random

import pytest

from kvcache_plugins.calibration.allocation import allocate_bits


@pytest.mark.parametrize("target", [2.0, 2.5, 3.0, 3.3, 4.0])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_better(seed: int, target: float) -> None:
    draw = random.Random(seed)
    items = [
        dict(zip((2, 3, 4), sorted((draw.expovariate(1.0) for _ in range(3)), reverse=True), strict=True))
        for _ in range(6)
    ]
    chosen = allocate_bits(items, target)
    assert sum(chosen) <= target * 6 + 1e-9
    least = min(
        sum(item[bits] for item, bits in zip(items, choice, strict=True))
        for choice in itertools.product((2, 3, 4), repeat=6)
        if sum(choice) <= target * 6 + 1e-9
    )
    assert sum(item[bits] for item, bits in zip(items, chosen, strict=True)) == pytest.approx(least)


def test_bits_go_where_they_help() -> None:
    items = [{2: 10.0, 3: 5.0, 4: 1.0}, {2: 0.2, 3: 0.1, 4: 0.0}]
    assert allocate_bits(items, 3.0) == [4, 2]
    assert allocate_bits([{2: 1.0, 8: 0.0}] * 2, 5.0) in ([2, 8], [8, 2])


def test_all_bits_are_spent() -> None:
    assert allocate_bits([{2: 0.0, 4: 0.0}] * 3, 4.0) == [4, 4, 4]
    # where more bits seem to lose more, it is the rounding of a bf16 model
    draw = random.Random(0)
    floor = [{bits: draw.uniform(1e-4, 2e-4) for bits in (2, 3, 4)} for _ in range(20)]
    assert allocate_bits(floor, 4.0) == [4] * 20
    assert sum(allocate_bits(floor, 3.3)) == 66
    assert allocate_bits([{2: 3e-4, 3: 1e-4, 4: 2e-4}, {2: 9e-4, 3: 8e-4, 4: 1e-4}], 3.5) == [3, 4]
    # where a sum, or the bits there are, come out a rounding below what they are
    assert allocate_bits([{2: 0.2}, {2: 0.3, 4: 0.1}, {2: 0.3, 3: 0.1}], 8 / 3) == [2, 4, 2]
    assert sum(allocate_bits([{4: 1.0, 5: 0.0}] * 100, 4.35)) == 435


def test_too_few_bits() -> None:
    with pytest.raises(ValueError, match=r"2\.5 bits is less than the fewest possible, 3\.0"):
        allocate_bits([{3: 0.0, 4: 0.0}] * 2, 2.5)
