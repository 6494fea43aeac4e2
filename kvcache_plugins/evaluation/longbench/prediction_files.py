"""The files of predictions: `<folder of a cache>/<task>.jsonl`, as the benchmark's own code writes them.

```
{"pred": "...", "answers": ["...", ...], "all_classes": null, "length": 4096, "_id": "..."}
```

`cache.json` beside them says which cache they were made with.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...artifacts.files import read_json, replaced, write_json
from ...runs.earlier import free_name
from ...runs.journal import append_line
from ...runs.json_lines import read_rows
from ...runs.labels import DENSE, cache_label
from ...runs.results import RESULTS_FILE
from .tasks import TASKS, Task, find_tasks

__all__ = [
    "append_prediction",
    "count_predictions",
    "find_predictions",
    "folder_name",
    "name_folder",
    "prediction_path",
    "read_predictions",
    "remove_predictions",
    "rewrite_predictions",
    "set_aside",
]

_CACHE_FILE = "cache.json"
_COLUMNS = {"pred": (str,), "answers": (list,), "all_classes": (list, type(None))}


def folder_name(cache_config: dict[str, Any]) -> str:
    """Return a name for the folder of a cache that every file system takes, another for every cache.

    It is the label of the cache where that says all and can be a name; otherwise what is left of it and a
    hash.
    """
    label = cache_label(cache_config)
    name = re.sub(r"[^A-Za-z0-9._=-]+", "_", label).strip("_.")[:60]
    if name == cache_label(cache_config, whole_paths=True).replace(" ", "_"):
        return name
    digest = hashlib.sha256(json.dumps(cache_config, sort_keys=True).encode()).hexdigest()
    return f"{name}_{digest[:8]}"


def prediction_path(folder: Path, task: Task) -> Path:
    """Return where the predictions of a task go."""
    return folder / f"{task.name}.jsonl"


def name_folder(folder: Path, cache_config: dict[str, Any]) -> None:
    """Make the folder of a cache and say in it which cache that is."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / _CACHE_FILE, {"cache_config": cache_config})


def set_aside(output: Path, cache_configs: Iterable[dict[str, Any]]) -> None:
    """Make room for the predictions of a run where there are those of another one.

    They are moved to a folder beside, which can be scored like any other, with a line that says so.

    Args:
        output (`Path`): Directory of the results.
        cache_configs (`Iterable[dict]`): The caches of the run.
    """
    folders = [output / folder_name(cache_config) for cache_config in cache_configs]
    folders = [folder for folder in folders if any(map(_has_rows, folder.glob("*.jsonl")))]
    if folders:
        kept = free_name(output / RESULTS_FILE, "longbench", [""])
        kept.mkdir()
        for folder in folders:
            folder.replace(kept / folder.name)
        print(f"kept: {kept}, the predictions of an earlier run")


def append_prediction(path: Path, row: Mapping[str, Any]) -> None:
    """Add one row; it is on the disk when this returns.

    Raises:
        OSError: If it cannot be written; the rows before it stay as they were.
    """
    append_line(path, _line(row))


def count_predictions(path: Path) -> int:
    """Return how many rows a file has; 0 if there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def rewrite_predictions(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a whole file, under a temporary name until it is complete."""
    with replaced(path) as unfinished:
        unfinished.write_text("".join(f"{_line(row)}\n" for row in rows), encoding="utf-8")


def remove_predictions(folder: Path, tasks: Iterable[Task]) -> None:
    """Delete the predictions of a cache that could not answer all, and its folder unless more is in it."""
    for name in (*(prediction_path(folder, task).name for task in tasks), _CACHE_FILE):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def read_predictions(path: Path, task: Task, *, longbench_e: bool = False) -> list[dict[str, Any]]:
    """Read the predictions of a task.

    Raises:
        ValueError: If a row lacks what its metric needs.
    """
    columns: dict[str, tuple[type, ...]] = dict(_COLUMNS)
    if task.metric == "classification":
        columns["all_classes"] = (list,)
    if longbench_e:
        columns["length"] = (int, float)
    return read_rows(path, columns)


def find_predictions(
    directory: Path, tasks: Iterable[str] | None = None, *, longbench_e: bool = False
) -> list[tuple[str, dict[str, Any], dict[str, Path]]]:
    """Find files of predictions.

    Args:
        directory (`Path`): Holds `<task>.jsonl` files, or folders that do, one for every cache.
        tasks (`Iterable[str]`, *optional*): Only these; by default all that are there.
        longbench_e (`bool`): Only tasks of LongBench-E, whose files may also be called `<task>_e.jsonl`.

    Returns:
        `list`: Of a label, the cache and its files by task; the dense one comes first. Where no `cache.json`
        says which cache it is, that is `{"backend": "unknown"}`, labeled by the name of the folder.

    Raises:
        ValueError: If there is no directory, no file, a named task has none, or a file is of no task.
    """
    if not directory.is_dir():
        raise ValueError(f"--score_only must be a directory with <task>.jsonl files, got {str(directory)!r}.")
    wanted = [task.name for task in find_tasks(tasks, longbench_e=longbench_e)]
    found = []
    for folder in [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]:
        files: dict[str, Path] = {}
        for path in folder.glob("*.jsonl"):
            name = path.stem.removesuffix("_e") if longbench_e else path.stem
            if folder == directory or (folder / _CACHE_FILE).exists() or name in TASKS:
                find_tasks([name])  # raises and suggests the closest
                if name in files:
                    raise ValueError(f"{path} and {files[name]} are both predictions of {name}.")
                files[name] = path
        present = {name: files[name] for name in wanted if name in files}
        missing = [name for name in tasks or () if name not in present]
        if files and missing:
            raise ValueError(f"{folder} has no predictions of {', '.join(missing)}.")
        if present:
            found.append((*_cache_of(folder), present))
    if not found:
        raise ValueError(
            f"--score_only found no <task>.jsonl in {str(directory)!r} or in its folders; tasks are "
            f"{', '.join(wanted)}."
        )
    return sorted(found, key=lambda entry: entry[1] != DENSE)


def _has_rows(path: Path) -> bool:
    with path.open("rb") as file:
        return file.readline().endswith(b"\n")  # not the half of one that an interruption has left


def _cache_of(folder: Path) -> tuple[str, dict[str, Any]]:
    path = folder / _CACHE_FILE
    if not path.exists():
        return folder.resolve().name, {"backend": "unknown"}
    cache_config = read_json(path).get("cache_config")
    if not isinstance(cache_config, dict) or not isinstance(cache_config.get("backend"), str):
        raise ValueError(f"{path} must hold a cache_config that names a backend, got {cache_config!r}.")
    return cache_label(cache_config), cache_config


def _line(row: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(row, ensure_ascii=False)
        text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, which a byte-level tokenizer may decode to
        text = json.dumps(row)
    return text
