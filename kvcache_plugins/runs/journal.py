"""Records of a run that are kept as soon as they are made, so that an interruption loses none of them.

A run is cut into items (a window of text, a question, a trial) that are measured apart from each other. Every
process of a run writes one file, `progress/records-<process>.jsonl` in the output directory: a first line
with what the records belong to, then one record a line. A later run with the same settings, of any number of
processes, reads them all and does only what is missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..artifacts.files import json_line, naming, plain_values
from ..errors import ArtifactError

__all__ = ["Journal", "append_line", "check_settings", "differences", "progress_folder", "remove_progress"]


class Journal:
    """The finished records of a run.

    Args:
        directory (`Path`): The run's output directory; made if need be.
        settings (`Mapping`): Plain values on which a record depends. Records made with other settings are
            not mixed with new ones.
        process (`int`): Index of this process, which writes a file of its own.

    Raises:
        ValueError: If the directory holds an unfinished run with other settings.
        ArtifactError: If a file there is none of ours.
        OSError: If the directory cannot be written to.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any], process: int = 0) -> None:
        self._folder = progress_folder(directory)
        self._settings = plain_values(settings)
        self._path = self._folder / f"records-{process}.jsonl"
        self._used: set[str] = set()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._records = self._read_all()
        if not self._path.exists():
            self._write_line({"settings": self._settings})

    def __contains__(self, key: str) -> bool:
        """Whether the record was made, now or by an earlier run (of any process)."""
        return key in self._records

    def __getitem__(self, key: str) -> dict[str, Any]:
        self._used.add(key)
        return self._records[key]

    def __iter__(self) -> Iterator[str]:
        """Yield the keys of all records."""
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def is_done(self, key: str) -> bool:
        """Whether there is a record that is not of a failure: those are tried again by a later run."""
        return key in self._records and "failed" not in self._records[key]

    def add(self, key: str, record: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a record under a key; it is on the disk when this returns.

        One of a failure holds its reason as `failed`.

        Returns:
            `dict`: The record as a later run would read it, so that both compute with the same numbers; None
            stands for those that are infinite or NaN.

        Raises:
            OSError: If it cannot be written, for instance because the disk is full; what was kept before
                stays.
        """
        line = {"key": key, "record": record}
        self._write_line(line)
        self._used.add(key)
        self._records[key] = plain_values(record)
        return self._records[key]

    def reload(self) -> None:
        """Read what all processes have written by now."""
        self._records = self._read_all()

    def remove(self, is_outdated: Callable[[str], bool] = lambda key: False) -> None:
        """Delete the records of all processes: the run is finished and its results are written.

        They stay if some of them were not used: a run of more windows, questions or caches goes on with them.

        Args:
            is_outdated (`Callable`): Whether no run can use the record of a key any more.
        """
        unused = [key for key in self._records.keys() - self._used if not is_outdated(key)]
        if unused:
            print(f"kept: {self._folder}, for {len(unused)} records of a run of more than this one")
            return
        remove_progress(self._folder, "records-*.jsonl")

    def _write_line(self, line: Mapping[str, Any]) -> None:
        append_line(self._path, json_line(line))

    def _read_all(self) -> dict[str, dict[str, Any]]:
        records: dict[str, dict[str, Any]] = {}
        for path in sorted(self._folder.glob("records-*.jsonl")):
            for key, record in self._read(path).items():
                if key not in records or "failed" in records[key]:  # another process may have done it since
                    records[key] = record
        return records

    def _read(self, path: Path) -> dict[str, dict[str, Any]]:
        data = path.read_bytes()
        complete = data[: data.rfind(b"\n") + 1]  # the last line may have been cut short
        if len(complete) < len(data) and path == self._path:
            os.truncate(path, len(complete))
        if not complete:
            if path == self._path:  # that of another process may be about to get its first line
                path.unlink()
            return {}
        try:
            first, *lines = [json.loads(line) for line in complete.splitlines()]
            settings, records = first["settings"], {line["key"]: line["record"] for line in lines}
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path} is not a record of an unfinished run; remove it.") from error
        if settings != self._settings and not records:  # it was stopped before it had done anything
            if path == self._path:
                path.unlink()
            return {}
        check_settings(settings, self._settings, self._folder.parent)
        return records


def progress_folder(output: Path) -> Path:
    """Return where an unfinished run keeps what it has done, in its output directory."""
    return output / "progress"


def remove_progress(folder: Path, files: str) -> None:
    """Delete what a finished run has kept, and its folder unless that holds something else.

    Args:
        folder (`Path`): Of [`progress_folder`]; it need not exist.
        files (`str`): A pattern of the names.
    """
    for path in folder.glob(files):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # holds something else
        folder.rmdir()


def append_line(path: Path, line: str) -> None:
    """Add a line to a file; it is on the disk when this returns.

    Raises:
        OSError: Naming the file, if it cannot be written, for instance because the disk is full; the lines
            before it stay.
    """
    left = memoryview(f"{line}\n".encode())
    # without a buffer, whose rest would be written when the file is closed
    with naming(path), path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)  # no half line that the next one would be glued to
            raise


def differences(found: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return in words what differs, `"seed was 0, is 1, ..."`; nothing if all is the same."""
    names = sorted(name for name in {*found, *settings} if found.get(name) != settings.get(name))
    return ", ".join(f"{name} was {found.get(name)!r}, is {settings.get(name)!r}" for name in names)


def check_settings(found: Mapping[str, Any], settings: Mapping[str, Any], output: Path) -> None:
    """Refuse to go on with a run that was begun with other settings.

    Args:
        found (`Mapping`): Those it was begun with.
        settings (`Mapping`): Those of now; plain values, as JSON gives them back.
        output (`Path`): Its output directory, whose folder `progress` holds what it has done.

    Raises:
        ValueError: Naming what differs.
    """
    if changed := differences(found, settings):
        raise ValueError(
            f"{output} holds an unfinished run with other settings ({changed}). Repeat it with those, choose "
            "another --output, or delete its folder 'progress'."
        )
