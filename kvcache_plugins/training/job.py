"""The whole job: check, load, train, measure, write."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction, Trainer, set_seed

from ..artifacts.files import naming
from ..artifacts.folders import check_card, check_no_model, check_push, push
from ..backends.locret import LocretConfig
from ..building import build_cache
from ..models.decoder import decoder_only_config
from ..models.layer_plan import plan_layers
from ..models.pretrained import check_attention, load_config, load_model, load_tokenizer
from ..retaining.configuration import DEFAULT_BUDGET, RetainingHeadsConfig
from ..retaining.heads import RetainingHeads
from ..retaining.loading import CONFIG_FILE, WEIGHTS_FILE
from ..runs.options import DTYPES, check_choice, check_directory
from ..runs.output_lock import writing_alone
from ..runs.progress import ProgressBar, no_bar
from ..runs.results import RESULTS_FILE
from .answers import check_caches, score_answers, with_heads
from .arguments import LocretTrainingArguments
from .checkpoints import check_checkpoint, check_none_lost, find_checkpoint, is_finished, training_facts
from .data import build_datasets
from .examples import Collator
from .options import SYNTHETIC, LocretOptions
from .output_files import CARD_FILE, PICTURE_FILE, Recalls, add_answers, write_heads
from .trainer import LocretTrainer, recall_metrics

__all__ = ["train_locret"]


def train_locret(
    options: LocretOptions, args: LocretTrainingArguments, progress_bar: ProgressBar = no_bar
) -> dict[str, Any] | None:
    """Train retaining heads, and write them with their card, their recall and the course of the training.

    Args:
        options (`LocretOptions`): Model, data and heads.
        args (`LocretTrainingArguments`): The training; `output_dir` is where everything goes. With
            `resume_from_checkpoint` an interrupted one is continued.
        progress_bar (`ProgressBar`): What is shown while answers are read through caches, behind the
            training, which has the Trainer's own.

    Returns:
        `dict | None`: The document of `results.json`; None in every process but the first.

    Raises:
        ValueError: If the model or the data cannot be trained with, another run is writing to `output_dir`,
            the model gives no numbers, or the training diverges; nothing is written then but its checkpoints.
        OSError: If something cannot be read or written.
    """
    assert args.output_dir is not None and options.model is not None  # both are checked when they are parsed
    output = Path(args.output_dir)
    check_directory("output_dir", output)
    check_no_model(output, own=RetainingHeadsConfig.model_type)
    check_card(output)
    with writing_alone(output, "output_dir"):
        return _train(options, options.model, args, output, progress_bar)


@dataclass(frozen=True)
class _Job:
    """What is known of a training before its model is loaded."""

    config: Any
    source: dict[str, Any]
    """Where configuration, tokenizer and model are read from, beside the model's name."""
    heads_config: RetainingHeadsConfig
    facts: dict[str, Any]
    checkpoint: str | None
    push_to: str | None
    data: dict[str, Any]
    """What a Trainer is given of the data."""


def _train(
    options: LocretOptions, model: str, args: LocretTrainingArguments, output: Path, progress_bar: ProgressBar
) -> dict[str, Any] | None:
    job = _prepare(options, model, args, output)
    set_seed(args.seed)
    heads = RetainingHeads(job.heads_config)
    _check_trainer(copy.deepcopy(heads), args, job.data)
    skipped = check_caches(job.config, heads, options.cache_config or ())
    base_model = _load_base(job.config, options, job.source)
    # a Trainer that has evaluated would not average gradients over processes when it trains after that
    recalls = _measure(LocretTrainer(copy.deepcopy(heads), base_model, args, **job.data), "untrained")
    _check_numbers(recalls["untrained"]["loss"], base_model)
    trainer = LocretTrainer(heads, base_model, args, job.facts, **job.data)
    seconds = _run(trainer, job.checkpoint, args, output)
    heads.to(getattr(torch, DTYPES[options.heads_dtype]))  # measured as they will be used
    if not all(bool(weight.isfinite().all()) for weight in heads.parameters()):
        raise ValueError("The training diverged: the heads are not finite. Try a lower --learning_rate.")
    recalls = {"trained": _measure(trainer, "trained")["trained"]} | recalls
    if not trainer.is_world_process_zero():
        return None
    inputs = {"model": job.facts["model_digest"], "data": job.facts["data_digest"]}
    document, card_facts = write_heads(output, trainer, options, inputs, recalls, seconds)
    if options.cache_config:
        left_out = [entry["cache_config"] for entry in skipped]
        caches = [with_heads(each, str(output)) for each in options.cache_config if each not in left_out]
        examples = [job.data["eval_dataset"][index] for index in range(options.eval_examples)]
        results, failed = score_answers(base_model, examples, caches, progress_bar)
        add_answers(output, document, card_facts, recalls, results, [*skipped, *failed])
    if job.push_to is not None:
        _push(output, job.push_to, args)
    return document


