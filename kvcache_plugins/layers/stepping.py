"""A decode step: both sides take the new tokens and pack what is due, in one call of one kernel.

It ends in the bytes that `Stream.append` of the keys and of the values ends in, at a fraction of the host
time, which is what a step on a GPU costs. Nothing of a layer is remembered here: tensors and lengths are read
where they are, and what a stream has looked up for its kernels is checked to be of the same codec, layout and
device. So the verbs of a layer have nothing to invalidate.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..kernels.writing_ops import append_tokens
from .storing import storing
from .stream import Stream
from .view import StreamView

__all__ = ["MAX_STEP_TOKENS", "take_step"]

MAX_STEP_TOKENS = 16
"""New tokens that are a step, such as drafted ones; more are part of a prompt."""


def take_step(
    keys: Stream, values: Stream, key_states: Tensor, value_states: Tensor
) -> tuple[StreamView, StreamView] | None:
    """Append a few new tokens and pack what is due.

    Args:
        keys (`Stream`): One side of a layer.
        values (`Stream`): The other.
        key_states (`torch.Tensor` of shape `(B, H, n, D)`): The new keys.
        value_states (`torch.Tensor` of shape `(B, H, n, Dv)`): The new values.

    Returns:
        `tuple[StreamView, StreamView] | None`: What attention reads of either side, as `Stream.append`
        returns it; `None`, and nothing has been taken, if this is no step that a kernel serves.
    """
    key_step = _plan(keys, key_states)
    value_step = None if key_step is None else _plan(values, value_states)
    if key_step is None or value_step is None:
        return None
    encoder = keys.encoder
    is_packed = append_tokens(
        keys.records.data,
        key_states,
        value_states,
        keys.tail.buffer,
        values.tail.buffer,
        key_step.plan,
        value_step.plan,
        *encoder.rotation,
        encoder.factors,
    )
    count = key_states.shape[2]
    return _advance(keys, key_step, count, is_packed), _advance(values, value_step, count, is_packed)


class _Step(NamedTuple):
    """What a stream is about to do.

    Args:
        plan (`list[int]`): Where the new tokens go and what is to be packed, as `append_tokens` takes it.
        due (`int`): Tokens that should be packed afterwards, whether the kernel can do that or not.
    """

    plan: list[int]
    due: int


def _plan(stream: Stream, states: Tensor) -> _Step | None:
    """Make room for the new tokens and for what is due.

    `None` if the tokens are many, or need more than a place in the tail.
    """
    tail, packed_length, count = stream.tail, stream.packed_length, states.shape[2]
    buffer, needed = tail.buffer, tail.length + count
    seen = packed_length + needed
    room, capacity = tail.room(seen), buffer.shape[2]
    if (
        count > MAX_STEP_TOKENS
        or not stream.use_native
        or not stream.is_calibrated
        or capacity > room
        or needed > room
        or states.dtype != buffer.dtype
        or states.device != buffer.device
        or states.is_meta
        or not (encoder := stream.encoder).may_step()
    ):
        return None
    if capacity < room or tail.start + needed > room:
        tail.make_room(count, seen)
    place = tail.start + tail.length
    due = stream.due(seen)
    if due == packed_length or not encoder.can_encode(packed_length, stream.padding):
        return _Step([place, 0, 0, 0], due)
    stream.reserve(due)
    return _Step([place, tail.start, due - packed_length, packed_length, *encoder.layout], due)


def _advance(stream: Stream, step: _Step, count: int, is_packed: bool) -> StreamView:
    """Count the new tokens and those that have been packed; return what attention reads in this call."""
    tail = stream.tail
    tail.length += count
    view = StreamView.of(stream)
    if is_packed and (packed := step.plan[2]):
        tail.drop(packed)
        stream.packed_length += packed
    if stream.packed_length < step.due:  # which no kernel could do
        with storing():
            stream.settle()
    return view
