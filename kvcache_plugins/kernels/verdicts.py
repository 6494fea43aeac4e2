"""What is known of a build of the CUDA kernels on a model of GPU: a file that later processes read.

It lies beside the build. Where that directory cannot be written to, as in an image or where an administrator
has filled it, it lies in a directory of the user's own: `trials` in `builds.user_directory`, or one named
after the user in the system's directory for temporary files. A directory of these that is a link, belongs to
somebody else, or that others may write to is neither read nor written to; as Windows tells this otherwise,
there are none there.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from . import builds
from .compiler import file_lock

__all__ = ["Verdict", "VerdictFile"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """Outcome of a trial.

    Args:
        device (`str`): The model of GPU, with the driver.
        fault (`str`, *optional*): Why the kernels must not be used there; `None` if they have passed.
        is_final (`bool`): Whether another trial would find the same.
        ran_out (`bool`): Whether it was ended, for it took too long.
    """

    device: str
    fault: str | None
    is_final: bool
    ran_out: bool = False


@dataclass(frozen=True)
class VerdictFile:
    """Where the verdict on a build is or will be.

    Args:
        library (`Path`): The build.
        key (`str`): Stands for its bytes, the model of GPU and the driver in the name of the file.
    """

    library: Path
    key: str

    def read(self, started: float) -> Verdict | None:
        """The verdict, if it is final or has been found since `started`, in seconds since the epoch.

        With 0 it is the latest, whatever it is.
        """
        for directory in self._directories(make=False):
            with suppress(OSError, ValueError, TypeError):  # not there, not whole, not ours
                file = directory / self._name
                verdict = Verdict(**json.loads(file.read_text(encoding="utf-8")))
                if verdict.is_final or file.stat().st_mtime >= started:
                    return verdict
        return None

    def write(self, verdict: Verdict) -> None:
        """Keep a verdict; never raises, and says so where it cannot be kept."""
        for directory in self._directories(make=True):
            with suppress(OSError):
                whole = directory / f"{self._name}.{os.getpid()}"  # readers take no lock
                whole.write_text(json.dumps(asdict(verdict), indent=1), encoding="utf-8")
                whole.replace(directory / self._name)
                return
        _logger.warning(
            "what was found of the CUDA kernels can be kept in none of %s, so every process tries them "
            "again; KVCACHE_KERNEL_CACHE names another directory for builds, KVCACHE_CUDA_KERNELS=1 does "
            "without trials",
            ", ".join(map(str, [self.library.parent, *_of_the_user()])),
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from holding the same trial, as far as there is a place for a lock."""
        with ExitStack() as stack:
            for directory in self._directories(make=True):
                with suppress(OSError):
                    stack.enter_context(file_lock(directory / f"{self.library.stem}.trial.lock"))
                    break
            yield

    @property
    def _name(self) -> str:
        return f"{self.library.stem}.{self.key}.trial"

    def _directories(self, *, make: bool) -> Iterator[Path]:
        """Those that may be used, the best first; with `make`, they are made when their turn comes."""
        yield self.library.parent
        for directory in _of_the_user():
            if _is_private(directory, make=make):
                yield directory


def _of_the_user() -> list[Path]:
    if os.name != "posix":  # whom a directory belongs to, and who may write to it, is told otherwise there
        return []
    found = []
    with suppress(RuntimeError):  # without a home
        found.append(builds.user_directory() / "trials")
    with suppress(OSError):  # without a place for temporary files
        found.append(Path(tempfile.gettempdir()) / f"kvcache_plugins-{os.geteuid()}")
    return found


def _is_private(directory: Path, *, make: bool) -> bool:
    """Whether a directory is there, is the user's, and nobody else may put anything into it."""
    try:
        if make:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = directory.lstat()  # its own, should it be a link
    except OSError:
        return False
    is_shared = bool(state.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not is_shared
