"""What kernels ask of shared and global memory, counted by the PTX machine as `ptx/counting.h` says."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Access", "Kernel", "count"]

_KERNEL = re.compile(r"(?:void )?(?:kvcache::)?(?P<name>[^(]+)")


class Access(NamedTuple):
    """What instructions have asked of memory, over all warps that executed them."""

    times: int = 0
    wavefronts: int = 0
    """Of shared memory: times that it is busy, with 128 bytes at most."""
    least: int = 0
    """Wavefronts if no two words had met in a bank."""
    sectors: int = 0
    """Of global memory, 32 bytes each."""
    bytes: int = 0
    """Of global memory that were asked for."""

    @property
    def conflicts(self) -> int:
        """Wavefronts that banks have cost."""
        return self.wavefronts - self.least


class Kernel(NamedTuple):
    """All launches of a kernel."""

    warps: int
    instructions: dict[str, Access]
    """By place: LISTING:LINE `STATEMENT` of SOURCE:LINE."""

    def total(self, *names: str) -> Access:
        """Of the instructions whose names begin like one of these; of all of them, if there are none.

        They are those of the PTX: moves and 64-bit arithmetic that ptxas drops are among them.
        """
        pattern = re.compile(rf"`(@\S+ +)?({'|'.join(map(re.escape, names))})")
        found = [access for place, access in self.instructions.items() if pattern.search(place)]
        return Access(*map(sum, zip(*found, strict=True)))

    def culprits(self, value: Callable[[Access], float], most: int = 5) -> str:
        """Places with most of something, a line each, for whoever looks for what costs it."""
        values = {place: value(access) for place, access in self.instructions.items()}
        places = sorted(values, key=lambda place: -values[place])[:most]
        return "\n".join(f"{values[place]:12g}  {place}" for place in places if values[place] > 0)

    def __sub__(self, other: Kernel) -> Kernel:
        """What has been done more: by loops, if all that is around them is the same."""
        more = {
            place: Access(
                *(a - b for a, b in zip(access, other.instructions.get(place, Access()), strict=True))
            )
            for place, access in self.instructions.items()
        }
        return Kernel(self.warps - other.warps, more)


def count(library: ctypes.CDLL, run: Callable[[], object]) -> dict[str, Kernel]:
    """What kernels do, by their names, while `run` runs."""
    library.kvcache_ptx_counts.restype = ctypes.c_char_p
    library.kvcache_count_accesses(True)
    run()
    library.kvcache_count_accesses(False)
    kernels: dict[str, Kernel] = {}
    for line in library.kvcache_ptx_counts().decode().splitlines():
        name, *numbers = line.split("\t")
        if len(numbers) == 1:
            match = _KERNEL.match(name)
            assert match is not None
            kernel = kernels[match["name"]] = Kernel(int(numbers[0]), {})
        else:
            kernel.instructions[name] = Access(*map(int, numbers))
    return kernels
