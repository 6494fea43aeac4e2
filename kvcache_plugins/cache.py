"""The cache: one layer per model layer, packed where the backend can, transformers' own elsewhere."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from .artifacts.named import paths_of_artifacts
from .attention import eager  # noqa: F401  # registers how handles are attended to
from .attention.exact import prompt_dtype, tensors_shown_from
from .attention.latent_models import let_latents_pass
from .config import BackendConfig, check_length
from .kernels.selection import select_kernel
from .layers.base import PackedLayer
from .layers.compiled import CompiledLayers
from .layers.counting import bytes_of, dense_length, dense_size, host_tensors, owned_tensors, tensors_beside
from .layers.crossing import with_cross_attention
from .layers.dense import check_states_are_here, forget_past
from .layers.gradients import copies_to_take
from .layers.indexed import with_indexer
from .layers.moving import follow_model
from .layers.offloading import Shelf
from .layers.padding import left_padding
from .layers.reasons import why_exact, why_torch
from .layers.recurrent import with_recurrent_branch
from .layers.storing import storing
from .layers.verbs import CacheVerbs
from .layers.windowed import WindowedLayer, window_rule, with_window
from .models.decoder import check_model, decoder_config, decoder_only_config, split_model_or_config
from .models.encoder_states import refuse_encoder_states
from .models.facts import (
    LayerFacts,
    check_attention_function,
    check_owner,
    describe_layers,
    refuse_split_heads,
)
from .models.layer_plan import (
    LayerPlan,
    attends_once,
    caches_latents,
    dense_reasons,
    key_value_heads,
    plan_layers,
)
from .models.longrope import choose_frequencies, follow_cache
from .report import CacheReport
from .saved import SavedCache
from .sending import send_as_copies

__all__ = ["KVCache"]


class KVCache(SavedCache, CacheVerbs):
    """A `transformers.Cache` whose attention layers are packed. Base class of every backend's cache.

    Built by `generate(cache_implementation="quantized", cache_config={"backend": ...})`, by `build_cache`, or
    directly from a subclass, which of an encoder-decoder model serves the decoder's own text alone:

    ```python
    cache = KIVICache(model, nbits=2)
    model.generate(**inputs, past_key_values=cache)  # `cache=cache` since Transformers 5.24
    ```

    Args:
        model_or_config (`PreTrainedModel | PreTrainedConfig`): What the cache is for. With a model, rotary
            parameters and key biases are read from it; with a configuration, from its family's modelling
            file.
        max_cache_length (`int`, *optional*): Tokens the cache will hold in the end, if known.
        options: The backend's options, see its `config_class`.

    Raises:
        ValueError: On a wrong option, or for a model that this package does not serve.
        KernelUnavailableError: If `kernel="native"` cannot be met.
    """

    backend: ClassVar[str]
    config_class: ClassVar[type[BackendConfig]]
    layer_class: ClassVar[type[PackedLayer]]
    evicts: ClassVar[bool] = False
    """Whether tokens are dropped, which layers that choose among all of them do not allow."""
    undoes_rotation: ClassVar[bool] = False
    """Whether keys, or queries, are always turned back to what they were before the rotary embedding."""
    native_kernels: ClassVar[tuple[str, ...]] = ()
    """Devices of which kernels read the codes, as tables say; codecs of this package are served by them
    whatever stands here."""

    is_bound_by_call = False
    """Whether a call of `generate()` has bound it, and has yet to read."""
    reads_long_text = False
    """Whether a model with two sets of rotary frequencies is to use those of long texts."""
    whole_prompt_reason: str | None = None
    """Why the latest prompt was not read in chunks, although that would have bounded memory."""
    longest_call: int | None = None
    """Tokens a model reads at most in one call without throwing this cache away."""

    def __init__(self, model_or_config: Any, *, max_cache_length: int | None = None, **options: Any) -> None:
        if not hasattr(self, "backend"):
            said = "Allowed are `build_cache` and classes of backends, such as Int8Cache."
            raise TypeError(f"{type(self).__name__} is of no backend. {said}")
        model, config = split_model_or_config(model_or_config)
        max_cache_length = check_length("max_cache_length", max_cache_length)
        if self.evicts:
            what = f"The backend {self.backend!r}, which evicts tokens,"
            decoder_only_config(config, what, "backends that keep every token, such as 'int8' and 'kivi'")
        config = decoder_config(config)
        self.config = self.config_class.from_dict(options)
        kernel = self._select_kernel(model)
        self.model_config = config
        self._plans = self._plan()
        skipped = self.config.skipped_layers(len(self._plans))
        layer_configs = [self.config.for_layer(index, len(self._plans)) for index in range(len(self._plans))]
        # now, because the current directory may be another one when the cache is saved
        self.artifact_paths = paths_of_artifacts(self.config.to_dict())
        for checked in (self.config, *(other for other in layer_configs if other is not self.config)):
            self.check_artifacts(checked, config)
        facts = self._describe(model)
        self._plans = self._plan_layers(skipped, layer_configs, facts)
        if self.config.layer_overrides:
            without = self._plan_layers(skipped, [self.config] * len(layer_configs), facts)
            self.config.check_overrides(dense_reasons(self._plans, without))
        if model is not None:
            self._prepare_model(model)
        layers: list[Any] = []
        self._shelf = Shelf() if self.config.offload else None
        for layer_idx, plan in enumerate(self._plans):
            is_limited = plan.window is not None or plan.is_cross_attention
            build = self._build_limited if is_limited else self._build_layer
            layer = build(plan, layer_configs[layer_idx], layer_idx, facts[layer_idx])
            if isinstance(layer, PackedLayer):
                layer.kernel = kernel
                layer.final_length = max_cache_length
                layer.shelf = None if is_limited else self._shelf
                layer.prepare(*self._key_value_heads(layer_idx))
            layers.append(layer)
        if layers and not any(isinstance(layer, PackedLayer) for layer in layers):
            warnings.warn(
                f"The backend {self.backend!r} packs none of the {len(layers)} layers of this model: "
                f"{sorted({str(plan.dense_reason) for plan in self._plans})}.",
                stacklevel=2,
            )
        super().__init__(layers=layers)
        # of layers that evict a compiler cannot know how many tokens they hold after an update
        is_known = not self.evicts and not any(plan.has_indexer for plan in self._plans)
        self.compiled_layers = CompiledLayers(self) if attends_once(config) and is_known else None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        send_as_copies(cls)

    @property
    def prefill_chunk_size(self) -> int | None:
        """Prompt tokens `generate()` should read at once; `None` for all of them."""
        return self.longest_call if self.reads_long_text else None

    def rotated_length(self, prompt_length: int | None) -> int | None:
        """Tokens of a text that ends at the largest position of any call in which a prompt is read.

        Args:
            prompt_length (`int`, *optional*): Tokens of all that will have been read then; `None` if unknown.
        """
        return prompt_length

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        check_states_are_here("copy.deepcopy", self.layers)
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        memo |= copies_to_take(tensor for layer in self.layers for tensor in tensors_beside(layer))
        with storing():  # copies made in inference mode could not be written to outside of it
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    @classmethod
    def check_artifacts(cls, config: Any, model_config: Any) -> None:
        """Check that the files that `config` names were made for a model; backends that read any do so.

        Args:
            config (`BackendConfig`): Options of the cache, or of one of its layers.
            model_config (`PreTrainedConfig`): Of the model.

        Raises:
            ArtifactError: Naming both models.
        """

    def check_outputs(self, *, with_attentions: bool) -> None:
        """Raise `ValueError` if a model cannot return attention weights with this cache, and is to do so."""

    @property
    def is_linear(self) -> list[bool]:
        """Which layers hold no keys and values, so that their lengths say nothing of the text's."""
        return [
            isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, CacheLayerMixin)
            for layer in self.layers
        ]

    def bind(
        self,
        model: nn.Module,
        attention_mask: Tensor | None = None,
        max_cache_length: int | None = None,
        *,
        prompt_length: int | None = None,
    ) -> KVCache:
        """Tell the cache what `update` is never told. `generate()` does this by itself.

        Loops of one's own do so where rows are padded, and before an evicting cache reads a prompt in several
        calls: pads are taken for tokens otherwise, and every call for the end of a prompt.

        Args:
            model (`PreTrainedModel`): Whose rotary parameters and key biases to use.
            attention_mask (`torch.Tensor` of shape `(B, T)`, *optional*): Its leading zeros are left padding.
                Masks of more dimensions say nothing of padding and are ignored. Without effect once tokens
                are held, or if the model's first call has more tokens than the mask: it then puts a soft
                prompt before.
            max_cache_length (`int`, *optional*): Tokens the cache will hold in the end.
            prompt_length (`int`, *optional*): Tokens, those already seen included, after which the prompt or
                the next turn of it will have been read; matters to evicting backends.

        Returns:
            `KVCache`: itself.

        Raises:
            ValueError: If the model is none, or none like that which the cache was built for, or cannot use
                the attention function it was told to; on a wrong length or mask; or if a forward was
                interrupted.
            KernelUnavailableError: If `kernel="native"` cannot be met where the model is.
        """
        check_model(model)
        max_cache_length = check_length("max_cache_length", max_cache_length)
        prompt_length = check_length("prompt_length", prompt_length)
        check_owner(self.model_config, model, [layer.layer_idx for layer in self.packed_layers])
        self.check_in_step()
        check_attention_function(model)
        self._prepare_model(model)
        self._select_kernel(model)
        choose_frequencies(model, self, prompt_length, max_cache_length)
        with follow_cache(model, self):
            facts = self._describe(model)
        unknown = [layer for layer in self.packed_layers if facts[layer.layer_idx].is_rotation_unknown]
        if self.undoes_rotation and unknown:
            warnings.warn(
                f"The backend {self.backend!r} turns back the rotation of keys, and that of "
                f"{type(model).__name__} is written in a way of its own, which is not known: its keys are "
                "taken as they come, which costs quality.",
                stacklevel=2,
            )
        self.shown_from = tensors_shown_from(model, self.config.kernel)
        pads, columns = left_padding(attention_mask)
        follow_model(self.layers, model)
        for layer_idx, layer in enumerate(self.layers):
            forget_past(layer)  # of an earlier call
            if isinstance(layer, PackedLayer):
                layer.bind(facts[layer_idx], pads, max_cache_length, columns)
                layer.prompt_dtype = prompt_dtype(model, layer.config.kernel)
        return self

    def reset(self) -> None:
        """Forget all tokens, and what earlier calls have told."""
        super().reset()
        self.reads_long_text, self.whole_prompt_reason = False, None

    def kv_bytes(self) -> int:
        """Bytes of every live tensor the cache owns: capacity, not what is in use."""
        return bytes_of(self._tensors())

    def report(self) -> CacheReport:
        """Return the state of the cache as a [`CacheReport`]; `print` it for a table."""
        sizes = [dense_size(layer) for layer in self.layers]
        packed = self.packed_layers
        of_text = self._packed_text_layers
        unlimited = [layer for layer in of_text if not isinstance(layer, WindowedLayer)]
        counting = (layer for layer in self._text_layers if hasattr(layer, "get_seq_length"))
        seen = max((layer.get_seq_length() for layer in counting), default=0)
        held = [layer.held_length for layer in unlimited or of_text]
        return CacheReport(
            backend=self.backend,
            tokens_seen=seen,
            tokens_held=max(held or map(dense_length, self._dense_text_layers), default=0),
            kv_bytes=self.kv_bytes(),
            dense_bytes=sum(dense_bytes for _, dense_bytes in sizes),
            kernel=[layer.kernel if isinstance(layer, PackedLayer) else "dense" for layer in self.layers],
            dense_layers={
                i: str(p.dense_reason) for i, p in enumerate(self._plans) if p.dense_reason is not None
            },
            fallback_reads=sum(layer.fallback_reads for layer in packed),
            values=sum(values for values, _ in sizes),
            kernel_reasons={layer.layer_idx: reason for layer in packed if (reason := why_torch(layer))},
            exact_layers={layer.layer_idx: reason for layer in packed if (reason := why_exact(layer))},
            whole_prompt_reason=self.whole_prompt_reason,
            host_bytes=bytes_of(host_tensors(self.layers)) if self.config.offload else None,
            dropped_outliers=sum(layer.dropped_outliers for layer in packed),
        )

    def _plan_layers(
        self, skipped: frozenset[int], configs: list[Any], facts: list[LayerFacts]
    ) -> list[LayerPlan]:
        """Plan the layers with the options of each."""
        return self._plan(
            skipped,
            evicts=self.evicts,
            packs_window=window_rule(self.model_config, configs, facts, self._limited_storage),
            cross_reason=self._cross_reason(),
        )

    def _plan(self, skipped: frozenset[int] = frozenset(), **rules: Any) -> list[LayerPlan]:
        """Plan the layers by the rules of [`plan_layers`]."""
        return plan_layers(self.model_config, skipped, **rules)

    def _key_value_heads(self, layer_idx: int) -> tuple[int, int, int]:
        """Heads, channels of a key and of a value, that a layer is given."""
        return key_value_heads(self.model_config, layer_idx)

    def _prepare_model(self, model: nn.Module) -> None:
        refuse_encoder_states(model)
        if (stored := self._limited_storage(self.config)) and stored[1].is_calibrated:
            refuse_split_heads(model, self.backend, has_artifact=True)
        if caches_latents(self.model_config):
            let_latents_pass(model)

    def _select_kernel(self, model: nn.Module | None) -> str:
        devices: set[torch.device] = set()
        if model is not None and self.config.kernel == "native":
            devices = {parameter.device for parameter in model.parameters()}
        return select_kernel(self.config.kernel, self.backend, devices)

    def _build_layer(self, plan: LayerPlan, config: Any, layer_idx: int, facts: LayerFacts) -> Any:
        if plan.dense_reason is not None:
            return plan.build_dense()
        return self._build_packed(plan, config, layer_idx, facts)

    def _limited_storage(self, config: Any) -> tuple[type[PackedLayer], Any] | None:
        """Class and options of what stores a window, or images, for these options; `None` if nothing does."""
        return self.layer_class, config

    def _cross_reason(self) -> str | None:
        """Why layers that attend to images, or to an encoder, are not packed; `None` if they are."""
        stored = self._limited_storage(self.config)
        if stored is None:
            return "what it holds of images is not evicted"
        return "a calibration knows keys and values of text only" if stored[1].is_calibrated else None

    def _build_limited(self, plan: LayerPlan, config: Any, layer_idx: int, facts: LayerFacts) -> Any:
        stored = self._limited_storage(config)
        if plan.dense_reason is not None or stored is None:
            return plan.build_dense()
        layer_class, config = stored
        if plan.window is None:
            return with_cross_attention(layer_class)(config, layer_idx, facts)
        layer = with_window(layer_class)(config, layer_idx, facts)
        layer.window = plan.window
        return layer

    def _build_packed(self, plan: LayerPlan, config: Any, layer_idx: int, facts: LayerFacts) -> Any:
        if plan.has_indexer:
            return with_indexer(self.layer_class)(config, layer_idx, facts)
        if not plan.has_recurrent_branch:
            return self.layer_class(config, layer_idx, facts)
        layer = with_recurrent_branch(self.layer_class)(config, layer_idx, facts)
        layer.branch = LinearAttentionLayer(**plan.dense_kwargs)
        return layer

    def _describe(self, model: nn.Module | None) -> list[LayerFacts]:
        return describe_layers(model, self.model_config, self._plans)

    def _tensors(self) -> Iterator[Tensor]:
        if self._shelf is not None:
            yield from self._shelf.tensors()
        for layer in self.layers:
            yield from owned_tensors(layer)
