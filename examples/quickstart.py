"""Continue a long real text with every cache, and compare memory, quality and speed with the ordinary cache.

    python examples/quickstart.py
    python examples/quickstart.py --cache_config '{"backend": "kivi", "nbits": 2}' '{"backend": "int8"}'
    python examples/quickstart.py --model meta-llama/Llama-3.2-1B --text my_notes.txt

Without options it needs no network: the model is bundled, and the text is the Python language reference that
every CPython carries in `pydoc_data.topics` (the topics the bundled model was not trained on).

Each cache is used twice. `model.generate()` continues the prompt greedily, which gives the time per token,
the cache and its size. Then the true continuation is read in blocks through a fresh cache, which gives the
perplexity and the distance to the dense run on the same tokens.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

import kvcache_plugins as kvp
from kvcache_plugins.cli.display import show
from kvcache_plugins.cli.options import OUTPUT, add_cache_config_option
from kvcache_plugins.cli.preparing import output_directory, prepare_transformers
from kvcache_plugins.evaluation.caches import cache_bytes, generate, new_cache, split_available
from kvcache_plugins.evaluation.perplexity.scoring import (
    Schedule,
    check_finite,
    divergence_of,
    predictions,
)
from kvcache_plugins.evaluation.perplexity.summary import perplexity_of
from kvcache_plugins.evaluation.speed.devices import choose_device
from kvcache_plugins.evaluation.speed.timing import Spread, StepTimer
from kvcache_plugins.models.cache_argument import cache_of
from kvcache_plugins.models.decoder import decoder_only_config
from kvcache_plugins.models.pretrained import load_config, load_model, load_tokenizer
from kvcache_plugins.registry import TRANSFORMERS_BACKENDS
from kvcache_plugins.runs.cache_words import parse_cache_configs
from kvcache_plugins.runs.failures import Failures
from kvcache_plugins.runs.file_digests import artifact_digests, digest_words, model_settings
from kvcache_plugins.runs.footnotes import other_work
from kvcache_plugins.runs.labels import cache_label, dense_first
from kvcache_plugins.runs.language_reference import read_language_reference
from kvcache_plugins.runs.options import DTYPES, MOST_THREADS, check_count, check_model
from kvcache_plugins.runs.other_work import OtherWork
from kvcache_plugins.runs.plot_labels import LabeledPoint, place_labels
from kvcache_plugins.runs.plotting import pyplot, save_figure, scale_divergences
from kvcache_plugins.runs.progress import progress_bar
from kvcache_plugins.runs.results import build_document, write_results
from kvcache_plugins.runs.text_files import read_text_file

ROOT = Path(__file__).resolve().parents[1]
BUNDLED_MODEL = ROOT / "examples" / "models" / "tiny-llama-books"
CALIBRATION, HEADS = (os.path.relpath(f"{BUNDLED_MODEL}-{kind}") for kind in ("kvquant3", "locret"))

LOCRET = {"backend": "locret", "heads": HEADS, "budget": 512, "chunk_size": 256}
DEFAULT_CACHE_CONFIGS: list[dict[str, Any]] = [
    {"backend": "int8"},
    {"backend": "float8"},
    {"backend": "int4"},
    {"backend": "kivi", "nbits": 4},
    {"backend": "kivi", "nbits": 2},
    # calibrated for the bundled model, so for no other
    {"backend": "kvquant", "nbits": 3, "calibration": CALIBRATION},
    # a quarter of the prompt, in the model's dtype and packed; the heads were trained for the bundled model
    LOCRET,
    LOCRET | {"storage": {"backend": "int4", "key_bits": 8, "value_bits": 4}},
    {"backend": "fp8"},
    {"backend": "quanto", "nbits": 4},
    # transformers' default axis is quanto's; its documentation recommends axis 1 for hqq
    {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
    {"backend": "quanto", "nbits": 2},
]

TINY_MODEL = 100_000_000  # parameters up to which a decode step is too short to be shared between threads
SMALL_MODEL = 1_000_000_000  # parameters up to which a second copy of the model in fp32 is affordable
SHORTEST_PROMPT = 32
WARM_UP_STEPS = 4  # decode steps left out of the time per token: first-use allocations and thread start


def main(argv: list[str] | None = None) -> int:
    """Run the comparison; return 0, 2 for an error of the user, or 130 for an interruption."""
    args = parse_args(argv)
    try:
        args.output = output_directory(args)
        prepare_transformers()
        run(args)
    except (ValueError, OSError, kvp.KernelUnavailableError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: nothing is kept.", file=sys.stderr)
        return 130
    return 0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Continue a long real text with every cache and compare memory, quality and speed."
    )
    parser.add_argument(
        "--model", default=str(BUNDLED_MODEL), metavar="PATH_OR_HUB_ID", help="default: bundled"
    )
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text (default: Python's language reference)")
    add_cache_config_option(
        parser,
        "int8, float8, int4, kivi, and transformers' own; on the bundled model kvquant and locret too",
    )
    parser.add_argument("--prompt_tokens", type=int, default=2048, help="default: 2048")
    parser.add_argument("--new_tokens", type=int, default=128, help="tokens to generate (default: 128)")
    parser.add_argument("--score_tokens", type=int, default=512, help="true tokens to score (default: 512)")
    parser.add_argument(
        "--block_length", type=int, default=32, help="tokens read per scoring step (default: 32)"
    )
    names = ("auto", *dict.fromkeys(DTYPES.values()))
    dtype = {"choices": names, "type": lambda name: DTYPES.get(name, name)}  # bf16 is one of them, too
    parser.add_argument("--dtype", **dtype, default="auto", help="default: auto, the checkpoint's")
    parser.add_argument("--score_dtype", **dtype, help="default: float32 up to a billion parameters")
    parser.add_argument("--threads", type=int, help="CPU threads (default: 1 for a tiny model, else torch's)")
    parser.add_argument("--device", default="auto", help="default: cuda if there is one, else cpu")
    parser.add_argument("--output", default=".", metavar="DIR", help=OUTPUT)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    """Measure every cache and write the table, `results.json` and `quickstart.png`."""
    started = time.perf_counter()
    device = check_options(args)
    is_bundled = Path(args.model).resolve() == BUNDLED_MODEL
    defaults = [c for c in DEFAULT_CACHE_CONFIGS if is_bundled or not {"calibration", "heads"} & c.keys()]
    chosen = defaults if args.cache_config is None else parse_cache_configs(args.cache_config)
    text = read_language_reference() if args.text is None else read_text_file(args.text, "--text")
    model_config = load_config(args.model)
    decoder_only_config(model_config, "The quickstart")
    cache_configs, skipped = split_available(model_config, dense_first(chosen))
    args.output.mkdir(parents=True, exist_ok=True)

    tokenizer = load_tokenizer(args.model)
    model = load_model(args.model, model_config, dtype=args.dtype).to(device).eval()
    if args.threads is None and model.num_parameters() <= TINY_MODEL:
        # waiting for a second thread would cost more than it brings, most of all on a busy machine
        args.threads = 1
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    scorer = scoring_model(model, args.score_dtype)
    token_ids = encode(tokenizer, text, args, model_config).to(device)

    inputs = {
        "model": model_settings(args.model, model_config)["model_digest"],
        "text": digest_words(map(str, token_ids[0].tolist())),
        "artifacts": artifact_digests(cache_configs),
    }
    meanwhile = OtherWork()
    results, failures = measure_all(model, scorer, token_ids, cache_configs, args, tokenizer)
    sizes = ("prompt_tokens", "new_tokens", "score_tokens", "block_length")
    settings = {name: getattr(args, name) for name in sizes} | {
        "model": model_name(args.model),
        "text": args.text or "pydoc_data.topics",
        "dtype": str(model.dtype).removeprefix("torch."),
        "score_dtype": str(scorer.dtype).removeprefix("torch."),
    }
    skipped += failures
    document = build_document(
        "quickstart",
        results,
        settings=settings,
        inputs=inputs,
        skipped=skipped,
        device=model.device,
        other_work=meanwhile,
    )
    show([continuations(tokenizer.decode(token_ids[0, : args.prompt_tokens][-40:]), results)])
    show([], headings(document))
    show([comparison(document)], footnotes(document))
    show([], [f"numbers: {write_results(args.output, document)}"])
    if importlib.util.find_spec("matplotlib") is None:
        said = "matplotlib is not installed; pip install 'kvcache-plugins[plots]'"
    else:
        said = str(args.output / "quickstart.png")
        save_picture(document, args.output / "quickstart.png")
    show([], [f"picture: {said}", f"done in {time.perf_counter() - started:.0f} s"])


def check_options(args: argparse.Namespace) -> torch.device:
    """Check every option, before anything is loaded, and return the device."""
    check_model(args.model)
    try:
        device = choose_device(args.device)
        torch.empty(1, device=device)
    except (AssertionError, ImportError, RuntimeError) as error:  # as of kinds this torch was not built for
        raise ValueError(f"--device must be a device of torch such as 'cpu', got {args.device!r}.") from error
    for name in ("prompt_tokens", "score_tokens", "block_length"):
        check_count(name, getattr(args, name))
    check_count("new_tokens", args.new_tokens, least=WARM_UP_STEPS + 2)
    if args.threads is not None:
        check_count("threads", args.threads, most=MOST_THREADS)
    return device


# ---- text and model ----


def encode(tokenizer: Any, text: str, args: argparse.Namespace, config: Any) -> Tensor:
    """Tokenize the prompt and its true continuation; both shrink where the text or the model is too short."""
    wanted = args.prompt_tokens + args.score_tokens
    # 32 characters a token is more than any real text has, and a whole novel need not be tokenized
    token_ids = tokenizer(text[: 32 * wanted], return_tensors="pt")["input_ids"]
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or math.inf
    available = min(token_ids.shape[1], limit)
    prompt_tokens = min(args.prompt_tokens, args.prompt_tokens * available // wanted, limit - args.new_tokens)
    if prompt_tokens < SHORTEST_PROMPT:
        raise ValueError(
            f"The prompt would have {max(prompt_tokens, 0)} tokens and needs {SHORTEST_PROMPT}: the text has "
            f"{token_ids.shape[1]} tokens, the model {limit} positions, {args.new_tokens} are generated."
        )
    if prompt_tokens < args.prompt_tokens:
        args.prompt_tokens = prompt_tokens
        args.score_tokens = min(args.score_tokens, available - prompt_tokens)
        show([], [f"text or model too short: prompt {prompt_tokens}, scored {args.score_tokens} tokens"])
    return token_ids[:, : args.prompt_tokens + args.score_tokens]


def scoring_model(model: PreTrainedModel, dtype: str | None) -> PreTrainedModel:
    """Return the model that judges quality: in fp32 where that is affordable.

    In bf16 the rounding of the model itself moves a prediction by more than a good cache does, and would hide
    the difference between two caches.
    """
    if dtype is None:
        dtype = "float32" if model.num_parameters() <= SMALL_MODEL else "auto"
    if dtype == "auto" or getattr(torch, dtype) == model.dtype:
        return model
    return copy.deepcopy(model).to(getattr(torch, dtype))


def model_name(model: str) -> str:
    """Return how results name the model: the bundled one by its place in the checkout, others by name."""
    path = Path(model).resolve()
    if not path.exists():
        return model
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


# ---- measuring ----


class Measured(NamedTuple):
    """One cache: what does not depend on others, what they are compared by."""

    row: dict[str, Any]
    log_probs: Tensor  # of the true tokens, [score_tokens, vocabulary] in fp32
    new_token_ids: Tensor


@torch.inference_mode()
def measure(
    model: PreTrainedModel,
    scorer: PreTrainedModel,
    token_ids: Tensor,
    cache_config: dict[str, Any],
    args: argparse.Namespace,
) -> Measured:
    """Generate with one cache, then read the true continuation through a fresh one."""
    started = time.perf_counter()
    prompt, truth = token_ids[:, : args.prompt_tokens], token_ids[0, args.prompt_tokens :]
    generate(model, prompt[:, :64], cache_config, WARM_UP_STEPS)  # quanto compiles at its first use
    timer = StepTimer()
    output = generate(model, prompt, cache_config, args.new_tokens, timer)
    cache, times = cache_of(output), Spread.of(timer.decode_ms()[WARM_UP_STEPS:])
    report = cache.report() if isinstance(cache, kvp.KVCache) else None
    kv_bytes = cache_bytes(cache)
    if scorer is not model:
        output = generate(scorer, prompt, cache_config, args.new_tokens)
    # all of the prompt but its last token fills the cache, so that every true token is predicted through it
    schedule = Schedule(args.prompt_tokens - 1, args.block_length, approximate=True)
    _, *read = predictions(scorer, token_ids, new_cache(scorer, cache_config), schedule)
    log_probs = torch.cat([prediction.logits.float().log_softmax(-1) for prediction in read])
    losses = F.nll_loss(log_probs, truth, reduction="none")
    check_finite(losses.tolist(), len(truth), cache_config, scorer.dtype)
    nll = losses.mean().item()
    row = {
        "cache_config": cache_config,
        "label": cache_label(cache_config),
        "kv_bytes": kv_bytes,
        "perplexity": perplexity_of(nll),
        "nll": nll,
        "tokens": len(truth),
        "ms_per_token": times.median_ms,
        "ms_per_token_mean": times.mean_ms,
        "kernel": sorted(set(report.kernel)) if report else None,
        "fallback_reads": report.fallback_reads if report else None,
        "seconds": time.perf_counter() - started,
    }
    return Measured(row, log_probs, output.sequences[0, prompt.shape[1] :])


def measure_all(
    model: PreTrainedModel,
    scorer: PreTrainedModel,
    token_ids: Tensor,
    cache_configs: list[dict[str, Any]],
    args: argparse.Namespace,
    tokenizer: Any,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a row for every cache, the dense one first, and entries for those whose failure ends no run."""
    results: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    noted = Failures()
    dense: Measured | None = None
    with progress_bar(len(cache_configs)) as progress:
        for cache_config in cache_configs:
            label = cache_label(cache_config)
            progress(label)
            try:
                measured = measure(model, scorer, token_ids, cache_config, args)
            except Exception as error:
                entry = {
                    "cache_config": cache_config,
                    "reason": f"failed: {noted.note(cache_config, error)[:200]}",
                }
                failures.append(entry | {"is_failure": True})
            else:
                dense = dense or measured  # the dense cache comes first
                results.append(compare(measured, dense, model.dtype, tokenizer))
            progress(label, advance=1)
    return results, failures


