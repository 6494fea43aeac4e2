"""The functions that call the operators that write tokens into a cache; their schemas are in `ops`."""

from __future__ import annotations

from torch import Tensor

from ..quantizers.outliers import Outliers
from .layout import SideLayout
from .ops import operators

__all__ = ["append_tokens", "encode_levels", "encode_tokens", "gather_tokens"]


def append_tokens(
    records: Tensor,
    key_states: Tensor,
    value_states: Tensor,
    key_tail: Tensor,
    value_tail: Tensor,
    key_plan: list[int],
    value_plan: list[int],
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    factors: Tensor | None = None,
) -> bool:
    """Put new tokens into the exact tails, and encode those of `[tail | new tokens]` that are due.

    Args:
        records (`torch.Tensor` of shape `(B, H, N, record_bytes)`): uint8, zero where nothing is written yet.
        key_states (`torch.Tensor` of shape `(B, H, n, D)`): The new keys.
        value_states (`torch.Tensor` of shape `(B, H, n, Dv)`): The new values.
        key_tail (`torch.Tensor` of shape `(B, H, capacity, D)`): Exact keys, in the dtype of the new ones.
        value_tail (`torch.Tensor` of shape `(B, H, capacity, Dv)`): The same of the values.
        key_plan (`list[int]`): `[write, first, count, slot]`: place in the tail of the first new token, place
            of the first token that is due, how many are (new ones among them or not), and the slot of the
            first; then the integers of a layout, see `encode_tokens`, which may be left out if `count` is 0.
        value_plan (`list[int]`): The same of the values.
        cos (`torch.Tensor`, *optional*): Rotation to be undone of keys, see `encode_tokens`.
        sin (`torch.Tensor`, *optional*): Given with `cos`.
        factors (`torch.Tensor` of shape `(B, H, 1, D)`, *optional*): fp32; keys are divided by them before
            they are encoded. Not together with a rotation.

    Returns:
        `bool`: Whether all that was due is encoded. If not, the tails hold the new tokens and the records are
        what they were: see `encode_tokens`. On a GPU nobody waits for the numbers: metadata beyond fp16
        saturate there, which a later call reports by a `RuntimeError`.
    """
    done: bool = operators.append_tokens(
        records, key_states, value_states, key_tail, value_tail, key_plan, value_plan, cos, sin, factors
    )
    return done


def encode_levels(
    records: Tensor,
    outliers: Outliers | None,
    states: Tensor,
    is_key: bool,
    layout: list[int],
    boundaries: Tensor,
    levels: Tensor,
    per_side: int,
    start: int,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    first_plain: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> bool:
    """Encode whole blocks by non-uniform levels, with their outliers (see `layers.nonuniform`).

    Args:
        records (`torch.Tensor` of shape `(B, H, N, record_bytes)`): uint8.
        outliers (`Outliers`, *optional*): Lists of as many blocks; none if `per_side` is 0.
        states (`torch.Tensor` of shape `(B, H, 64 n, D)`): fp32, bf16 or fp16.
        is_key (`bool`): Whether codes go in key order, and ranges are of channels, not of tokens.
        layout (`list[int]`): See `encode_tokens`, of single tokens; `minimum_offset` is that of the offsets.
        boundaries (`torch.Tensor` of shape `(2 ** nbits - 1,)`): fp32, between the levels of the codes.
        levels (`torch.Tensor` of shape `(2 ** nbits,)`): fp32, what codes stand for.
        per_side (`int`): Half of the outliers of a token; of keys, on average over a block. Up to 255.
        start (`int`): Slot of the first token, a multiple of 64.
        scale (`torch.Tensor` of shape `(1 or B, H, 1, D)`, *optional*): fp32, half of the ranges of keys.
        offset (`torch.Tensor` of shape `(1 or B, H, 1, D)`, *optional*): fp32, their middle.
        first_plain (`torch.Tensor` of shape `(B,)`, *optional*): int64, slot of the first token of a row that
            may have outliers; all may if not given.
        cos (`torch.Tensor` of shape `(1 or B, 64 n, rotary_dim / 2)`, *optional*): fp32; tokens are first
            rotated back, see `encode_tokens`.
        sin (`torch.Tensor`, *optional*): Given with `cos`.

    Returns:
        `bool`: Whether it was done; if not, nothing was written (see `encode_tokens`).
    """
    entries, starts = (None, None) if outliers is None else outliers
    done: bool = operators.encode_levels(
        records, entries, starts, states, is_key, layout, boundaries, levels, per_side, start, scale, offset,
        first_plain, cos, sin,
    )  # fmt: skip
    return done


def encode_tokens(
    records: Tensor,
    states: Tensor,
    is_key: bool,
    layout: list[int],
    start: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> bool:
    """Encode new tokens into their places in the records.

    Args:
        records (`torch.Tensor` of shape `(B, H, N, record_bytes)`): uint8, zero where nothing is written yet.
        states (`torch.Tensor` of shape `(B, H, n, D)`): fp32, bf16 or fp16; whole groups of tokens.
        is_key (`bool`): Whether codes go in key order.
        layout (`list[int]`): `[nbits, format, head_dim, group_tokens, width, metadata_bytes, interleaved,
            codes_offset, scale_offset, minimum_offset]`, offsets in bytes inside a record, -1 if absent.
        start (`int`): Slot of the first token.
        cos (`torch.Tensor` of shape `(period, rotary_dim / 2)`, *optional*): fp32; a token of slot `t` is
            first rotated back by row `t % period`, in fp32 and to the last bit as `Rotary.turn` does it.
            Pairs are as `interleaved` says.
        sin (`torch.Tensor` of shape `(period, rotary_dim / 2)`, *optional*): fp32, given with `cos`.

    Returns:
        `bool`: Whether it was done. If not, nothing was written: no native library is loaded, or the states
        hold what only the torch path handles (numbers that are not finite, metadata beyond fp16, or that may
        be once rotated).
    """
    done: bool = operators.encode_tokens(records, states, is_key, layout, start, cos, sin)
    return done


def gather_tokens(
    records_in: Tensor, records_out: Tensor, index: Tensor, keys: SideLayout, values: SideLayout
) -> None:
    """Copy codes and metadata of chosen slots into slots `0..K - 1` of other records, bit for bit.

    Nothing is decoded to numbers, so a token that is kept stays what it was. Of every block that holds one of
    the `K` slots, the fields of both sides are written whole: zero beyond slot `K - 1`, as blocks are that
    later tokens complete. Other bytes of `records_out` are left alone.

    Args:
        records_in (`torch.Tensor` of shape `(B, H, N, record_bytes)`): uint8.
        records_out (`torch.Tensor` of shape `(B, H, M, record_bytes)`): uint8, at least `K` slots; other
            memory.
        index (`torch.Tensor` of shape `(B, H, K)`): int64, slots of `records_in` per row and head, in any
            order, repeated or not.
        keys (`SideLayout`): Fields of the keys in both records; groups within one token (`group_tokens ==
            1`), if any metadata is stored. Slots from `packed_length` on may not be chosen.
        values (`SideLayout`): The same of the values.
    """
    operators.gather_tokens(records_in, records_out, index, keys.integers(), values.integers())
