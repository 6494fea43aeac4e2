"""What a compiled model runs as it is written: the bookkeeping of caches, which is no arithmetic on tensors.

A compiler that traced it would write what a layer counts (tokens held, blocks that are due) into its graphs
as conditions, and compile them anew whenever one of these numbers has changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.fx.node import has_side_effect

__all__ = ["define_opaque", "makes_graph", "outside_graphs"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_graphs(function: _Function) -> _Function:
    """Decorator: a compiled model calls `function`, and all that it calls, without tracing it."""
    uncompiled: _Function = torch.compiler.disable(function)
    return uncompiled


def makes_graph(device_type: str) -> bool:
    """Whether a compiler is making a graph of what runs, in which the caller may put an operator.

    Not of one that is exported, for other processes, that needs gradients, which operators do not have, or
    under autocast, which is over when a graph runs.

    Args:
        device_type (`str`): Of the tensors.
    """
    return (
        torch.compiler.is_dynamo_compiling()
        and not _is_exporting()
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(device_type)
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_exporting() -> bool:
    """What torch says if it is asked, and the question is not traced: torch 2.11 then takes it for true."""
    return torch.compiler.is_exporting()


def define_opaque(name: str, schema: str, function: Callable[..., Any], shape: Callable[..., Any]) -> None:
    """Define an operator of the package that compilers call without looking into it, once per process.

    It may read and write what is no tensor, so that a CUDA graph cannot record it: compilers that make such
    graphs are told to end one before it and begin another behind it.

    Args:
        name (`str`): Its name in `torch.ops.kvcache_plugins`.
        schema (`str`): Its signature.
        function (`Callable`): What it does, on any device. That of the same name is called which its module
            has then: a module may be imported again, an operator is registered once.
        shape (`Callable`): Makes results without numbers.
    """
    if hasattr(torch.ops.kvcache_plugins, name):
        return
    torch.library.define(f"kvcache_plugins::{name}", schema, tags=(torch.Tag.cudagraph_unsafe,))

    def called(*args: Any) -> Any:
        return getattr(sys.modules[function.__module__], function.__name__)(*args)

    torch.library.impl(f"kvcache_plugins::{name}", "default", called)
    torch.library.register_fake(f"kvcache_plugins::{name}", shape)
    has_side_effect(
        getattr(torch.ops.kvcache_plugins, name).default
    )  # or it is left out of what nobody reads
