"""Which prompts transformers can read in chunks so that nothing else is computed than of the whole.

Evicting caches are read in chunks to bound memory. That is transformers' doing, and what it can split differs
between releases, models, and what comes with a prompt. What is not known to be split right is read whole.

Nothing of torch is imported at the top, because importing this package costs next to nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_drafting", "soft_prompt_kind", "why_not_cut", "why_not_filled", "why_read_whole"]

_SPLIT_WITH_THE_TEXT = frozenset(
    {"attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}
)
"""Inputs of which transformers gives each chunk of a prompt its part."""
_SPLIT_FEATURES = frozenset(
    {"last_hidden_state", "pooler_output", "deepstack_features", "hidden_states", "attentions"}
)
"""What an encoded image has if each chunk can be given its part; models that encode more read more of it."""
_READ_BEFORE = frozenset({"cache_position", "second_per_grid_ts", "video_second_per_grid"})
"""Inputs that number tokens, which has been done for the whole prompt."""
_READ_WHOLE = frozenset({"jamba", "kosmos_2_5_text_model", "zamba"})
"""Families that compute something else in chunks, with transformers' caches too: recurrent layers of Jamba
and Zamba start anew in each, and Kosmos-2.5 numbers tokens of padded rows by other rules in the first."""
_DRAFTING = "assisted_generation"
"""transformers' name for generation in which an assistant, or the prompt itself, proposes tokens."""


def why_read_whole(
    model: Any,
    model_kwargs: dict[str, Any],
    *,
    is_first: bool,
    rotated_length: int | None = None,
    generation_mode: Any = None,
    returns_states: bool = False,
) -> str | None:
    """Say why this prompt is not split; `None` if transformers can, and what it computes stays what it is.

    Args:
        model (`PreTrainedModel`): What generates.
        model_kwargs (`dict`): The call's arguments.
        is_first (`bool`): Whether nothing has been read before.
        rotated_length (`int`, *optional*): Tokens that will have been read then, if known; of a cache that
            numbers what it holds, the most that its positions will count in any call.
        generation_mode (`GenerationMode`, *optional*): What transformers calls this way of generating.
        returns_states (`bool`): Whether the call is to hand out the prompt's hidden states.
    """
    from .models.origins import is_of_family

    if getattr(generation_mode, "value", None) == _DRAFTING:
        return "the call that reads it verifies drafted tokens as well"
    if returns_states:  # by which other models may go on, as the talkers of Qwen-Omni do
        return "output_hidden_states would be those of its last chunk alone"
    if soft_prompt_kind(model) is not None:
        return "PEFT takes every call after a soft prompt's first for a step of one token"
    if _is_activated_within(model):
        return "PEFT counts the tokens that aLoRA adapts from the end of every call"
    if _sees_ahead(model, model_kwargs):
        return "tokens of an image, or of the whole prompt, see later ones"
    if is_of_family(model.config.get_text_config(decoder=True), _READ_WHOLE):
        return "this model computes something else in chunks"
    if _rotates_by_length(model, rotated_length):
        return "its rotary frequencies follow the longest text that a call has read"
    if not _has_masks(model):
        return "transformers makes no masks for its attention function, which then takes a chunk for all"
    if names := _unsplittable_inputs(model_kwargs):
        return f"transformers would give every chunk all of {', '.join(names)}"
    encoded = model_kwargs.get("mm_encoder_outputs") or {}
    if not all(_splits_features(model.config, *item) for item in encoded.items() if item[1] is not None):
        return "this model encodes more of an image than transformers splits"
    if encoded and "mm_encoder_outputs" not in _how_prompts_are_read():
        return "this release of transformers would give every chunk all images"
    positions = model_kwargs.get("position_ids")
    if getattr(positions, "ndim", 2) > 2 and "position_ids[..., past_length" not in _how_prompts_are_read():
        return "this release of transformers cannot split positions by time, row and column"
    if not is_first and "input_ids[:, -next_sequence_length:]" not in _how_prompts_are_read():
        return "this release of transformers cannot split a later turn"
    return None


def check_drafting(seen: int, generation_mode: Any) -> None:
    """Raise `ValueError` where tokens are to be drafted for a text of which a cache has `seen` a part.

    Transformers, in all releases that are served, reads the whole prompt behind that part then.
    """
    if seen and getattr(generation_mode, "value", None) == _DRAFTING:
        raise ValueError(
            f"Drafts (assistant_model, prompt_lookup_num_tokens) were asked for with a cache that has seen "
            f"{seen} tokens: transformers would read the whole prompt again behind them, and answer another "
            "text. Allowed are calls without drafts, a new cache, and this one after its `reset()`."
        )


def _unsplittable_inputs(model_kwargs: dict[str, Any]) -> list[str]:
    """Names of what comes with a prompt, as a tensor or several, and would reach every chunk whole."""
    others = model_kwargs.keys() - _SPLIT_WITH_THE_TEXT - _READ_BEFORE
    values = {name: model_kwargs[name] for name in others}
    return sorted(n for n, v in values.items() if isinstance(v, (list, tuple)) or hasattr(v, "shape"))


