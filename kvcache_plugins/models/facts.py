"""What a cache layer wants to know about the attention layer it serves."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .decoder import decoder_config, decoder_of, split_model_or_config
from .frequencies import Change, frequency_change, is_told
from .layer_plan import LayerPlan, caches_latents, key_value_heads
from .origins import forward_names, is_of_family, modeling_files, modeling_module
from .placement import num_processes
from .rotary import Rotary, find_rotary, names_rotation, rotary_module

__all__ = [
    "LayerFacts",
    "biases_by_distance",
    "check_attention_function",
    "check_owner",
    "describe_layers",
    "exchanges_attention",
    "masks_all_columns",
    "masks_all_seen",
    "refuse_split_heads",
    "takes_values_apart",
    "weighs_rotated_keys",
]

_BIASED_FAMILIES = frozenset(
    {
        "glm4v_text",
        "gpt_oss",
        "persimmon",
        "phi",
        "qwen2",
        "qwen2_5_omni_text",
        "qwen2_5_vl_text",
        "qwen2_moe",
        "qwen2_vl_text",
        "starcoder2",
    }
)
"""Families whose key projection has a bias by construction, or by a default the flags below do not show."""
_BIAS_FLAGS = ("attention_bias", "qkv_bias", "use_qkv_bias", "use_bias")
_DISTANCE_BIASED_FAMILIES = frozenset(
    {"bloom", "cpmant", "inkling2_loop_text", "inkling2_text", "inkling_text", "mpt"}
)
_ROTATING_WINDOWS = frozenset({"afmoe", "cohere2", "cohere2_moe", "flint"})
"""Families whose layers of full attention do not rotate their keys."""
_ROTATING_WINDOWS_IF_ANY = frozenset({"exaone4", "exaone_moe", "kolibri1"})
"""Families whose layers of full attention do not rotate their keys in models that have windows as well."""
_FAMILIES_OF_THETAS = frozenset({"granite_swa", "granitemoe_swa"})
"""Families with rotary frequencies of their own for every layer, by `layer_rope_theta`; others only say by it
which layers rotate."""
_FAMILIES_OF_SCALED_LAYERS = frozenset({"molmo2_text"})
"""Families that scale the frequencies of some layers only, by `rope_scaling_layers`."""
_WEIGHING_FAMILIES = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text"})
_MASKING_FAMILIES = frozenset({"kosmos_2_text_model"})
_FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"
"""transformers' name for the attention functions to choose from, where a modelling file asks for one."""
_KEY_PROJECTIONS = ("k_proj", "key", "k")
_FUSED_PROJECTIONS = ("qkv_proj", "query_key_value", "c_attn", "Wqkv")


@dataclass(frozen=True)
class LayerFacts:
    """Facts about one attention layer.

    Args:
        rotary (`Rotary`, *optional*): How its keys are rotated.
        has_key_bias (`bool`): Whether the key projection adds a bias.
        key_bias_max (`float`, *optional*): Largest absolute bias of the key projection, where it can be read.
        is_rotation_unknown (`bool`): Whether its keys are rotated, by what is said of it or of its family, in
            a way that is not known.
        change (`Change`, *optional*): When the model begins to rotate by other frequencies than `rotary`.
    """

    rotary: Rotary | None = None
    has_key_bias: bool = False
    key_bias_max: float | None = None
    is_rotation_unknown: bool = False
    change: Change | None = None


def biases_by_distance(config: Any) -> bool:
    """Whether attention adds to its logits what the model works out from the distances of tokens.

    Linear biases (ALiBi) or relative ones, which are worked out for all tokens seen, or as if those held were
    the newest. Positions inside the keys (rotary ones) or in the embeddings do not count.
    """
    return is_of_family(config, _DISTANCE_BIASED_FAMILIES) or bool(getattr(config, "alibi", False))


def masks_all_seen(config: Any) -> bool:
    """Whether a model makes its masks for every token seen, and does not ask the cache how many it holds."""
    return is_of_family(config, _MASKING_FAMILIES)


def masks_all_columns(config: Any) -> bool:
    """Whether a model's masks are as wide as its text, and the model cannot be told that less is held.

    Encoders that serve as decoders have such in some releases of transformers.
    """
    source = modeling_module(config)
    return hasattr(source, "create_bidirectional_mask") and not hasattr(source, "create_causal_mask")


def check_attention_function(model: nn.Module) -> None:
    """Refuse our own attention function where it was set on a model that takes none.

    Raises:
        ValueError: Naming the model and what to load it with.
    """
    config = getattr(model, "config", None)
    if getattr(config, "_attn_implementation", None) != "kvcache_plugins":
        return
    if not exchanges_attention(model):
        raise ValueError(
            f"attn_implementation='kvcache_plugins' was set on {type(model).__name__}, whose attention is "
            "written into the model and cannot be exchanged. Allowed for this model is 'eager'."
        )


