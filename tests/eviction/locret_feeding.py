"""Random retaining heads for tiny models, and what they make of a text, computed step by step."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from kvcache_plugins.backends.locret import LocretCache
from kvcache_plugins.retaining.configuration import RetainingHeadsConfig
from kvcache_plugins.retaining.heads import RetainingHeads
from tests.eviction.feeding import bound_cache

__all__ = [
    "bound_locret",
    "heads_of",
    "inputs_of_attention",
    "locret",
    "projections",
    "worth",
    "worth_of_all",
]

_folders: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def heads_of(model: PreTrainedModel, seed: int = 0) -> str:
    """A folder of random heads that fit `model`."""
    config = RetainingHeadsConfig.from_model(model, hidden_dim=24)
    shape = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act")
    return _saved(tuple((name, getattr(config, name)) for name in shape), seed)


@functools.cache
def _saved(fields: tuple[tuple[str, Any], ...], seed: int) -> str:
    _folders.append(tempfile.TemporaryDirectory(prefix="locret-heads-"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        RetainingHeads(RetainingHeadsConfig(**dict(fields), hidden_dim=24)).save_pretrained(_folders[-1].name)
    return _folders[-1].name


def locret(model: PreTrainedModel, seed: int = 0, **options: Any) -> dict[str, Any]:
    """Options of a cache with random heads for `model`."""
    return {"backend": "locret", "heads": heads_of(model, seed), "budget": 24, "chunk_size": 16, **options}


def bound_locret(
    model: PreTrainedModel, prompt_length: int | None, mask: Tensor | None = None, **options: Any
) -> LocretCache:
    """A Locret cache that knows what `generate()` would have told it."""
    cache = bound_cache(model, locret(model, **options), prompt_length, mask)
    assert isinstance(cache, LocretCache)
    return cache


def projections(attention: Any, hidden: Tensor) -> list[Tensor]:
    """Queries, keys and values `(B, n, heads * D)` before any norm and rotation."""
    if hasattr(attention, "qkv_proj"):
        width = attention.config.num_key_value_heads * attention.head_dim  # of all keys
        return list(
            attention.qkv_proj(hidden).split([attention.num_key_value_groups * width, width, width], -1)
        )
    return [attention.q_proj(hidden), attention.k_proj(hidden), attention.v_proj(hidden)]


def worth(heads: str, layer_idx: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`W2 silu(W1 (q|k|v))` of tokens `(B, n, ...)`: `(B, H, n)`, from the file of the heads."""
    weights = load_file(f"{heads}/model.safetensors")
    first, second = (weights[f"layers.{layer_idx}.fc{number}.weight"] for number in (1, 2))
    hidden = torch.cat([query, key, value], dim=-1).float() @ first.T
    return (hidden * hidden.sigmoid() @ second.T).transpose(1, 2)


@contextmanager
def inputs_of_attention(model: Any) -> Iterator[list[list[Tensor]]]:
    """What the attention modules are called with meanwhile: `[layer][call]`, `(B, n, hidden size)`."""
    seen: list[list[Tensor]] = [[] for _ in model.model.layers]
    handles = [
        block.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, calls=calls: calls.append(kwargs["hidden_states"].clone()),
            with_kwargs=True,
        )
        for block, calls in zip(model.model.layers, seen, strict=True)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def worth_of_all(model: Any, heads: str, seen: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Worth of every token of the calls `seen`, per layer `(B, H, T)`."""
    return [
        worth(heads, index, *projections(block.self_attn, torch.cat(list(calls), dim=1)))
        for index, (block, calls) in enumerate(zip(model.model.layers, seen, strict=True))
    ]
