"""Retaining heads as a model of transformers: loading, saving and sharing come from there."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.utils.generic import ModelOutput

from ..models.decoder import decoder_only_config, split_model_or_config
from .configuration import RetainingHeadsConfig, model_name, model_shape
from .losses import layer_loss

__all__ = ["RetainingHeads", "RetainingHeadsOutput"]


@dataclass
class RetainingHeadsOutput(ModelOutput):
    """What [`RetainingHeads`] return.

    Args:
        loss (`torch.Tensor`): Scalar, the sum of the next two.
        regression (`torch.Tensor`): Mean smooth L1 distance of scores and labels.
        smoothness (`torch.Tensor`): Weighted squared difference of neighbours.
        scores (`tuple[torch.Tensor]`): Of every layer, `(B, H_kv, n)`, fp32.
    """

    loss: Tensor | None = None
    regression: Tensor | None = None
    smoothness: Tensor | None = None
    scores: tuple[Tensor, ...] | None = None


class RetainingHead(nn.Module):
    """One layer's head, `W2 act(W1 x)` without biases (Locret, arXiv 2410.01805, section 3.1)."""

    def __init__(self, config: RetainingHeadsConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.input_dim, config.hidden_dim, bias=False)
        self.fc2 = nn.Linear(config.hidden_dim, config.num_key_value_heads, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, features: Tensor) -> Tensor:
        """Score tokens `(B, n, input_dim)`: fp32 `(B, H_kv, n)`.

        The last product is taken in fp32: the order of scores must not depend on the ties that bf16 makes.
        """
        hidden = self.act_fn(self.fc1(features.to(self.fc1.weight.dtype)))
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.fc2.weight.float()).transpose(1, 2)


class RetainingHeads(PreTrainedModel):
    """Small networks, one per layer of a model, that predict how much a key will matter later.

    A score depends on the query, key and value projections of its own token only: it is computed once, when
    the token is read, needs no attention weights and never changes.

    Args:
        config (`RetainingHeadsConfig`): What they are.

    Examples:
    ```python
    >>> heads = RetainingHeads.from_pretrained("examples/models/tiny-llama-books-locret")
    >>> heads.score(0, torch.randn(1, 10, heads.config.input_dim)).shape
    torch.Size([1, 2, 10])
    ```
    """

    config_class = RetainingHeadsConfig
    base_model_prefix = ""
    main_input_name = "features"

    def __init__(self, config: RetainingHeadsConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(RetainingHead(config) for _ in range(config.num_hidden_layers))
        self._replicas: dict[tuple[int, torch.device], tuple[tuple[int, ...], nn.Module]] = {}
        self.post_init()  # type: ignore[no-untyped-call]  # transformers annotates none

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def forward(
        self, features: Sequence[Tensor], labels: Sequence[Tensor], mask: Tensor | None = None
    ) -> RetainingHeadsOutput:
        """Return the loss of Locret: `mean_layers SmoothL1 + 0.0025 * sum_layers MSE(neighbours)`.

        Args:
            features (`Sequence[torch.Tensor]`): Of every layer, `(B, n, input_dim)`.
            labels (`Sequence[torch.Tensor]`): Of every layer, `(B, H_kv, n)`, fp32.
            mask (`torch.Tensor` of shape `(B, n)`, *optional*): Which tokens count, `bool`.

        Raises:
            ValueError: If there are not as many features and labels as layers.
        """
        if not len(features) == len(labels) == len(self.layers):
            raise ValueError(
                f"Expected features and labels of {len(self.layers)} layers, got {len(features)} and "
                f"{len(labels)}."
            )
        regressions, smoothnesses, scores = [], [], []
        device = self.device
        for layer_idx, (x, label) in enumerate(zip(features, labels, strict=True)):
            score, regression, smoothness = self.layer_forward(layer_idx, x, label, mask)
            regressions.append(regression.to(device))
            smoothnesses.append(smoothness.to(device))
            scores.append(score)
        regression, smoothness = torch.stack(regressions).sum(), torch.stack(smoothnesses).sum()
        return RetainingHeadsOutput(regression + smoothness, regression, smoothness, tuple(scores))

    def layer_forward(
        self, layer_idx: int, features: Tensor, labels: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return one layer's scores and what it adds to the loss: regression and smoothness."""
        layer: Any = self.layers[layer_idx]
        device = layer.fc1.weight.device
        scores = layer(features.to(device))
        mask = None if mask is None else mask.to(device)
        regression, smoothness = layer_loss(scores, labels.to(device), mask, len(self.layers))
        return scores, regression, smoothness

    @torch.no_grad()
    def score(self, layer_idx: int, features: Tensor) -> Tensor:
        """Score the tokens of one layer.

        Args:
            layer_idx (`int`): The layer, from 0.
            features (`torch.Tensor` of shape `(B, n, input_dim)`): Query, key and value projections of the
                tokens side by side, in any float dtype, on any device: the head is copied there once.

        Returns:
            `torch.Tensor` of shape `(B, H_kv, n)`: fp32, on the device of `features`; the larger, the more a
                key and its value are worth keeping.

        Raises:
            ValueError: If the layer or the width of the features is not that of the model.
        """
        if not 0 <= layer_idx < len(self.layers):
            raise ValueError(f"layer_idx must be in [0, {len(self.layers)}), got {layer_idx}.")
        if features.dim() != 3 or features.shape[-1] != self.config.input_dim:
            raise ValueError(
                f"features must be of shape (B, n, {self.config.input_dim}), query, key and value "
                f"projections side by side, got {tuple(features.shape)}."
            )
        with torch.autocast(features.device.type, enabled=False):
            scores: Tensor = self._layer_on(layer_idx, features.device)(features)
        return scores

    def _layer_on(self, layer_idx: int, device: torch.device) -> nn.Module:
        """Return a layer where the features are. Heads may serve models on several devices at once."""
        layer: Any = self.layers[layer_idx]
        if layer.fc1.weight.device == device:
            return layer  # type: ignore[no-any-return]  # nn.Module by construction
        versions = tuple(w._version for w in layer.parameters()) + tuple(id(w) for w in layer.parameters())
        known = self._replicas.get((layer_idx, device))
        if known is None or known[0] != versions:
            known = (versions, copy.deepcopy(layer).to(device))
            self._replicas[layer_idx, device] = known
        return known[1]

    def check_model(self, model_or_config: Any) -> None:
        """Check that these heads belong to a model; warn if only its name differs.

        Args:
            model_or_config (`PreTrainedModel | PreTrainedConfig`): The model, or its configuration.

        Raises:
            ValueError: If a number differs; both sides are named.
        """
        config = decoder_only_config(split_model_or_config(model_or_config)[1])
        theirs = model_shape(config)
        ours = {name: getattr(self.config, name) for name in theirs}
        made_for, given = self.config.base_model_name_or_path, model_name(config)
        if ours != theirs:
            raise ValueError(
                f"The retaining heads were made for {made_for or 'a model'} with {_listed(ours)}; "
                f"{given or type(config).__name__} has {_listed(theirs)}."
            )
        if made_for and given and made_for.split("/")[-1].lower() != given.split("/")[-1].lower():
            warnings.warn(
                f"The retaining heads were trained for {made_for!r} and are used with {given!r}: a fine-tune "
                "of the same model may do, another one will not.",
                stacklevel=2,
            )


def _listed(shape: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in shape.items())
