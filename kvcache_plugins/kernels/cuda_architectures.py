"""For which GPUs the CUDA kernels are built, and which a build serves.

Built for are those present or named, without those that are too old for the kernels.

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

__all__ = ["OLDEST", "VARIABLE", "asked_for", "runs_on", "to_build", "to_serve", "told_to_torch"]

OLDEST = (8, 0)
"""Compute capability that the kernels need at least."""
VARIABLE = "TORCH_CUDA_ARCH_LIST"
_ENTRY = re.compile(r"(\d+)\.(\d)([a-z]?)(\+PTX)?")
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


def to_serve(present: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Compute capabilities a build must run on here: of the GPUs present or, without any, those named.

    Args:
        present (`Sequence`): Of all GPUs; those too old for the kernels are not to be served.

    Raises:
        KernelUnavailableError: As [`to_build`] raises it, where there is none.
    """
    served = [capability for capability in present if capability >= OLDEST]
    if present:
        return served
    found = [_ENTRY.fullmatch(architecture) for architecture in to_build()]
    return sorted({(int(entry[1]), int(entry[2])) for entry in found if entry is not None})


def runs_on(architectures: Sequence[str], capability: tuple[int, int], *, from_ptx: bool) -> bool:
    """Whether a build has what a GPU runs.

    Machine code runs on its own major version from its minor one on; what ends in a letter, on that alone.

    Args:
        architectures (`Sequence`): Of the build, in the words of the list.
        capability (`tuple`): Of the GPU.
        from_ptx (`bool`): Count PTX as well, which the driver, if new enough, translates for newer GPUs.
    """
    for entry in filter(None, map(_ENTRY.fullmatch, architectures)):
        built = (int(entry[1]), int(entry[2]))
        if built == capability:
            return True
        is_older = built < capability and not entry[3]
        if is_older and (built[0] == capability[0] or (from_ptx and entry[4] is not None)):
            return True
    return False


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
