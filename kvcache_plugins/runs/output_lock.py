"""One run at a time in an output directory: two would mix their records, and delete each other's."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from accelerate.utils import get_int_from_env
from filelock import FileLock, Timeout

__all__ = ["writing_alone"]

_LOCK_FILE = ".kvcache-plugins.lock"
_RANK = ["RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"]
"""Where launchers tell a process its index; the first one locks for all of its run."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def writing_alone(output: Path, option: str = "output") -> Iterator[None]:
    """Keep every other run out of a directory until the block ends, or the process does, however it ends.

    Args:
        output (`Path`): The directory; made if need be, and deleted if it was made and stays empty.
        option (`str`): What it was given as, for the message.

    Raises:
        ValueError: If another run is writing there, or it cannot be a directory.
        OSError: If nothing can be written there.
    """
    try:
        is_new = not output.exists()
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a link to nowhere, or too long a name
        raise ValueError(
            f"--{option} must be a directory that can be written to, got {str(output)!r}: {error.strerror}."
        ) from error
    path = output / _LOCK_FILE
    lock = FileLock(path)
    if get_int_from_env(_RANK, 0) == 0:
        _acquire(lock, output, option)
    try:
        yield
    finally:
        if lock.is_locked:
            # while nobody else can have it; a system that deletes no open file does so when it is released
            with suppress(OSError):
                path.unlink()
            lock.release()
        if is_new:
            with suppress(OSError):  # it holds what the block has written
                output.rmdir()


def _acquire(lock: FileLock, output: Path, option: str) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"--{option}: another run is writing to {str(output)!r}. Wait for its end, or choose another "
            f"--{option}."
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"The file system of {str(output)!r} has no locks ({error.strerror}): nothing keeps a second run "
            f"from the same --{option}.",
            stacklevel=4,
        )
