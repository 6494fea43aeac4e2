"""Tensors without data, which make their numbers when an operation asks for them.

They have a shape, a dtype and a device, and go through unmodified modelling code. An operation for which an
interceptor has been registered reaches it instead; any other is given the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["LazyTensor", "intercept"]

_Interceptor = Callable[..., Any]
_interceptors: dict[Callable[..., Any], _Interceptor] = {}

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


def intercept(*functions: Callable[..., Any]) -> Callable[[_Interceptor], _Interceptor]:
    """Decorator: let lazy tensors reach `functions` through the decorated one, with the same arguments.

    It returns `NotImplemented` for what it leaves to the function itself, which is then given numbers.
    """

    def decorate(replacement: _Interceptor) -> _Interceptor:
        for function in functions:
            _interceptors[function] = replacement
        return replacement

    return decorate


class LazyTensor(Tensor):
    """A tensor whose numbers do not exist until an operation needs them.

    Once an operation has changed them in place, they are what it is.
    """

    _dense: Tensor | None = None
    _changes = 0

    @property
    def is_changed(self) -> bool:
        """Whether its numbers have been made, and changed since."""
        dense = self._dense  # of tensors of inference mode, torch does not count the changes
        return dense is not None and (dense.is_inference() or dense._version != self._changes)

    def dense(self) -> Tensor:
        """Make the numbers, once: a plain tensor of the same shape, dtype and device."""
        if self._dense is None:
            self._dense = self._made()
            if not self._dense.is_inference():
                self._changes = self._dense._version
        return self._dense

    def _made(self) -> Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func in _METADATA_READS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _interceptors:
            result = _interceptors[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
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
    return value.dense() if isinstance(value, LazyTensor) else value
