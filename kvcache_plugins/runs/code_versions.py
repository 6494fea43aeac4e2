"""Whose code a measurement is made with, and a digest of it.

An unfinished run is continued by whatever code is there by then, and a cache may have become another one: its
author has mended it, or another version has been installed. Records of the old code must not be mixed with
those of the new one.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..registry import TRANSFORMERS_BACKENDS, announced_by, loaded_backend
from .file_digests import digest_files, digest_words

__all__ = ["PACKAGES", "code_digests", "code_settings", "foreign_versions", "is_foreign", "version_of"]

_OURS = __name__.partition(".")[0]
PACKAGES = ("kvcache-plugins", "torch", "transformers")
"""What every measurement is made with."""
_KNOWN = {_OURS, "torch", "transformers", *sys.stdlib_module_names}
_OF_TRANSFORMERS = {"quanto": "optimum-quanto", "hqq": "hqq"}
"""What computes in caches of transformers' own."""
_SOURCES = {
    ".py", ".pyx", ".so", ".pyd", ".yaml", ".c", ".cc", ".cpp", ".h", ".hpp", ".inl", ".cu", ".cuh",
}  # fmt: skip
"""Endings of what is code of a package, or decides what it computes; other files may be its users'."""


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution, `"not installed"` of any other."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def code_settings() -> dict[str, str]:
    """Return what computes in every run, for the settings of its records: versions, and our own sources.

    A version says too little of our own: whoever works on the package, edits and runs again.

    Raises:
        OSError: If a source cannot be read.
    """
    settings = {name: version_of(name) for name in PACKAGES}
    settings[PACKAGES[0]] += f" (sources {_digest_module(_OURS)})"
    return settings


def is_foreign(cache_config: Mapping[str, Any]) -> bool:
    """Whether code of a third party computes in a cache, or in its storage.

    Args:
        cache_config (`Mapping`): Of a cache that has been built before.
    """
    return any(_foreign_code(cache_config))


def code_digests(cache_config: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of all code of third parties that computes in a cache, by a name for it.

    Of a package it is that of all its sources, because a class may compute with any of them, and of a module
    that is in none that of its file. Of what was typed into an interpreter, which has no file, it is that of
    the text of the classes where Python knows it; a change cannot be seen where it does not.

    Args:
        cache_config (`Mapping`): Of a cache that has been built before.

    Raises:
        OSError: If a source cannot be read.
    """
    digests = {}
    for code in _foreign_code(cache_config):
        name = f"the code of {code.distribution or code.module} {code.version or ''}".rstrip()
        digests[name] = digest_words([code.version or "", code.digest()])
    for backend in _backends(cache_config):
        if (package := _OF_TRANSFORMERS.get(backend)) is not None:
            version = version_of(package)
            digests[f"{package} {version}"] = digest_words([version])
    return digests


def foreign_versions(cache_configs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the version of each distribution of a third party that computes in a cache.

    Args:
        cache_configs (`Iterable[Mapping]`): Caches. Nothing is said of those that were not built here.

    Returns:
        `dict[str, str]`: By the name of the distribution; of a module that is in none, a script perhaps, it
        is `"in no distribution"`.
    """
    found = [code for cache_config in cache_configs for code in _foreign_code(cache_config)]
    return {code.distribution or code.module: code.version or "in no distribution" for code in found}


@dataclass(frozen=True)
class _Code:
    """A package of a third party, or a module that is in none.

    Args:
        module (`str`): Its name where it is imported.
        distribution (`str`, *optional*): What it was installed with.
        version (`str`, *optional*): Of the distribution.
        classes (`tuple[type, ...]`): What is used of it.
    """

    module: str
    distribution: str | None
    version: str | None
    classes: tuple[type, ...]

    def digest(self) -> str:
        digest = _digest_module(self.module)
        return digest_words(map(_source, self.classes)) if digest is None else digest


def _foreign_code(cache_config: Mapping[str, Any]) -> Iterator[_Code]:
    """Yield what computes in a cache and is neither ours nor of what we build on, each package once."""
    for backend in _backends(cache_config):
        cache_class: Any = None if backend in (*TRANSFORMERS_BACKENDS, "dense") else loaded_backend(backend)
        used = [cache_class, *(getattr(cache_class, name, None) for name in ("layer_class", "config_class"))]
        classes = dict.fromkeys(base for cls in used if isinstance(cls, type) for base in cls.__mro__)
        by_module: dict[str, list[type]] = {}
        for cls in classes:
            if cls.__module__.partition(".")[0] not in _KNOWN:
                by_module.setdefault(_outermost(cls.__module__), []).append(cls)
        for module, own in by_module.items():
            yield _Code(module, *_distribution(backend, module), tuple(own))


def _backends(options: Any) -> Iterator[str]:
    """Yield the backends that the options of a cache name, that of a storage included."""
    if isinstance(options, Mapping):
        for option, value in options.items():
            if option == "backend" and isinstance(value, str):
                yield value.lower()
            else:
                yield from _backends(value)


def _outermost(module: str) -> str:
    """Return the outermost package with a file of its own: one without is shared by many distributions."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((name for name in names if _file(name) is not None), module)


def _distribution(backend: str, module: str) -> tuple[str | None, str | None]:
    """Return name and version of the distribution that a module was installed with."""
    point = announced_by(backend)
    if point is not None and point.dist is not None and _outermost(point.module) == module:
        return point.dist.name, point.dist.version
    for name in _distributions().get(module.partition(".")[0], ()):
        return name, version_of(name)
    return None, None


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Return the distributions of every module; all that are installed are read for it."""
    return importlib.metadata.packages_distributions()


def _file(module: str) -> Path | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return None if file is None else Path(file)


def _digest_module(module: str) -> str | None:
    """Return a digest of the file of a module, or of all sources of a package; None if there is none."""
    file = _file(module)
    if file is None or not file.is_file():
        return None
    if not hasattr(sys.modules[module], "__path__"):
        return digest_files([file])
    return digest_files(sorted(path for path in file.parent.rglob("*") if path.suffix in _SOURCES))


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""
