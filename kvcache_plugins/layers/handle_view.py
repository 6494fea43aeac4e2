"""Handles in the shapes that models give to keys and values before they multiply them.

Modelling code that writes its attention out transposes keys, merges rows and heads, casts, and repeats heads
that serve several query heads. None of this needs the numbers: a [`HandleView`] notes it. What it does not
know is done to the decoded tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from ..compilation import outside_graphs
from .handle import KVHandle
from .lazy import LazyTensor, intercept
from .view import StreamView

__all__ = ["HandleView", "Seen", "as_view"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Seen:
    """How a handle of shape `(B, H, T, D)` is seen.

    Args:
        dtype (`torch.dtype`): What it was cast to.
        form (`str`): `heads`: `(B, H * repeats, T, D)`; `merged`: `(B * H * repeats, T, D)`; `spread`:
            `(B, H, repeats, T, D)`.
        repeats (`int`): Times every head stands there.
        is_tiled (`bool`): Whether all heads come before any is repeated; else each is repeated in its place.
        is_transposed (`bool`): Whether channels come before tokens.
    """

    dtype: torch.dtype
    form: Literal["heads", "merged", "spread"] = "heads"
    repeats: int = 1
    is_tiled: bool = False
    is_transposed: bool = False

    def shape(self, handle: KVHandle) -> tuple[int, ...]:
        """The shape of `handle` seen so."""
        batch_size, heads, *matrix = handle.shape
        if self.is_transposed:
            matrix = matrix[::-1]  # not in place: torch 2.11 traces a tuple
        rows = {
            "heads": (batch_size, heads * self.repeats),
            "merged": (batch_size * heads * self.repeats,),
            "spread": (batch_size, heads, self.repeats),
        }
        return (*rows[self.form], *matrix)


@outside_graphs
def _make_view(cls: type[HandleView], handle: KVHandle, seen: Seen) -> HandleView:
    view: HandleView = Tensor._make_wrapper_subclass(
        cls, seen.shape(handle), dtype=seen.dtype, device=handle.tokens.segments[-1].device
    )
    view.handle, view.seen = handle, seen
    return view


class HandleView(LazyTensor):
    """A handle in another shape or dtype, of which nothing has been decoded.

    Attributes:
        handle (`KVHandle`): What is seen.
        seen (`Seen`): How.
    """

    handle: KVHandle
    seen: Seen

    @staticmethod
    def __new__(cls, handle: KVHandle, seen: Seen) -> HandleView:
        return _make_view(cls, handle, seen)

    @property
    def tokens(self) -> StreamView:
        """What the handle reads."""
        return self.handle.tokens

    @property
    def is_changed(self) -> bool:
        """Whether its numbers, or those of the handle, have been changed."""
        return super().is_changed or self.handle.is_changed

    @property
    def has_heads_as_stored(self) -> bool:
        """Whether it is `(B, H * repeats, T, D)` in the handle's dtype, which attention functions take."""
        seen = self.seen
        return seen.form == "heads" and not seen.is_transposed and seen.dtype == self.handle.dtype

    def query_order(self, query_heads: int) -> Tensor | None:
        """Query heads in an order in which those of one stored head are neighbours; `None` if they are.

        Args:
            query_heads (`int`): Of a query that is attended with this view: a multiple of its heads.
        """
        seen, heads = self.seen, self.handle.shape[1]
        if not seen.is_tiled or seen.repeats == 1:
            return None
        order = torch.arange(query_heads, device=self.handle.device)
        return order.view(seen.repeats, heads, -1).transpose(0, 1).flatten()

    def _made(self) -> Tensor:
        """Decode the handle, and do to the tensor what was done to the view."""
        seen = self.seen
        states = self.handle.dense().to(seen.dtype)
        if seen.is_tiled:
            states = states.repeat(1, seen.repeats, 1, 1)
        elif seen.repeats > 1:
            states = states.repeat_interleave(seen.repeats, dim=1)
        if seen.is_transposed:
            states = states.transpose(-1, -2)
        return states.reshape(seen.shape(self.handle)).contiguous()  # as it says of itself

    def __repr__(self) -> str:  # type: ignore[override]
        return f"HandleView({self.seen}, {self.handle!r})"


def as_view(states: Any) -> HandleView | None:
    """A handle, or a view of one, as a view; `None` of anything else, or if its numbers have been changed."""
    if not isinstance(states, (KVHandle, HandleView)) or states.is_changed:
        return None
    return states if isinstance(states, HandleView) else HandleView(states, Seen(states.dtype))


def _changed(view: HandleView, **changes: Any) -> HandleView:
    return HandleView(view.handle, replace(view.seen, **changes))


@intercept(Tensor.transpose, torch.transpose, Tensor.swapaxes)
def _transpose(states: Any, dim0: int, dim1: int) -> Any:
    view = as_view(states)
    if view is None or _axes(view, dim0, dim1) not in ([-2, -1], [-1, -2]):
        return NotImplemented
    return _changed(view, is_transposed=not view.seen.is_transposed)


@intercept(Tensor.mT.__get__)  # type: ignore[attr-defined]  # of a descriptor
def _transposed(states: Any) -> Any:
    return _transpose(states, -1, -2)