def refuse_split_heads(model: nn.Module, backend: str, *, has_artifact: bool = False) -> None:
    """Refuse a tensor parallel model, each of whose processes has some of the heads of a layer only.

    Args:
        model (`torch.nn.Module`): What is to use the cache.
        backend (`str`): Which judges a token by all heads of a layer together.
        has_artifact (`bool`): Or rather has an artifact that was made for them.

    Raises:
        ValueError: Naming both.
    """
    processes = num_processes(model)
    if processes > 1:
        does = "has an artifact for" if has_artifact else "judges a token by"
        others = (
            "without an artifact" if has_artifact else "that judge every head by itself, such as 'snapkv'"
        )
        raise ValueError(
            f"The backend {backend!r} {does} all heads of a layer, and {type(model).__name__} is spread over "
            f"{processes} processes by tp_plan, each of which has some of them. Allowed for this model are "
            f"backends {others}; device_map leaves the heads of a layer together."
        )


def check_owner(config: Any, model: nn.Module, layer_indices: Sequence[int]) -> None:
    """Check that a cache serves a model like the one it was built for.

    Args:
        config (`PreTrainedConfig`): The decoder's configuration that it was built for.
        model (`torch.nn.Module`): What is to use it.
        layer_indices (`Sequence[int]`): The layers that are packed.

    Raises:
        ValueError: If the model has another number of layers, or heads of another shape, or fewer layers than
            its configuration says.
    """
    own = decoder_config(split_model_or_config(model)[1])
    layers = getattr(decoder_of(model), "layers", ())
    if len(layers) < own.num_hidden_layers:  # as LongCat-Flash's are, of which each has two
        indices = [index for module in layers for index in _layer_indices(module)]
        if indices and max(indices) < own.num_hidden_layers - 1:
            raise ValueError(
                f"{type(model).__name__} has {len(layers)} layers, and its configuration says "
                f"num_hidden_layers={own.num_hidden_layers}: set that to {len(layers)}, so that a cache has "
                "no layers which nothing is ever written to."
            )
    if own is config:
        return
    expected, found = config.num_hidden_layers, own.num_hidden_layers
    what = "layers"
    if expected == found:
        what = "heads, channels of keys and channels of values"
        expected, found = ({key_value_heads(each, i) for i in layer_indices} for each in (config, own))
    if expected != found:
        raise ValueError(
            f"This cache was built for a model of type {config.model_type!r} with {expected} {what}, and "
            f"{type(model).__name__} has {found}. Every model needs a cache of its own."
        )


def _layer_indices(module: nn.Module) -> list[int]:
    """The indices that the parts of a layer have among a cache's layers."""
    found = (getattr(part, "layer_idx", None) for part in module.modules())
    return [index for index in found if isinstance(index, int)]


def weighs_rotated_keys(config: Any) -> bool:
    """Whether keys are multiplied with weights after they were rotated, so that no rotation moves them."""
    return is_of_family(config, _WEIGHING_FAMILIES)


def takes_values_apart(config: Any) -> bool:
    """Whether attention is handed parts of the values, and not what a cache returned (DiffLlama)."""
    return is_of_family(config, {"diffllama"})


def exchanges_attention(model: nn.Module) -> bool:
    """Whether a model asks transformers for its attention function, and has not written it into itself."""
    decoder = decoder_of(model)
    if hasattr(sys.modules.get(type(decoder).__module__), _FUNCTIONS):
        return True
    if not any(hasattr(module, _FUNCTIONS) for module in modeling_files(decoder)):
        return False
    # a decoder of one's own, derived from one that asks: its attention may be written anew
    attentions = [module for found in _attention_modules(decoder).values() for module in found]
    return bool(attentions) and all(_FUNCTIONS in forward_names(module) for module in attentions)