def _splits_features(config: Any, modality: str, encoded: Any) -> bool:
    """Whether each chunk of a prompt gets what it needs of images, or videos, that were encoded before."""
    if not isinstance(encoded, Mapping):
        return False
    names = {name for name, value in encoded.items() if value is not None}
    finds_tokens = isinstance(getattr(config, f"{modality}_token_id", None), int)
    return finds_tokens and names <= _SPLIT_FEATURES and _num_features(encoded) is not None


def why_not_cut(token_ids: Tensor) -> str | None:
    """Say why transformers cannot cut a prompt's tokens apart; `None` if it can.

    Args:
        token_ids (`torch.Tensor` of shape `(B, T)`): The tokens; `(B, T, codes)` if each is several codes, as
            CSM's are where it has sounds for a prompt.
    """
    return "transformers would split the codes of its tokens, not the tokens" if token_ids.ndim > 2 else None


def why_not_filled(config: Any, token_ids: Tensor, encoded: Mapping[str, Any]) -> str | None:
    """Say which images, or videos, are not as many as the tokens that stand for them; `None` if all are.

    Transformers hands each chunk as much of them as it has such tokens, from the first image on, and so never
    meets what is left over: images of an earlier turn that are given again, or of a text that was cut off. A
    prompt that is read whole is checked by its model, which may know tokens of another kind for them, too
    (GLM-4V's videos).

    Args:
        config (`PreTrainedConfig`): Of the model.
        token_ids (`torch.Tensor` of shape `(B, T)`): What is still to be read.
        encoded (`dict`): Of every kind (`"image"`, `"video"`), what has been encoded for this call.
    """
    for modality, output in encoded.items():
        if output is None:
            continue
        name = f"{modality}_token_id"
        placeholder, features = getattr(config, name, None), _num_features(output)
        tokens = int((token_ids == placeholder).sum()) if isinstance(placeholder, int) else None
        if features is None or tokens != features:
            what = f"{features} features of {modality}s come with {tokens} tokens for them"
            return f"{what} ({name}={placeholder})"
    return None


def _num_features(encoded: Any) -> int | None:
    """Tokens that what has been encoded is to fill, counted as transformers does; `None` if it cannot."""
    pooled = encoded.get("pooler_output") if isinstance(encoded, Mapping) else None
    if pooled is None or not all(hasattr(part, "shape") and len(part.shape) for part in pooled):
        return None
    return sum(int(part.shape[:-1].numel()) for part in pooled)


def _sees_ahead(model: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether tokens of this prompt attend to later ones, which must then be in the same call.

    Those of one image do in Gemma 3 and 4, those of the whole prompt in PaliGemma. Such models mark them by
    types of tokens, which others need for other things.
    """
    from .models.origins import modeling_files

    if not any(_masks_blocks(module) for module in modeling_files(model)):
        return False
    types = (model_kwargs.get(name) for name in ("token_type_ids", "mm_token_type_ids"))
    return bool(model_kwargs.get("mm_encoder_outputs")) or any(t is not None and bool(t.any()) for t in types)


@cache
def _masks_blocks(module: ModuleType) -> bool:
    """Whether a modelling file makes masks of blocks whose tokens all see one another."""
    try:
        return "block_sequence_ids" in inspect.getsource(module)
    except (OSError, TypeError):  # what has been typed in, as into a notebook, has no file
        return False


@cache
def _how_prompts_are_read() -> str:
    """The source that splits a prompt into chunks, which tells what it can split in this release."""
    from transformers.generation.utils import GenerationMixin

    return inspect.getsource(GenerationMixin._prefill)


def _rotates_by_length(model: Any, length: int | None) -> bool:
    """Whether the first keys of a prompt would be rotated by other frequencies in chunks than with all of it.

    Those of longrope are chosen by the cache where a model would discard it otherwise (`models.longrope`).
    """
    from .models.frequencies import frequency_change
    from .models.longrope import switch_length

    config = model.config.get_text_config(decoder=True)
    given = getattr(config, "rope_parameters", None) or {}
    kinds = [None] if "rope_type" in given else given
    changes = (frequency_change(config, kind) for kind in kinds)
    limits = [
        change.length
        for change in changes
        if change is not None and (change.rope_type != "longrope" or switch_length(model) is None)
    ]
    return bool(limits) and (length is None or length > min(limits))


def _has_masks(model: Any) -> bool:
    """Whether transformers makes masks for a model's attention function, of whatever kind."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
    return name is None or name in ALL_MASK_ATTENTION_FUNCTIONS


def _is_activated_within(model: Any) -> bool:
    """Whether PEFT has adapters that serve from some token of a prompt on (aLoRA), and not from the first."""
    adapters = getattr(model, "peft_config", None) or {}
    return any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters.values())


def soft_prompt_kind(model: Any) -> str | None:
    """The kind of soft prompt that PEFT, which then speaks for the model, puts before every prompt."""
    owner = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    config: Any = getattr(owner, "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False):
        return None
    return str(getattr(config.peft_type, "value", config.peft_type))
