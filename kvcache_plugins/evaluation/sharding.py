"""Cutting an evaluation over the processes of a run, started by `accelerate launch` or `torchrun`.

Items are dealt out in turn, every process keeps its records in a journal of its own, and the first process
puts all of them together in the order of the items. Sums are therefore taken in the same order whatever the
number of processes, and give the same numbers to the last bit.

The processes of a tensor parallel model hold one model between them: all of them work on every item, and the
first one writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from accelerate import PartialState

__all__ = ["Shard"]

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """The part of one process.

    Args:
        process (`int`): Its index; 0 writes the results.
        index (`int`), count (`int`): It does items `index`, `index + count`, ...
        device (`torch.device`): Where its model belongs, unless a device map or a tensor parallel plan
            says otherwise.
    """

    process: int = 0
    index: int = 0
    count: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of_this_process(cls, *, is_tensor_parallel: bool = False) -> Shard:
        """Return the part of this process; joins the process group if there is one to join."""
        state = PartialState()
        process, count, device = state.process_index, state.num_processes, state.device
        return cls(process, 0, 1, device) if is_tensor_parallel else cls(process, process, count, device)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the results."""
        return self.process == 0

    def take(self, items: Sequence[T]) -> list[T]:
        """Return this process's items, in order."""
        return list(items[self.index :: self.count])

    def wait(self) -> None:
        """Wait until all processes have come here."""
        PartialState().wait_for_everyone()