def describe_layers(model: nn.Module | None, config: Any, plans: list[LayerPlan]) -> list[LayerFacts]:
    """Describe every layer of a decoder's cache from the model if given, else from its configuration.

    Args:
        model (`torch.nn.Module`, *optional*): The model.
        config (`PreTrainedConfig`): The decoder's configuration.
        plans (`list[LayerPlan]`): Of every layer. Those without keys (recurrent ones) have no rotation.
    """
    if model is not None:
        model = decoder_of(model)
    own = [plan for plan in plans if plan.repeats is None]
    kinds = [
        (
            plan.layer_type,
            key_value_heads(config, layer_idx)[1] if plan.has_keys else 0,
            _own_rope_parameters(config, layer_idx),
        )
        for layer_idx, plan in enumerate(own)
    ]
    rotaries = {kind: find_rotary(model, config, *kind) for kind in set(kinds) if kind[1]}
    missing = [kind for kind, rotary in rotaries.items() if rotary is None and model is not None]
    known_of_family = {kind for kind in missing if find_rotary(None, config, *kind) is not None}
    attentions = _attention_modules(model) if model is not None else {}
    holder = rotary_module(model) if model is not None else None
    follows = holder is None or not is_told(holder)
    named = _rotating_layers(model) if missing and model is not None and not caches_latents(config) else set()
    facts = []
    for layer_idx, kind in enumerate(kinds):
        modules = attentions.get(layer_idx, [])
        crosses = own[layer_idx].is_cross_attention
        rotates = not crosses and _uses_rotary(next(iter(modules), None), config, layer_idx, kind[0])
        if modules:  # beside an encoder, a layer attends to its text first
            has_bias, largest = _key_bias(modules[1] if crosses and len(modules) > 1 else modules[0])
        else:
            has_bias, largest = _config_has_key_bias(config), None
        rotary = rotaries.get(kind) if rotates else None
        seems_to = kind in known_of_family or (kind in missing and layer_idx in named)
        is_unknown = rotates and rotary is None and seems_to
        may_change = follows and rotary is not None and "rope_type" not in dict(kind[2])
        change = frequency_change(config, kind[0]) if may_change else None
        facts.append(LayerFacts(rotary, has_bias, largest, is_unknown, change))
    return facts + [facts[plan.repeats] for plan in plans if plan.repeats is not None]


def _rotating_layers(model: nn.Module) -> set[int]:
    """Indices of the layers whose attention is written with names of a rotation."""
    numbered = ((getattr(module, "layer_idx", None), module) for module in model.modules())
    return {index for index, module in numbered if isinstance(index, int) and names_rotation(module)}


def _own_rope_parameters(config: Any, layer_idx: int) -> tuple[tuple[str, Any], ...]:
    """What one layer has in the place of its model's `rope_parameters`, where layers differ in these."""
    if is_of_family(config, _FAMILIES_OF_THETAS) and config.layer_rope_theta[layer_idx]:
        return (("rope_theta", config.layer_rope_theta[layer_idx]),)
    if is_of_family(config, _FAMILIES_OF_SCALED_LAYERS) and layer_idx not in config.rope_scaling_layers:
        return (("rope_type", "default"),)
    return ()


def _attention_modules(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Attention modules by layer index, in their order: those that know their index and project keys."""
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        layer_idx = getattr(module, "layer_idx", None)
        if isinstance(layer_idx, int) and any(
            hasattr(module, n) for n in (*_KEY_PROJECTIONS, *_FUSED_PROJECTIONS)
        ):
            found.setdefault(layer_idx, []).append(module)
    return found


def _key_bias(attention: nn.Module) -> tuple[bool, float | None]:
    for name in _KEY_PROJECTIONS:
        if (bias := _bias_of(getattr(attention, name, None))) is not None:
            return True, None if bias.is_meta or bias.numel() == 0 else bias.detach().abs().max().item()
    for name in _FUSED_PROJECTIONS:
        if _bias_of(getattr(attention, name, None)) is not None:
            return True, None  # the key's share of a fused bias lies differently in every family
    return False, None


def _bias_of(projection: Any) -> torch.Tensor | None:
    """What a projection adds; that of one quantized by torch is packed, and made by a method."""
    bias = getattr(projection, "bias", None)
    bias = bias() if inspect.ismethod(bias) else bias
    return bias if isinstance(bias, torch.Tensor) else None


def _config_has_key_bias(config: Any) -> bool:
    return is_of_family(config, _BIASED_FAMILIES) or any(
        bool(getattr(config, flag, False)) for flag in _BIAS_FLAGS
    )


def _uses_rotary(attention: nn.Module | None, config: Any, layer_idx: int, layer_type: str) -> bool:
    """Whether this layer rotates its keys at all; some families leave the rotation out of some layers."""
    if attention is not None and hasattr(attention, "use_rope"):
        return bool(attention.use_rope)
    if getattr(config, "alibi", False):  # Falcon then has a rotary module and does not call it
        return False
    if not getattr(config, "use_mem_rope", True):  # Zamba2
        return False
    of_kinds = getattr(config, "rope_parameters", None) or {}
    if layer_type in of_kinds and of_kinds[layer_type] is None:  # Beam
        return False
    if is_of_family(config, {"granitemoehybrid"}) and config.position_embedding_type != "rope":
        return False
    # despite its name, 1 means the layer does rotate
    per_layer = getattr(config, "no_rope_layers", None) or getattr(config, "layer_rope_theta", None)
    if per_layer:
        return bool(per_layer[layer_idx])
    has_prefix = is_of_family(config, {"cohere2_moe"}) and config.prefix_dense_sliding_window_pattern == 1
    if has_prefix and config.mlp_layer_types[layer_idx] == "dense":
        return True
    is_hybrid = is_of_family(config, _ROTATING_WINDOWS_IF_ANY) and config.sliding_window is not None
    rotates_windows = is_hybrid or is_of_family(config, _ROTATING_WINDOWS)
    return layer_type != "full_attention" if rotates_windows else True
