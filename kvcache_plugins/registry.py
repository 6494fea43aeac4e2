"""Backend registry: name -> cache class, discovered lazily.

The modules of `kvcache_plugins.backends` are known by file name without being imported, third parties
announce theirs through the entry-point group `kvcache_plugins.backends`, and a script may use the decorator
directly. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.metadata
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from .cache import KVCache

__all__ = [
    "ENTRY_POINT_GROUP",
    "LEGACY_OPTIONS",
    "TRANSFORMERS_BACKENDS",
    "announced_by",
    "get_backend",
    "list_backends",
    "loaded_backend",
    "register_backend",
    "suggest",
    "without_legacy",
]

ENTRY_POINT_GROUP = "kvcache_plugins.backends"

TRANSFORMERS_BACKENDS = ("fp8", "hqq", "quanto")
"""Names that transformers serves itself and that we pass on to it."""

LEGACY_OPTIONS = ("compute_dtype", "device")
"""What older tutorials pass and no cache uses."""
RESERVED_OPTIONS = ("backend", "max_cache_length", "model_or_config", *LEGACY_OPTIONS)
"""What no option of a backend may be called: by these, others say something else."""

_RESERVED_NAMES = (*TRANSFORMERS_BACKENDS, "dense")
_SCORED_AFTER = ("update", "attention", "forward")

_T = TypeVar("_T", bound="type[KVCache]")
_registered: dict[str, type[KVCache]] = {}


def without_legacy(options: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return `options` without those of `LEGACY_OPTIONS`."""
    return {key: value for key, value in options.items() if key not in LEGACY_OPTIONS}


