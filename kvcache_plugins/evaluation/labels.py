"""How results name a cache. Nothing heavy is imported, because the command line needs it too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["DENSE", "cache_label", "dense_first"]

DENSE: dict[str, Any] = {"backend": "dense"}
"""Options of the ordinary cache, to which every result is compared."""


def cache_label(cache_config: dict[str, Any]) -> str:
    """Return a short name of a cache for tables and plots, such as `kivi 2-bit` or `hqq 4-bit axis 1`."""
    options = dict(cache_config)
    words = [str(options.pop("backend"))]
    if "nbits" in options:
        words.append(f"{options.pop('nbits')}-bit")
    if "axis_key" in options and options["axis_key"] == options.get("axis_value"):
        words.append(f"axis {options.pop('axis_key')}")
        del options["axis_value"]
    # of a directory or hub id the last part says enough
    words += [f"{key}={str(value).rstrip('/').rpartition('/')[2]}" for key, value in options.items()]
    return " ".join(words)


def dense_first(cache_configs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of the options with the dense cache in front, and only there."""
    return [dict(DENSE), *(dict(c) for c in cache_configs if c != DENSE)]
