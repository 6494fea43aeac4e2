"""Which layers of a model are packed, and which keep transformers' own cache layer, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .decoder import begins_with_encoder
from .loops import repeated_layers
from .origins import is_of_family, modeling_module

__all__ = [
    "LayerPlan",
    "attends_once",
    "caches_latents",
    "dense_reasons",
    "encoder_key_value_heads",
    "has_indexer_keys",
    "indexer_sizes",
    "key_value_heads",
    "plan_cross_attention",
    "plan_layers",
    "query_heads",
]


_WINDOWED_KINDS = ("sliding_attention", "chunked_attention")
_INDEXED = "indexed_attention"
_BORROWING = "reuse_but_indexer"
"""transformers' name for what a layer does that keeps its indexer's keys and no others."""
_CACHES = "transformers.cache_utils"
_FULL_KINDS = ("full_attention", "hybrid", _INDEXED)  # hybrid: beside a recurrent branch


@dataclass(frozen=True)
class LayerPlan:
    """What to build for one layer.

    Args:
        layer_type (`str`): transformers' name for the kind of layer.
        dense_kwargs (`dict`): Arguments of transformers' own cache layer.
        dense_reason (`str`, *optional*): Why the layer is not packed; `None` if it is.
        window (`int`, *optional*): How far back a layer that is packed, or could be, sees, its own token
            included; `None` if to the first one.
        is_cross_attention (`bool`): Whether the layer attends to images, or to what an encoder has read, and
            not to the text.
        repeats (`int`, *optional*): The layer of the model of which this is a further pass (`models.loops`).
        borrows_keys (`bool`): Whether the layer attends to what an earlier one has cached, and keeps at most
            keys of an indexer itself.
    """

    layer_type: str
    dense_kwargs: dict[str, Any]
    dense_reason: str | None = None
    window: int | None = None
    is_cross_attention: bool = False
    repeats: int | None = None
    borrows_keys: bool = False

    @property
    def has_keys(self) -> bool:
        """Whether the layer keeps keys and values at all; recurrent ones do not."""
        from transformers.cache_utils import CacheLayerMixin

        return issubclass(self._dense_class(), CacheLayerMixin)

    @property
    def has_indexer(self) -> bool:
        """Whether the layer chooses what to attend to by keys of an indexer, which it keeps as well."""
        return self.layer_type == _INDEXED

    @property
    def has_recurrent_branch(self) -> bool:
        """Whether the layer keeps a recurrent branch's state beside the keys and values of full attention."""
        return self.layer_type == "hybrid"

    @property
    def grows_unpacked(self) -> bool:
        """Whether transformers' own layer keeps every token, and takes the mask of full attention."""
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        is_left = self.dense_reason is not None and not self.is_cross_attention and not self.borrows_keys
        found = self._dense_class()
        return (
            is_left and issubclass(found, DynamicLayer) and not issubclass(found, DynamicSlidingWindowLayer)
        )

    @property
    def updates_beside(self) -> frozenset[str]:
        """Methods by which a model gives a layer of a class of its own more than keys and values."""
        own = (kind for kind in self._dense_class().__mro__ if kind.__module__ != _CACHES)
        return frozenset(name for kind in own for name in vars(kind) if name.startswith("update_"))

    def build_dense(self) -> Any:
        """Build transformers' own cache layer for this kind of layer, or one that only lets prompts go."""
        return self._dense_class()(**self.dense_kwargs)

    def _dense_class(self) -> Any:
        from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicSlidingWindowLayer

        from .short_windows import ShortWindowLayer

        found = DYNAMIC_LAYER_TYPE_MAPPING[self.layer_type]
        return ShortWindowLayer if found is DynamicSlidingWindowLayer else found


