"""Caches of encoder-decoder models: what the decoder has written, and what it reads of the encoder.

Transformers keeps the two apart in an `EncoderDecoderCache`, and so does the class here, whose halves are
caches of one backend: the first a cache like any other, which grows with the text; the second of the keys and
values that every layer makes of what the encoder has read, once, and reads at every step. Of speech and long
documents the second is nearly all there is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache

from .cache import KVCache
from .config import BackendConfig
from .layers.base import PackedLayer
from .layers.extending import extended
from .layers.shown import ShownLayer
from .models.decoder import begins_with_encoder
from .models.facts import LayerFacts
from .models.layer_plan import LayerPlan, encoder_key_value_heads, plan_cross_attention
from .report import CacheReport
from .saved import SavedCache

__all__ = [
    "CrossAttentionCache",
    "KVEncoderDecoderCache",
    "SelfAttentionCache",
    "build_both",
    "halves_of",
    "layers_of",
]

_NAMING_LAYERS = ("skip_layers", "layer_overrides")
"""Options that are of some layers."""


class SelfAttentionCache(KVCache):
    """The half that grows with the text. Made by [`build_both`]."""

    def _build_packed(self, plan: LayerPlan, config: Any, layer_idx: int, facts: LayerFacts) -> Any:
        # Whisper takes the rows of its batch apart by the keys and values it is shown
        return extended(ShownLayer, self.layer_class)(config, layer_idx, facts)


class CrossAttentionCache(KVCache):
    """The half that holds what the decoder reads of the encoder. Made by [`build_both`]."""

    def __new__(cls, *args: Any, config: Any = None, **options: Any) -> Any:
        """T5Gemma asks for another of the same class, without windows; there are none in this one."""
        return super().__new__(cls) if config is None else None

    def bind(
        self,
        model: nn.Module,
        attention_mask: Tensor | None = None,
        max_cache_length: int | None = None,
        *,
        prompt_length: int | None = None,
    ) -> CrossAttentionCache:
        """Tell the cache what `update` is never told.

        Args:
            model (`PreTrainedModel`): Whose key biases to use.
            attention_mask (`torch.Tensor` of shape `(B, S)`, *optional*): Which of the encoder's tokens are
                no padding. Other shapes, as of sounds, say nothing of it and are ignored.
            max_cache_length (`int`, *optional*): Without effect: what the encoder has read comes at once.
            prompt_length (`int`, *optional*): Without effect.
        """
        super().bind(model)
        is_known = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
        real_tokens = attention_mask if is_known and not bool(attention_mask.all()) else None  # type: ignore[union-attr]
        for layer in self.packed_layers:
            layer.real_tokens = real_tokens if layer.cumulative_length == 0 else None  # type: ignore[attr-defined]
        return self

    @property
    def _text_layers(self) -> list[Any]:
        """All: here their tokens are the encoder's."""
        return self.layers

    def _limited_storage(self, config: Any) -> tuple[type[PackedLayer], Any] | None:
        # they come at once, so that none is newest
        return super()._limited_storage(replace(config, residual_length=0))

    def _key_value_heads(self, layer_idx: int) -> tuple[int, int, int]:
        return encoder_key_value_heads(self.model_config, layer_idx)

    def _plan(self, skipped: frozenset[int] = frozenset(), **rules: Any) -> list[LayerPlan]:
        return plan_cross_attention(self.model_config, skipped, cross_reason=rules.get("cross_reason"))


