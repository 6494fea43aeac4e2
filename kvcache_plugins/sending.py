"""Caches that go to another process, through queues and pipes or with the arguments of a process, as copies.

The pickles that Python makes for this put the memory of tensors where both processes go on sharing it, and
layers write to theirs in place: what one process generated would change what the other holds. So the sender
hands over a copy, and the receiver makes one of it. From what came it would else keep a file open for every
tensor and, on GPUs, memory of the sender, and share both with processes that it forks.

Pickles of other kinds share nothing, and are left as they are.
"""

from __future__ import annotations

import copy
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any
from weakref import WeakSet

__all__ = ["send_as_copies"]

_parcels: WeakSet[Any] = WeakSet()  # copies that are on their way, of which there need be no others


def send_as_copies(cache_class: type) -> None:
    """Let what another process is given of a cache of this very class, and not of a subclass, be a copy.

    Args:
        cache_class (`type[KVCache]`): Its instances are copied by `copy.deepcopy`.
    """
    ForkingPickler.register(cache_class, _reduced)


def _reduced(cache: Any) -> Any:
    """Return how to make a cache in the process that is given it, as `__reduce__` does."""
    if cache in _parcels:
        return cache.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    parcel = copy.deepcopy(cache)
    _parcels.add(parcel)
    return copy.deepcopy, (parcel,)
