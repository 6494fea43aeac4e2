"""FlashInfer's batch decode over a paged dense cache, as a dense way to compare with, where it is installed.

Pages hold `_PAGE_TOKENS` tokens each, keys and values `(pages, Hkv, _PAGE_TOKENS, D)` (its layout "HND"), in
the order of the rows. The plan, which a program makes once per step for all layers of a model, is not timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .states import AttentionShape, States

__all__ = ["flashinfer_ways"]

_Way = Callable[[States], Callable[[], Tensor]]
_PAGE_TOKENS = 16
_WORKSPACE_BYTES = 128 << 20
"""What the library's documentation recommends."""


def flashinfer_ways(shape: AttentionShape, device: torch.device) -> tuple[dict[str, _Way], dict[str, str]]:
    """Return batch decode with and without tensor cores, planned for a shape.

    Returns:
        `tuple[dict, dict]`: What prepares attention over states, by name, and the reasons of what is not
        there. Nothing is raised, whatever the library does.
    """
    try:
        library = importlib.import_module("flashinfer")
    except ModuleNotFoundError:
        return {}, {"flashinfer": "not installed"}
    except Exception as error:  # an installation may be broken in any way
        return {}, {"flashinfer": f"cannot be imported: {type(error).__name__}: {error}"}
    ways: dict[str, _Way] = {}
    reasons = {}
    for name, has_tensor_cores in (("flashinfer", False), ("flashinfer_tensor_cores", True)):
        try:
            ways[name] = _PagedDecode(library, shape, device, has_tensor_cores)
        except Exception as error:  # it compiles its kernels now, and supports what it supports
            reasons[name] = f"{type(error).__name__}: {error}"[:240]
    return ways, reasons


class _PagedDecode:
    def __init__(
        self, library: Any, shape: AttentionShape, device: torch.device, has_tensor_cores: bool
    ) -> None:
        if shape.key_dim != shape.value_dim:
            raise ValueError("keys and values must have the same channels")
        rows, tokens = shape.batch_size, shape.length + 1
        pages = -(-tokens // _PAGE_TOKENS)
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=has_tensor_cores
        )
        integers = partial(torch.tensor, dtype=torch.int32, device=device)
        self.wrapper.plan(
            integers([row * pages for row in range(rows + 1)]),
            torch.arange(rows * pages, dtype=torch.int32, device=device),
            integers([tokens - (pages - 1) * _PAGE_TOKENS] * rows),
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.key_dim,
            _PAGE_TOKENS,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )

    def __call__(self, states: States) -> Callable[[], Tensor]:
        query = states.query.squeeze(2).contiguous()
        pages = _paged(states.keys), _paged(states.values)

        def call() -> Tensor:
            output: Tensor = self.wrapper.run(query, pages)
            return output.unsqueeze(2)

        return call


def _paged(states: Tensor) -> Tensor:
    """`(B, H, T, D)` -> `(B * pages, H, _PAGE_TOKENS, D)`, the last page of a row filled up with zeros."""
    missing = -states.shape[2] % _PAGE_TOKENS
    padded = torch.nn.functional.pad(states, (0, 0, 0, missing))
    pages: Tensor = padded.unflatten(2, (-1, _PAGE_TOKENS)).transpose(1, 2).flatten(0, 1)
    return pages.contiguous()
