"""The checkpoint a training goes on from: found and checked before the model is loaded."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from transformers import TrainerState

from ..artifacts.files import read_json, read_tensors
from ..errors import ArtifactError
from ..retaining.configuration import RetainingHeadsConfig
from ..retaining.loading import CONFIG_FILE, WEIGHTS_FILE
from .arguments import LocretTrainingArguments

__all__ = ["check_checkpoint", "find_checkpoint"]

_STATE_FILE = "trainer_state.json"
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


def check_checkpoint(checkpoint: str | None, config: RetainingHeadsConfig) -> None:
    """Check that the heads of a checkpoint are those that are to be trained.

    Raises:
        ValueError: Naming what differs.
    """
    if checkpoint is None or not (Path(checkpoint) / CONFIG_FILE).is_file():
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
