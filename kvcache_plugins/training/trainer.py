"""The Trainer of retaining heads: they are its model, the model they serve stays outside and frozen."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..artifacts.files import naming
from ..models.decoder import decoder_only_config
from ..models.layer_plan import plan_layers
from ..retaining.heads import RetainingHeads
from ..retaining.loading import WEIGHTS_FILE
from ..retaining.losses import row_losses, top_recall
from ..retaining.projections import ProjectionTap
from .arguments import LocretTrainingArguments
from .checkpoints import begun_before, seconds_before, write_facts
from .clipping import ClipValues
from .targets import Targets, observe_targets

__all__ = ["LocretTrainer", "evicting_layers", "recall_metrics"]


class LocretTrainer(Trainer):
    """Trains [`RetainingHeads`] on labels made on the fly (Locret, arXiv 2410.01805).

    Every step the base model reads prompt and answer once, without gradients and without logits; causality
    makes the features of the prompt independent of the answer. Checkpoints hold the heads alone.

    Args:
        model (`RetainingHeads`): What is trained.
        base_model (`PreTrainedModel`): What it is trained for: put into evaluation mode, its weights frozen,
            and moved to the Trainer's device unless it was spread over several.
        args (`LocretTrainingArguments`): With `layerwise_backward`, the features of one layer are held
            at a time.
        facts (`Mapping`, *optional*): What its checkpoints say of the training, see [`training_facts`],
            beside when it began: `begun`, in seconds since 1970.
        kwargs: As for `Trainer`; `data_collator` gives the batches of [`Collator`].

    Raises:
        ValueError: If the heads do not fit the base model, or layer-wise backward is asked for with FSDP or
            DeepSpeed, which gather weights in the model's own forward.
    """

    args: LocretTrainingArguments

    def __init__(
        self,
        model: RetainingHeads,
        base_model: Any,
        args: LocretTrainingArguments,
        facts: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        model.check_model(base_model)
        tapped = ProjectionTap.of(base_model).layers
        if len(tapped) != model.config.num_hidden_layers:
            raise ValueError(
                f"Retaining heads need the projections of all {model.config.num_hidden_layers} layers, found "
                f"are {sorted(tapped)} in {type(base_model).__name__}."
            )
        if args.layerwise_backward and (args.fsdp or args.deepspeed):
            raise ValueError("--layerwise_backward is for one process or DDP, got FSDP or DeepSpeed as well.")
        self.evicting_layers = evicting_layers(base_model.config)
        kwargs.setdefault("compute_metrics", partial(recall_metrics, layers=self.evicting_layers))
        super().__init__(model=model, args=args, **kwargs)
        if args.clip_value > 0:
            self.add_callback(ClipValues(args.clip_value))
        self._facts = None if facts is None else dict(facts)
        self._began = time.perf_counter()
        self.begun: float | None = None
        self.base_model = base_model.eval().requires_grad_(False)
        if getattr(base_model, "hf_device_map", None) is None:
            self.base_model.to(args.device)

    @property
    def seconds(self) -> float:
        """How long the training has taken, with the parts of it that were interrupted."""
        return time.perf_counter() - self._began

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train, as a `Trainer` does."""
        checkpoint = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else None
        self._began = time.perf_counter() - seconds_before(checkpoint)
        begun = begun_before(checkpoint)
        self.begun = time.time() if begun is None else begun
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Observe the base model on a batch, and return the heads' loss on what it showed."""
        layers: dict[int, Targets] = {}
        self.observe(inputs, layers.__setitem__)
        found = [layers[index] for index in sorted(layers)]
        output = model(
            features=[layer.features for layer in found],
            labels=[layer.labels for layer in found],
            mask=found[0].mask,
        )
        return (output.loss, (output, found)) if return_outputs else output.loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Take the gradients of a batch; layer by layer if asked for, with the same result."""
        if not self.args.layerwise_backward:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        heads: RetainingHeads = self.accelerator.unwrap_model(model)
        losses: list[Tensor] = []

        def learn(layer_idx: int, layer: Targets) -> None:
            with torch.enable_grad():
                with self.accelerator.autocast():
                    _, regression, smoothness = heads.layer_forward(
                        layer_idx, layer.features, layer.labels, layer.mask
                    )
                loss = (regression + smoothness) / self.current_gradient_accumulation_steps
                self.accelerator.backward(loss)
            losses.append(loss.detach().to(self.args.device))

        self.observe(self._prepare_inputs(inputs), learn)
        if self.accelerator.sync_gradients and self.accelerator.num_processes > 1:
            # the wrapper did not see these backward passes, so it has not averaged their gradients
            for parameter in heads.parameters():
                if parameter.grad is not None:
                    parameter.grad.copy_(self.accelerator.reduce(parameter.grad, reduction="mean"))
        return torch.stack(losses).sum()

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the loss of a batch, what [`recall_metrics`] are taken of, and the same of `knorm`.

        Losses are of the layers that evict, as by them checkpoints are compared. The loss of a batch is a
        mean, from which rows that several processes have read twice, to fill their last batches, cannot be
        taken back. An evaluation reports the mean over the rows instead.

        Returns:
            `tuple`: Scalar; `(B, L + 1)`, recalls of the layers and the loss of every row; `(B, L)`, recalls.
        """
        with torch.no_grad():
            _, (output, layers) = self.compute_loss(model, self._prepare_inputs(inputs), return_outputs=True)
            losses = self._losses_of_evicting(output.scores, layers)
            if prediction_loss_only:
                return losses.mean(), None, None
            device = self.args.device
            recalls = [
                top_recall(score, layer.labels.to(score.device), layer.mask.to(score.device)).to(device)
                for score, layer in zip(output.scores, layers, strict=True)
            ]
            norms = [top_recall(-x.key_norms, x.labels, x.mask).to(device) for x in layers]
        return losses.mean(), torch.stack([*recalls, losses], dim=1), torch.stack(norms, dim=1)

    def restore(self, checkpoint: str) -> None:
        """Take the heads and the state of a checkpoint, or of the best one that its training has kept."""
        self._began = time.perf_counter() - seconds_before(checkpoint)
        self.begun = begun_before(checkpoint)
        self._load_from_checkpoint(checkpoint)
        self.state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None and Path(best).is_dir():
            self._load_best_model()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        with naming(folder / WEIGHTS_FILE):
            super()._save(output_dir, state_dict)
        if self._facts is not None and self.begun is not None and self.args.should_save:  # of every process
            write_facts(folder, self._facts, self.seconds, self.begun)

    def _losses_of_evicting(self, scores: Sequence[Tensor], layers: Sequence[Targets]) -> Tensor:
        """Locret's loss of every row, as if the model had no layers but those that evict, if any does."""
        indices = self.evicting_layers or range(len(layers))
        terms: list[Tensor] = []
        for index in indices:
            score, layer = scores[index], layers[index]
            labels, mask = layer.labels.to(score.device), layer.mask.to(score.device)
            terms += row_losses(score, labels, mask, len(indices))
        return torch.stack([term.to(self.args.device) for term in terms]).sum(0)

    def observe(self, inputs: dict[str, Any], receive: Callable[[int, Targets], None]) -> None:
        """Let the base model read a batch of [`Collator`], as [`observe_targets`] does."""
        heads: Any = self.accelerator.unwrap_model(self.model)
        observe_targets(self.base_model, inputs, receive, max_train_length=heads.config.max_train_length)