def _prepare(options: LocretOptions, model: str, args: LocretTrainingArguments, output: Path) -> _Job:
    """Check what can be wrong with options, place and data, and read what is small.

    Raises:
        ValueError: If the model or the data cannot be trained with, or a checkpoint is of another training.
        OSError: If something cannot be read.
    """
    if options.dataset == SYNTHETIC and args.max_steps < 1:
        raise ValueError(
            f"--max_steps must be at least 1 for synthetic tasks, which have no end, got {args.max_steps}."
        )
    if options.cache_config and (args.fsdp or args.deepspeed):
        raise ValueError(
            f"--cache_config is measured in one process, got {options.cache_config!r} with FSDP or DeepSpeed "
            "as well. Allowed are one process and DDP."
        )
    checkpoint = find_checkpoint(args, output)
    check_none_lost(checkpoint, output)
    push_to = (output.name if args.hub_model_id is None else args.hub_model_id) if args.push_to_hub else None
    args.push_to_hub = False  # the Trainer would upload its checkpoints
    if push_to is not None:
        check_push(push_to, "hub_model_id", args.hub_token)
    source: dict[str, Any] = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    check_attention(options.attn_implementation)
    config = load_config(model, **source)
    heads_config = RetainingHeadsConfig.from_model(
        config,
        hidden_dim=options.hidden_dim,
        max_train_length=options.max_train_length,
        defaults=_recommended(options),
    )
    _check_layers(model, config)
    facts = training_facts(options, args, config)
    check_checkpoint(checkpoint, heads_config, facts)
    tokenizer = load_tokenizer(model, **source)
    positions = getattr(decoder_only_config(config), "max_position_embeddings", None)
    data_seed = args.seed if args.data_seed is None else args.data_seed
    train, held_out = build_datasets(options, tokenizer, positions=positions, seed=data_seed)
    data = {
        "train_dataset": train,
        "eval_dataset": held_out,
        "data_collator": Collator(tokenizer.pad_token_id or 0),
    }
    return _Job(config, source, heads_config, facts, checkpoint, push_to, data)


def _run(
    trainer: LocretTrainer, checkpoint: str | None, args: LocretTrainingArguments, output: Path
) -> float:
    """Train from a checkpoint or from the start, and return the seconds that all of it took."""
    if checkpoint is not None and is_finished(checkpoint, args):  # of which the Trainer would make one more
        print(f"{checkpoint} has all of its steps; --max_steps {args.max_steps} asks for no more")
        trainer.restore(checkpoint)
    else:
        with naming(output):  # where its checkpoints go
            trainer.train(resume_from_checkpoint=checkpoint)
    return trainer.seconds


def _push(output: Path, push_to: str, args: LocretTrainingArguments) -> None:
    """Upload the files of trained heads."""
    push(
        output,
        (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE, RESULTS_FILE, PICTURE_FILE),
        push_to,
        private=args.hub_private_repo,
        token=args.hub_token,
        revision=args.hub_revision,
    )


