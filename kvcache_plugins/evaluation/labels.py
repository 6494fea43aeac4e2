"""How results name a cache. Nothing heavy is imported, because the command line needs it too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["DENSE", "cache_label", "dense_first"]

DENSE: dict[str, Any] = {"backend": "dense"}
"""Options of the ordinary cache, to which every result is compared."""


def cache_label(cache_config: dict[str, Any]) -> str:
    """Return a short name of a cache for tables and plots.

    Such as `kivi 2-bit`, `hqq 4-bit axis 1`, or `knorm budget=192 over int4 key_bits=8`.
    """
    options = dict(cache_config)
    words = [str(options.pop("backend"))]
    if "budget" in options:  # of all that evicting caches are told, what their size depends on
        words.append(f"budget={options.pop('budget')}")
    storage = options.pop("storage", None)
    if "nbits" in options:
        words.append(f"{options.pop('nbits')}-bit")
    if "axis_key" in options and options["axis_key"] == options.get("axis_value"):
        words.append(f"axis {options.pop('axis_key')}")
        del options["axis_value"]
    # of a directory or hub id the last part says enough
    words += [f"{key}={str(value).rstrip('/').rpartition('/')[2]}" for key, value in options.items()]
    if isinstance(storage, dict) and "backend" in storage:
        words.append(f"over {cache_label(storage)}")
    return " ".join(words)


def dense_first(cache_configs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of the options with the dense cache in front, and every cache once."""
    found = [DENSE]
    for cache_config in cache_configs:
        if cache_config not in found:
            found.append(cache_config)
    return [dict(cache_config) for cache_config in found]
