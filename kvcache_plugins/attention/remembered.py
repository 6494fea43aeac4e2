"""What a mask amounts to, found once for all layers that are shown it in one call of a model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = ["remembered"]

Answer = TypeVar("Answer")


class _Seen(NamedTuple):
    mask: weakref.ref[Tensor]
    version: int
    answers: dict[Hashable, Any]


_seen: dict[int, _Seen] = {}


def remembered(mask: Tensor, question: Hashable, answer: Callable[[], Answer]) -> Answer:
    """Return the answer to a question about a mask, found anew only where the mask is another one.

    It is kept as long as the mask is, so it should be small beside it.

    Args:
        mask (`torch.Tensor`): What is asked about, as long as nobody writes to it.
        question (`Hashable`): All that the answer depends on besides.
        answer (`Callable`): Finds it.
    """
    if _changes_unseen(mask) or torch.compiler.is_compiling():  # what is left here then would be missed later
        return answer()
    number = id(mask)
    seen = _seen.get(number)
    if seen is None or seen.mask() is not mask or seen.version != mask._version:
        seen = _Seen(weakref.ref(mask, lambda _: _seen.pop(number, None)), mask._version, {})
        _seen[number] = seen
    if question not in seen.answers:
        seen.answers[question] = answer()
    found: Answer = seen.answers[question]
    return found


def _changes_unseen(mask: Tensor) -> bool:
    """Whether a mask may be another one with the same version.

    One of inference mode has none. A CUDA graph that is replayed writes what it has recorded, and counts
    nothing: the outputs of a compiled model, which are the same tensors in every run, and what it was given.
    """
    if mask.is_inference():
        return True
    return mask.is_cuda and (torch.cuda.is_current_stream_capturing() or _is_of_a_graph(mask))


# torch's own name for the outputs of its graphs, for which there is no public one
_is_of_a_graph: Callable[[Tensor], bool] = getattr(torch._C, "_is_cached_tensor", lambda mask: False)