def plan_layers(
    config: Any,
    skipped: frozenset[int] = frozenset(),
    *,
    evicts: bool = False,
    packs_window: Callable[[int, int], bool] | None = None,
    cross_reason: str | None = None,
) -> list[LayerPlan]:
    """Plan the layers of a decoder's cache, which are those of the decoder, and of its further passes.

    Full attention is packed, also beside a recurrent branch, and so are layers with an indexer where no token
    is evicted. A sliding or chunked layer whose window is at least the model's context never
    drops a token, so it is packed as well (Phi-3, Mistral configurations), and a shorter one if that is said
    to be worth it. Every other kind stays with transformers' class.

    Args:
        config (`PreTrainedConfig`): The decoder's configuration.
        skipped (`frozenset[int]`): Layers the user wants dense.
        evicts (`bool`): Whether tokens are to be evicted.
        packs_window (`Callable`, *optional*): Whether to pack the layer of an index and a window; none if not
            given.
        cross_reason (`str`, *optional*): Why layers that attend to images are not to be packed; they are if
            not given.

    Raises:
        ValueError: If no layer keeps keys and values (state-space models).
    """
    from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

    kwargs: Any
    layer_types, kwargs = get_layer_types_and_kwargs(config)
    if not set(layer_types) <= DYNAMIC_LAYER_TYPE_MAPPING.keys():
        modeling_module(config)  # in which models have cache layers of kinds of their own
    if isinstance(kwargs, dict):  # transformers < 5.18 shares one set of arguments between the layers
        kwargs = [kwargs] * config.num_hidden_layers
    # a model that was cut short, for good or while it drafts by its first layers, lists the types of all
    layers = list(zip(layer_types, kwargs, strict=False))
    context = getattr(config, "max_position_embeddings", None)
    crossing = frozenset(getattr(config, "cross_attention_layers", None) or ())
    served = [*range(len(layers)), *repeated_layers(config)]
    plans = []
    for layer_idx, of_model in enumerate(served):
        kind, dense_kwargs = layers[of_model]
        window = dense_kwargs.get("sliding_window")
        windowed = kind in _WINDOWED_KINDS
        if layer_idx in crossing:
            reason = cross_reason and f"cross_attention: {cross_reason}"
            plan = LayerPlan(kind, dense_kwargs, reason, is_cross_attention=True)
        elif windowed and window is not None and context is not None and window >= context:
            plan = LayerPlan(kind, dense_kwargs)
        elif windowed and window is not None and packs_window is not None and packs_window(layer_idx, window):
            plan = LayerPlan(kind, dense_kwargs, window=window)
        elif windowed:
            plan = LayerPlan(kind, dense_kwargs, f"{kind}: holds at most {window} tokens already")
        elif kind == _INDEXED and evicts:
            plan = LayerPlan(kind, dense_kwargs, f"{kind}: chooses among all tokens, so none may be evicted")
        elif DYNAMIC_LAYER_TYPE_MAPPING[kind].__module__ != _CACHES:
            plan = LayerPlan(kind, dense_kwargs, f"{kind}: cached by a class of the model's own")
        elif kind not in _FULL_KINDS:
            plan = LayerPlan(kind, dense_kwargs, f"{kind}: not a growing key/value cache of full attention")
        elif _sharing_mode(config, of_model) == _BORROWING:
            reason = f"{kind}: attends to what an earlier layer has cached"
            plan = LayerPlan(kind, dense_kwargs, reason, borrows_keys=True)
        elif caches_latents(config) and not key_value_heads(config, of_model)[2]:
            plan = LayerPlan(kind, dense_kwargs, f"{kind}: caches latents without rotated keys beside them")
        else:
            plan = LayerPlan(kind, dense_kwargs)
        if plan.dense_reason is None and layer_idx in skipped:
            plan = replace(plan, dense_reason="skip_layers")
        plans.append(plan if layer_idx == of_model else replace(plan, repeats=of_model))
    if not any(plan.has_keys for plan in plans):
        raise ValueError(
            f"Models of type {config.model_type!r} have no layer that keeps keys and values, so there is "
            "nothing to pack. Allowed for this model is no cache_implementation at all."
        )
    return plans


def dense_reasons(*plans: Sequence[LayerPlan]) -> list[str | None]:
    """Return why layers of the text are dense by all of several plans; `None` of those that are not."""
    return [
        layers[0].dense_reason
        if all(layer.dense_reason and not layer.is_cross_attention for layer in layers)
        else None
        for layers in zip(*plans, strict=True)
    ]


def plan_cross_attention(
    config: Any, skipped: frozenset[int] = frozenset(), *, cross_reason: str | None = None
) -> list[LayerPlan]:
    """Plan the cache of what the layers of an encoder-decoder model's decoder read of its encoder.

    Args:
        config (`PreTrainedConfig`): The decoder's configuration.
        skipped (`frozenset[int]`): Layers the user wants dense.
        cross_reason (`str`, *optional*): Why none is to be packed; all are if not given.

    Returns:
        `list[LayerPlan]`: One for every layer; empty where none has cross-attention.
    """
    if begins_with_encoder(config):
        return []
    kind = "full_attention"  # also of a layer that sees a window of its own text
    reason = cross_reason and f"cross_attention: {cross_reason}"
    return [
        LayerPlan(kind, {}, reason or ("skip_layers" if index in skipped else None), is_cross_attention=True)
        for index in range(config.num_hidden_layers)
    ]


