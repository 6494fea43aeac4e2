"""Options of a training: transformers' own with other defaults, and what heads and data need beside."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

import torch
from torch._inductor import list_mode_options
from transformers import SchedulerType, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from ..runs.options import check_amount, check_choice, check_count, check_unused

__all__ = ["WITHOUT_USE", "LocretTrainingArguments"]

WITHOUT_USE = {
    "activation_checkpointing": "heads have too few activations",
    "batch_eval_metrics": "the recall is taken of all batches together",
    "do_predict": "there is nothing to predict",
    "gradient_checkpointing": "heads have too few activations",
    "hub_always_push": "the finished heads alone are uploaded",
    "hub_strategy": "the finished heads alone are uploaded",
    "include_for_metrics": "the recall needs nothing beside the scores",
    "label_names": "labels are made while the model reads",
    "label_smoothing_factor": "labels are no classes",
    "neftune_noise_alpha": "heads have no embeddings that noise could be added to",
    "prediction_loss_only": "a training ends with the recall of its heads",
    "use_liger_kernel": "it has no kernels for heads",
}
"""Options of the Trainer that would fail later or do nothing, and why."""
_JSON_OR_FILE = ("accelerator_config", "deepspeed", "fsdp_config")
_MOST_SEED = 2**32 - 1  # numpy's
_MOST_EPOCHS = 10**9  # more than anybody trains, and their steps can be counted
_NOT_NEGATIVE = ("logging_steps", "save_steps", "eval_steps", "warmup_steps", "weight_decay")
_COUNTS = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")


@dataclass
class LocretTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the defaults of retaining heads.

    They suit small models on a CPU; `configs/locret/` holds the authors' own for large ones. One process
    trains on one GPU, also where there are several: `torchrun` starts as many processes as are to share the
    work, on GPUs or, where there are none, on the CPU. `max_steps` is the end of a training unless the
    command line names `--num_train_epochs` alone.

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
        for name, why in WITHOUT_USE.items():
            check_unused(self, (name,), f"must be left out, {why}")
        if not self.push_to_hub:
            uploads = ("hub_model_id", "hub_private_repo", "hub_revision")
            check_unused(self, uploads, "needs --push_to_hub true")
        if not self.fsdp:
            check_unused(self, ("fsdp_config",), "needs --fsdp")
        self._check_numbers()
        self._check_words()
        # Unless told that this is a run of CPUs, accelerate looks for accelerators alone, finds none, and
        # leaves every process to itself.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        if self.fp16 and self.use_cpu:
            raise ValueError(
                "--fp16 trains in half precision on accelerators alone, and this is a run of CPUs, got true; "
                "allowed is --bf16 true."
            )
        super().__post_init__()  # type: ignore[no-untyped-call]  # transformers annotates none
        if not self.clip_value >= 0:
            raise ValueError(f"--clip_value must be at least 0 (0: no clipping), got {self.clip_value!r}.")

    def _check_numbers(self) -> None:
        """Check what transformers would fail on, or make a training of no steps of.

        Raises:
            ValueError: Naming the option, the value and what is allowed.
        """
        for name in _COUNTS:
            check_count(name, getattr(self, name))
        if self.eval_accumulation_steps is not None:
            check_count("eval_accumulation_steps", self.eval_accumulation_steps)
        if self.max_steps != -1 and self.max_steps < 1:
            raise ValueError(
                "--max_steps must be an integer >= 1, or -1 for a training that ends with its "
                f"--num_train_epochs, got {self.max_steps!r}."
            )
        check_amount("num_train_epochs", self.num_train_epochs, _MOST_EPOCHS)
        for name in _NOT_NEGATIVE:
            given = getattr(self, name)
            if given is not None and not 0 <= given < math.inf:  # eval_steps may be left out
                raise ValueError(f"--{name} must be a finite number of at least 0, got {given!r}.")

    def _check_words(self) -> None:
        """Check what transformers refuses as well, in messages that do not say which option is meant."""
        check_count("seed", self.seed, least=0, most=_MOST_SEED)
        if self.torch_compile_mode is not None:
            check_choice("torch_compile_mode", self.torch_compile_mode, list_mode_options())
        for name, kind in (("lr_scheduler_type", SchedulerType), ("save_strategy", SaveStrategy)):
            check_choice(name, getattr(self, name), [choice.value for choice in kind])
        if self.optim_args and any(pair.count("=") != 1 for pair in self.optim_args.split(",")):
            raise ValueError(f"--optim_args must be NAME=VALUE,NAME=VALUE, got {self.optim_args!r}.")
        for name in (*_JSON_OR_FILE, "lr_scheduler_kwargs"):
            given: object = getattr(self, name)
            if isinstance(given, str) and (given.startswith("{") or name not in _JSON_OR_FILE):
                _check_json(name, given)

    @property
    def n_gpu(self) -> int:
        """GPUs of this process, at most one: `Trainer` would copy the heads to all of them, not the model."""
        return min(1, int(super().n_gpu))


def _check_json(name: str, given: str) -> None:
    why = ""
    try:
        if isinstance(json.loads(given), dict):
            return
    except ValueError as error:
        why = f" ({error})"
    raise ValueError(f"--{name} must be a JSON object, got {given!r}{why}.")
