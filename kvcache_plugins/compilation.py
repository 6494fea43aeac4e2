"""What a compiled model runs as it is written: the bookkeeping of caches, which is no arithmetic on tensors.

A compiler that traced it would write what a layer counts (tokens held, blocks that are due) into its graphs
as conditions, and compile them anew whenever one of these numbers has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["outside_graphs"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_graphs(function: _Function) -> _Function:
    """Decorator: a compiled model calls `function`, and all that it calls, without tracing it."""
    uncompiled: _Function = torch.compiler.disable(function)
    return uncompiled
