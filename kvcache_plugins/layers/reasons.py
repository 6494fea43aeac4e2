"""Why a layer is not what its options promise: read by torch, or exact where it could be packed."""

from __future__ import annotations

from .base import PackedLayer

__all__ = ["why_exact", "why_torch"]

_UNREAD = "nothing packed has been read yet"


def why_torch(layer: PackedLayer) -> str | None:
    """Why the latest attention over packed tokens was not by a fast kernel, if it was not."""
    is_unread = layer.kernel == "torch" and layer.config.kernel != "torch"
    return layer.kernel_reason or (_UNREAD if is_unread else None)


def why_exact(layer: PackedLayer) -> str | None:
    """Why keys or values of a layer are exact although some could be packed, if they are."""
    streams = [stream for part in layer.uniform_layers if part.is_initialized for stream in part.streams]
    waiting = [stream for stream in streams if stream.awaited_tokens]
    if not waiting:
        return None
    sides = " and ".join(f"{side}s" for side in ("key", "value") if side in {each.side for each in waiting})
    learnt_from = max(stream.codec.warmup_tokens for stream in waiting)
    awaited = max(stream.awaited_tokens for stream in waiting)
    return (
        f"its codes are learnt from the first {learnt_from} tokens of every row behind its sinks, and the "
        f"row with the most padding has shown fewer: {sides} are packed after {awaited} more"
    )
