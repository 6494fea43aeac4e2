"""The checkpoint a training goes on from: found and checked before the model is loaded."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerState

from ..artifacts.files import plain_values, read_json, read_tensors, write_json
from ..errors import ArtifactError
from ..retaining.configuration import RetainingHeadsConfig
from ..retaining.loading import CONFIG_FILE, WEIGHTS_FILE
from ..runs.file_digests import digest_files, model_settings
from ..runs.journal import differences
from .arguments import LocretTrainingArguments
from .options import SYNTHETIC, LocretOptions

__all__ = [
    "TRAINING_FILE",
    "begun_before",
    "check_checkpoint",
    "check_none_lost",
    "find_checkpoint",
    "is_finished",
    "seconds_before",
    "training_facts",
    "write_facts",
]

TRAINING_FILE = "training.json"
"""What a checkpoint says of its training."""

_SECONDS = "seconds"
"""In it, beside the facts: how long the training had taken."""
_BEGUN = "begun"
"""And when it began, in seconds since 1970: by that, results say which checkpoints they have come of."""
_STATE_FILE = "trainer_state.json"
_OPTIMIZER_FILES = ("optimizer.pt", "scheduler.pt")
_RANDOM_FILES = "rng_state*.pth"
"""One, or one of every process."""
_OPTIONS = (
    "revision", "dtype", "attn_implementation", "dataset", "sequence_length", "max_length",
    "num_examples", "eval_examples", "max_train_length",
)  # fmt: skip
_ARGUMENTS = (
    "seed", "data_seed", "optim", "optim_args", "learning_rate", "warmup_steps", "lr_scheduler_type",
    "lr_scheduler_kwargs", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
    "clip_value", "optim_target_modules", "bf16", "fp16", "tf32", "bf16_full_eval", "fp16_full_eval",
    "torch_compile", "train_sampling_strategy", "dataloader_drop_last", "load_best_model_at_end",
    "metric_for_best_model", "greater_is_better",
)  # fmt: skip
"""What the optimizer's state would go on with whatever is given, in which numbers steps are computed and on
which examples, and what the results are said to be of."""
_ORDER = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
"""Of `accelerator_config`, on what the order of the examples depends."""
_SHAPE = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_dim")


def find_checkpoint(args: LocretTrainingArguments, output: Path) -> str | None:
    """Return the checkpoint to go on from: if none is named, the newest of a training that was interrupted.

    Those of a finished training are gone on from where there are no others: with more steps, it may go on.

    Raises:
        ValueError: If one is asked for that is not there, or that the training could not go on from.
        ArtifactError: If a file of it is damaged.
    """
    given: Any = args.resume_from_checkpoint
    if given is None or str(given).lower() in ("false", "0", "no"):
        return None
    if str(given).lower() in ("true", "1", "yes"):
        # the state is written last: a checkpoint without it was interrupted
        states = output.glob(f"checkpoint-*/{_STATE_FILE}")
        found = [(begun_before(str(path.parent)) or 0.0, _step(path), path.parent) for path in states]
        if not found:
            raise ValueError(f"--resume_from_checkpoint: there is no checkpoint in {str(output)!r}.")
        unfinished = {path.parent for path in _unfinished(output)}
        *_, checkpoint = max([entry for entry in found if entry[-1] in unfinished] or found)
        if not unfinished:
            print(f"no unfinished training in {output}: going on from {checkpoint}, of a finished one")
    else:
        checkpoint = Path(given)
        if not (checkpoint / _STATE_FILE).is_file():
            raise ValueError(
                f"--resume_from_checkpoint must be true or a checkpoint of the Trainer, got {given!r}."
            )
        _step(checkpoint / _STATE_FILE)
    _check_files(checkpoint)
    if not is_finished(str(checkpoint), args):
        _check_complete(checkpoint, args)
    return str(checkpoint)


def check_none_lost(checkpoint: str | None, output: Path) -> None:
    """Refuse to begin anew where an interrupted training has left its steps: the Trainer would delete them.

    Those of a finished one may go: its heads, whose results are there, are what has come of them.

    Args:
        checkpoint (`str`, *optional*): What the training goes on from, of [`find_checkpoint`].
        output (`Path`): Where it will keep its own checkpoints.

    Raises:
        ValueError: Naming the checkpoint with the most steps.
    """
    if checkpoint is not None and Path(checkpoint).resolve().parent == output.resolve():
        return
    steps = [
        step for state in _unfinished(output).values() if isinstance(step := state.get("global_step"), int)
    ]
    if steps:
        raise ValueError(
            f"--output_dir must not hold checkpoints of a training that was not finished, which a new one "
            f"would delete, got {str(output)!r} with checkpoint-{max(steps)}. Go on with it by "
            "--resume_from_checkpoint true, choose another --output_dir, or delete it."
        )


def _unfinished(output: Path) -> dict[Path, dict[str, Any]]:
    """Return the states of those checkpoints whose training has left no results, by their files."""
    documents = _readable(output.glob("results*.json")).values()
    finished = [document for document in documents if document.get("task") == "train locret"]
    states = _readable(output.glob(f"checkpoint-*/{_STATE_FILE}"))
    return {
        path: state
        for path, state in states.items()
        if not any(_is_of(document, path.parent, state) for document in finished)
    }


def _is_of(document: Mapping[str, Any], checkpoint: Path, state: Mapping[str, Any]) -> bool:
    """Whether results are of the training that a checkpoint is of, when that had as many steps or more."""
    begun = next((facts.get(_BEGUN) for facts in _readable([checkpoint / TRAINING_FILE]).values()), None)
    training = document.get("training")
    known = training if isinstance(training, dict) else {}
    is_same = begun is not None and known.get(_BEGUN) == begun
    return is_same and bool(known.get("steps", 0) >= state.get("global_step", 0))


def _readable(paths: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """Return what files hold, apart from those that are missing or damaged."""
    found = {}
    for path in paths:
        with suppress(ArtifactError):
            found[path] = read_json(path)
    return found


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
        "accelerator_config": {name: getattr(args.accelerator_config, name) for name in _ORDER},
        "batch": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "data_digest": digest_files(files),
    }
    facts |= model_settings(str(options.model), config)
    plain: dict[str, Any] = plain_values(facts)
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
        facts (`Mapping`): Of [`training_facts`]. What the checkpoint does not say is not asked for: one that
            somebody else's program has saved says nothing.

    Raises:
        ValueError: Naming what differs.
    """
    if checkpoint is None:
        return
    _check_shape(checkpoint, config)
    path = Path(checkpoint) / TRAINING_FILE
    found = read_json(path) if path.is_file() else {}
    changed = differences({**facts, **{k: v for k, v in found.items() if k not in (_SECONDS, _BEGUN)}}, facts)
    if changed:
        raise ValueError(
            f"--resume_from_checkpoint: {checkpoint!r} is of another training ({changed}). Go on with the "
            "same options and files, or begin anew in another --output_dir."
        )


