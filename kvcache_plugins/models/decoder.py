"""The text decoder of a model: which module it is, and what its configuration says."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from .loops import check_loops
from .origins import is_of_family

__all__ = [
    "WITHOUT_CACHE",
    "begins_with_encoder",
    "check_model",
    "decoder_config",
    "decoder_of",
    "decoder_only_config",
    "has_cross_attention",
    "has_encoder",
    "most_positions",
    "split_model_or_config",
]

WITHOUT_CACHE = frozenset({"flaubert", "openai-gpt", "xlm"})
"""Families that read their whole text at every step. Their signatures do not tell: others take `**kwargs`."""
_BEGINNING_WITH_ENCODER = frozenset({"musicgen_melody", "musicgen_melody_decoder"})
_TAKING_CACHES_APART = frozenset({"rag"})
_REFUSED = (
    (WITHOUT_CACHE, "take no cache and read their whole text at every step"),
    (
        {"minimax", "reformer", "xlnet", "xlstm"},
        "keep their past in a class of their own, which transformers cannot exchange",
    ),
    (
        {"blip_text_model"},
        "would store keys and values of images among those of text in a cache of this package",
    ),
    (
        {"prophetnet"},
        "attend to padding as soon as a cache holds tokens, which no cache of this package keeps",
    ),
    (
        {"diffusion_gemma_text"},
        "read keys and values off the layers of their cache, which in one of this package show the newest "
        "tokens alone",
    ),
)
"""Families of decoders that no cache of this package serves, and what they do."""
_SERVED_PARTS = {"bark": "its parts model.semantic and model.coarse_acoustics, and their configurations"}
"""Of models of several decoders, by the type of the whole: those that have a cache."""


def split_model_or_config(model_or_config: Any) -> tuple[nn.Module | None, Any]:
    """Return `(model or None, config)` for something that is a model or a configuration.

    Raises:
        ValueError: If it is neither.
    """
    if isinstance(model_or_config, nn.Module):
        config = getattr(model_or_config, "config", None)
        if config is not None:
            return model_or_config, config
        raise ValueError(
            "Expected a transformers model or its configuration, got the module "
            f"{type(model_or_config).__name__}, which has none. Of a wrapper such as DistributedDataParallel "
            "allowed is the model in it, `.module`."
        )
    if hasattr(model_or_config, "get_text_config"):
        return None, model_or_config
    raise ValueError(
        f"Expected a transformers model or its configuration, got {type(model_or_config).__name__}: "
        f"{model_or_config!r}."
    )


def check_model(model: Any) -> None:
    """Raise `ValueError` unless something is a model, and no configuration of one."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"bind: expected the transformers model that reads, got {type(model).__name__}, which has no "
            "layers to look at. Allowed is the model itself, also for a cache that was built of its "
            "configuration."
        )


def has_encoder(config: Any) -> bool:
    """Whether a model's text comes of a decoder that reads an encoder: the model's own, or a part of it.

    Of the models that hand an image to a T5, some say so themselves (BLIP-2) and some do not (InstructBLIP).
    """
    parts = (config, getattr(config, "text_config", None))
    return any(getattr(part, "is_encoder_decoder", False) for part in parts)


def begins_with_encoder(config: Any) -> bool:
    """Whether what an encoder has read comes before a decoder's text, among its tokens (MusicGen Melody)."""
    return is_of_family(config, _BEGINNING_WITH_ENCODER)


def has_cross_attention(config: Any) -> bool:
    """Whether a model's decoder reads its encoder by layers of cross-attention, which have a cache."""
    return has_encoder(config) and not begins_with_encoder(config)


