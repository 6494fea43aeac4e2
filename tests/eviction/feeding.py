"""The models and backends of these tests, and what the conformance suite feeds them with."""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedModel

from kvcache_plugins.testing.eviction.feeding import (
    bound_cache,
    chunks_of,
    feed,
    ids,
    mask_of,
    real_positions,
)
from kvcache_plugins.testing.models import tiny_model

__all__ = [
    "EVICTING",
    "NEEDS_QUERIES",
    "bound_cache",
    "chunks_of",
    "feed",
    "ids",
    "mask_of",
    "model_of",
    "real_positions",
]

EVICTING = (
    "expected_attention", "h2o", "keydiff", "knorm", "kvzip", "lagkv", "random", "sirllm", "snapkv",
    "streaming_llm", "tova",
)  # fmt: skip
NEEDS_QUERIES = ("expected_attention", "h2o", "kvzip", "snapkv", "tova")


@functools.cache
def model_of(name: str = "llama", attention: str = "sdpa", **config: Any) -> PreTrainedModel:
    """One model per test process; nothing may change it."""
    return tiny_model(name, attn_implementation=attention, **{"vocab_size": 512, **config})