def _check_layers(model: str, config: Any) -> None:
    """Refuse a model whose heads no cache could use, or that has layers without keys, before it is loaded.

    Raises:
        ValueError: If all of its layers are left as they are, with the reasons; if some have no keys;
            or if caches that evict refuse the model.
    """
    config = decoder_only_config(config)
    plans = plan_layers(config, evicts=True, cross_reason="not evicted from")
    if all(plan.dense_reason is not None for plan in plans):
        reasons = "; ".join(sorted({str(plan.dense_reason) for plan in plans}))
        raise ValueError(
            f"--model {model!r} has no layer that could evict tokens ({reasons}): retaining heads would be "
            "of no use. Allowed are models with a layer of full attention."
        )
    recurrent = [i for i, plan in enumerate(plans) if not plan.has_keys and plan.layer_type != "dummy"]
    if recurrent:
        raise ValueError(
            f"--model {model!r} has layers without keys and values, {recurrent}, and retaining heads are for "
            "models that have them in every layer. Allowed for it are backends that are not trained, such as "
            "'knorm' and 'kvzip', which evict from its other layers."
        )
    build_cache(config, {"backend": "knorm", "budget": DEFAULT_BUDGET["budget"]})


def _recommended(options: LocretOptions) -> dict[str, Any]:
    """Return options of the cache for the configuration of the heads, as given or fitting the budget.

    Raises:
        ValueError: If no cache could have them.
    """
    given = options.defaults()
    # as a cache does that is told a budget alone
    most = given.get("budget", DEFAULT_BUDGET["budget"]) // 8
    protected = {name: min(DEFAULT_BUDGET[name], most) for name in ("stabilizer_length", "local_length")}
    recommended = DEFAULT_BUDGET | protected | given
    try:
        LocretConfig(heads="heads", **recommended)
    except ValueError as error:  # of options of the command, by the same names
        raise ValueError(str(error).replace(f"{LocretConfig.__name__}.", "--")) from error
    return recommended


def _check_trainer(heads: RetainingHeads, args: LocretTrainingArguments, data: dict[str, Any]) -> None:
    """Make of the options, before the model is loaded, what a Trainer would make of them after it.

    Raises:
        ValueError: If it cannot: a package is missing, or an option has a value that nothing has checked.
    """
    if args.metric_for_best_model is not None:
        found = np.zeros((1, len(heads.layers) + 1))
        names = set(recall_metrics(EvalPrediction(found, found[:, :-1])))
        check_choice("metric_for_best_model", args.metric_for_best_model.removeprefix("eval_"), names)
    try:
        trainer = Trainer(heads, args, compute_metrics=recall_metrics, **data)
        trainer.get_train_dataloader()
        trainer.get_eval_dataloader()
        trainer.create_optimizer_and_scheduler(max(1, args.max_steps))
    except Exception as error:  # of any kind: all of it is made of the options
        raise ValueError(f"The Trainer cannot have these options: {error}") from error


def _load_base(config: Any, options: LocretOptions, source: dict[str, Any]) -> Any:
    placement: dict[str, Any] = {}
    for name in ("device_map", "attn_implementation"):
        if getattr(options, name) is not None:
            placement[name] = getattr(options, name)
    dtype = DTYPES.get(options.dtype, "auto")
    return load_model(str(options.model), config, dtype=dtype, **source, **placement)


def _check_numbers(loss: float, base_model: Any) -> None:
    """Refuse a model that gives heads nothing to learn from: they are finite themselves before any step.

    Raises:
        ValueError: If the loss of such heads is no number.
    """
    if math.isfinite(loss):
        return
    dtype = str(base_model.dtype).removeprefix("torch.")
    raise ValueError(
        f"The model itself gives no numbers in {dtype}: before any step, the loss of the heads is {loss}. "
        "Its weights are damaged, or --dtype must be one of a wider range, such as fp32."
    )


def _measure(trainer: LocretTrainer, name: str) -> Recalls:
    """Return the recall of the heads as they are, and that of `knorm` on the same examples."""
    metrics = trainer.evaluate()
    heads: Any = trainer.model
    layers = range(heads.config.num_hidden_layers)
    recalls: Recalls = {}
    for key, metric in ((name, "recall"), ("knorm", "knorm_recall")):
        recalls[key] = {
            "recall": metrics[f"eval_{metric}"],
            "recall_layers": trainer.evicting_layers,
            "recall_by_layer": [metrics[f"eval_{metric}_layer_{layer}"] for layer in layers],
            "seconds": metrics["eval_runtime"],
        }
    recalls[name]["loss"] = metrics["eval_loss"]
    return recalls
