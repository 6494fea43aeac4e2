"""The evicting cache: what its layers are told, and how `generate()` is made to read a prompt in chunks."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from ..attention.latent_models import why_expanded
from ..cache import KVCache
from ..config import check_length
from ..layers.base import PackedLayer
from ..models.decoder import check_model, decoder_config, decoder_of, split_model_or_config
from ..models.facts import (
    LayerFacts,
    biases_by_distance,
    exchanges_attention,
    masks_all_columns,
    masks_all_seen,
    takes_values_apart,
    weighs_rotated_keys,
)
from ..models.layer_plan import LayerPlan, caches_latents, key_value_heads
from ..registry import get_backend
from .kept import kept_positions
from .layer import EvictingLayer
from .options import EvictingConfig
from .pooling.stage import weights_of
from .renumbering import count_from_what_is_held

__all__ = ["EvictingCache"]

_SKIPPED = "skip_layers"


class EvictingCache(KVCache):
    """A cache that keeps `budget` tokens per layer and head, or as many on average where heads share it.

    Base class of every evicting backend's cache.

    Memory while a prompt of any length is read is bounded by the budget and a chunk: `generate()` is told to
    read in chunks of `chunk_size` tokens, and after each a layer keeps its best. `get_seq_length()` goes on
    counting every token seen, so positions, later turns and padding come out as with any other cache.

    Layers left out by `skip_layers` hold everything. All layers share the model's one attention mask, so as
    soon as two of them hold different numbers of tokens, or the model makes it without asking how many are
    held, they make their own, for which the model must ask transformers for its attention function.
    """

    config_class: ClassVar[type[EvictingConfig]] = EvictingConfig
    layer_class: ClassVar[type[EvictingLayer]] = EvictingLayer
    evicts = True
    config: EvictingConfig

    def __init__(self, model_or_config: Any, *, max_cache_length: int | None = None, **options: Any) -> None:
        _, config = split_model_or_config(model_or_config)
        reason = None
        if biases_by_distance(decoder_config(config)):
            reason = "add a bias to every logit that they work out from its token's distance,"
        elif masks_all_columns(decoder_config(config)):
            reason = "make their masks, in this release of transformers,"
        if reason is not None:
            raise ValueError(
                f"The backend {self.backend!r} evicts tokens, and models of type {config.model_type!r} "
                f"{reason} as if all were still held. Allowed for this model are backends that keep every "
                "token, such as 'int8' and 'kivi'."
            )
        super().__init__(model_or_config, max_cache_length=max_cache_length, **options)
        self._check_shared_mask()
        self._check_pooling(None)
        self.prompt_length: int | None = None
        layers = self.evicting_layers
        kinds = {(layer.config.budget if layer.evicts else None) for layer in layers}
        are_uneven = any(layer.config.is_uneven for layer in layers)
        for layer in layers:
            layer.is_ragged = len(kinds) > 1 or are_uneven or masks_all_seen(self.model_config)
            if self.config.storage is None:
                layer.kernel = "dense"  # read by the model's own attention, unless that cannot mask it
        if self.config.positions == "compact":
            self._check_compact(layers, f"models of type {self.model_config.model_type!r}")
        model, _ = split_model_or_config(model_or_config)
        if model is not None:
            self.attach(model)
            self._count_what_is_held(model)

    @classmethod
    def check_artifacts(cls, config: Any, model_config: Any) -> None:
        storage = config.storage_config()
        if storage is not None:
            get_backend(config.storage["backend"]).check_artifacts(storage, model_config)

    @property
    def evicting_layers(self) -> list[EvictingLayer]:
        """The layers this package stores, those that keep everything included."""
        return [layer for layer in self.layers if isinstance(layer, EvictingLayer)]

    @property
    def prefill_chunk_size(self) -> int | None:
        """`chunk_size`, unless the whole prompt is kept anyway."""
        limit = super().prefill_chunk_size
        if self.prompt_length is None:
            return self.config.chunk_size
        smallest = self._smallest_budget(self.prompt_length)
        if self.prompt_length <= smallest or self.config.chunk_size is None:
            return limit
        return min(self.config.chunk_size, limit or self.config.chunk_size)

    def rotated_length(self, prompt_length: int | None) -> int | None:
        wanted = self.prefill_chunk_size
        if prompt_length is None or wanted is None or self.compact_layer is None:
            return prompt_length
        return min(prompt_length, max(self.num_held(), self._smallest_budget(prompt_length)) + wanted)

    @property
    def compact_layer(self) -> EvictingLayer | None:
        """A layer that knows the numbers of the next tokens, with compact positions."""
        return self.evicting_layers[0] if self.config.positions == "compact" else None

    @property
    def needs_queries(self) -> bool:
        """Whether the model's attention function must show its queries."""
        return any(layer.scored_after == "attention" and layer.evicts for layer in self.evicting_layers)

    def kept_positions(self) -> dict[int, Tensor]:
        """Return where in the text the tokens stood that are held, by layer: what was thought worth keeping.

        `input_ids[row, cache.kept_positions()[layer][row, head]]` are the tokens of a head (without its -1).

        Returns:
            `dict[int, torch.Tensor]`: For the index of every layer that evicts and has been given tokens,
            int64 `(B, H, m)`: columns of the text, pads included in the count, ascending; -1 for pads that
            are held, for what `pool` has made of several tokens, and where a head holds fewer than another.
        """
        layers = (layer for layer in self.evicting_layers if layer.evicts and layer.is_initialized)
        return {layer.layer_idx: kept_positions(layer) for layer in layers}

    def num_held(self) -> int:
        """Tokens held per row and head: the most any evicting layer holds."""
        return max((layer.held_length for layer in self.evicting_layers), default=0)

    def attach(self, model: nn.Module) -> None:
        """Hook into `model` where a backend must see more of it than keys and values; not twice.

        Raises:
            ValueError: If the model does not have what the backend needs.
        """

    def bind(
        self,
        model: nn.Module,
        attention_mask: Tensor | None = None,
        max_cache_length: int | None = None,
        *,
        prompt_length: int | None = None,
    ) -> EvictingCache:
        """Tell the cache what `update` is never told (see [`KVCache.bind`]).

        Without `prompt_length`, every call of several tokens counts as the end of a prompt.

        Raises:
            ValueError: If the model's attention function does not show the cache what it needs to see, the
                model cannot read a prompt in several calls, or a `budget` that is a fraction of the prompt
                leaves no room for what is pooled.
        """
        check_model(model)
        prompt_length = check_length("prompt_length", prompt_length)
        self._check_attention(model)
        self._check_embeddings(model)
        self.attach(model)
        super().bind(model, attention_mask, max_cache_length, prompt_length=prompt_length)
        self.prompt_length = prompt_length
        for layer in self.evicting_layers:
            layer.set_prompt_length(prompt_length)
        self._check_pooling(prompt_length)
        self._check_mask(attention_mask)
        if self.config.positions == "compact":
            self._check_compact(self.evicting_layers, f"a {type(model).__name__}")  # by its own modules
        self._count_what_is_held(model)
        return self

    def reset(self) -> None:
        super().reset()
        self.prompt_length = None

    def _count_what_is_held(self, model: nn.Module) -> None:
        if self.config.positions == "compact":
            count_from_what_is_held(decoder_of(model))

    def _build_layer(self, plan: LayerPlan, config: Any, layer_idx: int, facts: LayerFacts) -> Any:
        if plan.dense_reason not in (None, _SKIPPED):
            return plan.build_dense()
        layer = self._build_packed(plan, config, layer_idx, facts)
        layer.evicts = plan.dense_reason is None
        return layer

    def _limited_storage(self, config: EvictingConfig) -> tuple[type[PackedLayer], Any] | None:
        """What a window holds, or images, is never evicted; it is stored as what is kept of other layers."""
        storage = config.storage_config()
        if storage is None:
            return None
        assert config.storage is not None
        return get_backend(config.storage["backend"]).layer_class, storage

    def _check_attention(self, model: nn.Module) -> None:
        layers = self.evicting_layers
        reason = None
        if self.needs_queries:
            reason = f"the backend {self.backend!r} must see the queries"
        elif any(layer.is_ragged for layer in layers):
            reason = "layers that hold different numbers of tokens make their own masks"
        config = decoder_config(getattr(model, "config", None))
        self.check_outputs(with_attentions=bool(getattr(config, "output_attentions", False)))
        found = getattr(config, "_attn_implementation", None)
        is_written_in = found == "eager" and not exchanges_attention(model)
        if reason is not None and (is_written_in or takes_values_apart(config)):
            raise ValueError(
                f"{reason}, which the attention of {type(model).__name__}, written into the model, does not "
                "show them. Allowed for this model are backends that judge a token by itself, such as "
                "'knorm' and 'streaming_llm', with the same options for all layers."
            )
        if self.needs_queries and (obstacle := why_expanded(model)) is not None:
            raise ValueError(
                f"The backend {self.backend!r} must see the queries of latents, and {type(model).__name__} "
                f"makes keys and values of them: {obstacle}. Allowed for this model are backends that judge "
                "a token by itself, such as 'knorm' and 'streaming_llm', and adapters that have been merged."
            )

    def check_outputs(self, *, with_attentions: bool) -> None:
        if with_attentions and any(layer.config.is_uneven and layer.evicts for layer in self.evicting_layers):
            raise ValueError(
                "output_attentions=True needs heads that hold the same tokens, which those of the backend "
                f"{self.backend!r} do not with `head_floor`. Allowed is one of the two."
            )

    def _check_embeddings(self, model: nn.Module) -> None:
        """Refuse assistants that transformers has number their drafts otherwise than their prompt."""
        if any(hasattr(module, "assistant_overlap_token_ids") for module in model.modules()):
            raise ValueError(
                f"The backend {self.backend!r} reads a prompt in several calls, and {type(model).__name__}, "
                "which drafts for a target with another tokenizer, embeds the last token alone of every call "
                "after its first. Allowed for it are backends that keep every token, such as 'int8'."
            )

    def _check_mask(self, attention_mask: Tensor | None) -> None:
        """Refuse masks with holes: transformers looks a mask up by slots, which move when something goes."""
        if not isinstance(attention_mask, Tensor):
            return
        if attention_mask.dim() == 4 and any(layer.is_ragged for layer in self.evicting_layers):
            raise ValueError(
                "attention_mask has 4 dimensions, and layers that hold different numbers of tokens "
                "(head_floor, layers with options of their own) make their own masks. Allowed are masks of "
                "shape (batch, tokens seen), and with 4 dimensions the same budget for all layers and heads."
            )
        if attention_mask.dim() != 2:
            return
        is_real = attention_mask.bool()
        holes = (is_real.cummax(dim=1).values != is_real).any(dim=1)
        length = attention_mask.shape[1]
        if bool(holes.any()) and (self.config.evict_at_decode or length > self._smallest_budget(length)):
            raise ValueError(
                f"attention_mask has zeros after a one in row {int(holes.nonzero()[0])}. A cache that evicts "
                "takes padding on the left only; allowed are rows of zeros followed by ones. Later turns of "
                "a batch, and texts after a prefix that they share, are as long as each other, or read one "
                "row at a time. `generate()` makes a mask with holes by itself where `input_ids` hold the "
                "padding token: pass attention_mask."
            )

    def _check_pooling(self, prompt_length: int | None) -> None:
        """Refuse what cannot be pooled, and weights that do not fit, before a token is read."""
        for layer in self.evicting_layers:
            config, pooling = layer.config, layer.config.pooling()
            if pooling is None or not layer.evicts:
                continue
            if caches_latents(self.model_config):
                raise ValueError(
                    f"{type(config).__name__}.pool={config.pool!r} adds up values, and models of type "
                    f"{self.model_config.model_type!r} cache latents and rotated keys instead; allowed for "
                    "this model is None."
                )
            is_known = prompt_length is not None or isinstance(config.budget, int)
            budget = config.budget_of(prompt_length or 0) if is_known else None
            _, key_dim, value_dim = key_value_heads(self.model_config, layer.layer_idx)
            weights_of(layer, pooling, key_dim, value_dim, budget)

    def _check_shared_mask(self) -> None:
        """Refuse models of which layers that keep every token take the mask of others that evict."""
        beside = {
            layer_idx: plan.layer_type
            for layer_idx, plan in enumerate(self._plans)
            if plan.grows_unpacked and plan.dense_reason != _SKIPPED
        }
        if beside and any(layer.evicts for layer in self.evicting_layers):
            raise ValueError(
                f"The backend {self.backend!r} evicts tokens of layers of full attention, whose mask models "
                f"of type {self.model_config.model_type!r} also give to layers that keep every token "
                f"({sorted(set(beside.values()))}, such as layer {min(beside)}). Allowed for this model are "
                "backends that keep every token, such as 'int8' and 'kivi', and `skip_layers` of all layers "
                "that evict."
            )

    def _smallest_budget(self, prompt_length: int) -> int:
        """Tokens of a prompt that the layers keep, the least of all."""
        layers = [layer for layer in self.evicting_layers if layer.evicts]
        return min((layer.budget_for(prompt_length) for layer in layers), default=prompt_length)

    def _check_compact(self, layers: list[EvictingLayer], owner: str) -> None:
        name = type(self.config).__name__
        num_attending = sum(plan.has_keys and not plan.is_cross_attention for plan in self._plans)
        is_known = any(layer.facts.rotary is not None for layer in layers)
        if layers and (not is_known or weighs_rotated_keys(self.model_config)):
            raise ValueError(
                f"{name}.positions='compact' needs rotary position embeddings of a known layout, and nothing "
                f"done to keys after them, which {owner} does not have; allowed is 'absolute'."
            )
        if any(layer.is_ragged for layer in layers) or len(layers) < num_attending:
            raise ValueError(
                f"{name}.positions='compact' numbers the tokens of all layers alike, so every layer must "
                "evict with the same budget; allowed for this model and these options is 'absolute'."
            )
