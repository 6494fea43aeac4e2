"""A decode step: both sides take the new tokens and pack what is due, in one call of one kernel.

It ends in the bytes that `Stream.append` of the keys and of the values ends in, at a fraction of the host
time, which is what a step on a GPU costs. Nothing of a layer is remembered here: tensors and lengths are read
where they are, and what a stream has looked up for its kernels is checked to be of the same codec, layout and
device. So the verbs of a layer have nothing to invalidate.
"""

from __future__ import annotations

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
    key_plan = _plan(keys, key_states)
    value_plan = None if key_plan is None else _plan(values, value_states)
    if key_plan is None or value_plan is None:
        return None
    encoder = keys.encoder
    is_packed = append_tokens(
        keys.records.data,
        key_states,
        value_states,
        keys.tail.buffer,
        values.tail.buffer,
        key_plan,
        value_plan,
        *encoder.rotation,
        encoder.factors,
    )
    views = (
        _advanced(keys, key_states.shape[2], key_plan[2] if is_packed else 0),
        _advanced(values, value_states.shape[2], value_plan[2] if is_packed else 0),
    )
    for stream in (keys, values):
        if stream.due(stream.length) > stream.packed_length:  # which no kernel could do
            with storing():
                stream.settle()
    return views


def _plan(stream: Stream, states: Tensor) -> list[int] | None:
    """Where the new tokens go and what is due, as `append_tokens` takes it; room is made for both.

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
        return [place, 0, 0, 0]
    stream.reserve(due)
    return [place, tail.start, due - packed_length, packed_length, *encoder.layout]


def _advanced(stream: Stream, count: int, packed: int) -> StreamView:
    """Count the new tokens and those that have been packed; return what attention reads in this call."""
    tail = stream.tail
    tail.length += count
    view = StreamView.of(stream)
    if packed:
        tail.drop(packed)
        stream.packed_length += packed
    return view
