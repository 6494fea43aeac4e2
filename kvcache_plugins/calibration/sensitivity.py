"""What the loss of one layer's keys, or values, costs the model: all else is exact.

A sample is read as a prompt, with the ordinary cache, and then in blocks of tokens (of one token where layers
are recurrent). For each candidate, the blocks are read again with one side of one layer packed as its backend
would; its loss is the mean divergence (Kullback-Leibler, nats per token) of the predictions from those of the
ordinary cache. The prompt is the same for all, so it is read once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from ..building import build_cache
from ..device_dtypes import doubled
from ..evaluation.perplexity.blocks import longest_block
from ..evaluation.perplexity.scoring import divergence_of
from ..layers.base import PackedLayer
from ..layers.crossing import CrossAttentionLayer
from ..layers.handle import KVHandle
from ..models.cache_argument import as_argument
from ..models.decoder import decoder_only_config
from ..models.layer_plan import key_value_heads

__all__ = [
    "BLOCK_TOKENS",
    "Candidate",
    "OneSidedLayer",
    "candidates_of",
    "check_candidates",
    "measure_candidates",
]

BLOCK_TOKENS = 64
"""Tokens read at once after the prompt, at most."""
_SIDES = ("key", "value")
_DECIDED = ("nbits", "key_bits", "value_bits", "layer_overrides")


@dataclass(frozen=True)
class Candidate:
    """One way to store one side of one layer.

    Args:
        layer_idx (`int`): The layer.
        side (`str`): `"key"` or `"value"`.
        nbits (`int`): Bits of a code.
        rope_mode (`str`, *optional*): Of keys, for backends that have the option.
    """

    layer_idx: int
    side: str
    nbits: int
    rope_mode: str | None = None

    @property
    def name(self) -> str:
        """Key of its record."""
        words = [
            str(self.layer_idx),
            self.side,
            str(self.nbits),
            *([self.rope_mode] if self.rope_mode else []),
        ]
        return " ".join(words)

    @property
    def options(self) -> dict[str, Any]:
        """Options of the layer that make it so."""
        chosen: dict[str, Any] = {f"{self.side}_bits": self.nbits}
        return chosen | ({} if self.rope_mode is None else {"rope_mode": self.rope_mode})


def candidates_of(model: Any, cache_config: Mapping[str, Any], bits: Sequence[int]) -> list[Candidate]:
    """Return the candidates for every layer that a cache of these options packs.

    Where the backend has a `rope_mode` and the options do not set it, keys come in each that the layer has.

    Args:
        model (`PreTrainedModel`): The model.
        cache_config (`Mapping`): The backend and its options for all layers, without bits.
        bits (`Sequence[int]`): Numbers of bits to choose from.

    Raises:
        ValueError: If the options decide what is to be chosen, or are wrong.
    """
    decided = [name for name in _DECIDED if name in cache_config]
    if decided:
        raise ValueError(f"--target_bits chooses {decided}, so --cache_config must not set them.")
    candidates = []
    # a window may be worth packing with few bits only
    packed = {n: build_cache(model, {**cache_config, "nbits": n}).packed_layers for n in bits}
    layers = {
        layer.layer_idx: layer
        for found in packed.values()
        for layer in found
        if not isinstance(layer, CrossAttentionLayer)  # texts have no images
    }
    for layer_idx, layer in sorted(layers.items()):
        modes: tuple[str | None, ...] = (None,)
        if "rope_mode" in type(layer.config).__dataclass_fields__ and "rope_mode" not in cache_config:
            modes = ("post", "block") if layer.facts.rotary is not None else ("post",)
        for nbits in (n for n in bits if any(other.layer_idx == layer_idx for other in packed[n])):
            candidates += [Candidate(layer_idx, "key", nbits, mode) for mode in modes]
            candidates.append(Candidate(layer_idx, "value", nbits))
    return candidates


def check_candidates(
    model: Any, cache_config: Mapping[str, Any], bits: Sequence[int], sequence_length: int
) -> None:
    """Check that every candidate can be measured, without reading a token.

    Args:
        model (`PreTrainedModel`): The model.
        cache_config (`Mapping`): The backend and its options for all layers, without bits.
        bits (`Sequence[int]`): Numbers of bits to choose from.
        sequence_length (`int`): Tokens of a sample.

    Raises:
        ValueError: If the options decide what is to be chosen, are wrong, or leave nothing to choose, or if
            half a sample is so short that nothing of it is packed.
    """
    if not candidates_of(model, cache_config, bits):
        raise ValueError(
            f"--target_bits has nothing to choose: --cache_config {dict(cache_config)!r} packs no layer."
        )
    config = decoder_only_config(model.config)
    least = 0
    for nbits in bits:
        for layer in build_cache(model, {**cache_config, "nbits": nbits}).packed_layers:
            heads, *dims = key_value_heads(config, layer.layer_idx)
            layer.lazy_initialization(*(torch.empty(1, heads, 0, dim, device="meta") for dim in dims))
            specs = [stream.spec for stream in layer.streams]
            least = max(least, *(2 * (spec.keep_recent + spec.block_length) for spec in specs))
    if sequence_length < least:
        raise ValueError(
            f"--sequence_length {sequence_length} is too short to judge a precision: of a prompt of half of "
            f"it, {cache_config['backend']!r} packs nothing. Take {least} or more."
        )


class OneSidedLayer:
    """A dense cache layer that reads its keys, or its values, from a packed one.

    In all else it is the dense layer, whose window it has.

    Args:
        packed (`PackedLayer`): Empty.
        side (`str`): Which side is read packed: `"key"` or `"value"`.
        dense (`CacheLayerMixin`): transformers' own layer, which holds the prompt.
    """

    def __init__(self, packed: PackedLayer, side: str, dense: Any) -> None:
        self.packed, self.side, self.dense = packed, side, dense
        packed.update(dense.keys, dense.values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dense, name)

    @property  # type: ignore[misc]  # read-only, as proxies have it
    def __class__(self) -> Any:
        """That of the dense layer, which models ask for: it may have a recurrent branch."""
        return type(self.dense)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new keys and values and return all, one side as the packed layer reads it."""
        keys, values = self.dense.update(key_states, value_states, *args, **kwargs)
        reads = self.packed.update(key_states, value_states)
        read = reads[_SIDES.index(self.side)]
        read = read.dense() if isinstance(read, KVHandle) else read
        return (read, values) if self.side == "key" else (keys, read)


