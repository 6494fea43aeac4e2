"""Which kernel reads a layer's packed codes."""

from __future__ import annotations

from ..errors import KernelUnavailableError
from . import loader

__all__ = ["native_kernels", "select_kernel"]

_SERVED = ("float8", "int4", "int8", "kivi", "kvquant")


def native_kernels(backend: str) -> tuple[str, ...]:
    """Devices (`"cpu"`, `"cuda"`) on which a native kernel reads a backend's codes.

    Nothing is built to find out. A backend that is not listed, such as a third party's, is served all the
    same if it stores its tokens by codecs of this package.
    """
    return ("cpu", "cuda") if backend in _SERVED else ()


def select_kernel(requested: str, backend: str) -> str:
    """Return what a layer reports as its kernel until it has attended for the first time.

    Args:
        requested (`str`): `"auto"` (native where possible, built at the first decode), `"torch"` or
            `"native"`.
        backend (`str`): Registry name.

    Raises:
        KernelUnavailableError: If `"native"` is asked for and no native library can be loaded or built.
    """
    if requested != "native":
        return "torch"
    try:
        loader.build()
    except KernelUnavailableError as error:
        raise KernelUnavailableError(
            f"kernel='native' was given, but no native kernel for the backend {backend!r} is available here; "
            f"kernel='auto' and kernel='torch' work without. Reason: {error}"
        ) from error
    return "cpu"
