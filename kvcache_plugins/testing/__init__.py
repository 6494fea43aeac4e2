"""Test tools for backends, ours and third parties': conformance suite, tiny models, comparisons."""

from .comparison import assert_close, sqnr_db
from .conformance import BackendConformance
from .models import ARCHITECTURES, tiny_model

__all__ = ["ARCHITECTURES", "BackendConformance", "assert_close", "sqnr_db", "tiny_model"]
