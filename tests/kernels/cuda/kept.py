"""What tests compile is kept under a name that says what it depends on, while it is used.

It depends on nothing of the checkout, such as where it lies, and is kept for all checkouts of a user, beside
the kernels that are built at their first use: a fresh one finds what another has compiled. Where that cannot
be, pytest's cache takes it.

Whoever finds a file there renews its modification time, and whoever asks for a folder removes what nobody has
found there for some days: objects of sources that have changed since, mostly.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kvcache_plugins.kernels.builds import user_directory

__all__ = ["DAYS", "folder", "is_there", "remove_unused", "shared_folder"]

DAYS = 3
"""Without use: a weekend."""
_SUFFIXES = (".new", ".o", ".program", ".ptx", ".so", ".txt")
"""Of what is compiled, or was being compiled; locks stay, which somebody may hold."""
_SHARED = user_directory() / "tests"


def folder(config: pytest.Config, name: str) -> Path | None:
    """A folder without what is no longer used: for all checkouts, else of pytest's cache, if there is one."""
    shared = shared_folder(name)
    if shared is not None:
        return shared
    cache = getattr(config, "cache", None)
    if cache is None:
        return None
    found = Path(cache.mkdir(name))
    remove_unused(found)
    return found


def shared_folder(name: str) -> Path | None:
    """A folder for all checkouts of this user, without what is no longer used, if there can be one."""
    found = _SHARED / name
    try:
        found.mkdir(parents=True, exist_ok=True)
    except OSError:  # of a user without a home, or with one that is full
        return None
    if not os.access(found, os.W_OK):
        return None
    remove_unused(found)
    return found


def is_there(file: Path) -> bool:
    """Whether a file is there, of which it is noted then that it is used."""
    with suppress(OSError):  # such as that of somebody else
        os.utime(file)
    return file.exists()


def remove_unused(found: Path) -> None:
    """Remove what has not been used for `DAYS`, and directories left by compilers; as far as possible."""
    limit = time.time() - DAYS * 86400
    for path in found.iterdir():
        with suppress(OSError):  # another process does the same
            if path.stat().st_mtime >= limit:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            elif path.suffix in _SUFFIXES:
                path.unlink()
