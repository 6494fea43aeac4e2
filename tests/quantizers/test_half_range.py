"""Numbers beyond fp16 that are to be cast to it."""

from __future__ import annotations

import pytest
import torch

from kvcache_plugins.quantizers.half_range import kept_finite


def test_finite_numbers_stay_so_in_fp16() -> None:
    given = torch.tensor([65504.0, 65519.0, 65520.0, -3.4e38, 1.5, -0.0, torch.inf, -torch.inf, torch.nan])
    expected = [65504.0, 65504.0, 65504.0, -65504.0, 1.5, -0.0, torch.inf, -torch.inf]
    found = kept_finite(given, torch.float16).half()
    assert found[:-1].tolist() == expected and found[-1].isnan()
    assert found[5].signbit()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_hold_them(dtype: torch.dtype) -> None:
    given = torch.tensor([65520.0, 3.0e38])
    assert kept_finite(given, dtype) is given
    half = torch.tensor([torch.inf, 1.0]).half()
    assert kept_finite(half, torch.float16) is half
