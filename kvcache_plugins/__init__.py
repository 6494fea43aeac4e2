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
    from .backends.expected_attention import ExpectedAttentionCache
    from .backends.float8 import Float8Cache
    from .backends.h2o import H2OCache
    from .backends.int4 import Int4Cache
    from .backends.int8 import Int8Cache
    from .backends.keydiff import KeyDiffCache
    from .backends.kivi import KIVICache
    from .backends.knorm import KnormCache
    from .backends.kvquant import KVQuantCache
    from .backends.kvzip import KVzipCache
    from .backends.lagkv import LagKVCache
    from .backends.locret import LocretCache
    from .backends.random import RandomCache
    from .backends.sirllm import SirLLMCache
    from .backends.snapkv import SnapKVCache
    from .backends.streaming_llm import StreamingLLMCache
    from .backends.tova import TOVACache
    from .building import build_cache
    from .cache import KVCache
    from .capacity import most_tokens
    from .config import BackendConfig
    from .encoder_decoder import KVEncoderDecoderCache
    from .errors import (
        ArtifactError,
        IncompatibleTransformersError,
        KernelUnavailableError,
        UnavailableCacheError,
        UnsupportedOperationError,
    )
    from .estimation import estimate
    from .eviction.cache import EvictingCache
    from .report import CacheReport
    from .retaining.configuration import RetainingHeadsConfig
    from .retaining.heads import RetainingHeads

__version__ = "0.1.0"

__all__ = [
    "ArtifactError",
    "BackendConfig",
    "CacheReport",
    "EvictingCache",
    "ExpectedAttentionCache",
    "Float8Cache",
    "H2OCache",
    "IncompatibleTransformersError",
    "Int4Cache",
    "Int8Cache",
    "KIVICache",
    "KVCache",
    "KVEncoderDecoderCache",
    "KVQuantCache",
    "KVzipCache",
    "KernelUnavailableError",
    "KeyDiffCache",
    "KnormCache",
    "LagKVCache",
    "LocretCache",
    "RandomCache",
    "RetainingHeads",
    "RetainingHeadsConfig",
    "SirLLMCache",
    "SnapKVCache",
    "StreamingLLMCache",
    "TOVACache",
    "UnavailableCacheError",
    "UnsupportedOperationError",
    "build_cache",
    "estimate",
    "install",
    "list_backends",
    "most_tokens",
    "register_backend",
    "uninstall",
]

_LAZY = {
    "ArtifactError": "errors",
    "BackendConfig": "config",
    "CacheReport": "report",
    "EvictingCache": "eviction.cache",
    "ExpectedAttentionCache": "backends.expected_attention",
    "Float8Cache": "backends.float8",
    "H2OCache": "backends.h2o",
    "IncompatibleTransformersError": "errors",
    "Int4Cache": "backends.int4",
    "Int8Cache": "backends.int8",
    "KIVICache": "backends.kivi",
    "KVCache": "cache",
    "KVEncoderDecoderCache": "encoder_decoder",
    "KVQuantCache": "backends.kvquant",
    "KernelUnavailableError": "errors",
    "KeyDiffCache": "backends.keydiff",
    "KnormCache": "backends.knorm",
    "KVzipCache": "backends.kvzip",
    "LagKVCache": "backends.lagkv",
    "LocretCache": "backends.locret",
    "RandomCache": "backends.random",
    "RetainingHeads": "retaining.heads",
    "RetainingHeadsConfig": "retaining.configuration",
    "SirLLMCache": "backends.sirllm",
    "SnapKVCache": "backends.snapkv",
    "StreamingLLMCache": "backends.streaming_llm",
    "TOVACache": "backends.tova",
    "UnavailableCacheError": "errors",
    "UnsupportedOperationError": "errors",
    "build_cache": "building",
    "estimate": "estimation",
    "most_tokens": "capacity",
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
