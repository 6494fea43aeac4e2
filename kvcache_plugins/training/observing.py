"""A frozen model shown layer by layer while it reads a text: its projections, queries and keys.

Queries and keys are taken from the call of the attention function, where they are exactly what the model's
attention multiplies: after the norms some families have, after whichever rotation, with the factor they are
scaled by. The model keeps its own attention function for the attention itself, so no attention weights are
computed and any fast kernel will do.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..models.decoder import decoder_of
from ..retaining.projections import ProjectionTap

__all__ = ["LayerView", "observe_layers"]

_SUFFIX = "_observed_by_kvcache_plugins"


@dataclass(frozen=True)
class LayerView:
    """What one attention layer computes of a batch.

    Args:
        features (`torch.Tensor` of shape `(B, T, input_dim)`): Projections, as retaining heads read them.
        query (`torch.Tensor` of shape `(B, Hq, T, D)`): After norm and rotation.
        key (`torch.Tensor` of shape `(B, H_kv, T, D)`): After norm and rotation.
        scaling (`float`): Factor of the logits.
        softcap (`float`, *optional*): Of the logits.
    """

    features: Tensor
    query: Tensor
    key: Tensor
    scaling: float
    softcap: float | None


Observer = Callable[[int, LayerView], None]
"""Called with the index of a layer and what it computes, in the order of the layers."""

_current = threading.local()
"""Per thread: `seen`, a dictionary from the id of an attention module to what is told of it."""


@torch.no_grad()
def observe_layers(model: Any, inputs: dict[str, Tensor], observer: Observer) -> None:
    """Let a model read a batch, and show every attention layer.

    Args:
        model (`PreTrainedModel`): The base model; its logits are not computed.
        inputs (`dict[str, torch.Tensor]`): `input_ids` and `attention_mask`.
        observer (`Callable`): Told of every layer; nothing is kept for it.

    Raises:
        ValueError: If the model has no attention layer with known projections, or its attention does not go
            through transformers' attention functions.
    """
    tap = ProjectionTap.of(model)
    seen: set[int] = set()

    def show(layer_idx: int, view: LayerView) -> None:
        seen.add(layer_idx)
        observer(layer_idx, view)

    device = next(model.parameters()).device
    decoder = decoder_of(model)
    with _watching(tap, show), torch.autocast(device.type, enabled=False):
        decoder(**inputs, use_cache=False)
    missing = sorted(tap.layers.keys() - seen)
    if missing:
        kind = type(tap.layers[missing[0]]).__name__
        raise ValueError(
            f"Layers {missing} of {type(model).__name__} were not seen: {kind} does not call transformers' "
            "attention functions, so their logits cannot be observed."
        )


@contextmanager
def _watching(tap: ProjectionTap, show: Observer) -> Iterator[None]:
    """Catch projections and attention calls of this thread meanwhile."""
    layers = {id(module): (index, tap, show) for index, module in tap.layers.items()}
    found = (getattr(module, "config", None) for module in tap.layers.values())
    configs: dict[int, Any] = {id(config): config for config in found if config is not None}
    before = {key: config._attn_implementation for key, config in configs.items()}
    outer = getattr(_current, "seen", {})
    _current.seen = layers
    thread = threading.get_ident()

    def wants(_: Any) -> bool:
        return threading.get_ident() == thread

    try:
        for key, config in configs.items():
            config._attn_implementation = _observed(before[key])
        tap.attach(wants)
        yield
    finally:
        tap.detach(wants)
        _current.seen = outer
        for key, config in configs.items():
            config._attn_implementation = before[key]


def _observed(name: str | None) -> str:
    """Return the name of an attention function that shows its arguments and goes on to the one of `name`."""
    original = name or "eager"
    observed = original.removesuffix(_SUFFIX) + _SUFFIX
    if original != observed and observed not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(observed, _showing(original))
        AttentionMaskInterface.register(observed, ALL_MASK_ATTENTION_FUNCTIONS[original])
    return observed


def _showing(original: str) -> Callable[..., Any]:
    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        # once a forward: layers of DiffLlama call twice, with the same queries and keys
        found = getattr(_current, "seen", {}).pop(id(module), None)
        if found is not None:
            layer_idx, tap, show = found
            scaling = kwargs.get("scaling")
            if scaling is None:
                scaling = query.shape[-1] ** -0.5
            view = LayerView(tap.take(layer_idx), query, key, float(scaling), kwargs.get("softcap"))
            with torch.no_grad():
                show(layer_idx, view)
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)
        config: Any = module.config
        observed, config._attn_implementation = config._attn_implementation, original
        try:  # the flash functions look up their kernel under the name in the configuration
            return function(module, query, key, value, *args, **kwargs)
        finally:
            config._attn_implementation = observed

    return forward