@intercept(Tensor.permute, torch.permute)
def _permute(states: Any, *dims: Any) -> Any:
    rank = states.dim()
    is_transposition = _axes(states, *_integers(dims)) == [*range(-rank, -2), -1, -2]
    return _transpose(states, -1, -2) if is_transposition else NotImplemented


@intercept(Tensor.reshape, Tensor.view, torch.reshape)
def _reshape(states: Any, *shape: Any, **kwargs: Any) -> Any:
    view = as_view(states)
    wanted = _integers(shape)
    if view is None or kwargs or not wanted or not all(isinstance(size, int) for size in wanted):
        return NotImplemented
    if -1 in wanted:
        known = prod(size for size in wanted if size != -1)
        wanted = [view.numel() // max(known, 1) if size == -1 else size for size in wanted]
    if tuple(wanted) == tuple(view.shape):
        return view
    # where no head is repeated, or each in its place, all forms are the same numbers in the same order
    forms = ("heads", "merged") if view.seen.is_tiled else ("heads", "merged", "spread")
    for form in forms:
        changed = replace(view.seen, form=form)  # type: ignore[arg-type]
        if tuple(wanted) == changed.shape(view.handle):
            return HandleView(view.handle, changed)
    return NotImplemented


@intercept(Tensor.__getitem__)
def _getitem(states: Any, index: Any) -> Any:
    if type(index) is int and type(states) is KVHandle and states.may_be_decoded and states._dense is None:
        return states.row(index)
    everything = slice(None)
    if index in ((everything, everything, None), (everything, everything, None, everything, everything)):
        return _unsqueeze(states, 2)
    return NotImplemented


@intercept(Tensor.unsqueeze, torch.unsqueeze)
def _unsqueeze(states: Any, dim: int) -> Any:
    view = as_view(states)
    if view is None or dim != 2 or view.seen.form != "heads" or view.seen.repeats != 1:
        return NotImplemented
    return _changed(view, form="spread")


@intercept(Tensor.expand)
def _expand(states: Any, *shape: Any) -> Any:
    view = as_view(states)
    wanted = _integers(shape)
    if view is None or view.seen.form != "spread" or view.seen.repeats != 1 or len(wanted) != 5:
        return NotImplemented
    others = zip((*wanted[:2], *wanted[3:]), (*view.shape[:2], *view.shape[3:]), strict=True)
    if wanted[2] == 0 or any(size not in (-1, own) for size, own in others):
        return NotImplemented
    return _changed(view, repeats=max(wanted[2], 1))


@intercept(Tensor.repeat)
def _repeat(states: Any, *repeats: Any) -> Any:
    view = as_view(states)
    times = _integers(repeats)
    if view is None or view.seen.form != "heads" or view.seen.repeats != 1 or len(times) != 4:
        return NotImplemented
    if [times[0], *times[2:]] != [1, 1, 1] or times[1] < 1:
        return NotImplemented
    return _changed(view, repeats=times[1], is_tiled=True)


@intercept(Tensor.repeat_interleave, torch.repeat_interleave)
def _repeat_interleave(states: Any, repeats: Any, dim: int | None = None, **kwargs: Any) -> Any:
    view = as_view(states)
    if view is None or kwargs or not isinstance(repeats, int) or repeats < 1 or dim is None:
        return NotImplemented
    if view.seen.form != "heads" or view.seen.repeats != 1 or _axes(view, dim) != [-3]:
        return NotImplemented
    return _changed(view, repeats=repeats)


@intercept(Tensor.to)
def _to(states: Any, *args: Any, **kwargs: Any) -> Any:
    given = [*args, *kwargs.values()]
    if len(given) != 1 or not isinstance(given[0], torch.dtype) or kwargs.keys() - {"dtype"}:
        return NotImplemented
    return _cast(states, given[0])


def _cast(states: Any, dtype: torch.dtype) -> Any:
    view = as_view(states)
    if view is None or dtype not in _FLOATS:
        return NotImplemented
    if dtype == view.seen.dtype:
        return states
    # what was rounded stays so in a wider dtype
    is_exact = torch.promote_types(view.handle.dtype, view.seen.dtype) == view.seen.dtype
    return _changed(view, dtype=dtype) if is_exact else NotImplemented


for _function, _dtype in (
    (Tensor.float, torch.float32),
    (Tensor.bfloat16, torch.bfloat16),
    (Tensor.half, torch.float16),
    (Tensor.double, torch.float64),
):
    intercept(_function)(lambda states, _dtype=_dtype: _cast(states, _dtype))


def _axes(states: Tensor, *dims: int) -> list[int]:
    """Dimensions counted from the end; empty if there is no such one."""
    rank = states.dim()
    axes = [dim - rank if dim >= 0 else dim for dim in dims]
    return axes if all(-rank <= axis < 0 for axis in axes) else []


def _integers(sizes: tuple[Any, ...]) -> list[Any]:
    """Sizes, given one by one or as a sequence."""
    is_sequence = len(sizes) == 1 and isinstance(sizes[0], (tuple, list))
    return list(sizes[0] if is_sequence else sizes)
