"""Exception types of the package. Wrong options are plain `ValueError`s; these name the other failures."""

from __future__ import annotations

__all__ = [
    "ArtifactError",
    "IncompatibleTransformersError",
    "KernelUnavailableError",
    "NotFiniteError",
    "NotPredictedError",
    "UnavailableCacheError",
    "UnsupportedOperationError",
]


class ArtifactError(ValueError):
    """A calibration, trained weights or a saved cache is missing, damaged, or was made for another model."""


class IncompatibleTransformersError(RuntimeError):
    """The installed transformers no longer has the seam this package hooks into."""


class KernelUnavailableError(RuntimeError):
    """`kernel="native"` was asked for and no native kernel can serve the request."""


class NotFiniteError(ValueError):
    """What a model predicts is not a number, by itself or with a cache."""


class NotPredictedError(ValueError):
    """The bytes of a model's cache cannot be told before they are held."""


class UnavailableCacheError(ValueError):
    """One of transformers' own quantized caches that cannot be had here.

    Args:
        backend (`str`): Its name.
        reason (`str`): Why, in a few words that a table has room for.
        remedy (`str`, *optional*): What helps.
    """

    def __init__(self, backend: str, reason: str, remedy: str | None = None) -> None:
        super().__init__(backend, reason, remedy)  # all of them, to be pickled
        self.reason = reason

    def __str__(self) -> str:
        backend, reason, remedy = self.args
        helps = f" ({remedy})" if remedy else ""
        return f"{backend!r} is transformers' own cache, and cannot be had here: {reason}{helps}."


class UnsupportedOperationError(NotImplementedError):
    """A cache operation that a backend cannot perform exactly, so that it refuses instead."""
