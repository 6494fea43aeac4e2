"""Masks of many queries that are one row for all of them, beside causality or a window.

Models make such masks of prompts and of turns: what they hide besides, pads say, they hide from every query.
Kernels are then told of a row, a flag and a number, and skip what no query sees.

A mask is compared with what its diagonal says of it, some queries at a time, which stay in the processor's
cache: 8192 x 8192 booleans take 20 ms, as many numbers in fp32 85 ms (two threads of a Zen 5 core).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["RowMask", "row_mask"]

_COMPARED = 1 << 18
"""Numbers of a mask that are compared at once."""


class RowMask(NamedTuple):
    """What a mask amounts to.

    Args:
        row (`torch.Tensor` of shape `(B or 1, Hq or 1, 1, T)`): Boolean: slots that queries may see.
        is_causal (`bool`): Whether a query sees none of them above its own slot.
        window (`int`): Nor, in slot `s`, one up to `s - window`; 0 if all.
    """

    row: Tensor
    is_causal: bool
    window: int = 0


def row_mask(mask: Tensor, window: int | None = None) -> RowMask | None:
    """Find the row of a mask; `None` if its queries differ in more than causality or a window.

    Args:
        mask (`torch.Tensor` of shape `(B or 1, Hq or 1, q, T)`): On a CPU, of the newest `q` tokens: boolean
            (true = attend), or additive. Of numbers only zeros and the least of their dtype are a row, and
            only where each query sees something: one from which they hide everything sees all slots alike.
        window (`int`, *optional*): A window that the mask may be found to have.
    """
    query_length, length = mask.shape[2:]
    past = length - query_length
    if past < 0 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        return None
    for dim in range(3):  # what was expanded is looked at once
        mask = mask.narrow(dim, 0, 1) if mask.stride(dim) == 0 else mask
    first, last = (_shown(mask[:, :, [query]]) for query in (0, -1))
    if mask.shape[2] == 1 or bool(first[..., past + 1 :].any()):
        found = RowMask(first, is_causal=False)
    else:
        own = _shown(mask[..., past:].diagonal(dim1=2, dim2=3))[:, :, None]
        found = RowMask(torch.cat((first[..., :past], own), dim=3), is_causal=True)
        if window is not None and not torch.equal(last, found.row):
            found = found._replace(window=window)
    return found if _is_all_of(mask, found) else None


def _is_all_of(mask: Tensor, found: RowMask) -> bool:
    """Whether a mask is what was found of it, and nothing else."""
    query_length, length = mask.shape[2:]
    past, reach = length - query_length, found.window or length
    step = min(max(1, _COMPARED // length), query_length)
    # what neighbouring queries see of the slots from the first one's oldest on
    band = torch.ones(step, reach - 1 + step, dtype=torch.bool, device=mask.device).triu().tril(reach - 1)
    for start in range(0, query_length, step):
        stop = min(start + step, query_length)
        part = mask[:, :, start:stop]
        shown = _shown(part)
        if shown is not part and not _says_all(shown, part):
            return False
        low, high, expected = 0, length, found.row
        if found.is_causal:
            oldest = past + start - reach + 1
            low, high = max(0, oldest), past + stop
            expected = found.row[..., low:high] & band[: stop - start, low - oldest : high - oldest]
        seen = shown[..., low:high]
        if not torch.equal(seen, expected.expand_as(seen)):
            return False
        if bool(shown[..., :low].any()) or bool(shown[..., high:].any()):
            return False
    return True


def _shown(part: Tensor) -> Tensor:
    return part if part.dtype == torch.bool else part == 0


def _says_all(shown: Tensor, part: Tensor) -> bool:
    """Whether booleans say what numbers do."""
    is_hidden = part == torch.finfo(part.dtype).min
    return bool((shown | is_hidden).all()) and bool(shown.any(-1).all())