def decoder_config(config: Any) -> Any:
    """Return the configuration of the text decoder, which may be half of an encoder-decoder model.

    Raises:
        ValueError: For models without a cache, or with one of a class of their own, or two that are not one
            of each half, for those that attend to padding, for those that read the layers of a cache, and
            for those without a text decoder, or with several.
    """
    if is_of_family(config, _TAKING_CACHES_APART):
        raise ValueError(
            f"Models of type {config.model_type!r} take their caches apart to search beams, and put them "
            "together again as dense ones. Allowed for this model is no cache_implementation at all."
        )
    decoder = _decoders_half(config)
    if not hasattr(decoder, "num_hidden_layers"):
        parts = _SERVED_PARTS.get(config.model_type, "models with a text decoder, and such parts of this one")
        raise ValueError(
            f"{type(config).__name__} (model_type={config.model_type!r}) names no layers of a text decoder, "
            f"whose keys and values a cache would keep. Allowed are {parts}."
        )
    for families, what in _REFUSED:
        if is_of_family(decoder, families):
            raise ValueError(
                f"Models of type {decoder.model_type!r} {what}. Allowed for this model is no "
                "cache_implementation at all."
            )
    check_loops(decoder)
    return decoder


def decoder_only_config(config: Any, what: str = "What was asked for", instead: str | None = None) -> Any:
    """Return the configuration of the text decoder of a model that has no encoder.

    Args:
        config (`PreTrainedConfig`): The model's.
        what (`str`): What serves such models alone.
        instead (`str`, *optional*): What serves others.

    Raises:
        ValueError: For encoder-decoder models, and whatever [`decoder_config`] refuses.
    """
    if has_encoder(config):
        kind = "an encoder-decoder model"
        if begins_with_encoder(config):
            kind = "a model whose decoder begins with what an encoder has read"
        raise ValueError(
            f"{what} serves decoder-only models; {type(config).__name__} "
            f"(model_type={getattr(config, 'model_type', None)!r}) is {kind}. "
            f"Allowed are {instead or 'decoder-only configurations (is_encoder_decoder=False)'}."
        )
    return decoder_config(config)


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the text decoder, which numbers the tokens; what knows of none is its own.

    The towers of a multimodal model have attention layers of their own.
    """
    found = getattr(model, "get_decoder", lambda: None)()
    if isinstance(found, nn.Module) and not hasattr(found, "config"):  # ModernBERT calls its head so
        found = getattr(model, "base_model", None)
    return found if isinstance(found, nn.Module) else model


def most_positions(config: Any) -> int | None:
    """Return how many positions a model can read, None where it says of no limit.

    It is `max_position_embeddings`, or more where rotary frequencies are stretched: some configurations count
    the positions before that (as transformers once advised), others those after it. Which is not said, so
    that the larger number is taken.
    """
    config = decoder_only_config(config)
    positions: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if positions is None or not isinstance(rope, dict):
        return positions
    for stretched in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # by kind of layer
        original = stretched.get("original_max_position_embeddings") or positions
        positions = max(positions, int(original * (stretched.get("factor") or 1)))
    return positions


def _decoders_half(config: Any) -> Any:
    """The configuration of a decoder, with the numbers of layers and heads that are the decoder's.

    Transformers copies and renames what an encoder-decoder model says of its decoder (BART); it does not
    where that is half of another model (Donut's MBART, Florence 2's BART), nor know T5's name for it.
    """
    decoder = config.get_text_config(decoder=True)
    is_the_users = decoder is config.get_text_config(decoder=True)  # and no copy, renamed by transformers
    map_of_names = getattr(decoder, "attribute_map", {})
    is_to_be_renamed = is_the_users and map_of_names.get("num_hidden_layers") == "encoder_layers"
    num_layers = getattr(decoder, "num_decoder_layers", None) if has_encoder(config) else None
    if is_the_users and (is_to_be_renamed or num_layers is not None):
        decoder = copy.deepcopy(decoder)
    if is_to_be_renamed:
        has_encoder_of_its_own, decoder.is_encoder_decoder = decoder.is_encoder_decoder, True
        decoder = decoder.get_text_config(decoder=True)
        decoder.is_encoder_decoder = has_encoder_of_its_own
    if num_layers is not None:
        decoder.num_hidden_layers = num_layers
    return decoder
