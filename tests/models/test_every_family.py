"""Every decoder-only family that Transformers has, as small as its configuration allows.

With a cache that never packs, generation is that of the ordinary cache. With one that packs, every layer is
packed or says why not, and the first step that reads packed tokens is that of a dense cache which rounds by
the formula. One that evicts goes on, or refuses the family for a known reason.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvcache_plugins import KVCache, estimate
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.facts import biases_by_distance, masks_all_columns
from tests.models.families import NAMES, as_far_as_it_can_be_built, greedy, small_model
from tests.models.rounded import Rounded

LENGTH, NEW = 44, 6
# What cannot be built, or generated with, in the release that was looked through.
BROKEN = frozenset({"reformer", "xlstm"})


# Encoders that serve as decoders: in older releases they do not ask the cache how many tokens it holds.
MASKS_OF_THEIR_OWN = frozenset({"big_bird", "megatron-bert", "rembert", "roformer"})

# Read their whole text at every step, and since Transformers 5.24 hand a cache on all the same.
READING_ALL = frozenset({"xlm"})

# Ask for keys or values as such: DiffLlama cuts its values in two; Gemma 3n hands on what its layers share,
# in releases that keep that outside of the cache.
DECODED_WHOLE = frozenset({"diffllama", "gemma3n_text"})

# Decoders that forget their mask after the prompt.
ATTENDING_TO_PADS = frozenset({"prophetnet"})


def generate(
    model: Any, cache_config: dict[str, Any] | None = None, **cache: Any
) -> tuple[Tensor, Tensor, Any]:
    """Tokens `(B, NEW)`, logits `(B, NEW, vocabulary)` and the cache."""
    return greedy(model, (LENGTH, 31), NEW, cache_config, **cache)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_family(name: str) -> None:
    with as_far_as_it_can_be_built(name, BROKEN):
        model = small_model(name)
        tokens, logits, past = generate(model)
    keeps_keys = isinstance(past, Cache) and any(isinstance(layer, CacheLayerMixin) for layer in past.layers)
    is_used = keeps_keys and past.get_seq_length() > 0 and name not in READING_ALL
    if not model._supports_default_dynamic_cache() or (keeps_keys and not is_used):
        with pytest.raises(ValueError, match="would be ignored"):
            generate(model, {"backend": "int8"})
        with pytest.raises(ValueError, match=r"is no cache_implementation at all|no keys and"):
            estimate(model.config, {"backend": "int8"}, LENGTH)
        return
    if not keeps_keys:
        pytest.skip(f"{name} keeps no keys")
    if name in ATTENDING_TO_PADS:
        with pytest.raises(ValueError, match="attend to padding as soon as a cache holds tokens"):
            generate(model, {"backend": "int8"})
        return

    same, exact, cache = generate(model, {"backend": "int4", "residual_length": 1024})
    assert isinstance(cache, KVCache)
    assert same.tolist() == tokens.tolist()
    torch.testing.assert_close(exact, logits, atol=1e-4, rtol=1e-4)

    _, near, cache = generate(model, {"backend": "int8"})
    report = cache.report()
    dense = {index for index, kernel in enumerate(report.kernel) if kernel == "dense"}
    assert set(report.dense_layers) == dense
    for layer in cache.packed_layers:
        assert layer.stored_keys.packed_length == cache.get_seq_length()
        assert name in DECODED_WHOLE or "decoded whole" not in (layer.kernel_reason or "")
    torch.testing.assert_close(near[:, 0], logits[:, 0], atol=1e-4, rtol=1e-4)
    packed = {layer.layer_idx for layer in cache.packed_layers}
    _, rounded, _ = generate(model, **as_argument(Rounded(packed, config=model.config)))
    assert (near[:, 1] - rounded[:, 1]).norm() < 0.002 * logits[:, 1].norm()

    evicting = {"backend": "knorm", "budget": 24, "chunk_size": 16, "sink_length": 2}
    if biases_by_distance(model.config) or (name in MASKS_OF_THEIR_OWN and masks_all_columns(model.config)):
        with pytest.raises(ValueError, match="Allowed for this model are backends that keep every token"):
            generate(model, evicting)
        return
    _, first, _ = greedy(model, (LENGTH, 31), 1, {**evicting, "budget": LENGTH - 1})
    torch.testing.assert_close(first, logits[:, :1], atol=1e-4, rtol=1e-4)  # reading in chunks is no other
    _, logits, cache = generate(model, evicting)
    assert torch.isfinite(logits).all()
    assert {layer.held_length for layer in cache.packed_layers} <= {24 + NEW - 1}
