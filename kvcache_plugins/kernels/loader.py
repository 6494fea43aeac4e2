"""The native CPU library: built at first use into the user's cache directory, found there ever after.

A build is named after everything it depends on: the sources, the operators' signatures, the flags, the
releases of torch and of Python's platform, and the compiler. How builds are kept is said in `builds`.

Environment, beside that of `builds`: `CXX` is the compiler, `KVCACHE_CPU_ISA` the instruction set to use
instead of the best.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import threading
import warnings
from pathlib import Path

import torch

from ..errors import KernelUnavailableError
from . import builds, compiler
from .builds import KernelStatus
from .ops import SCHEMAS

__all__ = ["build", "instruction_set", "status", "try_load"]

_logger = logging.getLogger(__name__)
_SOURCES = Path(__file__).with_name("csrc") / "cpu"

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_path: Path | None = None
_failure: str | None = None


def try_load() -> bool:
    """Make the native implementations available, building them if need be.

    Never raises. The first failure of a process is told in one warning and remembered; later calls return
    false at once.
    """
    if _library is not None:
        return True
    if _failure is not None:
        return False
    try:
        build()
    except KernelUnavailableError as error:
        warnings.warn(
            f"Attention over packed keys and values runs in plain torch, which is slower: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def build(*, force: bool = False) -> Path:
    """Load the library, building it first if there is no intact build.

    Args:
        force (`bool`): Build anew even if there is one. What the process has loaded stays in use.

    Returns:
        `Path`: The library.

    Raises:
        KernelUnavailableError: If it can neither be found nor built, with the reason and the compiler's last
            lines.
    """
    global _library, _path, _failure
    with _lock:
        if _library is not None and _path is not None and not force:
            return _path
        try:
            if _failure is not None and not force:
                raise KernelUnavailableError(_failure)
            path, library = _find_or_build(force)
            if _library is None:
                _library, _path = library or _load(path), path
        except (OSError, KernelUnavailableError) as error:
            _failure = str(error)
            raise KernelUnavailableError(_failure) from error
        _failure = None
        return path


def instruction_set() -> str:
    """Name of the instruction set the loaded library uses: `"avx512"`, `"avx2"` or `"portable"`.

    Raises:
        KernelUnavailableError: If no library is loaded.
        ValueError: If `KVCACHE_CPU_ISA` names none, or one this processor lacks.
    """
    if _library is None:
        raise KernelUnavailableError("The native library is not loaded.")
    answer = str(_library.kvcache_cpu_instruction_set().decode())
    if answer.startswith("error: "):
        raise ValueError(answer.removeprefix("error: "))
    return answer


def status() -> KernelStatus:
    """Return the state of the library. Never builds, loads or raises."""
    found = compiler.find_compiler()
    name = None if found is None else found.description
    if _library is not None:
        try:
            chosen = instruction_set()
        except ValueError as error:
            return KernelStatus("loaded", _path, builds.cache_directory(), name, None, str(error))
        return KernelStatus("loaded", _path, builds.cache_directory(), name, chosen)
    try:
        cached = _cached(found)
    except OSError as error:
        return KernelStatus("unavailable", None, builds.cache_directory(), name, reason=str(error))
    if cached is not None:
        return KernelStatus("cached", cached, builds.cache_directory(), name, reason=_failure)
    reason = _failure or _why_not_buildable(found)
    path = None if found is None else _target(found)
    return KernelStatus(
        "missing" if reason is None else "unavailable", path, builds.cache_directory(), name, None, reason
    )


def _find_or_build(force: bool) -> tuple[Path, ctypes.CDLL | None]:
    """Return the path of an intact build, and the library if finding it meant loading it."""
    found = compiler.find_compiler()
    if not force:
        cached = _cached(found)
        if cached is not None:
            try:
                return cached, _load(cached)
            except OSError as error:  # intact, but not for this process: rebuilt once
                _logger.info("%s does not load: %s", cached, error)
                force = True
    reason = _why_not_buildable(found)
    if reason is not None:
        raise KernelUnavailableError(reason)
    assert found is not None
    target = _target(found)
    builds.install(
        target,
        "CPU",
        lambda: compiler.compile_library(found, _SOURCES, target, builds.sealed),
        force=force,
    )
    return target, None


def _cached(found: compiler.Compiler | None) -> Path | None:
    """An intact build of these sources: by this compiler if there is one, else by any."""
    if found is not None and builds.is_intact(_target(found)):
        return _target(found)
    if found is not None and builds.why_forbidden() is None:
        return None
    candidates = sorted(builds.cache_directory().glob(f"cpu-{_source_key()}-*.so"))
    return next((path for path in candidates if builds.is_intact(path)), None)


def _why_not_buildable(found: compiler.Compiler | None) -> str | None:
    if found is None and builds.why_forbidden() is None:
        given = os.environ.get("CXX")
        return f"no C++ compiler was found ({f'CXX={given}' if given else 'g++ or c++ on the PATH'})."
    return builds.why_forbidden()


def _target(found: compiler.Compiler) -> Path:
    return builds.cache_directory() / f"cpu-{_source_key()}-{builds.short_hash(found.description)}.so"


def _source_key() -> str:
    parts = [torch.__version__, platform.system(), platform.machine(), repr(SCHEMAS), *compiler.FLAGS]
    for path in sorted(_SOURCES.iterdir()):
        parts += [path.name, path.read_text(encoding="utf-8")]
    return builds.short_hash("\0".join(parts))


def _load(path: Path) -> ctypes.CDLL:
    library = builds.load(path)
    library.kvcache_cpu_instruction_set.restype = ctypes.c_char_p
    return library
