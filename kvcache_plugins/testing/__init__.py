"""Test tools for backends, ours and third parties': conformance suites, tiny models, comparisons."""

from .comparison import assert_close, sqnr_db
from .conformance import BackendConformance
from .eviction import EvictionConformance
from .models import ARCHITECTURES, tiny_model

__all__ = [
    "ARCHITECTURES",
    "BackendConformance",
    "EvictionConformance",
    "assert_close",
    "sqnr_db",
    "tiny_model",
]
