"""For which GPUs the CUDA kernels are built: those present or named, without those that are too old for them.

`TORCH_CUDA_ARCH_LIST` is often set for everything of an image, and then names architectures for which the
kernels do not compile. torch itself says what the list means (names of families, separators, what it takes
for the GPUs present where there is no list), and gets a list without these.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..errors import KernelUnavailableError

__all__ = ["OLDEST", "VARIABLE", "asked_for", "to_build", "told_to_torch"]

OLDEST = (8, 0)
"""Compute capability that the kernels need at least."""
VARIABLE = "TORCH_CUDA_ARCH_LIST"
_CODE = re.compile(r"code=(sm|compute)_(\d+)(\d)([a-z]?)$")


def asked_for() -> str | None:
    """The list the user has given; `None` where the GPUs present decide."""
    given = os.environ.get(VARIABLE, "")
    return None if given in ("", "native") else given


def to_build() -> tuple[str, ...]:
    """What a build is for, one by one and in the words of the list: `("8.0", "9.0a", "12.0+PTX")`.

    Raises:
        KernelUnavailableError: If nothing is left without what is too old, or torch does not know the list.
    """
    from torch.utils import cpp_extension

    given = asked_for()
    source = "the GPUs here" if given is None else f"{VARIABLE}={given!r}"
    try:
        codes = [_code(flag) for flag in cpp_extension._get_cuda_arch_flags()]
    except Exception as error:  # a ValueError if it is unknown, others if it is no list
        raise KernelUnavailableError(f"torch cannot tell from {source} what to build for: {error}") from error
    suffixes: dict[tuple[int, int, str], str] = {}
    for kind, major, minor, letter in codes:
        if (major, minor) >= OLDEST:
            suffix = "+PTX" if kind == "compute" else ""
            suffixes[major, minor, letter] = suffixes.get((major, minor, letter), "") or suffix
    if not suffixes:
        oldest = "{}.{}".format(*OLDEST)
        raise KernelUnavailableError(
            f"the kernels compile for compute capability {oldest} and newer, of which there is none in "
            f"{source} ({VARIABLE}='{oldest};9.0', for example, names two)."
        )
    return tuple(f"{key[0]}.{key[1]}{key[2]}{suffix}" for key, suffix in sorted(suffixes.items()))


def _code(flag: str) -> tuple[str, int, int, str]:
    """What one of torch's flags lets nvcc make: machine code (`"sm"`) or PTX (`"compute"`), and for what."""
    found = _CODE.search(flag)
    if found is None:
        raise ValueError(f"{flag!r} names no architecture")
    return found[1], int(found[2]), int(found[3]), found[4]


@contextmanager
def told_to_torch(architectures: Sequence[str]) -> Iterator[None]:
    """Let torch build extensions for these for as long as this lasts, and for its own choice after."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = ";".join(architectures)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
