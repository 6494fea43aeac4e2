"""What the package exports, pinned: a name that disappears is a decision, not an accident."""

from __future__ import annotations

import kvcache_plugins as kvp


def test_exports() -> None:
    assert sorted(kvp.__all__) == [
        "ArtifactError", "BackendConfig", "CacheReport", "EvictingCache", "ExpectedAttentionCache",
        "Float8Cache", "H2OCache", "IncompatibleTransformersError", "Int4Cache", "Int8Cache",
        "KIVICache", "KVCache", "KVEncoderDecoderCache", "KVQuantCache", "KVzipCache",
        "KernelUnavailableError", "KeyDiffCache", "KnormCache",
        "LagKVCache", "LocretCache", "RandomCache", "RetainingHeads", "RetainingHeadsConfig", "SirLLMCache",
        "SnapKVCache", "StreamingLLMCache", "TOVACache", "UnavailableCacheError",
        "UnsupportedOperationError", "build_cache",
        "estimate", "install", "list_backends", "most_tokens", "register_backend", "uninstall",
    ]  # fmt: skip
    for name in kvp.__all__:
        assert getattr(kvp, name) is not None


def test_backends() -> None:
    assert {"float8", "int4", "int8", "kivi"} <= set(kvp.list_backends())


def test_named_caches_are_the_registered_ones() -> None:
    from kvcache_plugins.registry import get_backend

    for name, cls in {
        "kivi": kvp.KIVICache,
        "int8": kvp.Int8Cache,
        "int4": kvp.Int4Cache,
        "float8": kvp.Float8Cache,
    }.items():
        assert get_backend(name) is cls and issubclass(cls, kvp.KVCache)
