"""The quantized caches that transformers has itself, to compare with: built, and given no data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import transformers

from .config import drop_legacy_keys
from .errors import UnavailableCacheError
from .models.decoder import decoder_config, has_encoder
from .registry import TRANSFORMERS_BACKENDS

if TYPE_CHECKING:
    from transformers import QuantizedCache

__all__ = ["build_quantized_cache", "names_quantized_cache", "sized_layers"]

_PACKAGES = {"quanto": "optimum-quanto"}
"""What pip calls a backend, where it is not the same."""


def names_quantized_cache(cache_config: Any) -> bool:
    """Whether options are those of a cache that transformers serves itself, in any case."""
    return (
        isinstance(cache_config, Mapping)
        and str(cache_config.get("backend")).lower() in TRANSFORMERS_BACKENDS
    )


def build_quantized_cache(config: Any, cache_config: Mapping[str, Any]) -> QuantizedCache:
    """Build the cache that `generate(cache_implementation="quantized")` makes of such options.

    Args:
        config (`PreTrainedConfig`): The model's.
        cache_config (`Mapping`): `"backend"`, one of [`registry.TRANSFORMERS_BACKENDS`], and its options.

    Returns:
        `QuantizedCache`: Empty.

    Raises:
        UnavailableCacheError: If there is none for this model, of this transformers, or without a package.
        ValueError: On a wrong option.
    """
    options = drop_legacy_keys(cache_config)
    backend = str(options.pop("backend")).lower()
    if has_encoder(config):
        raise UnavailableCacheError(backend, "transformers has it for decoder-only models alone")
    try:
        return transformers.QuantizedCache(backend, decoder_config(config), **options)
    except ImportError as error:
        install = f"pip install {_PACKAGES.get(backend, backend)}"
        raise UnavailableCacheError(backend, "not installed", install) from error
    except TypeError as error:
        raise ValueError(
            f"{dict(cache_config)} is not what transformers' own cache takes: {error}"
        ) from error
    except ValueError as error:
        if "Unknown quantization backend" in str(error):  # fp8 came with a later transformers
            raise UnavailableCacheError(backend, f"not in transformers {transformers.__version__}") from error
        if "only full attention layers" in str(error):
            reason = "transformers has it for models of full attention layers alone"
            raise UnavailableCacheError(backend, reason) from error
        raise


def sized_layers(config: Any, cache_config: Mapping[str, Any]) -> list[Any]:
    """Build the layers of such a cache, to be given tensors without data, of which they take the same bytes.

    What HQQ fits, the scale and the zero of a group, it compares by numbers that such tensors have not; they
    are of the same shape without.

    Raises:
        UnavailableCacheError: As [`build_quantized_cache`].
        ValueError: On a wrong option.
    """
    layers: list[Any] = build_quantized_cache(config, cache_config).layers
    for layer in layers:
        if (quantizer := getattr(layer, "quantizer", None)) is not None:
            layer.quantizer = _without_fitting(quantizer)
    return layers


def _without_fitting(quantizer: Any) -> Any:
    class Unfitted(quantizer):  # type: ignore[misc]
        @classmethod
        def quantize(cls, *args: Any, **options: Any) -> Any:
            return super().quantize(*args, **options, optimize=False)

    return Unfitted