def evicting_layers(config: Any) -> list[int]:
    """Return the layers of a model that a cache can evict tokens from: not those of a sliding window, say.

    Args:
        config (`PreTrainedConfig`): Of the model.
    """
    plans = plan_layers(decoder_only_config(config), evicts=True, cross_reason="not evicted from")
    return [index for index, plan in enumerate(plans) if plan.dense_reason is None]


def recall_metrics(prediction: EvalPrediction, layers: Sequence[int] = ()) -> dict[str, Any]:
    """Return the loss, and the recall@10 % of heads and of `knorm`: of each layer, and the mean of some.

    Args:
        prediction (`EvalPrediction`): Recalls of the heads and losses as predictions, of shape `(examples,
            layers + 1)`; recalls of `knorm` as labels, `(examples, layers)`.
        layers (`Sequence[int]`): Those of [`evicting_layers`], of which the mean is taken: of the others no
            cache asks for a score. All of them if there are none.
    """
    # batch by batch with --eval_do_concat_batches false
    batches: tuple[Any, Any] = (prediction.predictions, prediction.label_ids)
    found, norms = (torch.as_tensor(np.vstack(rows)) for rows in batches)
    metrics: dict[str, Any] = {"loss": found[:, -1].mean().item()}
    for name, values in (("recall", found[:, :-1]), ("knorm_recall", norms)):
        metrics[name] = values[:, list(layers) or slice(None)].mean().item()
        for layer, value in enumerate(values.mean(0).tolist()):
            metrics[f"{name}_layer_{layer}"] = value
    return metrics
