"""What is shown of each kind of evaluation: its columns, and which of its numbers become pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .cells import Column

__all__ = ["TASKS", "TaskView", "view_of"]

_MEMORY: tuple[Column, ...] = (
    ("kv_bytes", "cache", "bytes"),
    ("memory_fraction", "of dense", "three"),
    ("bits_per_value", "bits per value", "two"),
)
_END: tuple[Column, ...] = (
    ("kernel", "kernel", "any"),
    ("fallback_reads", "fallback reads", "count"),
    ("seconds", "seconds", "one"),
)
_LIKELIHOOD: tuple[Column, ...] = (
    ("perplexity", "perplexity", "three"),
    ("nll", "nll", "three"),
    ("nll_stderr", "its standard error", "small"),
    ("kl_to_dense", "KL to dense", "small"),
    ("top1_agreement", "same top-1", "three"),
)
_POINT: tuple[Column, ...] = (("length", "tokens", "count"), ("batch_size", "batch", "count"))


@dataclass(frozen=True)
class TaskView:
    """How one kind of evaluation is shown.

    Args:
        title (`str`): Heading of its section.
        explanation (`str`): What the numbers mean, in a sentence or two.
        columns (`tuple[Column, ...]`): Of its table.
        quality (`tuple`): Key, description and axis of the metrics drawn against memory.
        speed (`tuple`): Key and description of the metrics drawn against the length; bytes in MiB.
        bars (`tuple`): Key, description and format of the metrics drawn as one bar per cache.
    """

    title: str
    explanation: str
    columns: tuple[Column, ...]
    quality: tuple[tuple[str, str, Literal["linear", "log"]], ...] = ()
    speed: tuple[tuple[str, str], ...] = ()
    bars: tuple[tuple[str, str, str], ...] = ()


TASKS: dict[str, TaskView] = {
    "perplexity": TaskView(
        "Perplexity",
        "Perplexity of true text that the model reads through the cache, each token predicted once (lower is "
        "better); KL divergence to the dense cache of the same run, in nats per token.",
        (
            *_LIKELIHOOD,
            ("tokens", "tokens scored", "count"),
            ("packed_read_fraction", "read packed", "three"),
            *_MEMORY,
            *_END,
        ),
        quality=(
            ("kl_to_dense", "KL divergence to dense, nats per token", "log"),
            ("perplexity", "perplexity", "linear"),
        ),
    ),
    "quickstart": TaskView(
        "Quickstart",
        "The comparison of examples/quickstart.py: quality on the true continuation of a text, memory, and "
        "time of greedy generation.",
        (
            *_LIKELIHOOD,
            ("agreement", "same tokens", "two"),
            ("ms_per_token", "ms per token", "one"),
            *_MEMORY,
            *_END,
        ),
        quality=(
            ("kl_to_dense", "KL divergence to dense, nats per token", "log"),
            ("perplexity", "perplexity", "linear"),
        ),
        bars=(("ms_per_token", "milliseconds per token, median", "one"),),
    ),
    "longbench": TaskView(
        "LongBench",
        "Scores of the benchmark's own metrics, 0 to 100 (higher is better).",
        (("average", "average", "two"), *_MEMORY, *_END),
        quality=(("average", "average score", "linear"),),
    ),
    "passkey": TaskView(
        "Passkey",
        "Share of hidden numbers found again in long texts (higher is better). With several facts a prompt "
        "is read without any question, and each fact is asked for on a copy of the cache.",
        (
            ("accuracy", "accuracy", "percent"),
            ("trials", "trials", "count"),
            ("facts", "facts a prompt", "count"),
            ("query_aware", "question known", "any"),
            *_MEMORY,
            *_END,
        ),
        quality=(("accuracy", "share found", "linear"),),
    ),
    "train locret": TaskView(
        "Training of retaining heads",
        "Recall@10 %: which part of the tokens that mattered most is among those that score highest, on text "
        "that no step has seen. Of caches that were asked for: by how much the text behind unseen prompts is "
        "less likely than with the dense cache, in nats per token.",
        (
            ("recall", "recall@10 %", "three"),
            ("loss", "loss", "three"),
            ("nll", "nll", "three"),
            ("nll_increase", "over dense", "small"),
            ("nll_increase_stderr", "its standard error", "small"),
            *_MEMORY,
            *_END,
        ),
        quality=(("nll_increase", "nats per token more than dense", "linear"),),
        bars=(("recall", "recall@10 %, mean of the layers that evict", "three"),),
    ),
    "bench attention": TaskView(
        "Speed of attention",
        "One decode step of one layer (append, encode, attend): median of the rounds, against the fastest "
        "dense way of the same run and against all of them. On a GPU it is the device's time, of attention "
        "and of appending; the CPU's time to launch a step stands beside it.",
        (
            *_POINT,
            ("median_ms", "median ms", "three"),
            ("p20_ms", "p20", "three"),
            ("p80_ms", "p80", "three"),
            ("attention_ms", "attend ms", "small"),
            ("append_ms", "append ms", "small"),
            ("append_host_ms", "append, launched by the CPU, ms", "three"),
            ("host_ms", "step, launched by the CPU, ms", "three"),
            ("ratio_to_best_dense", "of best dense", "two"),
            ("ratio_to_sdpa_gqa", "of sdpa gqa", "three"),
            ("gb_per_s", "GB/s", "one"),
            ("fraction_of_copy", "attend, of a copy's bandwidth", "percent"),
            *_MEMORY,
            ("max_rel_error", "kernel error", "power"),
            *_END,
            ("note", "note", "any"),
        ),
        speed=(
            ("median_ms", "milliseconds per step, median"),
            ("ratio_to_best_dense", "time, of the fastest dense way"),
        ),
    ),
    "bench generate": TaskView(
        "Speed of generate()",
        "Every point in a fresh process: the time to the first token (the prefill), the time per token after "
        "it, the bytes of the cache beside their prediction, and the peak memory of the process.",
        (
            *_POINT,
            ("ttft_ms", "first token ms", "one"),
            ("prefill_ms", "prefill ms", "one"),
            ("prefill_ratio_to_dense", "of dense", "two"),
            ("ms_per_token", "ms per token", "two"),
            ("p20_ms", "p20", "two"),
            ("p80_ms", "p80", "two"),
            ("ms_per_token_mean", "mean", "two"),
            ("ratio_to_dense", "of dense", "two"),
            ("ratio_to_quanto", "of quanto", "three"),
            ("kv_bytes", "cache", "bytes"),
            ("estimated_kv_bytes", "estimated", "bytes"),
            *_MEMORY[1:],
            ("estimated_peak_bytes", "estimated peak of the cache", "bytes"),
            ("peak_above_model_bytes", "peak above the model", "bytes"),
            ("peak_memory_bytes", "peak of the process", "bytes"),
            ("device_peak_bytes", "peak of the device", "bytes"),
            *_END,
            ("note", "note", "any"),
        ),
        speed=(
            ("ms_per_token", "milliseconds per token, median"),
            ("ttft_ms", "milliseconds to the first token"),
            ("prefill_ms", "milliseconds of prefill"),
            ("kv_bytes", "MiB of the cache"),
            ("peak_memory_bytes", "MiB, peak of the process"),
        ),
    ),
}
"""By the `task` of a result file."""


def view_of(task: str) -> TaskView | None:
    """Return how a kind of evaluation is shown, None if it is not known."""
    return TASKS.get(task)
