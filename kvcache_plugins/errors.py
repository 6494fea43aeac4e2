"""Exception types of the package. Wrong options are plain `ValueError`s; these name the other failures."""

from __future__ import annotations

__all__ = [
    "ArtifactError",
    "IncompatibleTransformersError",
    "KernelUnavailableError",
    "UnsupportedOperationError",
]


class ArtifactError(ValueError):
    """A calibration, trained weights or a saved cache is missing, damaged, or was made for another model."""


class IncompatibleTransformersError(RuntimeError):
    """The installed transformers no longer has the seam this package hooks into."""


class KernelUnavailableError(RuntimeError):
    """`kernel="native"` was asked for and no native kernel can serve the request."""


class UnsupportedOperationError(NotImplementedError):
    """A cache operation that a backend cannot perform exactly, so that it refuses instead."""