def suggest(name: str, allowed: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest of `allowed`, or an empty string."""
    close = difflib.get_close_matches(str(name).lower(), sorted(allowed), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


@lru_cache(maxsize=1)
def _builtin_names() -> frozenset[str]:
    folder = Path(__file__).parent / "backends"
    return frozenset(
        info.name for info in pkgutil.iter_modules([str(folder)]) if not info.name.startswith("_")
    )


@lru_cache(maxsize=1)
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """Announced backends by name; a warning tells of what is announced in vain."""
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        name, obstacle = point.name.lower(), _why_no_name(point.name.lower())
        if name in _builtin_names():
            obstacle = f"{name!r} is a backend of this package"
        elif name in found and found[name].value != point.value:
            obstacle = f"{name!r} is announced twice, first as {found[name].value!r}"
        if obstacle is None:
            found.setdefault(name, point)
            continue
        announced_by = f", announced by {point.dist.name}," if point.dist is not None else ""
        warnings.warn(
            f"The cache backend {point.name!r} ({point.value!r}){announced_by} is ignored: {obstacle}.",
            stacklevel=2,
        )
    return found


def _why_no_name(name: str) -> str | None:
    if not name.isidentifier():
        return f"a backend name must be a lower-case identifier, got {name!r}"
    if name in _RESERVED_NAMES:
        return f"the backend name {name!r} is reserved; reserved are {_RESERVED_NAMES}"
    return None


def list_backends() -> list[str]:
    """Return the sorted names accepted as `cache_config["backend"]` and served by this package."""
    return sorted({*_builtin_names(), *_entry_points(), *_registered})


def register_backend(name: str) -> Callable[[_T], _T]:
    """Class decorator that makes a [`KVCache`] subclass available as `cache_config={"backend": name}`.

    Args:
        name (`str`): Lower-case name. It may not be one transformers serves itself, nor one already taken by
            another class.

    Raises:
        ValueError: If the name is reserved, malformed, or registered by another class, or the class is none
            of which a cache can be built.
    """
    if not isinstance(name, str) or name != name.lower():
        raise ValueError(f"A backend name must be a lower-case identifier, got {name!r}.")
    if (obstacle := _why_no_name(name)) is not None:
        raise ValueError(f"{obstacle[0].upper()}{obstacle[1:]}.")

    def decorate(cls: _T) -> _T:
        _check_class(name, cls)
        known = _registered.get(name)
        own_module = f"{__package__}.backends.{name}"
        if name in _builtin_names() and cls.__module__ != own_module:  # which may not be imported yet
            raise ValueError(f"The backend name {name!r} is already registered by {own_module}.")
        # The same class may come again when its module is reloaded.
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"The backend name {name!r} is already registered by {known.__module__}.{known.__name__}."
            )
        _registered[name] = cls
        cls.backend = name
        return cls

    return decorate


def _check_class(name: str, cls: type) -> None:
    """Raise `ValueError` for a class of which no cache could be built, or none that can be saved."""
    if not _derives(cls, "cache", "KVCache"):
        raise ValueError(f"The backend {name!r} must be a subclass of KVCache, got {cls!r}.")
    config_class, layer_class = (getattr(cls, kind, None) for kind in ("config_class", "layer_class"))
    evicts = _derives(cls, "eviction.cache", "EvictingCache")
    for kind, found, module, wanted in (
        ("config_class", config_class, "config", "BackendConfig"),
        ("layer_class", layer_class, "layers.base", "PackedLayer"),
        *([("config_class", config_class, "eviction.options", "EvictingConfig")] if evicts else []),
        *([("layer_class", layer_class, "eviction.layer", "EvictingLayer")] if evicts else []),
    ):
        if not _derives(found, module, wanted):
            raise ValueError(
                f"{cls.__name__}.{kind}, of the backend {name!r}, must be a subclass of {wanted}, got "
                f"{found!r}."
            )
    if not evicts and _derives(layer_class, "eviction.layer", "EvictingLayer"):
        raise ValueError(
            f"The backend {name!r} has layers that evict ({layer_class!r}) and must be a subclass of "
            f"EvictingCache, got {cls!r}."
        )
    taken = [f.name for f in dataclasses.fields(config_class) if f.name in RESERVED_OPTIONS]  # type: ignore[arg-type]
    if taken:
        raise ValueError(
            f"The options {taken} of the backend {name!r} need other names: transformers, or the cache "
            f"itself, means something else by {RESERVED_OPTIONS}."
        )
    if getattr(layer_class, "scored_after", "update") not in _SCORED_AFTER:
        raise ValueError(
            f"{layer_class!r}.scored_after, of the backend {name!r}, must be one of {_SCORED_AFTER}, got "
            f"{layer_class.scored_after!r}."  # type: ignore[union-attr]
        )


def _derives(cls: object, module: str, name: str) -> bool:
    """Whether a class of this package is among the bases, asked without importing it."""
    base = (f"{__package__}.{module}", name)
    return isinstance(cls, type) and any((b.__module__, b.__qualname__) == base for b in cls.__mro__)


def get_backend(name: str) -> type[KVCache]:
    """Return the cache class registered as `name` (case-insensitive), importing its module if need be.

    Raises:
        ValueError: If no backend has this name; the message names the closest ones.
        ImportError: If the module that an installed package announces for it cannot be imported.
    """
    if not isinstance(name, str):
        raise ValueError(f"`backend` must be a string, one of {list_backends()}, got {name!r}.")
    key = name.lower()
    if key not in _registered:
        if key in _builtin_names():
            importlib.import_module(f"{__package__}.backends.{key}")
        elif key in _entry_points():
            _load(_entry_points()[key])
        elif key in TRANSFORMERS_BACKENDS:
            raise ValueError(
                f"The backend {name!r} is transformers' own, built by `generate()` and by "
                f"`QuantizedCache({key!r}, config)`. Allowed here are {list_backends()}."
            )
        elif key == "dense":
            raise ValueError(
                f"The backend {name!r} is what tables and result files call the ordinary cache of "
                "transformers: leave out cache_implementation and cache_config, and generate() has it. "
                f"Allowed here are {list_backends()}."
            )
        else:
            allowed = [*list_backends(), *TRANSFORMERS_BACKENDS]
            raise ValueError(
                f"Unknown cache backend {name!r}.{suggest(key, allowed)} Available: {sorted(allowed)}."
            )
    if key not in _registered:
        raise ValueError(f"The module announced for the backend {key!r} does not register that name.")
    return _registered[key]


def loaded_backend(name: str) -> type[KVCache] | None:
    """Return the class of a backend that has been asked for before; nothing is imported for it."""
    return _registered.get(name.lower())


def announced_by(name: str) -> importlib.metadata.EntryPoint | None:
    """Return with which an installed package announces a backend, if one does."""
    return _entry_points().get(name.lower())


def _load(point: importlib.metadata.EntryPoint) -> None:
    """Import the module of a third party, which may fail in any way.

    Raises:
        ImportError: Naming the backend, the module and whose it is. A missing module is still one.
    """
    try:
        point.load()
    except Exception as error:
        package = "" if point.dist is None else f" of {point.dist.name} {point.dist.version}"
        said = " ".join(str(error).split())
        kind = ModuleNotFoundError if isinstance(error, ModuleNotFoundError) else ImportError
        raise kind(
            f"The backend {point.name!r} cannot be loaded: its module {point.module!r}{package} raises "
            f"{type(error).__name__}{said and f': {said}'}. Mend or uninstall it, or leave the backend out."
        ) from error
