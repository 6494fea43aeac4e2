"""What retaining heads are, and for which model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from ..config import check_count
from ..models.decoder import decoder_only_config, split_model_or_config
from ..models.layer_plan import key_value_heads
from ..models.loops import repeated_layers

__all__ = ["DEFAULT_BUDGET", "RetainingHeadsConfig", "default_hidden_dim", "model_name", "model_shape"]

DEFAULT_BUDGET: dict[str, Any] = {
    "budget": 1024,
    "stabilizer_length": 128,
    "chunk_size": 1024,
    "local_length": 100,
}
"""Options of the cache that heads recommend unless they were made with others."""

_LARGEST = 1024


def default_hidden_dim(hidden_size: int) -> int:
    """Return the width of heads for a model of `hidden_size` channels: at most 1024, as in the paper.

    A quarter of the model's width, but at least 128: below that, heads of small models lose recall and save
    next to nothing.
    """
    return max(min(_LARGEST, hidden_size // 4), 128)


class RetainingHeadsConfig(PreTrainedConfig):
    """Configuration of [`RetainingHeads`]: one head per layer of one model.

    Args:
        base_model_name_or_path (`str`, *optional*): The model the heads were trained for: its hub id, or the
            name of its directory without the place.
        base_model_revision (`str`, *optional*): Its revision on the hub.
        num_hidden_layers (`int`): Layers of the model.
        num_attention_heads (`int`): Query heads of a layer.
        num_key_value_heads (`int`): Key-value heads of a layer: a head gives one score for each.
        head_dim (`int`): Channels of a key.
        hidden_dim (`int`): Width between the two matrices of a head; 1024 in the paper.
        hidden_act (`str`): Activation between them, the model's own.
        inputs (`str`): What a head reads: `"qkv_proj"`, the outputs of the query, key and value projections
            of its layer, before any norm and rotation.
        label (`str`): What a score predicts: `"max_qk"`, the largest logit that a query of the answer gives
            the key.
        label_scale (`str`): How that logit is scaled: `"rsqrt_d"`, as the model's attention does, which is
            `1 / sqrt(head_dim)` in nearly all.
        positions (`str`): `"absolute"`: labels were made with the positions tokens have in the whole text.
        max_train_length (`int`, *optional*): Tokens of a prompt that the heads were trained on.
        defaults (`dict`, *optional*): Options of the cache that suit these heads: `budget`,
            `stabilizer_length`, `chunk_size`, `local_length`.

    Raises:
        ValueError: If a number is not positive, or `inputs`, `label` or `label_scale` is not one above, or
            there is no such activation.
    """

    model_type = "locret_heads"

    base_model_name_or_path: str | None = None
    base_model_revision: str | None = None
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_dim: int = 1024
    hidden_act: str = "silu"
    inputs: str = "qkv_proj"
    label: str = "max_qk"
    label_scale: str = "rsqrt_d"
    positions: str = "absolute"
    max_train_length: int | None = None
    defaults: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]  # transformers annotates none
        if self.defaults is None:
            self.defaults = dict(DEFAULT_BUDGET)
        if not isinstance(self.defaults, dict):
            raise ValueError(
                f"RetainingHeadsConfig.defaults must be options of the cache by name, got {self.defaults!r}."
            )
        for name in (
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "hidden_dim",
        ):
            setattr(self, name, check_count(f"RetainingHeadsConfig.{name}", getattr(self, name)))
        for name, allowed in (
            ("inputs", "qkv_proj"),
            ("label", "max_qk"),
            ("label_scale", "rsqrt_d"),
            ("positions", "absolute"),
        ):
            if getattr(self, name) != allowed:
                raise ValueError(
                    f"RetainingHeadsConfig.{name} must be {allowed!r}, got {getattr(self, name)!r}."
                )
        if self.hidden_act not in ACT2FN:
            raise ValueError(
                "RetainingHeadsConfig.hidden_act must be an activation of transformers, got "
                f"{self.hidden_act!r}."
            )

    @property
    def input_dim(self) -> int:
        """Channels a head reads of a token: all query heads, all key heads, all value heads."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim

    @classmethod
    def from_model(
        cls, model_or_config: Any, hidden_dim: int | None = None, **options: Any
    ) -> RetainingHeadsConfig:
        """Describe heads for a model.

        Args:
            model_or_config (`PreTrainedModel | PreTrainedConfig`): The model, or its configuration.
            hidden_dim (`int`, *optional*): Width of a head; [`default_hidden_dim`] of the model by default.
            options: Other fields.

        Raises:
            ValueError: For an encoder-decoder model, or one whose layers differ in heads.
        """
        config = decoder_only_config(split_model_or_config(model_or_config)[1])
        shapes = model_shape(config)
        revision = getattr(config, "_commit_hash", None)
        given: dict[str, Any] = {
            "base_model_name_or_path": model_name(config),
            "base_model_revision": revision,
            **shapes,
            "hidden_dim": default_hidden_dim(config.hidden_size) if hidden_dim is None else hidden_dim,
            "hidden_act": _activation(config),
        }
        return cls(**(given | options))


def model_name(config: Any) -> str | None:
    """Return the name of a model: its hub id, or the name of its directory without the place."""
    name = getattr(config, "_name_or_path", None) or None
    return Path(name).resolve().name if name is not None and Path(name).is_dir() else name


def model_shape(config: Any) -> dict[str, int]:
    """Return the numbers of a decoder that heads must agree with.

    Raises:
        ValueError: If layers differ in them, or are passed through several times.
    """
    if repeated_layers(config):
        raise ValueError(
            f"Retaining heads are for models that pass through every layer once, and {type(config).__name__} "
            "passes through some several times. Allowed for it are backends that need no heads, such as "
            "'kvzip'."
        )
    layers = {key_value_heads(config, index) for index in range(config.num_hidden_layers)}
    if len(layers) != 1:
        raise ValueError(
            "Retaining heads need the same key-value heads in every layer, got (heads, key channels, value "
            f"channels) {sorted(layers)} in {type(config).__name__}."
        )
    kv_heads, head_dim, value_dim = layers.pop()
    if head_dim != value_dim:
        raise ValueError(
            f"Retaining heads need keys and values of one width, got {head_dim} and {value_dim} channels in "
            f"{type(config).__name__}."
        )
    return {
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _activation(config: Any) -> str:
    for name in ("hidden_act", "hidden_activation", "activation_function", "activation"):
        value = getattr(config, name, None)
        if isinstance(value, str):
            return value
    return "silu"
