"""The whole job: check, load, train, measure, write."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction, Trainer, set_seed

from ..artifacts.files import naming, write_json
from ..artifacts.folders import check_card, check_no_model, check_push, push, replacing
from ..backends.locret import LocretConfig
from ..building import build_cache
from ..models.decoder import decoder_only_config
from ..models.layer_plan import plan_layers
from ..models.pretrained import check_attention, load_config, load_model, load_tokenizer
from ..retaining.configuration import DEFAULT_BUDGET, RetainingHeadsConfig
from ..retaining.heads import RetainingHeads
from ..retaining.loading import CONFIG_FILE, WEIGHTS_FILE
from ..runs.earlier import set_aside
from ..runs.options import DTYPES, check_choice, check_directory
from ..runs.output_lock import writing_alone
from ..runs.results import RESULTS_FILE, build_document
from .arguments import LocretTrainingArguments
from .card import heads_card
from .checkpoints import check_checkpoint, check_none_lost, find_checkpoint, is_finished, training_facts
from .data import build_datasets
from .examples import Collator
from .options import SYNTHETIC, LocretOptions
from .picture import plot_training
from .trainer import LocretTrainer, recall_metrics

__all__ = ["PICTURE_FILE", "train_locret"]

PICTURE_FILE = "training.png"
_CARD_FILE = "README.md"
_Recalls = dict[str, dict[str, Any]]


def train_locret(options: LocretOptions, args: LocretTrainingArguments) -> dict[str, Any] | None:
    """Train retaining heads, and write them with their card, their recall and the course of the training.

    Args:
        options (`LocretOptions`): Model, data and heads.
        args (`LocretTrainingArguments`): The training; `output_dir` is where everything goes. With
            `resume_from_checkpoint` an interrupted one is continued.

    Returns:
        `dict | None`: The document of `results.json`; None in every process but the first.

    Raises:
        ValueError: If the model or the data cannot be trained with, another run is writing to `output_dir`,
            or the training diverges; nothing is written then but its checkpoints.
        OSError: If something cannot be read or written.
    """
    assert args.output_dir is not None and options.model is not None  # both are checked when they are parsed
    output = Path(args.output_dir)
    check_directory("output_dir", output)
    check_no_model(output, own=RetainingHeadsConfig.model_type)
    check_card(output)
    with writing_alone(output, "output_dir"):
        return _train(options, options.model, args, output)


def _train(
    options: LocretOptions, model: str, args: LocretTrainingArguments, output: Path
) -> dict[str, Any] | None:
    if options.dataset == SYNTHETIC and args.max_steps < 1:
        raise ValueError(
            f"--max_steps must be at least 1 for synthetic tasks, which have no end, got {args.max_steps}."
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

    set_seed(args.seed)
    heads = RetainingHeads(heads_config)
    data: dict[str, Any] = {
        "train_dataset": train,
        "eval_dataset": held_out,
        "data_collator": Collator(tokenizer.pad_token_id or 0),
    }
    _check_trainer(copy.deepcopy(heads), args, data)
    base_model = _load_base(config, options, source)
    # a Trainer that has evaluated would not average gradients over processes when it trains after that
    recalls = _measure(LocretTrainer(copy.deepcopy(heads), base_model, args, **data), "untrained")
    trainer = LocretTrainer(heads, base_model, args, facts, **data)
    if checkpoint is not None and is_finished(checkpoint, args):  # of which the Trainer would make one more
        print(f"{checkpoint} has all of its steps; --max_steps {args.max_steps} asks for no more")
        trainer.restore(checkpoint)
    else:
        with naming(output):  # where its checkpoints go
            trainer.train(resume_from_checkpoint=checkpoint)
    seconds = trainer.seconds
    heads.to(getattr(torch, DTYPES[options.heads_dtype]))  # measured as they will be used
    if not all(bool(weight.isfinite().all()) for weight in heads.parameters()):
        raise ValueError("The training diverged: the heads are not finite. Try a lower --learning_rate.")
    recalls = {"trained": _measure(trainer, "trained")["trained"]} | recalls
    if not trainer.is_world_process_zero():
        return None
    inputs = {"model": facts["model_digest"], "data": facts["data_digest"]}
    document = _write(output, trainer, options, inputs, recalls, seconds)
    if push_to is not None:
        files = (CONFIG_FILE, WEIGHTS_FILE, _CARD_FILE, RESULTS_FILE, PICTURE_FILE)
        push(
            output,
            files,
            push_to,
            private=args.hub_private_repo,
            token=args.hub_token,
            revision=args.hub_revision,
        )
    return document


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
        recalls = np.zeros((1, len(heads.layers)))
        names = {"loss", *recall_metrics(EvalPrediction(recalls, recalls))}
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


def _measure(trainer: LocretTrainer, name: str) -> _Recalls:
    """Return the recall of the heads as they are, and that of `knorm` on the same examples."""
    metrics = trainer.evaluate()
    heads: Any = trainer.model
    layers = range(heads.config.num_hidden_layers)
    recalls: _Recalls = {}
    for key, metric in ((name, "recall"), ("knorm", "knorm_recall")):
        recalls[key] = {
            "recall": metrics[f"eval_{metric}"],
            "recall_layers": trainer.evicting_layers,
            "recall_by_layer": [metrics[f"eval_{metric}_layer_{layer}"] for layer in layers],
        }
    recalls[name]["loss"] = metrics["eval_loss"]
    return recalls


def _write(
    output: Path,
    trainer: LocretTrainer,
    options: LocretOptions,
    inputs: dict[str, Any],
    recalls: _Recalls,
    seconds: float,
) -> dict[str, Any]:
    args, heads = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    settings = {
        **{name: value for name, value in vars(options).items() if name not in ("no_plots", "text_files")},
        "text_files": [Path(name).name for name in options.text_files or ()] or None,
        "dtype": str(trainer.base_model.dtype).removeprefix("torch."),
        "steps": _steps(trainer),
        "batch": batch,
        "learning_rate": args.learning_rate,
        "warmup_steps": args.warmup_steps,
        "seed": args.seed,
        "layerwise_backward": args.layerwise_backward,
        "parameters": sum(weight.numel() for weight in heads.parameters()),
    }
    document = build_document(
        "train locret", _rows(recalls, seconds), settings=settings, inputs=inputs, device=args.device
    )
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
        (folder / _CARD_FILE).write_text(heads_card(facts, recalls), encoding="utf-8")
        write_json(folder / RESULTS_FILE, document)
        set_aside(output / RESULTS_FILE, document)
        if (output / WEIGHTS_FILE).exists():
            print(f"replaced: {output / WEIGHTS_FILE}, the heads of an earlier training")
        elif (output / _CARD_FILE).exists():
            print(f"replaced: {output / _CARD_FILE}, the card of another artifact")
    if not options.no_plots:
        title = f"Retaining heads for {heads.config.base_model_name_or_path or 'a model'}"
        try:
            plot_training(trainer.state.log_history, recalls, title, output / PICTURE_FILE)
        except OSError as error:  # the heads are what matters, and may be about to be uploaded
            print(f"no picture: {error}")
    return document


def _steps(trainer: LocretTrainer) -> int:
    """Return after how many steps the heads were what they are now."""
    state = trainer.state
    has_best = trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None
    best = state.best_global_step if has_best else None
    return state.global_step if best is None else best


def _rows(recalls: _Recalls, seconds: float) -> list[dict[str, Any]]:
    """Results in the common form: the dense cache keeps all, so its recall is 1."""
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
