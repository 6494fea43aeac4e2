"""Which kernel reads a layer's packed codes."""

from __future__ import annotations

from ..errors import KernelUnavailableError

__all__ = ["native_kernels", "select_kernel"]


def native_kernels(backend: str) -> tuple[str, ...]:
    """Native kernels (`"cpu"`, `"cuda"`) that exist for a backend."""
    del backend  # none is built yet; every backend is served by the torch reference
    return ()


def select_kernel(requested: str, backend: str) -> str:
    """Return the kernel for `cache_config["kernel"]`.

    Args:
        requested (`str`): `"auto"`, `"torch"` or `"native"`.
        backend (`str`): Registry name.

    Raises:
        KernelUnavailableError: If `"native"` is asked for and there is no native kernel.
    """
    available = native_kernels(backend)
    if requested == "native" and not available:
        raise KernelUnavailableError(
            f"kernel='native' was given, but no native kernel for the backend {backend!r} is available in "
            "this installation. Allowed here are kernel='auto' and kernel='torch'."
        )
    return "torch" if requested == "torch" or not available else available[0]
