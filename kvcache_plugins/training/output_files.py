"""What a training leaves in its directory."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from ..artifacts.files import write_json
from ..artifacts.folders import replacing
from ..retaining.loading import WEIGHTS_FILE
from ..runs.code_versions import foreign_versions
from ..runs.earlier import set_aside
from ..runs.file_digests import artifact_digests
from ..runs.labels import told_apart
from ..runs.results import RESULTS_FILE, build_document
from .card import heads_card
from .options import SYNTHETIC, LocretOptions
from .picture import plot_training
from .trainer import LocretTrainer

__all__ = ["CARD_FILE", "PICTURE_FILE", "Recalls", "add_answers", "write_heads"]

CARD_FILE = "README.md"
PICTURE_FILE = "training.png"
Recalls = dict[str, dict[str, Any]]
"""Of the heads, of heads before any training and of `knorm`, each with its `recall`."""

_NO_SETTINGS = ("no_plots", "text_files", "cache_config")
"""Options that results say otherwise, or need not say."""


def write_heads(
    output: Path,
    trainer: LocretTrainer,
    options: LocretOptions,
    inputs: dict[str, Any],
    recalls: Recalls,
    seconds: float,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the heads, their card, `results.json` and the picture.

    Args:
        output (`Path`): Where to.
        trainer (`LocretTrainer`): Has trained them.
        options (`LocretOptions`): What it was told.
        inputs (`dict`): Digests of model and data.
        recalls (`dict`): Of the trained heads, the untrained ones and `knorm`.
        seconds (`float`): That the training took.

    Returns:
        `tuple[dict, dict]`: What `results.json` holds, and the facts of the card, for [`add_answers`].

    Raises:
        OSError: If they cannot be written.
    """
    args, heads = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    settings = {
        **{name: value for name, value in vars(options).items() if name not in _NO_SETTINGS},
        "text_files": [Path(name).name for name in options.text_files or ()] or None,
        "dtype": str(trainer.base_model.dtype).removeprefix("torch."),
        "steps": _steps(trainer),
        "batch": _batch(trainer),
        "learning_rate": args.learning_rate,
        "warmup_steps": args.warmup_steps,
        "seed": args.seed,
        "layerwise_backward": args.layerwise_backward,
        "parameters": sum(weight.numel() for weight in heads.parameters()),
    }
    document = build_document(
        "train locret", _rows(recalls, seconds), settings=settings, inputs=inputs, device=args.device
    )
    document["training"] = {"begun": trainer.begun, "steps": trainer.state.global_step}
    document["history"] = [dict(entry) for entry in trainer.state.log_history]
    facts = {
        **heads.config.to_dict(),
        **settings,
        "hidden_dim": heads.config.hidden_dim,
        "max_train_length": heads.config.max_train_length,
        "input_dim": heads.config.input_dim,
        "data": _data_source(options),
        "seconds": seconds,
    }
    with replacing(output) as folder:
        copy.deepcopy(heads).cpu().save_pretrained(folder)
        (folder / CARD_FILE).write_text(heads_card(facts, recalls), encoding="utf-8")
        write_json(folder / RESULTS_FILE, document)
        set_aside(output / RESULTS_FILE, document)
        if (output / WEIGHTS_FILE).exists():
            print(f"replaced: {output / WEIGHTS_FILE}, the heads of an earlier training")
        elif (output / CARD_FILE).exists():
            print(f"replaced: {output / CARD_FILE}, the card of another artifact")
    if not options.no_plots:
        title = f"Retaining heads for {heads.config.base_model_name_or_path or 'a model'}"
        try:
            plot_training(trainer.state.log_history, recalls, title, output / PICTURE_FILE)
        except OSError as error:  # the heads are what matters, and may be about to be uploaded
            print(f"no picture: {error}")
    return document, facts


def add_answers(
    output: Path,
    document: dict[str, Any],
    facts: dict[str, Any],
    recalls: Recalls,
    results: list[dict[str, Any]],
    skipped: list[dict[str, Any]],
) -> None:
    """Add what caches make of answers to `results.json` and to the card, which are there already.

    Args:
        output (`Path`): Of [`write_heads`].
        document (`dict`): What it returned; rows of caches are added to it, and the dense one is completed.
        facts (`dict`): What it returned.
        recalls (`dict`): As for it.
        results (`list[dict]`): Of `score_answers`, the dense cache first.
        skipped (`list[dict]`): Caches that could not be had.
    """
    dense, *others = results
    (first, *recall_rows), caches = document["results"], [row["cache_config"] for row in others]
    document["results"] = told_apart([first | dense, *recall_rows, *others])
    document["skipped"] = skipped
    document["inputs"] |= {"artifacts": digests} if (digests := artifact_digests(caches)) else {}
    document["environment"]["versions"] |= foreign_versions(caches)
    write_json(output / RESULTS_FILE, document)
    card = heads_card(facts, recalls, told_apart(results))
    (output / CARD_FILE).write_text(card, encoding="utf-8")


def _steps(trainer: LocretTrainer) -> int:
    """Return after how many steps the heads were what they are now."""
    state = trainer.state
    has_best = trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None
    best = state.best_global_step if has_best else None
    return state.global_step if best is None else best


def _batch(trainer: LocretTrainer) -> int:
    """Return the most prompts that a step has had; none goes beyond the end of an epoch."""
    args, dataset = trainer.args, trainer.train_dataset
    at_once = int(args.train_batch_size * args.world_size)
    there = len(dataset)  # type: ignore[arg-type]  # of ours, all have a length
    if args.dataloader_drop_last:
        there -= there % at_once
    return min(at_once * args.gradient_accumulation_steps, there)


def _rows(recalls: Recalls, seconds: float) -> list[dict[str, Any]]:
    """Results in the common form: the dense cache keeps all, so its recall is 1.

    Recall is of scores, for which there is no cache, and so no bytes. The seconds of the trained heads are
    those of the training, of the others those of the one measurement of both.
    """
    rows: list[dict[str, Any]] = [{"cache_config": {"backend": "dense"}, "label": "dense", "recall": 1.0}]
    labels = {
        "trained": ("locret", "locret"),
        "untrained": ("locret", "locret, untrained"),
        "knorm": ("knorm", "knorm"),
    }
    for name, (backend, label) in labels.items():
        rows.append({"cache_config": {"backend": backend}, "label": label, **recalls[name]})
    rows[1]["seconds"] = seconds
    return rows


def _data_source(options: LocretOptions) -> str:
    if options.dataset != SYNTHETIC:
        return Path(options.dataset).name if os.path.exists(options.dataset) else options.dataset
    names = ", ".join(Path(name).name for name in options.text_files or ())
    return f"synthetic retrieval tasks in {names or 'the language reference of Python'}"
