"""What an evaluation leaves behind: one `results.json`, of one shape for every task.

```
{"schema_version": 1,
 "task": "bench attention",
 "settings": {...},                          the merged options of the run
 "inputs": {"model": "5d0c...", ...},        digests of what it has read: files change, their names do not
 "results": [{"cache_config": {"backend": "dense"}, ...}, {"cache_config": {...}, ...}, ...],
 "skipped": [{"cache_config": {...}, "reason": "not installed"}, ...],    "is_failure": true if it broke down
 "environment": {"versions", "device", "cpu", "threads", "commit", "dirty", "command"}}
```

The first result is the dense cache, measured in the same run, except where `settings` has `score_only`: then
nothing was run, and the results are the scores of predictions made before, with whatever caches there were.
`versions` are those of all distributions whose code has computed, those of third parties' caches included.
A number that json cannot hold, an infinite perplexity for instance, is null.
`settings`, `inputs` and `skipped` may be missing in a file written by another program. A file appears whole
or not at all, and that of another run is kept beside it (`earlier`).
"""

from __future__ import annotations

import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..artifacts.files import json_text, read_json, replaced
from .code_versions import foreign_versions, version_of
from .earlier import set_aside
from .labels import DENSE, told_apart
from .other_work import OtherWork

__all__ = [
    "RESULTS_FILE",
    "SCHEMA_VERSION",
    "build_document",
    "check_document",
    "cpu_name",
    "environment",
    "machine_names",
    "read_results",
    "write_results",
]

SCHEMA_VERSION = 1
RESULTS_FILE = "results.json"

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("kvcache-plugins", "torch", "transformers", "optimum-quanto", "hqq")
_ENVIRONMENT_KEYS = frozenset({"versions", "device", "cpu", "threads", "commit", "dirty", "command"})


def build_document(
    task: str,
    results: Iterable[Mapping[str, Any]],
    *,
    settings: Mapping[str, Any],
    inputs: Mapping[str, Any] | None = None,
    skipped: Iterable[Mapping[str, Any]] = (),
    device: torch.device | str = "cpu",
    threads: int | None = None,
    other_work: OtherWork | None = None,
) -> dict[str, Any]:
    """Put results together with where they come from.

    Args:
        task (`str`): What was measured, such as `"perplexity"` or `"bench attention"`.
        results (`Iterable[Mapping]`): One per measurement, each with its `"cache_config"`, the dense cache
            first.
        settings (`Mapping`): The merged options of the run.
        inputs (`Mapping`, *optional*): Digests of the files that it has read: model, texts, artifacts.
        skipped (`Iterable[Mapping]`): `{"cache_config", "reason"}` of what could not be measured.
        device (`torch.device | str`): Where it was measured.
        threads (`int`, *optional*): CPU threads, if another process measured; by default those of this one.
        other_work (`OtherWork`, *optional*): Begun when the first time was taken; of what measures times.

    Raises:
        ValueError: If the results do not follow the schema.
    """
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "task": task,
        "settings": dict(settings),
        "inputs": {name: digest for name, digest in (inputs or {}).items() if digest},
        "results": [dict(result) for result in results],
        "skipped": [dict(entry) for entry in skipped],
        "environment": environment(device, threads),
    }
    if other_work is not None:
        document["environment"]["other_work"] = other_work.share()
    check_document(document)
    caches = [entry["cache_config"] for entry in (*document["results"], *document["skipped"])]
    document["environment"]["versions"] |= foreign_versions(caches)
    return document | {"results": told_apart(document["results"])}


