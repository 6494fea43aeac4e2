"""The native CPU library: built at first use into the user's cache directory, found there ever after.

A build is named after everything it depends on: the sources, the operators' signatures, the flags, the
releases of torch and of Python's platform, and the compiler. Its last bytes are a digest of the others, so a
damaged file is recognised before the dynamic linker maps it. Several processes may need it at once: one
builds under a file lock, the others wait for it. Loading a build renews its modification time, and whoever
installs a new one removes those that nobody has loaded for 90 days.

Environment: `KVCACHE_KERNEL_CACHE` is the directory (default: `kvcache_plugins` in `XDG_CACHE_HOME` or
`~/.cache`), `KVCACHE_NO_BUILD=1` forbids building (a cached build still loads), `CXX` is the compiler,
`KVCACHE_CPU_ISA` the instruction set to use instead of the best.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import KernelUnavailableError
from . import compiler
from .ops import SCHEMAS

__all__ = [
    "KernelStatus",
    "build",
    "cache_directory",
    "cached_builds",
    "instruction_set",
    "status",
    "try_load",
]

_logger = logging.getLogger(__name__)
_SOURCES = Path(__file__).with_name("csrc") / "cpu"
_DIGEST_BYTES = 32
_HASH = "[0-9a-f]" * 16  # as a glob; see `_short_hash`
_KINDS = ("cpu", "cuda")
_UNUSED_SECONDS = 90 * 24 * 3600.0

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_path: Path | None = None
_failure: str | None = None


@dataclass(frozen=True)
class KernelStatus:
    """What is known of a native library, that for CPUs or that for GPUs, without building or loading it.

    Args:
        state (`str`): `"loaded"`, `"cached"` (an intact build exists), `"missing"` (the first decode builds
            it), or `"unavailable"`.
        path (`Path`, *optional*): The build in use, or the one that would be.
        cache_directory (`Path`): Where builds are kept.
        compiler (`str`, *optional*): Path and release.
        instruction_set (`str`, *optional*): What a loaded library uses.
        reason (`str`, *optional*): Why there is none, with the compiler's last lines.
    """

    state: str
    path: Path | None
    cache_directory: Path
    compiler: str | None
    instruction_set: str | None = None
    reason: str | None = None


def cache_directory() -> Path:
    """Directory of the builds; it need not exist."""
    given = os.environ.get("KVCACHE_KERNEL_CACHE")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "kvcache_plugins"


def cached_builds() -> dict[Path, os.stat_result]:
    """Every build in the cache directory, for CPUs and GPUs, of this and other versions.

    With its size and time of last use.
    """
    builds = {}
    directory = cache_directory()
    for path in sorted(found for kind in _KINDS for found in directory.glob(f"{kind}-{_HASH}-{_HASH}.so")):
        with suppress(OSError):  # another process has just removed it
            builds[path] = path.stat()
    return builds


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
            return KernelStatus("loaded", _path, cache_directory(), name, None, str(error))
        return KernelStatus("loaded", _path, cache_directory(), name, chosen)
    try:
        cached = _cached(found)
    except OSError as error:
        return KernelStatus("unavailable", None, cache_directory(), name, reason=str(error))
    if cached is not None:
        return KernelStatus("cached", cached, cache_directory(), name, reason=_failure)
    reason = _failure or _why_not_buildable(found)
    path = None if found is None else _target(found)
    return KernelStatus(
        "missing" if reason is None else "unavailable", path, cache_directory(), name, None, reason
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
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with compiler.file_lock(target.with_suffix(".lock")):
            if force or not _is_intact(target):  # another process may have built it meanwhile
                # Half a minute of silence in a first `generate()` would look like a hang.
                _logger.warning("building the CPU kernels into %s, once on this machine", target)
                compiler.compile_library(found, _SOURCES, target, _sealed)
                _remove_unused(target)
    except OSError as error:
        raise KernelUnavailableError(
            f"the kernel cache directory {cache_directory()} cannot be used ({error}); "
            "KVCACHE_KERNEL_CACHE names another."
        ) from error
    return target, None


def _cached(found: compiler.Compiler | None) -> Path | None:
    """An intact build of these sources: by this compiler if there is one, else by any."""
    if found is not None and _is_intact(_target(found)):
        return _target(found)
    if found is not None and not _is_building_forbidden():
        return None
    candidates = sorted(cache_directory().glob(f"cpu-{_source_key()}-*.so"))
    return next((path for path in candidates if _is_intact(path)), None)


def _why_not_buildable(found: compiler.Compiler | None) -> str | None:
    if _is_building_forbidden():
        return f"KVCACHE_NO_BUILD forbids building kernels, and none is cached in {cache_directory()}."
    if found is None:
        given = os.environ.get("CXX")
        return f"no C++ compiler was found ({f'CXX={given}' if given else 'g++ or c++ on the PATH'})."
    return None


def _is_building_forbidden() -> bool:
    return os.environ.get("KVCACHE_NO_BUILD", "") not in ("", "0")


def _target(found: compiler.Compiler) -> Path:
    return cache_directory() / f"cpu-{_source_key()}-{_short_hash(found.description)}.so"


def _source_key() -> str:
    parts = [torch.__version__, platform.system(), platform.machine(), repr(SCHEMAS), *compiler.FLAGS]
    for path in sorted(_SOURCES.iterdir()):
        parts += [path.name, path.read_text(encoding="utf-8")]
    return _short_hash("\0".join(parts))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sealed(content: bytes) -> bytes:
    """A library with its digest at the end, where the dynamic linker does not look."""
    return content + hashlib.sha256(content).digest()


def _is_intact(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:  # not there, or not readable, which building will name
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _remove_unused(current: Path) -> None:
    """Remove the builds, other than `current`, that were last loaded too long ago, as far as possible."""
    limit = time.time() - _UNUSED_SECONDS
    for path, state in cached_builds().items():
        if path != current and state.st_mtime < limit:
            with suppress(OSError):
                path.unlink(missing_ok=True)
                # Locks, and what is known of it. Should someone hold a lock, the worst that follows is that
                # two build the same file.
                for name in ("lock", "trial.lock", "*.trial"):
                    for beside in path.parent.glob(f"{path.stem}.{name}"):
                        beside.unlink(missing_ok=True)


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))  # registers the implementations
    with suppress(OSError):  # the directory may be read-only, or somebody else's
        os.utime(path)
    library.kvcache_cpu_instruction_set.restype = ctypes.c_char_p
    return library