def compare(measured: Measured, dense: Measured, dtype: torch.dtype, tokenizer: Any) -> dict[str, Any]:
    """Return a row of results, relative to the dense cache of the same run."""
    fraction = measured.row["kv_bytes"] / dense.row["kv_bytes"]
    divergence = divergence_of(dense.log_probs, measured.log_probs).mean()
    same_top = measured.log_probs.argmax(-1) == dense.log_probs.argmax(-1)
    same_tokens = measured.new_token_ids == dense.new_token_ids
    return measured.row | {
        "memory_fraction": fraction,
        "bits_per_value": 8 * dtype.itemsize * fraction,  # the dense cache keeps all in the model's dtype
        "kl_to_dense": max(divergence.item(), 0.0),  # rounding may leave it a hair below zero
        "top1_agreement": same_top.float().mean().item(),
        "agreement": same_tokens.double().mean().item(),
        "generated_text": tokenizer.decode(measured.new_token_ids),
    }


# ---- showing ----


OTHERS = "transformers' own:"
SHOWN_LETTERS = 100
COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("cache\nbytes", lambda row: f"{row['kv_bytes']:,}"),
    ("of\ndense", lambda row: f"{row['memory_fraction']:.3f}"),
    ("bits per\nvalue", lambda row: f"{row['bits_per_value']:.2f}"),
    ("perplexity", lambda row: f"{row['perplexity']:.3f}"),
    ("KL to\ndense", lambda row: f"{row['kl_to_dense']:.5f}"),
    ("same\ntop-1", lambda row: f"{row['top1_agreement']:.3f}"),
    ("ms per\ntoken", lambda row: f"{row['ms_per_token']:.1f}"),
    ("same\ntokens", lambda row: f"{row['agreement']:.2f}"),
)


