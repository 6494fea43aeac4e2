"""Bytes a cache will take, predicted without a model and without allocating anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .building import build_cache
from .config import check_count, check_length
from .dtype_names import floating_dtype
from .encoder_decoder import layers_of
from .errors import NotPredictedError
from .layers.base import PackedLayer
from .layers.counting import bytes_of, owned_tensors
from .layers.offloading import SLOTS
from .models.decoder import begins_with_encoder, decoder_config, has_cross_attention, split_model_or_config
from .models.layer_plan import (
    LayerPlan,
    encoder_key_value_heads,
    has_indexer_keys,
    indexer_sizes,
    key_value_heads,
    plan_cross_attention,
    plan_layers,
)
from .transformers_caches import names_quantized_cache, sized_layers

__all__ = ["MOST_NEW_TOKENS", "estimate"]

MOST_NEW_TOKENS = 2**17
"""Generated tokens of a prediction: layers that evict are given them a few at a time."""

_INDEX = "update_index"
"""How MiniMax-M3 gives layers that choose blocks of tokens the keys by which they do."""

_STEP = 32
"""Generated tokens given to a layer at once, so few that one which evicts takes them for such."""


def estimate(
    model_or_config: Any,
    cache_config: Mapping[str, Any],
    tokens: int,
    batch_size: int = 1,
    *,
    dtype: torch.dtype | str | None = None,
    max_cache_length: int | None = None,
    encoder_tokens: int | None = None,
    new_tokens: int = 1,
    at_peak: bool = False,
) -> int:
    """Predict `kv_bytes()` of a cache that was given `tokens` tokens: those of the moment, as it is then.

    A cache with `evict_at_decode` makes room now and then, and takes more just before than just after. With
    `at_peak`, the prediction is the most that it takes while tokens are generated.

    The layers of the cache are run on the meta device, where tensors have a shape and no data, so the
    prediction is the allocation itself rather than a formula beside it. Left padding adds 8 bytes a row; and
    where codes are learnt from the first tokens of every row (`smooth`, `"normal_float"`), keys stay exact
    until the row with the most padding has shown them, which is not counted. The fixed-size recurrent states
    of linear-attention layers, which no cache option changes, are not counted; nor are layers that attend to
    images and not to the text (Llama 3.2 Vision), nor by how much lists of outliers grow when an evicting
    cache over KVQuant moves tokens, which depends on the tokens. Heads that share a budget (`head_floor`) are
    taken to keep equally many; how many blocks they do not fill depends on the tokens, too. With `offload`,
    it is what rests in the host's memory, what is kept on the GPU beside it, and the two layers of codes that
    lie there in turn; not the blocks that the host may lack. A layer that is packed alone makes room for no
    other, and stays on the GPU. A window that transformers' own layer keeps is counted as it lies in memory
    once a token was generated; before, what has left it of a prompt is there, too.

    Transformers' own quantized caches decode all of a layer at every step, in memory that comes on top.

    Args:
        model_or_config (`PreTrainedModel | PreTrainedConfig`): The model.
        cache_config (`dict`): As for `generate`, so also of transformers' own `quanto`, `hqq` and `fp8`;
            `{"backend": "dense"}` predicts its ordinary cache.
        tokens (`int`): Tokens per row, with those that a model puts before the text itself (patches of an
            image, CPM-Ant's 32 of its own); of an evicting cache, those of a prompt that has just been read.
        batch_size (`int`): Rows.
        dtype (`torch.dtype | str`, *optional*): Of the states, also by a name such as `"bf16"`; the model's,
            else the configuration's, else bf16.
        max_cache_length (`int`, *optional*): Tokens the cache is known to hold in the end, as `generate()`
            tells it; room is then made for these and no more.
        encoder_tokens (`int`, *optional*): States per row that the encoder hands to the decoder, where there
            is one: tokens of a text, patches of an image, 1500 of 30 seconds of Whisper's sound. Those of
            MusicGen Melody come before the decoder's own, and are among `tokens`.
        new_tokens (`int`): Tokens generated after those: `max_new_tokens` of `generate()`, which hands all
            but the last one to the cache, and tells it so before (`max_cache_length`, unless it is given).
        at_peak (`bool`): Of layers that evict while tokens are generated, whether to take the most bytes that
            each has on the way from the end of the prompt on, instead of those at the end.

    Returns:
        `int`: bytes.

    Raises:
        UnavailableCacheError: If transformers has no such cache for this model, or lacks a package for it.
        ValueError: On a wrong option, a count that is not positive, none for an encoder, a dtype that is not
            of floating-point numbers, or a length that is less than the tokens.
        NotPredictedError: For models with layers that keep more than keys and values, in a form of their own
            (DeepSeek-V4).
    """
    tokens, batch_size, new_tokens = (
        check_count(f"estimate: {name}", value)
        for name, value in (("tokens", tokens), ("batch_size", batch_size), ("new_tokens", new_tokens))
    )
    encoder_tokens = (
        None if encoder_tokens is None else check_count("estimate: encoder_tokens", encoder_tokens)
    )
    max_cache_length = check_length("estimate: max_cache_length", max_cache_length)
    given = tokens + new_tokens - 1
    if max_cache_length is not None and max_cache_length < given:
        raise ValueError(
            f"estimate: max_cache_length must be at least {given}, the tokens and all new ones but the last, "
            f"got {max_cache_length}."
        )
    if new_tokens > MOST_NEW_TOKENS:
        raise ValueError(f"estimate: new_tokens must be at most {MOST_NEW_TOKENS}, got {new_tokens}.")
    model, whole = split_model_or_config(model_or_config)
    reads_encoder = has_cross_attention(whole)
    if reads_encoder != (encoder_tokens is not None):
        kind = "an encoder-decoder model" if reads_encoder else "a decoder-only model"
        if begins_with_encoder(whole):
            kind = "a model whose decoder has what its encoder reads among its own tokens"
        allowed = "an integer >= 1" if reads_encoder else "None"
        raise ValueError(
            f"estimate: {type(whole).__name__} is of {kind}, for which encoder_tokens must be {allowed}, "
            f"got {encoder_tokens!r}."
        )
    config = decoder_config(whole)
    if dtype is None:
        dtype = getattr(model, "dtype", None) or getattr(config, "dtype", None) or torch.bfloat16
    dtype = floating_dtype("estimate: dtype", dtype)
    if names_quantized_cache(cache_config):
        return _quantized_bytes(
            whole, cache_config, tokens, new_tokens - 1, _States(config, batch_size, dtype)
        )
    if max_cache_length is None and new_tokens > 1:
        max_cache_length = given
    plans = plan_layers(config)
    _check_predictable(plans)
    cross_plans = plan_cross_attention(config) if reads_encoder else []
    if isinstance(cache_config, Mapping) and str(cache_config.get("backend")).lower() == "dense":
        if options := {key: value for key, value in cache_config.items() if key != "backend"}:
            raise ValueError(f"estimate: the dense cache has no options, got {options!r}.")
        layers: list[Any] = [plan.build_dense() for plan in (*plans, *cross_plans)]
    else:
        layers = layers_of(build_cache(model_or_config, cache_config, max_cache_length=max_cache_length))
    states = _States(config, batch_size, dtype, max_cache_length)
    fed, given_back = [], 0
    for layer_idx, (layer, plan) in enumerate(zip(layers[: len(plans)], plans, strict=True)):
        if plan.is_cross_attention or not hasattr(layer, "get_mask_sizes"):
            continue  # also linear attention, and layers without any state
        given_back += states.feed_text(layer, plan, layer_idx, tokens, new_tokens - 1)
        fed.append(layer)
    for layer_idx, layer in enumerate(layers[len(plans) :]):
        layer.update(*states.of(encoder_key_value_heads(config, layer_idx), encoder_tokens or 0))
        fed.append(layer)
    packed = (layer for layer in fed if isinstance(layer, PackedLayer))
    offloaded = sorted(layer.records.data.nbytes for layer in packed if layer.shelf is not None)
    in_turn = offloaded[-SLOTS:] if len(offloaded) > 1 else []
    held = bytes_of(tensor for layer in fed for tensor in owned_tensors(layer))
    return held + sum(in_turn) + (given_back if at_peak else 0)


def _check_predictable(plans: list[LayerPlan]) -> None:
    """Refuse layers that a model gives something whose sizes its configuration does not say in a known way.

    Raises:
        NotPredictedError: Naming their kinds.
    """
    unknown = {plan.layer_type for plan in plans if plan.updates_beside - {_INDEX}}
    if unknown:
        raise NotPredictedError(
            f"estimate: layers of the kinds {sorted(unknown)} keep states of a form of their own beside keys "
            "and values, whose bytes are not predicted. Allowed are models without such layers; for this one "
            "`kv_bytes()` says what a cache takes."
        )


def _quantized_bytes(
    config: Any, cache_config: Mapping[str, Any], tokens: int, generated: int, states: _States
) -> int:
    """The bytes of one of transformers' own, which are the same for all layers of a shape."""
    of_shape: dict[tuple[int, int, int], int] = {}
    total = 0
    for layer_idx, layer in enumerate(sized_layers(config, cache_config)):
        shape = key_value_heads(states.config, layer_idx)
        if shape not in of_shape:
            try:
                states.feed_window(layer, shape, tokens, generated)
            except (AssertionError, RuntimeError, ValueError) as error:  # groups that do not fit
                raise ValueError(
                    f"estimate: transformers' own cache {dict(cache_config)} does not take {tokens} tokens, "
                    f"and {generated} generated ones, of {states.batch_size} rows, {shape[0]} heads and "
                    f"{shape[1:]} channels: {error}"
                ) from error
            of_shape[shape] = bytes_of(owned_tensors(layer))
        total += of_shape[shape]
    return total


class _States:
    """What a decoder's layers hand to their cache, without data.

    Args:
        config (`PreTrainedConfig`): The decoder's configuration.
        batch_size (`int`): Rows.
        dtype (`torch.dtype`): Of keys and values.
        final_length (`int`, *optional*): Tokens a layer is told that it will have been given in the end.
    """

    def __init__(
        self, config: Any, batch_size: int, dtype: torch.dtype, final_length: int | None = None
    ) -> None:
        self.config, self.batch_size, self.dtype, self.final_length = config, batch_size, dtype, final_length
        sizes: tuple[int | None, int] = indexer_sizes(config) or (None, 0)
        self.indexer_dim, self.position_dims = sizes

    def of(self, shape: tuple[int, int, int], count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of `count` tokens, of so many heads with so many channels."""
        heads, key_dim, value_dim = shape
        return self._empty(heads, count, key_dim), self._empty(heads, count, value_dim)

    def feed_text(self, layer: Any, plan: LayerPlan, layer_idx: int, tokens: int, generated: int) -> int:
        """Give a layer a prompt, the last token by itself, and generated ones.

        Returns:
            `int`: bytes that it took at most while tokens were generated, beyond those in the end.
        """
        if isinstance(layer, PackedLayer):
            layer.bind(layer.facts, None, self.final_length)
            layer.set_prompt_length(tokens)
        shape = key_value_heads(self.config, layer_idx)
        given = largest = 0
        for count in self._counts(layer, tokens, generated):
            if not plan.borrows_keys:
                layer.update(*self.of(shape, count))
            if self.indexer_dim is not None and plan.has_indexer and has_indexer_keys(self.config, layer_idx):
                layer.update_indexer(self._empty(count, self.indexer_dim))
            if _INDEX in plan.updates_beside:
                layer.update_index(self._empty(1, count, self.config.index_head_dim))
            given += count
            if given >= tokens and _makes_room(layer):
                largest = max(largest, bytes_of(owned_tensors(layer)))
        if self.position_dims and plan.has_indexer:
            positions = (self.position_dims, self.batch_size, tokens + generated)
            layer.indexer_position_ids = torch.empty(positions, dtype=torch.int64, device="meta")
            self.position_dims = 0  # the first layer keeps those of all
        return max(0, largest - bytes_of(owned_tensors(layer)))

    def feed_window(self, layer: Any, shape: tuple[int, int, int], tokens: int, generated: int) -> None:
        """Give a layer of transformers' own a prompt and generated tokens.

        These stay exact until there are `residual_length`, and are then encoded with all before them.
        """
        exact = generated % max(2, getattr(layer, "residual_length", 0))  # a first one stays, in 5.17 always
        layer.update(*self.of(shape, tokens + generated - exact))
        if exact:
            layer.update(*self.of(shape, exact))

    def _counts(self, layer: Any, tokens: int, generated: int) -> Iterator[int]:
        """Yield how many tokens a layer is given at once, each time from what it holds then."""
        yield from (tokens - 1, 1)
        while generated > 0:
            # one of transformers' own that forgets keeps what it was given at once until it is given more
            count = generated if isinstance(layer, PackedLayer) else max(1, generated - 1)
            if getattr(layer, "evicts", False):
                count = min(count, _STEP)
                if _makes_room(layer):  # no further than to where one more makes it do so
                    most = layer.budget_for(tokens) + layer.config.decode_slack
                    count = max(1, min(count, most - layer.mean_held))
            yield count
            generated -= count

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(self.batch_size, *shape, dtype=self.dtype, device="meta")


def _makes_room(layer: Any) -> bool:
    """Whether a layer evicts while tokens are generated."""
    return getattr(layer, "evicts", False) and bool(layer.config.evict_at_decode)
