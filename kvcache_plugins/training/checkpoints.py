"""The checkpoint a training goes on from: found and checked before the model is loaded."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerState

from ..artifacts.files import read_json, read_tensors
from ..errors import ArtifactError
from ..evaluation.file_digests import digest_files, model_settings
from ..evaluation.journal import differences
from ..retaining.configuration import RetainingHeadsConfig
from ..retaining.loading import CONFIG_FILE, WEIGHTS_FILE
from .arguments import LocretTrainingArguments
from .options import SYNTHETIC, LocretOptions

__all__ = ["TRAINING_FILE", "check_checkpoint", "find_checkpoint", "is_finished", "training_facts"]

TRAINING_FILE = "training.json"
"""What a checkpoint says of its training."""

_STATE_FILE = "trainer_state.json"
_OPTIONS = (
    "revision", "dtype", "attn_implementation", "dataset", "sequence_length", "max_length",
    "num_examples", "eval_examples", "max_train_length",
)  # fmt: skip
_ARGUMENTS = (
    "seed", "data_seed", "optim", "optim_args", "learning_rate", "warmup_steps", "lr_scheduler_type",
    "lr_scheduler_kwargs", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
    "clip_value",
)  # fmt: skip
"""What the optimizer's state would go on with whatever is given, and what the results are said to be of."""
_SHAPE = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_dim")


def find_checkpoint(args: LocretTrainingArguments, output: Path) -> str | None:
    """Return the checkpoint to go on from.

    Raises:
        ValueError: If one is asked for that is not there.
        ArtifactError: If a file of it is damaged.
    """
    given: Any = args.resume_from_checkpoint
    if given is None or str(given).lower() in ("false", "0", "no"):
        return None
    if str(given).lower() in ("true", "1", "yes"):
        # the state is written last: a checkpoint without it was interrupted
        states = output.glob(f"checkpoint-*/{_STATE_FILE}")
        found = {_step(path): path.parent for path in states}
        if not found:
            raise ValueError(f"--resume_from_checkpoint: there is no checkpoint in {str(output)!r}.")
        checkpoint = found[max(found)]
    else:
        checkpoint = Path(given)
        if not (checkpoint / _STATE_FILE).is_file():
            raise ValueError(
                f"--resume_from_checkpoint must be true or a checkpoint of the Trainer, got {given!r}."
            )
        _step(checkpoint / _STATE_FILE)
    _check_files(checkpoint)
    return str(checkpoint)


def training_facts(options: LocretOptions, args: LocretTrainingArguments, config: Any) -> dict[str, Any]:
    """Return what the steps of a training depend on, as plain values; not how many there are to be.

    Args:
        options (`LocretOptions`): Model and data.
        args (`LocretTrainingArguments`): The training.
        config (`PreTrainedConfig`): Of the model.

    Raises:
        OSError: If a file of the model or the data cannot be read.
    """
    names = options.text_files or () if options.dataset == SYNTHETIC else (options.dataset,)
    files = [path for name in names for path in _files(name)]
    facts = {name: getattr(options, name) for name in _OPTIONS}
    facts |= {name: getattr(args, name) for name in _ARGUMENTS}
    facts |= {
        "batch": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "data_digest": digest_files(files),
    }
    facts |= model_settings(str(options.model), config)
    plain: dict[str, Any] = json.loads(json.dumps(facts))
    return plain


def _files(name: str) -> list[Path]:
    """Return the file of a name, or those of a data set that is a directory, perhaps with `:NAME`."""
    path = Path(name)
    if path.is_file():
        return [path]
    folder = path if path.is_dir() else Path(name.partition(":")[0])
    found = (file for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else ()
    # hidden ones belong to the programs that fetch and keep a data set
    return sorted(file for file in found if not any(p[0] == "." for p in file.relative_to(folder).parts))


def is_finished(checkpoint: str, args: LocretTrainingArguments) -> bool:
    """Whether a checkpoint, of [`find_checkpoint`], has all the steps that are to be."""
    return 0 < args.max_steps <= _step(Path(checkpoint) / _STATE_FILE)


def check_checkpoint(checkpoint: str | None, config: RetainingHeadsConfig, facts: Mapping[str, Any]) -> None:
    """Check that a checkpoint is of the training that is to go on.

    Args:
        checkpoint (`str`, *optional*): Its folder.
        config (`RetainingHeadsConfig`): Of the heads that are to be trained.
        facts (`Mapping`): Of [`training_facts`]. Those of the checkpoint are not asked for if it has none, as
            one that somebody else's program has saved.

    Raises:
        ValueError: Naming what differs.
    """
    if checkpoint is None:
        return
    _check_shape(checkpoint, config)
    path = Path(checkpoint) / TRAINING_FILE
    changed = differences(read_json(path), facts) if path.is_file() else ""
    if changed:
        raise ValueError(
            f"--resume_from_checkpoint: {checkpoint!r} is of another training ({changed}). Go on with the "
            "same options and files, or begin anew in another --output_dir."
        )


def _check_shape(checkpoint: str, config: RetainingHeadsConfig) -> None:
    if not (Path(checkpoint) / CONFIG_FILE).is_file():
        return
    ours, found = config.to_dict(), RetainingHeadsConfig.from_pretrained(checkpoint).to_dict()
    wrong = [f"{name} {found[name]}, now {ours[name]}" for name in _SHAPE if found[name] != ours[name]]
    if wrong:
        raise ValueError(
            f"--resume_from_checkpoint: the heads of {checkpoint!r} are others than those of this training: "
            f"{'; '.join(wrong)}."
        )


def _step(path: Path) -> int:
    """Return the step of a state.

    Raises:
        ArtifactError: If the Trainer could not go on from it.
    """
    facts = read_json(path)
    for name in ("global_step", "train_batch_size"):
        if not isinstance(facts.get(name), int):
            raise ArtifactError(f"{path} is damaged: its {name} must be an integer, got {facts.get(name)!r}.")
    try:
        TrainerState(**facts)
    except TypeError as error:  # of a name the Trainer does not know
        raise ArtifactError(f"{path} is damaged: {error}.") from error
    return int(facts["global_step"])


def _check_files(checkpoint: Path) -> None:
    """Check what the Trainer would fail on only after the model is loaded: a file that is empty or cut."""
    if (checkpoint / WEIGHTS_FILE).is_file():
        read_tensors(checkpoint / WEIGHTS_FILE)
    for path in sorted([*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")]):
        if not zipfile.is_zipfile(path):  # which is what torch writes
            raise ArtifactError(f"{path} is damaged: it is no file of torch.")
