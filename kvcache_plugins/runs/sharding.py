"""Cutting an evaluation over the processes of a run, started by `accelerate launch` or `torchrun`.

Items are dealt out in turn, every process keeps its records in a journal of its own, and the first process
puts all of them together in the order of the items. Sums are therefore taken in the same order whatever the
number of processes, and give the same numbers to the last bit.

The processes of a tensor parallel model hold one model between them: all of them work on every item, and the
first one writes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import str_to_bool

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
        processes (`int`): How many the run has. More than `count` if they hold one model between them.
    """

    process: int = 0
    index: int = 0
    count: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    processes: int = 1

    @classmethod
    def of_this_process(cls, *, is_tensor_parallel: bool = False) -> Shard:
        """Return the part of this process; joins the process group if there is one to join."""
        # Unless told that this is a run of CPUs, accelerate looks for accelerators alone, finds none, and
        # leaves every process to itself.
        wants_cpu = str_to_bool(os.environ.get("ACCELERATE_USE_CPU", "false"))
        state = PartialState(cpu=bool(wants_cpu) or not torch.accelerator.is_available())
        if wants_cpu and state.num_processes == 1 and "MASTER_PORT" in os.environ:
            warnings.warn(
                "`accelerate launch --cpu --num_processes N` starts a single process unless it is given a "
                "file of MPI hosts. `torchrun --nproc_per_node N` starts N.",
                stacklevel=2,
            )
        process, count, device = state.process_index, state.num_processes, state.device
        index, parts = (0, 1) if is_tensor_parallel else (process, count)
        return cls(process, index, parts, device, count)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the results."""
        return self.process == 0

    @property
    def keeps_records(self) -> bool:
        """Whether the records of this process are its own; not those that repeat what the first one finds."""
        return self.is_main or self.count > 1

    def total(self, value: int) -> int:
        """Return the sum over the processes that hold one model between them, such as the bytes of a cache.

        Every one of them has to call this. A process that holds a whole model gets its own value back.
        """
        if self.processes == self.count:
            return value
        amount = torch.tensor(value, device=self.device)
        torch.distributed.all_reduce(amount)
        return int(amount)

    def take(self, items: Sequence[T]) -> list[T]:
        """Return this process's items, in order."""
        return list(items[self.index :: self.count])

    def wait(self) -> None:
        """Wait until all processes have come here."""
        PartialState().wait_for_everyone()
