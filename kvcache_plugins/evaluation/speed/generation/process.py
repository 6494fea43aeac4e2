"""One measurement of `generate()` in a fresh process: started, waited for, and its end understood."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....artifacts.files import read_json
from ....fresh_processes import python_command
from ....runs.labels import cache_label
from ....runs.options import DTYPES

if TYPE_CHECKING:
    import torch

    from ..options import GenerationOptions

__all__ = [
    "OUT_OF_MEMORY",
    "DidNotFitError",
    "WorkerError",
    "last_said",
    "make_job",
    "peak_above_model",
    "run_job",
]

OUT_OF_MEMORY = 77
"""Exit status of a worker whose allocation was refused."""

_WORKER = f"{__package__}.worker"
_MOST_WORDS = 60
"""Of what a process said last; some libraries say pages."""
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL) if os.name == "posix" else ()


class WorkerError(RuntimeError):
    """A measurement ended without an answer."""


class DidNotFitError(WorkerError):
    """A measurement needed more memory than there was."""


def make_job(
    options: GenerationOptions,
    cache_config: dict[str, Any],
    length: int,
    batch_size: int,
    device: torch.device,
    max_new_tokens: int | None = None,
) -> dict[str, Any]:
    """Say what a worker is to measure, and how long it may take.

    Args:
        options (`GenerationOptions`): Of the whole run.
        cache_config (`dict`): The cache.
        length (`int`): Tokens of the prompt, per row.
        batch_size (`int`): Rows.
        device (`torch.device`): Where to generate.
        max_new_tokens (`int`, *optional*): Tokens to generate; the run's by default.
    """
    return {
        "cache_config": cache_config,
        "length": length,
        "batch_size": batch_size,
        "model": options.model,
        "preset": options.preset,
        "num_layers": options.num_layers,
        "compile": options.compile,
        "dtype": DTYPES[options.dtype],
        "device": str(device),
        "max_new_tokens": options.max_new_tokens if max_new_tokens is None else max_new_tokens,
        "threads": options.threads,
        "time_limit": options.time_limit,
    }


def peak_above_model(answer: dict[str, Any]) -> int | None:
    """Return the most memory that generation took beyond what was there before it, in bytes.

    On a CPU it is not known, and None, where loading the model took more than generating.
    """
    if answer["device_peak_bytes"] is not None:
        return int(answer["device_peak_bytes"] - answer["device_before_bytes"])
    if answer["peak_memory_bytes"] > answer["load_peak_bytes"]:
        return int(answer["peak_memory_bytes"] - answer["memory_before_bytes"])
    return None


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job of [`worker.measure`] in a fresh process.

    Args:
        job (`dict`): What to measure.

    Returns:
        `dict`: The answer, and `seconds`, with the start of the process and the loading of the model.

    Raises:
        DidNotFitError: If the process was killed, which the system does when memory runs out, or was refused
            memory.
        WorkerError: If it failed otherwise; the message ends with the exception, or else with what it said
            last. Or if it had not ended in its time.
    """
    # With the tools installed beside the interpreter: quanto compiles an extension with ninja, which often is
    # not on the PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder, "job.json"), Path(folder, "answer.json")
        question.write_text(json.dumps(job), encoding="utf-8")
        name = cache_label(job["cache_config"])
        try:
            done = subprocess.run(
                python_command(_WORKER, "work", str(question), str(answer), str(os.getpid())),
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
                errors="replace",  # compilers and drivers may say anything
                timeout=job.get("time_limit"),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise WorkerError(f"{name} had not ended after {error.timeout:g} s (--time_limit)") from error
        said = last_said(done.stderr)
        if done.returncode in _KILLED:
            raise DidNotFitError("did not fit: the process was killed, as happens when memory runs out")
        if done.returncode == OUT_OF_MEMORY:
            raise DidNotFitError(f"did not fit: {said}")
        if done.returncode != 0:
            raise WorkerError(f"{name} ended with {done.returncode}: {said or 'nothing'}")
        return read_json(answer) | {"seconds": time.perf_counter() - started}


def last_said(text: str) -> str:
    """Return the exception that ended a Python process, in one line.

    Args:
        text (`str`): All that the process wrote to its standard error.

    Returns:
        `str`: The exception's type and message, the frames of its traceback left out; without a traceback,
        the last words.
    """
    lines = text.splitlines()
    headers = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    frames_on = headers[-1] + 1 if headers else len(lines)
    # frames are indented, what follows them is not
    ends = (
        i for i, line in enumerate(lines[frames_on:], frames_on) if line.strip() and not line[0].isspace()
    )
    if (end := next(ends, None)) is None:
        return " ".join(text.split()[-_MOST_WORDS:])
    words = " ".join(lines[end:]).split()
    return " ".join(words[:_MOST_WORDS] + ["..."] * (len(words) > _MOST_WORDS))
