"""Keys of a text that is moved: they must have turned as the model's layers are said to turn them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.decoder import decoder_config
from kvcache_plugins.models.facts import LayerFacts, describe_layers
from kvcache_plugins.models.layer_plan import plan_layers

LENGTH, DISTANCE = 12, 3


def described(model: Any, *, from_config: bool = False) -> list[LayerFacts]:
    """What is said of every layer of a model, or of its configuration without it."""
    config = decoder_config(model.config)
    return describe_layers(None if from_config else model, config, plan_layers(config))


def check_moved_keys(model: Any, *, from_config: bool, has_plain_cache: bool = False) -> list[int]:
    """Check that moving a text turns the keys of each layer as is said, and those of others not at all.

    Args:
        model (`torch.nn.Module`): A decoder that is told `position_ids`.
        from_config (`bool`): Whether its configuration says it, and not the model.
        has_plain_cache (`bool`): Whether its text is read with a cache that knows nothing of its layers.

    Returns:
        `list[int]`: The layers that turn.
    """
    config = decoder_config(model.config)
    facts, plans = described(model, from_config=from_config), plan_layers(config)
    tokens = torch.randint(5, 100, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    caches = []
    for start in (0, DISTANCE):
        cache = DynamicCache() if has_plain_cache else DynamicCache(config=config)
        with torch.no_grad():
            model(tokens, position_ids=torch.arange(start, start + LENGTH)[None], **as_argument(cache))
        caches.append(cache)
    attending = [index for index, plan in enumerate(plans) if plan.has_keys and not plan.is_cross_attention]
    assert attending
    for index in attending:
        before, after = (cache.layers[index].keys for cache in caches)
        rotary = facts[index].rotary
        if rotary is not None:
            assert (before - after).norm() > 0.1 * before.norm()
            before = rotary.rotate(before, torch.full((LENGTH,), DISTANCE))
        assert (before - after).norm() < 1e-5 * before.norm()
    return [index for index in attending if facts[index].rotary is not None]
