"""Outliers kept beside the codes: sparse lists, one for every 64-token block of a row (KVQuant).

An outlier is stored as what its code lacks, `x - x'`, so dense and sparse add up to the exact number (to
fp16), and leaving one out costs precision and not sense. A block's list runs over all kv heads and is sorted
by head, then token, then channel. Lists have a fixed capacity: memory is a function of the length alone, and
if more numbers qualify than fit, those that would lose most are kept.

    entries (B, N, capacity)  int32: residual (fp16) in the low half, token << 10 | channel in the high half
    starts  (B, N, H + 1)     int16: where each head's part begins, and the end of the last
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .packing import BLOCK_TOKENS

__all__ = ["MAX_CAPACITY", "Outliers", "add_outliers", "are_largest", "choose_outliers", "gather_outliers"]

MAX_CAPACITY = torch.iinfo(torch.int16).max
"""Entries a block's list can address."""

_CHANNEL_BITS = 10
_TOKEN_SHIFT = 16 + _CHANNEL_BITS
_HALF_MAX = torch.finfo(torch.float16).max


class Outliers(NamedTuple):
    """Lists of a run of `n` blocks.

    Args:
        entries (`torch.Tensor` of shape `(B, n, capacity)`): int32; zero beyond a list's end.
        starts (`torch.Tensor` of shape `(B, n, H + 1)`): int16.
    """

    entries: Tensor
    starts: Tensor

    def named(self) -> dict[str, Tensor]:
        """Both tensors by the names under which a cache owns and saves them."""
        return {"outliers": self.entries, "outlier_starts": self.starts}


def choose_outliers(residuals: Tensor, qualifies: Tensor, capacity: int) -> Outliers:
    """List the outliers of whole blocks.

    Args:
        residuals (`torch.Tensor` of shape `(B, H, 64 n, D)`): fp32 `x - x'` of every number.
        qualifies (`torch.Tensor` of shape `(B, H, 64 n, D)`): Which numbers may be outliers.
        capacity (`int`): Most entries of a block; of more, those with the largest residuals are kept, of
            equal ones the first.
    """
    batch, heads, tokens, channels = residuals.shape
    blocks = tokens // BLOCK_TOKENS

    def by_block(states: Tensor) -> Tensor:  # (B, n, H * 64 * D)
        return states.reshape(batch, heads, blocks, -1).transpose(1, 2).flatten(2)

    kept, size = by_block(residuals).clamp(-_HALF_MAX, _HALF_MAX), heads * BLOCK_TOKENS * channels
    loss = torch.where(by_block(qualifies), kept.abs(), -1.0)
    count = min(capacity, size)
    is_kept = are_largest(loss, count) & (loss >= 0)
    # what is not kept is moved behind the last place, so that the first places are left
    every = torch.arange(size, dtype=torch.float32, device=loss.device)  # exact, and sorted by any device
    places = torch.where(is_kept, every, float(size)).topk(count, dim=-1, largest=False).values.long()
    is_real = places < size
    inside = places.clamp_max(size - 1)
    half = kept.gather(-1, inside).to(torch.float16).view(torch.int16).int() & 0xFFFF
    token, channel = inside // channels % BLOCK_TOKENS, inside % channels
    entries = ((token << _CHANNEL_BITS | channel).int() << 16) | half
    entries = torch.where(is_real, entries, 0)
    first_places = torch.arange(heads + 1, device=places.device) * (BLOCK_TOKENS * channels)
    starts = torch.searchsorted(places, first_places.expand(batch, blocks, -1).contiguous()).to(torch.int16)
    return Outliers(torch.nn.functional.pad(entries, (0, capacity - count)), starts)


def are_largest(numbers: Tensor, count: int) -> Tensor:
    """Which are the `count` largest along the last dimension; of equal ones the first, on every device.

    Args:
        numbers (`torch.Tensor` of shape `(..., n)`): Without NaN.
        count (`int`): At most `n`.
    """
    if count == 0:
        return torch.zeros_like(numbers, dtype=torch.bool)
    least = numbers.topk(count, dim=-1).values[..., -1:]
    is_above, is_least = numbers > least, numbers == least
    room = count - is_above.sum(dim=-1, keepdim=True)
    return is_above | (is_least & (is_least.cumsum(dim=-1, dtype=torch.int32) <= room))