@torch.no_grad()
def measure_candidates(
    model: Any, sample: Tensor, cache_config: Mapping[str, Any], candidates: Sequence[Candidate]
) -> Iterator[tuple[Candidate, float]]:
    """Yield every candidate with its loss on a sample.

    Args:
        model (`PreTrainedModel`): In evaluation mode.
        sample (`torch.Tensor` of shape `(1, T)`): Token ids, the first half of them the prompt.
        cache_config (`Mapping`): The backend and its options for all layers.
        candidates (`Sequence[Candidate]`): What to measure.

    Raises:
        ValueError: If the prompt is so short that nothing of it is packed, or a prediction is no number.
    """
    prompt_length = sample.shape[1] // 2
    prompt = DynamicCache(config=decoder_only_config(model.config))
    model.base_model(input_ids=sample[:, :prompt_length], **as_argument(prompt), use_cache=True)
    blocks = sample[:, prompt_length:].split(longest_block(prompt, BLOCK_TOKENS), dim=1)
    exact = _predictions(model, blocks, copy.deepcopy(prompt))
    for candidate in candidates:
        packed = _packed_layer(model, cache_config, candidate)
        cache = copy.deepcopy(prompt)
        dense: Any = cache.layers[candidate.layer_idx]
        one_sided: Any = OneSidedLayer(packed, candidate.side, dense)
        cache.layers[candidate.layer_idx] = one_sided
        if packed.streams[_SIDES.index(candidate.side)].packed_length == 0:
            raise ValueError(
                f"A sample of {sample.shape[1]} tokens is too short to judge a precision: of a prompt of "
                f"half of it, {cache_config['backend']!r} packs nothing."
            )
        yield candidate, _divergence(exact, _predictions(model, blocks, cache))


def _packed_layer(model: Any, cache_config: Mapping[str, Any], candidate: Candidate) -> PackedLayer:
    """The empty layer of a candidate; its other side has the same bits and is not read."""
    options = {"nbits": candidate.nbits, **candidate.options}
    cache = build_cache(model, {**cache_config, **options})
    layer = cache.layers[candidate.layer_idx]
    assert isinstance(layer, PackedLayer)
    return layer


def _predictions(model: Any, blocks: Sequence[Tensor], cache: Cache) -> Tensor:
    """Log-probabilities `(T, vocabulary)` after every token of the blocks, fp32."""
    rows = []
    for block in blocks:
        logits = model(input_ids=block, **as_argument(cache), use_cache=True).logits
        rows.append(logits[0].float().log_softmax(-1))
    return torch.cat(rows)


def _divergence(exact: Tensor, approximate: Tensor) -> float:
    """Mean Kullback-Leibler divergence of rows of log-probabilities; a rounding below zero counts as zero.

    Raises:
        ValueError: If it is no number, so that there is nothing to choose by.
    """
    mean = float(doubled(divergence_of(exact, approximate)).mean())
    if not math.isfinite(mean):
        raise ValueError("The predictions of a calibration must be finite; use --dtype bf16 or fp32.")
    return max(mean, 0.0)
