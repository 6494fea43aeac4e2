"""An ordinary cache that shows every layer's keys and values to an observer as they come in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from ..models.decoder import decoder_only_config, split_model_or_config
from ..models.facts import describe_layers
from ..models.layer_plan import plan_layers
from ..models.rotary import Rotary

__all__ = ["CalibratedLayer", "RecordingCache", "calibrated_layers"]

Observer = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Called with a layer's index, keys and values `(B, H, T, D)`; returns what goes on into attention."""


@dataclass(frozen=True)
class CalibratedLayer:
    """A layer that a cache would pack.

    Args:
        rotary (`Rotary`, *optional*): How its keys are rotated.
    """

    rotary: Rotary | None

    def unrotate(self, states: Tensor) -> Tensor:
        """Turn `states` `(B, H, T, D)`, keys or their gradients, back to before the rotary embedding, fp32.

        The position of a token is its index: the map is orthogonal, so gradients turn like keys.
        """
        states = states.float()
        if self.rotary is None:
            return states
        return self.rotary.rotate(states, -torch.arange(states.shape[2], device=states.device))


def calibrated_layers(model: nn.Module) -> dict[int, CalibratedLayer]:
    """Return the layers of a model that a cache would pack, by index.

    Raises:
        ValueError: For an encoder-decoder model, one with weights on the device `meta`, or one without a
            layer of full attention.
    """
    config = decoder_only_config(split_model_or_config(model)[1])
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ValueError(
            f"The model has {len(missing)} weights on the device 'meta' (such as {missing[0]!r}): they were "
            "not loaded, or were offloaded. A calibration needs all weights in memory."
        )
    plans = plan_layers(config, cross_reason="a calibration reads text only")
    facts = describe_layers(model, config, plans)
    layers = {
        index: CalibratedLayer(fact.rotary)
        for index, (plan, fact) in enumerate(zip(plans, facts, strict=True))
        if plan.dense_reason is None
    }
    if not layers:
        raise ValueError(
            f"No layer of this model can be packed: {sorted({str(plan.dense_reason) for plan in plans})}."
        )
    return layers


class RecordingCache(DynamicCache):
    """transformers' dense cache for one forward of one sample, with an observer.

    Args:
        config (`PreTrainedConfig`): The decoder's configuration.
        observer (`Callable`): Sees keys as attention does, that is after the rotary embedding.
    """

    def __init__(self, config: Any, observer: Observer) -> None:
        super().__init__(config=config)
        self._observer = observer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Show new keys and values to the observer, then pass on what it returns."""
        key_states, value_states = self._observer(layer_idx, key_states, value_states)
        updated: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return updated
