"""Surprise: tokens the model did not expect carry the information of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import check_number
from ..eviction.layer import EvictingLayer
from ..eviction.model_calls import CallWatchingCache
from ..eviction.options import EvictingConfig
from ..layers.storing import storing
from ..models.logits import LogitRule, find_logit_rule, outputs_of_head
from ..registry import register_backend

__all__ = ["SirLLMCache", "SirLLMConfig", "SirLLMLayer"]

_LAST_STATE = "last_state"
_SLICE = 512
"""Tokens whose logits are computed at once."""


@dataclass(frozen=True, kw_only=True)
class SirLLMConfig(EvictingConfig):
    """Options of [`SirLLMCache`]; see [`EvictingConfig`].

    Args:
        sink_length (`int`): First real tokens never evicted.
        decay (`float`): Factor on the scores of all that is held, prompts and answers, when a later turn is
            read, so that later turns weigh more.
    """

    sink_length: int = 4
    decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "decay", self.decay, minimum=0.0, maximum=1.0)


class SirLLMLayer(EvictingLayer):
    """Worth of a token: `-log p(token | what came before)`, the same for all layers and heads."""

    scored_after = "forward"
    config: SirLLMConfig
    state_size = 0
    """Channels of the model's states, of which the first layer remembers the last."""

    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        if keys.is_meta and self.state_size:  # nobody shows a state where there are only shapes
            self.companions[_LAST_STATE] = keys.new_empty((keys.shape[0], 1, self.state_size))
        return super().score(keys, values)

    def take_scores(self, surprisal: Tensor) -> None:
        """Write the scores `(B, n)` of the newest tokens, and evict what is due."""
        with storing():
            newest = self.ledger.scores[:, :, -surprisal.shape[1] :]
            newest.copy_(surprisal.to(newest.device)[:, None].expand_as(newest))
            if self.config.decay < 1.0 and self._begins_turn(surprisal.shape[1]):
                self.ledger.scores[:, :, : -surprisal.shape[1]].mul_(self.config.decay)
        self.evict_due()

    def _begins_turn(self, count: int) -> bool:
        """Whether the newest `count` tokens are the first of a later prompt, or all of it, drafts or not."""
        seen = self.cumulative_length - count
        if self.prompt_length is not None and seen < self.prompt_length:
            return self._turn_length > 0 and seen <= self.prompt_length - self._turn_length
        return seen > 0 and self._due == "prompt"  # nobody said that one would come


@register_backend("sirllm")
class SirLLMCache(CallWatchingCache):
    """Keeps the tokens that surprised the model most.

    Paper: SirLLM, arXiv 2405.12528.
    Deviates: a token's surprisal is taken where it was predicted (the published code reads the logits one
        token late); the first token of a text counts as much as the most surprising of its call, and so does
        the first after drafted tokens were rejected. The newest tokens are protected between the chunks of a
        prompt (stabilizers) and from its end on (local), where the published code fills up with the newest
        what sinks and the most surprising leave of its cache.
    Cost: 8 bytes per token and head beside the storage; the language-model head on every token of a prompt,
        and twice on generated ones. All layers evict after the forward, so the peak is a budget and a chunk
        in every layer.
    Limits: needs `input_ids` of text, and a model whose logits are what a language-model head makes of its
        decoder's states, scaled or capped; the decoder cannot be called alone.
    """

    config_class = SirLLMConfig
    layer_class = SirLLMLayer
    purpose = "scores tokens by their probability"
    logit_rule: LogitRule | None = None
    """What the model did to the outputs of its head when it last read several tokens."""

    def __init__(self, model_or_config: Any, *, max_cache_length: int | None = None, **options: Any) -> None:
        super().__init__(model_or_config, max_cache_length=max_cache_length, **options)
        for first in self.evicting_layers[:1]:
            assert isinstance(first, SirLLMLayer)
            first.state_size = self.model_config.hidden_size

    def take_call(self, model: Any, token_ids: Tensor, states: Tensor, logits: Tensor, index: int) -> None:
        layers = self.evicting_layers
        if not layers:
            return
        if self.logit_rule is None or token_ids.shape[1] > 1:  # not waiting for a device at every step
            outputs = outputs_of_head(model, states[:, index, None])[:, 0]
            self.logit_rule = find_logit_rule(model, outputs, logits)
        # the state that predicted the first of these tokens follows the batch with the first layer
        before = layers[0].companions.get(_LAST_STATE)
        found = surprisal(model, self.logit_rule, states, token_ids, before)
        seen = layers[0].cumulative_length - token_ids.shape[1]
        if layers[0].pads is not None:
            _score_first(found, layers[0].pads.to(found.device) - seen)
        layers[0].companions[_LAST_STATE] = states[:, -1:].clone()
        for layer in layers:
            assert isinstance(layer, SirLLMLayer)
            layer.take_scores(found)


def _score_first(found: Tensor, first: Tensor) -> None:
    """Let the first real token of a padded row, at `first` `(B,)` of this call, count as in others."""
    for row, start in enumerate(first.tolist()):
        if 0 <= start < found.shape[1]:
            rest = found[row, start + 1 :]
            found[row, start] = rest.max() if len(rest) else 0.0


def surprisal(
    model: Any, rule: LogitRule, states: Tensor, token_ids: Tensor, before: Tensor | None = None
) -> Tensor:
    """Return `-log p` of every token given those before it.

    Args:
        model (`PreTrainedModel`): Whose head to use.
        rule (`LogitRule`): What becomes of what the head gives.
        states (`torch.Tensor` of shape `(B, n, hidden_size)`): What the decoder made of the tokens.
        token_ids (`torch.Tensor` of shape `(B, n)`): The tokens.
        before (`torch.Tensor` of shape `(B, 1, hidden_size)`, *optional*): The state before the first.

    Returns:
        `torch.Tensor` of shape `(B, n)`: fp32; of a first token without a state before it, the largest of its
        row, or zero if it is alone.
    """
    head = model.get_output_embeddings()
    predicting = states[:, :-1] if before is None else torch.cat([before.to(states), states[:, :-1]], dim=1)
    predicted = token_ids[:, -predicting.shape[1] :] if predicting.shape[1] else token_ids[:, :0]
    parts = [states.new_zeros((len(states), 0), dtype=torch.float32)]
    for start in range(0, predicting.shape[1], _SLICE):
        logits = rule.apply(head(predicting[:, start : start + _SLICE]))
        targets = predicted[:, start : start + _SLICE].to(logits.device)
        parts.append(F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").to(states.device))
    found = torch.cat(parts, dim=1)
    if before is not None:
        return found
    first = found.amax(1, keepdim=True) if found.shape[1] else found.new_zeros(len(found), 1)
    return torch.cat([first, found], dim=1)
