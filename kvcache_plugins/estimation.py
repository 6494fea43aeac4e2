"""Bytes a cache will take, predicted without a model and without allocating anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .building import build_cache
from .layers.base import PackedLayer
from .layers.counting import tensors_in
from .layers.offloading import SLOTS
from .models.facts import decoder_config, split_model_or_config
from .models.layer_plan import indexer_sizes, key_value_heads, plan_layers

__all__ = ["estimate"]


def estimate(
    model_or_config: Any,
    cache_config: Mapping[str, Any],
    tokens: int,
    batch_size: int = 1,
    *,
    dtype: torch.dtype | None = None,
    max_cache_length: int | None = None,
) -> int:
    """Predict `kv_bytes()` of a cache that was given `tokens` tokens.

    The layers of the cache are run on the meta device, where tensors have a shape and no data, so the
    prediction is the allocation itself rather than a formula beside it. Left padding adds 8 bytes a row. The
    fixed-size recurrent states of linear-attention layers, which no cache option changes, are not counted;
    nor are layers that attend to images and not to the text (Llama 3.2 Vision), nor by how much lists of
    outliers grow when an evicting cache over KVQuant moves tokens, which depends on the tokens. Heads that
    share a budget (`head_floor`) are taken to keep equally many; how many blocks they do not fill depends on
    the tokens, too. With `offload`, it is what rests in the host's memory, what is kept on the GPU beside
    it, and the two layers of codes that lie there in turn; not the blocks that the host may lack. A layer
    that is packed alone makes room for no other, and stays on the GPU.

    Args:
        model_or_config (`PreTrainedModel | PreTrainedConfig`): The model.
        cache_config (`dict`): As for `generate`; `{"backend": "dense"}` predicts transformers' own cache.
        tokens (`int`): Tokens per row; of an evicting cache, those of a prompt that has just been read.
        batch_size (`int`): Rows.
        dtype (`torch.dtype`, *optional*): Of the states; the model's, else the configuration's, else bf16.
        max_cache_length (`int`, *optional*): Tokens the cache is known to hold in the end, as `generate()`
            tells it; room is then made for these and no more.

    Returns:
        `int`: bytes.

    Raises:
        ValueError: On a wrong option, or a count that is not positive.
    """
    for name, value in (("tokens", tokens), ("batch_size", batch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"estimate: {name} must be an integer >= 1, got {value!r}.")
    model, config = split_model_or_config(model_or_config)
    config = decoder_config(config)
    if dtype is None:
        dtype = getattr(model, "dtype", None) or getattr(config, "dtype", None) or torch.bfloat16
    if isinstance(cache_config, Mapping) and str(cache_config.get("backend")).lower() == "dense":
        layers: list[Any] = [plan.build_dense() for plan in plan_layers(config)]
    else:
        layers = build_cache(model_or_config, cache_config, max_cache_length=max_cache_length).layers
    indexer_dim, position_dims = indexer_sizes(config) or (None, 0)
    storages: dict[int, int] = {}
    offloaded: list[int] = []
    for layer_idx, (layer, plan) in enumerate(zip(layers, plan_layers(config), strict=True)):
        if plan.is_cross_attention or not hasattr(layer, "get_mask_sizes"):
            continue  # also linear attention, and layers without any state
        heads, key_dim, value_dim = key_value_heads(config, layer_idx)
        if isinstance(layer, PackedLayer):
            layer.set_prompt_length(tokens)
        for count in (tokens - 1, 1):
            keys = torch.empty(batch_size, heads, count, key_dim, dtype=dtype, device="meta")
            values = torch.empty(batch_size, heads, count, value_dim, dtype=dtype, device="meta")
            layer.update(keys, values)
            if indexer_dim is not None and plan.has_indexer:
                layer.update_indexer(torch.empty(batch_size, count, indexer_dim, dtype=dtype, device="meta"))
        if position_dims and plan.has_indexer:
            shape = (position_dims, batch_size, tokens)
            layer.indexer_position_ids = torch.empty(shape, dtype=torch.int64, device="meta")
            position_dims = 0  # the first layer keeps those of all
        if isinstance(layer, PackedLayer) and layer.shelf is not None:
            offloaded.append(layer.records.data.nbytes)
        owned = layer.tensors().values() if isinstance(layer, PackedLayer) else tensors_in(vars(layer))
        storages |= {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in owned}
    in_turn = sorted(offloaded)[-SLOTS:] if len(offloaded) > 1 else []
    return sum(storages.values()) + sum(in_turn)
