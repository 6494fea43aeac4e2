"""How results name a cache. Nothing heavy is imported, because the command line needs it too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["DENSE", "cache_label", "dense_first", "told_apart"]

DENSE: dict[str, Any] = {"backend": "dense"}
"""Options of the ordinary cache, to which every result is compared."""

_LONGEST = 40
"""Characters of a list, or of what options hold by name, up to which a label shows it."""


def cache_label(cache_config: Mapping[str, Any], *, whole_paths: bool = False) -> str:
    """Return a short name of a cache for tables and plots.

    Such as `kivi 2-bit`, `hqq 4-bit axis 1`, or `knorm budget=192 over int4 key_bits=8`. Of options for many
    layers it is their number and a hash: `layer_overrides[32]#5fd2`.

    Args:
        cache_config (`Mapping`): Its options.
        whole_paths (`bool`): Whether to show all of a path or hub id, and not its last part alone.
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
    words += [_option_label(option, value, whole_paths) for option, value in options.items()]
    if isinstance(storage, dict) and "backend" in storage:
        words.append(f"over {cache_label(storage, whole_paths=whole_paths)}")
    return " ".join(words)


def _option_label(option: str, value: Any, whole_paths: bool) -> str:
    if isinstance(value, str):
        return f"{option}={value if whole_paths else value.rstrip('/').rpartition('/')[2]}"
    if isinstance(value, (Mapping, list, tuple)) and len(str(value)) > _LONGEST:
        digest = hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
        return f"{option}[{len(value)}]#{digest[:4]}"
    return f"{option}={value}"


def told_apart(results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of results in which no two caches have one label: those that did have whole paths in it.

    Args:
        results (`Iterable[Mapping]`): Each with its `cache_config`, and perhaps a `label` of [`cache_label`].
    """
    copies = [dict(result) for result in results]
    caches: dict[Any, list[Any]] = {}
    for result in copies:
        caches.setdefault(result.get("label"), []).append(result["cache_config"])
    for result in copies:
        label, cache_config = result.get("label"), result["cache_config"]
        if any(other != cache_config for other in caches[label]) and label == cache_label(cache_config):
            result["label"] = cache_label(cache_config, whole_paths=True)
    return copies


def dense_first(cache_configs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of the options with the dense cache in front, and every cache once."""
    found = [DENSE]
    for cache_config in cache_configs:
        if cache_config not in found:
            found.append(cache_config)
    return [dict(cache_config) for cache_config in found]