def headings(document: dict[str, Any]) -> list[str]:
    """Return what was measured, and where."""
    settings = document["settings"]
    return [
        f"\n{settings['model']} on {document['environment']['device']}:",
        f"{settings['prompt_tokens']} tokens of {settings['text']}, "
        f"then {settings['new_tokens']} generated, or {settings['score_tokens']} true ones read",
    ]


def comparison(document: dict[str, Any]) -> Table:
    """Show one row per cache: the dense one, ours, and transformers' own."""
    table = Table(box=box.SIMPLE_HEAD)
    rows = [*document["results"], *document["skipped"]]
    labels = [row.get("label") or cache_label(row["cache_config"]) for row in rows]
    table.add_column("backend")
    for title, _ in COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    previous = None
    for row, label in zip(rows, labels, strict=True):
        group = owner(row)
        if previous not in (None, group):
            table.add_section()
            if group == "transformers":
                table.add_row(OTHERS)
        previous = group
        if "reason" in row:
            short = row["reason"].partition(":")[0]
            cells = [short if len(short) <= len("not installed") else "see below"]
        else:
            cells = [text(row) for _, text in COLUMNS]
        table.add_row(Text(label), *cells)
    return table


def footnotes(document: dict[str, Any]) -> list[str]:
    """Return what the columns mean, what was skipped, and which kernels served."""
    settings = document["settings"]
    lines = [
        f"bytes, ms per token (median decode step): generate() in {settings['dtype']}",
        f"same tokens (share equal to the dense run's): generate() in {settings['score_dtype']}",
        "perplexity, KL, same top-1: on the true continuation, read through the cache in blocks, in "
        f"{settings['score_dtype']}",
        *(f"{cache_label(entry['cache_config'])}: {entry['reason']}" for entry in document["skipped"]),
    ]
    kernels = {kernel for row in document["results"] for kernel in row["kernel"] or ()}
    native = ", ".join(sorted(kernels - {"torch", "dense"}))
    if kernels:
        said = f"native kernels used: {native}" if native else "attention over packed codes in plain torch"
        lines.append(f"kernels: {said}")
    return lines + other_work(document)


