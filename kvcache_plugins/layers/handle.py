"""What `update` returns instead of a dense tensor: a tensor without data that knows the layer it stands for.

A handle has the shape, dtype and device of the keys (or values) attention would have received, and goes
through unmodified modelling code. An attention function that knows handles reads the packed tokens directly;
for any other operation the handle decodes itself, and the layer counts the read: slow, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .gradients import refusing_gradients
from .view import StreamView

if TYPE_CHECKING:
    from .base import PackedLayer

__all__ = ["KVHandle", "intercept"]

_Self = TypeVar("_Self", bound="KVHandle")
_Interceptor = Callable[..., Any]
_interceptors: dict[Callable[..., Any], _Interceptor] = {}

_DECODED = "decoded whole: the model multiplies keys or values itself, or asks for them otherwise"
_METADATA_READS = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_meta", "requires_grad")
    ),
    Tensor.__len__,
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_contiguous,
}
"""Reads that concern the shape and kind of a tensor and not its content."""


def intercept(function: Callable[..., Any]) -> Callable[[_Interceptor], _Interceptor]:
    """Decorator: let handles reach `function` through the decorated one, called with the same arguments."""

    def decorate(replacement: _Interceptor) -> _Interceptor:
        _interceptors[function] = replacement
        return replacement

    return decorate


class KVHandle(Tensor):
    """The keys or values of one layer in one call, of shape `(B, H, T, D)`.

    Attributes:
        layer (`PackedLayer`): The layer it stands for.
        tokens (`StreamView`): What to read.
        sources (`tuple[torch.Tensor, ...]`): The newest of them as the model gave them, which a gradient
            would have to reach.
    """

    layer: PackedLayer
    tokens: StreamView
    sources: tuple[Tensor, ...]
    _dense: Tensor | None

    @staticmethod
    def __new__(cls, layer: PackedLayer, tokens: StreamView, *sources: Tensor) -> KVHandle:
        newest = tokens.segments[-1]
        handle = cls.standing_for(layer, tokens, heads=newest.shape[1], head_dim=newest.shape[3])
        handle.sources = sources
        return handle

    @classmethod
    def standing_for(
        cls: type[_Self], layer: PackedLayer, tokens: StreamView, *, heads: int, head_dim: int
    ) -> _Self:
        """A handle of `heads` heads of `head_dim` channels for every one of `tokens`."""
        newest = tokens.segments[-1]
        shape = (newest.shape[0], heads, tokens.length, head_dim)
        handle: _Self = Tensor._make_wrapper_subclass(cls, shape, dtype=newest.dtype, device=newest.device)
        handle.layer, handle.tokens, handle.sources, handle._dense = layer, tokens, (), None
        return handle

    def dense(self) -> Tensor:
        """Bring everything into one tensor; the layer counts the read if anything had to be decoded."""
        if self._dense is None:
            if self.tokens.packed_length:
                self.layer.fallback_reads += 1
                self.layer.kernel, self.layer.kernel_reason = "torch", _DECODED
            else:
                self.layer.is_read_as_tensors = True
            with torch.no_grad():
                dense = self.tokens.dense(self.tokens.segments[-1].dtype)
            self._dense = refusing_gradients(dense, *self.sources)
        return self._dense

    def __repr__(self) -> str:  # type: ignore[override]
        packed = self.tokens.packed_length
        return f"KVHandle(shape={tuple(self.shape)}, packed_length={packed}, layer={self.layer!r})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func in _METADATA_READS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _interceptors:
            return _interceptors[func](*args, **kwargs)
        if func is torch.Tensor.contiguous and len(args) == 1 and not kwargs:
            return args[0]
        return func(*tree_map(_decoded, args), **tree_map(_decoded, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[no-untyped-def, override]
        cls, func, types, args=(), kwargs=None
    ):
        # Reached only by operations that bypass `__torch_function__`, such as calls from C++.
        return func(*tree_map(_decoded, args), **tree_map(_decoded, kwargs or {}))


def _decoded(value: Any) -> Any:
    return value.dense() if isinstance(value, KVHandle) else value