class KVEncoderDecoderCache(SavedCache, EncoderDecoderCache):
    """Both halves of an encoder-decoder model's cache, packed.

    Built by `generate(cache_implementation="quantized", cache_config={"backend": ...})` and by `build_cache`.
    Options hold for both halves, `skip_layers` and `layer_overrides` for both of the decoder layer they name.
    What the encoder has read comes at once, so that none of it is newest: `residual_length` counts tokens of
    the text only.

    Args:
        self_attention_cache (`KVCache`): Of the decoder's own text.
        cross_attention_cache (`CrossAttentionCache`): Of what it reads of the encoder; without layers where
            that comes before the text, in its own half (MusicGen Melody).
    """

    self_attention_cache: KVCache  # type: ignore[assignment]  # transformers writes its own class
    _cross_attention_cache: CrossAttentionCache
    is_bound_by_call = False
    """Whether a call of `generate()` has bound it, and has yet to read."""

    def __init__(self, self_attention_cache: KVCache, cross_attention_cache: CrossAttentionCache) -> None:
        super().__init__(self_attention_cache, cross_attention_cache)

    @property  # type: ignore[override]  # an attribute of transformers' own class
    def cross_attention_cache(self) -> CrossAttentionCache:
        """The half that holds what the decoder reads of the encoder."""
        return self._cross_attention_cache

    @cross_attention_cache.setter  # type: ignore[override]
    def cross_attention_cache(self, cache: CrossAttentionCache | None) -> None:
        if cache is not None:  # see `CrossAttentionCache.__new__`
            self._cross_attention_cache = cache

    @property
    def backend(self) -> str:
        """Registry name."""
        return self.self_attention_cache.backend

    @property
    def config(self) -> BackendConfig:
        """Options of both halves."""
        return self.self_attention_cache.config

    @property
    def model_config(self) -> Any:
        """The decoder's configuration."""
        return self.self_attention_cache.model_config

    @property
    def artifact_paths(self) -> dict[str, str]:
        """Where the artifacts lie that the options name."""
        return self.self_attention_cache.artifact_paths

    @property
    def packed_layers(self) -> list[PackedLayer]:
        """The layers this package stores, those of the text first."""
        return self.self_attention_cache.packed_layers + self.cross_attention_cache.packed_layers

    def bind(
        self,
        model: nn.Module,
        attention_mask: Tensor | None = None,
        max_cache_length: int | None = None,
        *,
        encoder_attention_mask: Tensor | None = None,
    ) -> KVEncoderDecoderCache:
        """Tell the cache what `update` is never told. `generate()` does this by itself; own loops may.

        Args:
            model (`PreTrainedModel`): Whose key biases to use.
            attention_mask (`torch.Tensor` of shape `(B, T)`, *optional*): Of the decoder's tokens, what
                models call `decoder_attention_mask`; its leading zeros are left padding.
            max_cache_length (`int`, *optional*): Tokens of the decoder the cache will hold in the end.
            encoder_attention_mask (`torch.Tensor` of shape `(B, S)`, *optional*): Of the encoder's, what
                models call `attention_mask`.

        Returns:
            `KVEncoderDecoderCache`: itself.

        Raises:
            ValueError: As [`KVCache.bind`] does.
            KernelUnavailableError: If `kernel="native"` cannot be met where the model is.
        """
        self.self_attention_cache.bind(model, attention_mask, max_cache_length)
        self.cross_attention_cache.bind(model, encoder_attention_mask)
        return self

    def find_out_what_is_held(self) -> None:
        """Set `is_updated`, by which models know which layers have read the encoder."""
        lengths = map(self.cross_attention_cache.get_seq_length, range(len(self.cross_attention_cache)))
        self.is_updated = {layer_idx: length > 0 for layer_idx, length in enumerate(lengths)}

    def check_dynamic_cache(self, method: str) -> None:
        """Nothing: both halves know every verb that transformers' own dynamic cache does."""

    def kv_bytes(self) -> int:
        """Bytes of every live tensor of both halves: capacity, not what is in use."""
        return self.self_attention_cache.kv_bytes() + self.cross_attention_cache.kv_bytes()

    def report(self) -> CacheReport:
        """Return the state of both halves as a [`CacheReport`]; `print` it for a table."""
        own, cross = self.self_attention_cache.report(), self.cross_attention_cache.report()
        return replace(
            own,
            kv_bytes=own.kv_bytes + cross.kv_bytes,
            dense_bytes=own.dense_bytes + cross.dense_bytes,
            values=own.values + cross.values,
            fallback_reads=own.fallback_reads + cross.fallback_reads,
            dropped_outliers=own.dropped_outliers + cross.dropped_outliers,
            cross_attention=cross if self.cross_attention_cache.layers else None,
        )


def build_both(
    cache_class: type[KVCache], model_or_config: Any, options: dict[str, Any], max_cache_length: int | None
) -> KVEncoderDecoderCache:
    """Build the cache of an encoder-decoder model.

    Args:
        cache_class (`type[KVCache]`): Of the backend.
        model_or_config (`PreTrainedModel | PreTrainedConfig`): What the cache is for.
        options (`dict`): The backend's.
        max_cache_length (`int`, *optional*): Tokens of the decoder the cache will hold in the end, if known.

    Raises:
        ValueError: On a wrong option, or for a backend that evicts.
    """
    own = extended(SelfAttentionCache, cache_class)  # type: ignore[arg-type]  # classes can be hashed
    cross = extended(CrossAttentionCache, cache_class)  # type: ignore[arg-type]
    of_text = own(model_or_config, max_cache_length=max_cache_length, **options)
    if begins_with_encoder(of_text.model_config):  # no layer of the other half to be named
        options = {name: value for name, value in options.items() if name not in _NAMING_LAYERS}
    return KVEncoderDecoderCache(of_text, cross(model_or_config, **options))


def halves_of(cache: KVCache | KVEncoderDecoderCache) -> tuple[KVCache, ...]:
    """Return what a cache is made of: itself, or its two halves, that of the text first."""
    if isinstance(cache, KVEncoderDecoderCache):
        return cache.self_attention_cache, cache.cross_attention_cache
    return (cache,)


def layers_of(cache: KVCache | KVEncoderDecoderCache) -> list[Any]:
    """Return the layers of a cache, ours and transformers'; of both halves, those of the text first."""
    return [layer for half in halves_of(cache) for layer in half.layers]
