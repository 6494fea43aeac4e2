"""What the heads of all layers are to learn from a batch of texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .labels import max_logits
from .observing import LayerView, observe_layers

__all__ = ["Targets", "observe_targets"]


@dataclass(frozen=True)
class Targets:
    """What one layer's head sees of a batch, and what it should say.

    Args:
        features (`torch.Tensor` of shape `(B, n, input_dim)`): Of the tokens that are trained on.
        labels (`torch.Tensor` of shape `(B, H_kv, n)`): fp32; zero beyond a row's prompt.
        mask (`torch.Tensor` of shape `(B, n)`): Which tokens are of a row's prompt.
        key_norms (`torch.Tensor` of shape `(B, H_kv, n)`): Of the same keys, fp32: what `knorm` judges by.
    """

    features: Tensor
    labels: Tensor
    mask: Tensor
    key_norms: Tensor


def observe_targets(
    base_model: Any,
    inputs: dict[str, Any],
    receive: Callable[[int, Targets], None],
    *,
    max_train_length: int | None = None,
) -> None:
    """Let a model read a batch, and hand on what every layer's head is to learn of it.

    Args:
        base_model (`PreTrainedModel`): The model the heads serve.
        inputs (`dict`): A batch of [`Collator`], on any device.
        receive (`Callable`): Called with the index of a layer and its [`Targets`], in their order.
        max_train_length (`int`, *optional*): First tokens of a prompt to be trained on; their labels are
            those of the whole text.

    Raises:
        ValueError: If the model's attention cannot be observed.
    """
    prompts, lengths = inputs["prompt_length"].tolist(), inputs["length"].tolist()
    width = min(max(prompts), max_train_length or max(prompts))

    def show(layer_idx: int, view: LayerView) -> None:
        keys = view.key[:, :, :width]
        labels = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            end = min(prompt, width)
            labels[row, :, :end] = max_logits(
                view.query[row, :, prompt:length], keys[row, :, :end], view.scaling, softcap=view.softcap
            )
        mask = torch.arange(width, device=keys.device) < inputs["prompt_length"].to(keys.device)[:, None]
        receive(layer_idx, Targets(view.features[:, :width], labels, mask, keys.float().norm(dim=-1)))

    device = base_model.get_input_embeddings().weight.device
    texts = {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}
    if bool(texts["attention_mask"].all()):
        del texts["attention_mask"]  # fast kernels prefer none
    observe_layers(base_model, texts, show)