def owner(row: dict[str, Any]) -> str:
    """Return whose cache a row shows: "dense", "kvcache_plugins" or "transformers"."""
    backend = row["cache_config"]["backend"]
    if backend == "dense":
        return "dense"
    return "transformers" if backend in TRANSFORMERS_BACKENDS else "kvcache_plugins"


def continuations(prompt: str, results: list[dict[str, Any]]) -> Table:
    """Show the end of the prompt and how each cache went on."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column()
    table.add_column()
    table.add_row("prompt", Text("... " + one_line(prompt)[-80:]))
    for row in results:
        table.add_row(Text(row["label"]), Text(beginning(row["generated_text"])))
    return table


def one_line(text: str) -> str:
    return " ".join(text.split())


def beginning(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= SHOWN_LETTERS else f"{line[:SHOWN_LETTERS]} ..."


def save_picture(document: dict[str, Any], path: Path) -> None:
    """Draw quality against memory, and the time per token."""
    colors = {"dense": "#555555", "kvcache_plugins": "#1f6fb4", "transformers": "#d9822b"}
    names = {"kvcache_plugins": "kvcache_plugins", "transformers": "transformers' own"}
    settings, results = document["settings"], document["results"]
    results = [{**row, "label": label} for row, label in zip(results, short_labels(results), strict=True)]
    packed = [row for row in results if owner(row) != "dense"]
    figure, (quality, speed) = pyplot().subplots(1, 2, figsize=(13, 5.2), layout="constrained")

    points: list[LabeledPoint] = []
    for name, label in names.items():
        rows = [row for row in packed if owner(row) == name]
        heights = [row["kl_to_dense"] for row in rows]
        quality.scatter([r["bits_per_value"] for r in rows], heights, s=55, color=colors[name], label=label)
        points += [
            LabeledPoint(row["bits_per_value"], height, row["label"], colors[name])
            for row, height in zip(rows, heights, strict=True)
        ]
    if points:
        quality.margins(x=0.18, y=0.12)
        scale_divergences(quality, (point.y for point in points))
        quality.legend(loc="upper right", frameon=False)
    dense_bits = results[0]["bits_per_value"]
    quality.set_xlabel(f"bits per value, metadata and exact recent tokens included (dense: {dense_bits:.0f})")
    quality.set_ylabel("KL divergence to the dense run (nats per token)")
    quality.set_title("Quality against memory (lower left is better)")

    rows = list(reversed(results))
    bars = speed.barh(
        [row["label"] for row in rows],
        [row["ms_per_token"] for row in rows],
        color=[colors[owner(row)] for row in rows],
        height=0.65,
    )
    speed.axvline(results[0]["ms_per_token"], color=colors["dense"], linestyle=":", linewidth=1, zorder=0)
    for text in speed.bar_label(bars, fmt="%.1f", padding=3, fontsize=9):
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
    speed.margins(x=0.12)
    speed.set_xlabel("milliseconds per generated token (median)")
    speed.set_title(f"Speed on {document['environment']['device']}")

    for axes in (quality, speed):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="both" if axes is quality else "x", alpha=0.25)
        axes.set_axisbelow(True)
    figure.suptitle(
        f"{Path(settings['model']).name}, {settings['dtype']}: {settings['prompt_tokens']} prompt tokens, "
        f"{settings['new_tokens']} generated, {settings['score_tokens']} scored"
    )
    figure.draw_without_rendering()  # fixes the layout, so that the space a label takes is known
    place_labels(quality, points)
    save_figure(figure, path)


def short_labels(results: list[dict[str, Any]]) -> list[str]:
    """Return the labels without the names of artifacts and what matters little, if they still differ."""
    left_out = ("heads=", "calibration=", "chunk_size=", "key_bits=", "value_bits=")
    short = [
        " ".join(word for word in row["label"].split() if not word.startswith(left_out)) for row in results
    ]
    return short if len(set(short)) == len(short) else [row["label"] for row in results]


if __name__ == "__main__":
    sys.exit(main())
