"""Builds of native code: the directory they are kept in, how a damaged one is told, and when one is removed.

A build is a library named after everything it depends on: its kind, a hash of its sources and what else
decides them, and what compiles it (a hash) or which release of nvcc and for which GPUs. Its last bytes are a
digest of the others, so a damaged file is recognized before the dynamic linker maps it. Several processes may
need it at once: one builds under a file lock, the others wait for it. Loading a build renews its modification
time, and whoever installs a new one removes those that nobody has loaded for 90 days, and what builds that
were killed have left.

Environment: `KVCACHE_KERNEL_CACHE` is the directory (default: `kvcache_plugins` in `XDG_CACHE_HOME` or
`~/.cache`), `KVCACHE_NO_BUILD=1` forbids building (a build that is there still loads).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import KernelUnavailableError
from .compiler import BUILD_PREFIX, file_lock

__all__ = [
    "KernelStatus",
    "cache_directory",
    "cached_builds",
    "install",
    "is_intact",
    "load",
    "sealed",
    "short_hash",
    "user_directory",
    "why_forbidden",
]

_logger = logging.getLogger(__name__)
_DIGEST_BYTES = 32
_HASH = "[0-9a-f]" * 16  # as a glob; see `short_hash`
_NAMES = (f"cpu-{_HASH}-{_HASH}.so", f"cuda-{_HASH}-*.so")
_UNUSED_SECONDS = 90 * 24 * 3600.0
_ABANDONED_SECONDS = 24 * 3600.0
"""Age of a directory in which nobody builds any more: its process was killed."""


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
    return Path(given).expanduser() if given else user_directory()


def user_directory() -> Path:
    """Directory of what is kept for this user where nothing else is said; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME")
    is_valid = bool(base) and Path(str(base)).is_absolute()  # or it is to be ignored, says its specification
    return (Path(str(base)) if is_valid else Path("~/.cache").expanduser()) / "kvcache_plugins"


def cached_builds() -> dict[Path, os.stat_result]:
    """Every build in the cache directory, for CPUs and GPUs, of this and other versions.

    With its size and time of last use.
    """
    builds = {}
    directory = cache_directory()
    for path in sorted(found for name in _NAMES for found in directory.glob(name)):
        with suppress(OSError):  # another process has just removed it
            builds[path] = path.stat()
    return builds


def install(target: Path, kind: str, make: Callable[[], None], *, force: bool = False) -> bool:
    """Make a build under its lock, unless another process has made it meanwhile.

    Args:
        target (`Path`): Where it is to be.
        kind (`str`): What is built, for the log.
        make (`Callable`): Puts it there, sealed, at once or not at all.
        force (`bool`): Make it even if there is an intact one.

    Returns:
        `bool`: Whether this process has made it.

    Raises:
        KernelUnavailableError: If the cache directory cannot be used, or as `make` raises it.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(target.with_suffix(".lock")):
            if not force and is_intact(target):
                return False
            # Half a minute of silence in a first `generate()` would look like a hang.
            _logger.warning("building the %s kernels into %s, once on this machine", kind, target)
            make()
            _remove_unused(target)
    except OSError as error:
        raise KernelUnavailableError(
            f"the kernel cache directory {target.parent} cannot be used ({error}); "
            "KVCACHE_KERNEL_CACHE names another."
        ) from error
    return True


def load(path: Path) -> ctypes.CDLL:
    """Load a library, which registers its implementations, and note that it is in use."""
    library = ctypes.CDLL(str(path))
    with suppress(OSError):  # the directory may be read-only, or somebody else's
        os.utime(path)
    return library


def sealed(content: bytes) -> bytes:
    """A library with its digest at the end, where the dynamic linker does not look."""
    return content + hashlib.sha256(content).digest()


def is_intact(path: Path) -> bool:
    """Whether a build is there, and whole."""
    try:
        content = path.read_bytes()
    except OSError:  # not there, or not readable, which building will name
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def short_hash(text: str) -> str:
    """The 16 digits that stand for a text in the name of a file."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def why_forbidden() -> str | None:
    """Why nothing may be built; `None` if it may."""
    if platform.system() == "Windows":
        return "kernels are built on Linux and macOS only."
    if os.environ.get("KVCACHE_NO_BUILD", "") in ("", "0"):
        return None
    return f"KVCACHE_NO_BUILD forbids building kernels, and none is cached in {cache_directory()}."


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
    for path in current.parent.glob(f"{BUILD_PREFIX}*"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _ABANDONED_SECONDS:
                shutil.rmtree(path)