def seconds_before(checkpoint: str | None) -> float:
    """Return how long a training had taken when it left a checkpoint; 0 if that does not say.

    Args:
        checkpoint (`str`, *optional*): Its folder.
    """
    return _number(checkpoint, _SECONDS) or 0.0


def begun_before(checkpoint: str | None) -> float | None:
    """Return when the training began that has left a checkpoint; None if that does not say.

    Args:
        checkpoint (`str`, *optional*): Its folder.
    """
    return _number(checkpoint, _BEGUN)


def _number(checkpoint: str | None, name: str) -> float | None:
    path = None if checkpoint is None else Path(checkpoint) / TRAINING_FILE
    found = read_json(path).get(name) if path is not None and path.is_file() else None
    return float(found) if isinstance(found, (int, float)) else None


def write_facts(folder: Path, facts: Mapping[str, Any], seconds: float, begun: float) -> None:
    """Write into a checkpoint what it is of, for [`check_checkpoint`] and those that ask it for more.

    Args:
        folder (`Path`): The checkpoint.
        facts (`Mapping`): Of [`training_facts`].
        seconds (`float`): How long the training has taken, with the parts before it was interrupted.
        begun (`float`): When it began, of [`begun_before`] if that was before it was interrupted.
    """
    write_json(folder / TRAINING_FILE, {**facts, _SECONDS: seconds, _BEGUN: begun})


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


def _check_complete(checkpoint: Path, args: LocretTrainingArguments) -> None:
    """Check that all is there without which the Trainer would begin its optimizer or its warm-up anew.

    It would say nothing of it. FSDP and DeepSpeed keep the optimizer in files of their own.
    """
    needed = [_RANDOM_FILES] if args.fsdp or args.deepspeed else [*_OPTIMIZER_FILES, _RANDOM_FILES]
    missing = [name for name in needed if not any(checkpoint.glob(name))]
    if missing:
        raise ValueError(
            "--resume_from_checkpoint must be a checkpoint with the state of optimizer, schedule and random "
            f"numbers, got {str(checkpoint)!r} without {', '.join(missing)}: --save_only_model true leaves "
            "them out. Go on from another checkpoint, or begin anew in another --output_dir."
        )


def _check_files(checkpoint: Path) -> None:
    """Check what the Trainer would fail on only after the model is loaded: a file that is empty or cut."""
    if (checkpoint / WEIGHTS_FILE).is_file():
        read_tensors(checkpoint / WEIGHTS_FILE)
    for path in sorted([*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")]):
        if not zipfile.is_zipfile(path):  # which is what torch writes
            raise ArtifactError(f"{path} is damaged: it is no file of torch.")
