"""How an evicting layer packs what it keeps: the streams of another backend, if their tokens can move."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..layers.codec import SymmetricCodec
from ..layers.stream import StreamSpec
from ..quantizers.granularity import per_token_head
from ..registry import get_backend
from .options import STORAGES

if TYPE_CHECKING:
    from .layer import EvictingLayer

__all__ = ["stored_stream"]


def stored_stream(layer: EvictingLayer, side: str, head_dim: int) -> StreamSpec:
    """How `layer` stores its `"key"`s or `"value"`s of `head_dim` channels.

    Raises:
        ValueError: If tokens of the storage cannot leave their blocks, or do not go with `positions`.
    """
    config = layer.config
    storage = config.storage_config()
    if storage is None:
        # never packed: the codec is there for the layout of records that stay empty
        return StreamSpec(SymmetricCodec(per_token_head()), keep_recent=sys.maxsize)
    assert config.storage is not None
    stored = get_backend(config.storage["backend"]).layer_class(storage, layer.layer_idx, layer.facts)
    stored.padding, stored.num_heads, stored.key_dim = layer.padding, layer.num_heads, layer.key_dim
    if side == "key":
        spec = stored.key_stream(head_dim)
    else:
        spec = stored.value_stream(head_dim)
        # both sides of a token are packed at once, so that both can be gathered
        spec.codec.warmup_tokens = stored.key_stream(layer.key_dim).codec.warmup_tokens
    given = f"{type(config).__name__}.storage={dict(config.storage)!r}"
    if not spec.codec.is_gatherable or spec.block_length != spec.codec.unit_tokens:
        raise ValueError(
            f"{given} cannot evict single tokens: the {side}s of {spec.codec.unit_tokens} tokens share their "
            f"scales. {STORAGES}"
        )
    if side == "key":
        _check_positions(layer, given, is_turned=spec.codec.follows_slots)
    return spec


def _check_positions(layer: EvictingLayer, given: str, *, is_turned: bool) -> None:
    positions, name = layer.config.positions, type(layer.config).__name__
    if is_turned and positions != "compact":
        raise ValueError(
            f"{given} codes keys as they are before the rotary embedding and turns them to the slot they are "
            f"in, so positions must be 'compact', got {positions!r}; allowed with it are 'int8', 'int4' and "
            "'float8', or None."
        )
    if not is_turned and positions == "compact" and layer.facts.rotary is not None:
        raise ValueError(
            f"{name}.positions='compact' rotates keys again, so they cannot stay packed: storage must be "
            f"None, or 'kvquant', whose keys are not rotated, got {layer.config.storage!r}; allowed with it "
            "is 'absolute'."
        )
