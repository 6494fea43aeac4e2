"""Where an attention module computes queries, keys and values, whatever its family calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

__all__ = ["Layout", "find_layout"]

_SEPARATE = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Layout:
    """The projections of an attention module.

    Args:
        names (`tuple[str, ...]`): Attributes of the module: three projections, or a fused one.
        arrange (`Callable`): Brings their outputs, `(B, n, ...)` each, to `(B, n, input_dim)`: all queries,
            then all keys, then all values, heads in order.
    """

    names: tuple[str, ...]
    arrange: Callable[[list[Tensor]], Tensor]

    def modules(self, attention: nn.Module) -> list[nn.Module]:
        """Return the projections as they are now: wrapping or quantizing a model replaces them."""
        return [getattr(attention, name) for name in self.names]


def find_layout(attention: nn.Module, kv_heads: int, head_dim: int, *, multi_query: bool) -> Layout | None:
    """Tell from its attributes how a module projects; `None` if it is no attention of a known kind.

    | attributes | families | order of the output |
    |---|---|---|
    | `q_proj`, `k_proj`, `v_proj` | most | three tensors |
    | `qkv_proj`, `Wqkv`, `W_pack` | Phi-3, MPT | queries, keys, values |
    | `c_attn` | GPT-2; GPT-BigCode with `multi_query` | queries, keys, values |
    | `query_key_value`; the other `c_attn` | GPT-NeoX, BLOOM | by group: queries, key, value |

    Args:
        attention (`torch.nn.Module`): The module.
        kv_heads (`int`): Its key-value heads.
        head_dim (`int`): Channels of a head.
        multi_query (`bool`): The flag of the configuration with this name.
    """
    by_group = partial(_by_group, kv_heads, head_dim)  # no closure: models are pickled with their taps
    if all(isinstance(getattr(attention, name, None), nn.Module) for name in _SEPARATE):
        return Layout(_SEPARATE, _side_by_side)
    for name in ("qkv_proj", "Wqkv", "W_pack"):
        if isinstance(getattr(attention, name, None), nn.Module):
            return Layout((name,), _side_by_side)
    if isinstance(getattr(attention, "query_key_value", None), nn.Module):
        return Layout(("query_key_value",), by_group)
    if isinstance(getattr(attention, "c_attn", None), nn.Module):
        is_grouped = "BigCode" in type(attention).__name__ and not multi_query
        return Layout(("c_attn",), by_group if is_grouped else _side_by_side)
    return None


def _side_by_side(outputs: list[Tensor]) -> Tensor:
    return outputs[0] if len(outputs) == 1 else torch.cat([output.flatten(2) for output in outputs], dim=-1)


def _by_group(kv_heads: int, head_dim: int, outputs: list[Tensor]) -> Tensor:
    groups = outputs[0].unflatten(-1, (kv_heads, -1, head_dim))  # (B, n, kv heads, G + 2, D)
    parts = (groups[..., :-2, :], groups[..., -2, :], groups[..., -1, :])
    return torch.cat([part.flatten(2) for part in parts], dim=-1)
