"""Lines below every table: what was left out, and where the numbers come from."""

from __future__ import annotations

from typing import Any

from .labels import cache_label

__all__ = ["machine", "origin", "other_work", "skipped"]

_NOTEWORTHY = 0.1
"""Share of all cores with which others make times longer."""


def skipped(document: dict[str, Any]) -> list[str]:
    """Return a line for each cache that was left out."""
    entries = document["skipped"]
    return [f"skipped {cache_label(entry['cache_config'])}: {entry['reason']}" for entry in entries]


def machine(document: dict[str, Any]) -> str:
    """Return the device and the threads of a run, and its processes if it had several."""
    place, processes = document["environment"], document["settings"].get("processes", 1)
    threads = f"{place['threads']} thread{'' if place['threads'] == 1 else 's'}"
    return f"{place['device']}, {f'{processes} processes of ' if processes > 1 else ''}{threads}"


def origin(document: dict[str, Any]) -> str:
    """Return [`machine`] and the version of torch."""
    return f"{machine(document)}, torch {document['environment']['versions']['torch']}"


def other_work(document: dict[str, Any]) -> list[str]:
    """Return a line for times that other work on the machine has made longer, which none of them shows."""
    share = document["environment"].get("other_work", 0.0)
    if share < _NOTEWORTHY:
        return []
    return [f"{share:.0%} of the processor was busy with other work meanwhile: do not rely on the times"]