def caches_latents(config: Any) -> bool:
    """Whether a layer of this configuration caches latents and rotated keys, and not keys and values."""
    return getattr(config, "kv_lora_rank", None) is not None


def attends_once(config: Any) -> bool:
    """Whether what a layer's update returns is keys and values, and attended to by that layer alone.

    Not where they are latents, and not where later layers have no keys of their own (Gemma 3n and 4).
    """
    return not caches_latents(config) and not getattr(config, "num_kv_shared_layers", 0)


def key_value_heads(config: Any, layer_idx: int) -> tuple[int, int, int]:
    """Return `(num_key_value_heads, key_head_dim, value_head_dim)` of what a layer hands to its cache.

    Raises:
        ValueError: If the configuration knows no attention heads (state-space models).
    """
    layer = _of_layer(config, layer_idx)
    if caches_latents(layer):  # one head of latents and one of rotated keys
        rotates = getattr(layer, "no_rope_layers", None) or {layer_idx: True}
        return 1, layer.kv_lora_rank, layer.qk_rope_head_dim if rotates[layer_idx] else 0
    heads = query_heads(config, layer_idx)
    kv_heads = _size(config, layer_idx, "num_key_value_heads")
    if getattr(layer, "new_decoder_architecture", False):
        kv_heads = heads  # Falcon 40B repeats its heads before it caches them
    elif kv_heads is None and getattr(layer, "multi_query", False):
        kv_heads = 1
    # relatives of T5, and CPM-Ant, have names of their own for it, which not all of them tell transformers
    names = ("head_dim", "d_kv", "dim_head")
    head_dim = next(filter(None, (_size(config, layer_idx, name) for name in names)), None)
    head_dim = head_dim or layer.hidden_size // heads
    return kv_heads or heads, head_dim, _size(config, layer_idx, "v_head_dim") or head_dim


def encoder_key_value_heads(config: Any, layer_idx: int) -> tuple[int, int, int]:
    """The same of what a decoder's layer makes of its encoder; Dia has heads of another kind there."""
    heads = getattr(config, "cross_num_key_value_heads", None)
    if heads is None:
        return key_value_heads(config, layer_idx)
    return heads, config.cross_head_dim, config.cross_head_dim


def indexer_sizes(config: Any) -> tuple[int, int] | None:
    """Return `(head_dim, position_dimensions)` of indexers; `None` if a model has none.

    Those that rotate their keys only when they choose keep positions by time, row and column, in the first
    layer that has one.
    """
    if getattr(config, "index_head_dim", None):
        return config.index_head_dim, 0
    if getattr(config, "indexer_head_dim", None):
        return config.indexer_head_dim, 3
    return None


def has_indexer_keys(config: Any, layer_idx: int) -> bool:
    """Whether a layer that has an indexer's choice made it itself, and not an earlier layer."""
    kinds = getattr(config, "indexer_types", None)
    return kinds is None or kinds[layer_idx] != "shared"


def query_heads(config: Any, layer_idx: int) -> int:
    """Return the number of query heads of a layer.

    Raises:
        ValueError: If the configuration knows no attention heads (state-space models).
    """
    layer = _of_layer(config, layer_idx)
    heads: int | None = _size(config, layer_idx, "num_attention_heads") or getattr(layer, "n_head", None)
    if heads is None:
        raise ValueError(f"{type(config).__name__} has no attention heads, so no keys and values to keep.")
    return heads


def _sharing_mode(config: Any, layer_idx: int) -> str | None:
    """Return the word for how a layer shares keys and values with others; `None` if it does not."""
    modes = getattr(config, "kv_sharing_modes", None)
    mode: str | None = None if modes is None else modes[layer_idx]
    return mode


def _of_layer(config: Any, layer_idx: int) -> Any:
    """The configuration of one layer, where layers differ."""
    return config.per_layer_config[layer_idx] if getattr(config, "is_heterogeneous", False) else config


def _size(config: Any, layer_idx: int, name: str) -> int | None:
    """A size of one layer by its name; `None` if the configuration has none.

    Layers of Inkling that have a window have sizes of their own, and those of MiMo twice the heads of keys.
    """
    layer = _of_layer(config, layer_idx)
    size: int | None = getattr(layer, name, None)
    own: int | None = getattr(layer, f"swa_{name}", None)
    if size and name == "num_key_value_heads" and is_of_family(config, {"mimo_v2_flash"}):
        own = 2 * size
    if own is None:
        return size
    served = [*range(config.num_hidden_layers), *repeated_layers(config)]
    is_windowed = config.layer_types[served[layer_idx]] in ("hybrid_sliding", "sliding_attention")
    return own if is_windowed else size
