"""KV caches for transformers that are really packed.

    import kvcache_plugins
    model.generate(**inputs, cache_implementation="quantized", cache_config={"backend": "kivi", "nbits": 2})

Importing installs the dispatch, and nothing else: no build, no CUDA call, no download. torch and the caches
are imported at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .integration import install, uninstall
from .registry import list_backends, register_backend

if TYPE_CHECKING:
    from .backends.float8 import Float8Cache
    from .backends.int4 import Int4Cache
    from .backends.int8 import Int8Cache
    from .backends.kivi import KIVICache
    from .cache import KVCache, build_cache
    from .config import BackendConfig
    from .errors import (
        ArtifactError,
        IncompatibleTransformersError,
        KernelUnavailableError,
        UnsupportedOperationError,
    )
    from .estimation import estimate
    from .report import CacheReport

__version__ = "0.1.0"

__all__ = [
    "ArtifactError",
    "BackendConfig",
    "CacheReport",
    "Float8Cache",
    "IncompatibleTransformersError",
    "Int4Cache",
    "Int8Cache",
    "KIVICache",
    "KVCache",
    "KernelUnavailableError",
    "UnsupportedOperationError",
    "build_cache",
    "estimate",
    "install",
    "list_backends",
    "register_backend",
    "uninstall",
]

_LAZY = {
    "ArtifactError": "errors",
    "BackendConfig": "config",
    "CacheReport": "report",
    "Float8Cache": "backends.float8",
    "IncompatibleTransformersError": "errors",
    "Int4Cache": "backends.int4",
    "Int8Cache": "backends.int8",
    "KIVICache": "backends.kivi",
    "KVCache": "cache",
    "KernelUnavailableError": "errors",
    "UnsupportedOperationError": "errors",
    "build_cache": "cache",
    "estimate": "estimation",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


install()