def add_outliers(states: Tensor, outliers: Outliers) -> Tensor:
    """Add the residuals of whole blocks to `states` `(B, H, 64 n, D)`, in place, and return it."""
    batch, heads, tokens, channels = states.shape
    entries = outliers.entries
    head, is_real = _heads_of(outliers)
    place = entries >> 16
    token, channel = place >> _CHANNEL_BITS & (BLOCK_TOKENS - 1), place & ((1 << _CHANNEL_BITS) - 1)
    residual = _residuals(entries)
    block = torch.arange(entries.shape[1], device=entries.device)[None, :, None]
    row = torch.arange(batch, device=entries.device)[:, None, None]
    flat = ((row * heads + head) * tokens + block * BLOCK_TOKENS + token) * channels + channel
    states.view(-1).index_add_(0, flat[is_real], residual[is_real])
    return states


def gather_outliers(
    outliers: Outliers, index: Tensor, capacity: int, most: int = MAX_CAPACITY
) -> tuple[Outliers, int]:
    """List the outliers of chosen tokens anew: none changes.

    Heads choose for themselves, so what they choose from several blocks may be more than a list holds; all
    lists then get as long as the longest. None is left out unless that is longer than a list can be: then
    those of the smallest residuals, of equal ones the later.

    Args:
        outliers (`Outliers`): Lists of the blocks they come from.
        index (`torch.Tensor` of shape `(B, H, 64 n)`): int64, slots of these blocks, ascending, none twice.
        capacity (`int`): Entries of a list, at least.
        most (`int`): Entries of a list, at most.

    Returns:
        `tuple[Outliers, int]`: The lists, and how many entries were left out.
    """
    batch, heads, count = index.shape
    blocks = count // BLOCK_TOKENS
    moved_to = index.new_full((batch, heads, outliers.entries.shape[1] * BLOCK_TOKENS), -1)
    moved_to.scatter_(2, index, torch.arange(count, device=index.device).expand_as(index))
    head, is_real = _heads_of(outliers)
    row, block, _ = is_real.nonzero(as_tuple=True)
    head, entries = head[is_real], outliers.entries[is_real]
    slot = moved_to[row, head, block * BLOCK_TOKENS + (entries >> _TOKEN_SHIFT & (BLOCK_TOKENS - 1))]
    stays = slot >= 0
    row, head, slot, entries = (part[stays] for part in (row, head, slot, entries))
    entries = entries & ((1 << _TOKEN_SHIFT) - 1) | (slot % BLOCK_TOKENS).int() << _TOKEN_SHIFT
    # slots ascend within a head as they did, so only blocks and heads have to be put in order
    part, order = (((row * blocks + slot // BLOCK_TOKENS) * heads) + head).sort(stable=True)
    entries = entries[order]
    is_kept = _fit_their_lists(entries, part // heads, batch * blocks, most)
    part, entries = part[is_kept], entries[is_kept]
    counts = torch.bincount(part, minlength=batch * blocks * heads).view(batch * blocks, heads)
    ends = counts.sum(1).cumsum(0)
    place = torch.arange(len(part), device=part.device) - (ends - counts.sum(1))[part // heads]
    capacity = max(capacity, int(counts.sum(1).max()) if counts.numel() else 0)
    listed = entries.new_zeros(batch * blocks, capacity)
    listed[part // heads, place] = entries
    starts = torch.nn.functional.pad(counts.cumsum(1), (1, 0)).to(torch.int16)
    lists = Outliers(listed.view(batch, blocks, capacity), starts.view(batch, blocks, heads + 1))
    return lists, len(is_kept) - len(part)


def _fit_their_lists(entries: Tensor, lists: Tensor, count: int, most: int) -> Tensor:
    """Which of the `entries` are among the `most` largest of their list; `lists` ascend, of `count`."""
    lengths = torch.bincount(lists, minlength=count)
    is_kept = torch.ones_like(lists, dtype=torch.bool)
    if int(lengths.max() if count else 0) > most:
        by_size = _residuals(entries).abs().sort(descending=True, stable=True).indices
        by_size = by_size[lists[by_size].sort(stable=True).indices]
        rank = torch.arange(len(lists), device=lists.device) - (lengths.cumsum(0) - lengths)[lists]
        is_kept[by_size] = rank < most
    return is_kept


def _residuals(entries: Tensor) -> Tensor:
    return (entries & 0xFFFF).to(torch.int16).view(torch.float16).float()


def _heads_of(outliers: Outliers) -> tuple[Tensor, Tensor]:
    """Head of every place of the lists, `(B, n, capacity)`, and whether there is an entry."""
    entries, starts = outliers
    order = torch.arange(entries.shape[-1], device=entries.device).expand(*entries.shape[:2], -1).contiguous()
    head = torch.searchsorted(starts.int()[..., 1:].contiguous(), order.int(), right=True)
    return head, order < starts[..., -1:]
