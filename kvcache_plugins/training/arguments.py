"""Options of a training: transformers' own with other defaults, and what heads and data need beside."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments

__all__ = ["LocretTrainingArguments"]


@dataclass
class LocretTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the defaults of retaining heads.

    They suit small models on a CPU; `configs/locret/` holds the authors' own for large ones. One process
    trains on one GPU, also where there are several: `torchrun` starts as many processes as are to share the
    work. `max_steps` is the end of a training unless the command line names `--num_train_epochs` alone.

    Args:
        clip_value (`float`): Largest magnitude of a component of the gradient; 0 does not clip.
        layerwise_backward (`bool`): Take the gradients of a layer as soon as the base model has computed it,
            so that the features of one layer are held at a time; the result is the same.
    """

    max_steps: int = 600
    learning_rate: float = 2e-3
    warmup_steps: float = 50
    lr_scheduler_type: str = "linear"
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    max_grad_norm: float = 0.0
    per_device_train_batch_size: int = 1  # prompts differ in length: a batch of several is mostly padding
    gradient_accumulation_steps: int = 2
    per_device_eval_batch_size: int = 1
    logging_steps: float = 10
    save_strategy: str = "steps"
    save_steps: float = 200
    save_total_limit: int | None = 1
    seed: int = 0
    remove_unused_columns: bool = False
    label_names: list[str] | None = field(default_factory=list)
    dataloader_pin_memory: bool = field(default_factory=torch.cuda.is_available)
    clip_value: float = field(
        default=0.5, metadata={"help": "Largest magnitude of a component of the gradient; 0: no clipping."}
    )
    layerwise_backward: bool = field(
        default=False, metadata={"help": "Take gradients layer by layer: the memory of one layer's features."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]  # transformers annotates none
        if self.clip_value < 0:
            raise ValueError(f"--clip_value must be at least 0 (0: no clipping), got {self.clip_value!r}.")

    @property
    def n_gpu(self) -> int:
        """GPUs of this process, at most one: `Trainer` would copy the heads to all of them, not the model."""
        return min(1, int(super().n_gpu))