def check_document(document: Mapping[str, Any]) -> None:
    """Check that a document follows the schema.

    Raises:
        ValueError: Naming the field, what was found and what is expected.
    """
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"schema_version of the results must be {SCHEMA_VERSION}, got {document.get('schema_version')!r}."
        )
    task = document.get("task")
    if not isinstance(task, str) or not task:
        raise ValueError(f"task of the results must be a non-empty string, got {task!r}.")
    results = document.get("results")
    if not isinstance(results, list) or not results:
        raise ValueError(f"results must be a non-empty list, got {results!r}.")
    for index, result in enumerate(results):
        cache_config = result.get("cache_config") if isinstance(result, dict) else None
        if not isinstance(cache_config, dict) or not isinstance(cache_config.get("backend"), str):
            raise ValueError(
                f"results[{index}] must be an object whose cache_config names a backend, got {result!r}."
            )
    settings = document.get("settings")
    is_run = not (isinstance(settings, dict) and settings.get("score_only") is True)
    if is_run and results[0]["cache_config"] != DENSE:
        raise ValueError(
            f"The first result must be the dense cache, {DENSE!r}, got {results[0]['cache_config']!r}."
        )
    place = document.get("environment")
    missing = _ENVIRONMENT_KEYS.difference(place if isinstance(place, dict) else ())
    if missing:
        raise ValueError(
            f"environment must hold {sorted(_ENVIRONMENT_KEYS)}, missing are {sorted(missing)} in {place!r}."
        )


def write_results(directory: Path, document: dict[str, Any]) -> Path:
    """Write `results.json` into `directory`, which is made if need be, and return its path.

    That of another run is kept under another name, see [`set_aside`].

    Raises:
        ValueError: If the document does not follow the schema; nothing is written.
    """
    check_document(document)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / RESULTS_FILE
    with replaced(path) as unfinished:
        unfinished.write_text(json_text(document), encoding="utf-8")
        set_aside(path, document)  # once nothing can go wrong any more
    return path


def read_results(path: Path) -> dict[str, Any]:
    """Read a `results.json`, or the one of a directory.

    Raises:
        ArtifactError: If it is missing or damaged.
        ValueError: If it does not follow the schema.
    """
    path = path / RESULTS_FILE if path.is_dir() else path
    document = read_json(path)
    try:
        check_document(document)
    except ValueError as error:
        raise ValueError(f"{path} is not a result file of this package: {error}") from error
    return document


def _device_name(device: torch.device, cpu: str) -> str:
    """What a device calls itself; one that has no name of its own, such as Apple's GPUs, is part of `cpu`."""
    if device.type == "cpu":
        return cpu
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{cpu} ({device.type})" if name is None else str(name(device))


def environment(device: torch.device | str = "cpu", threads: int | None = None) -> dict[str, Any]:
    """Return what a reader needs to repeat a run on `device`, with so many CPU threads."""
    device = torch.device(device)
    versions = {"python": platform.python_version()} | {name: version_of(name) for name in _PACKAGES}
    # An installed package may lie inside the checkout of something else, whose commit says nothing of us.
    is_checkout = (top := _git("rev-parse", "--show-toplevel")) is not None and Path(top).resolve() == _ROOT
    commit, status = (
        (_git("rev-parse", "HEAD"), _git("status", "--porcelain")) if is_checkout else (None, None)
    )
    return {
        "versions": versions,
        **machine_names(device),
        "threads": torch.get_num_threads() if threads is None else threads,
        "commit": commit,
        "dirty": None if status is None else bool(status),
        "command": _command(),
    }


def machine_names(device: torch.device) -> dict[str, str]:
    """Return what runs are measured on: `device` and `cpu`, by their names."""
    cpu = cpu_name()
    return {"device": _device_name(device, cpu), "cpu": cpu}


def cpu_name() -> str:
    """Return the processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _command() -> str:
    """Return the command line, without the place of the checkout or of the interpreter and without tokens."""
    script = Path(sys.argv[0]).resolve()
    if script.is_relative_to(_ROOT) and script.name == "__main__.py":  # whose relative imports need the -m
        words = ["python", "-m", ".".join(script.relative_to(_ROOT).parts[:-1])]
    elif script.is_relative_to(_ROOT) and script.suffix == ".py":
        words = ["python", script.relative_to(_ROOT).as_posix()]
    else:
        words = [script.name]
    given = shlex.join([*words, *sys.argv[1:]])
    return re.sub(r"(--\S*token[ =])\S+", r"\1...", given)  # results are shown to others


def _git(*arguments: str) -> str | None:
    """Return the output of a git command in the checkout, or None outside of one."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=_ROOT, capture_output=True, text=True, errors="replace", check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
