"""Multi-head latent attention: models whose keys and values are linear maps of one short latent per token.

Such a model (DeepSeek-V2, arXiv 2405.04434, section 2.1) caches a latent `c` of `kv_lora_rank` numbers and a
rotated key `r` that all heads share. Head `h` has the key `[K c, r]` and the value `V c`, with its own rows
`K` and `V` of the weight of `kv_b_proj`. A query `[a, b]` therefore has the logits

    a . K c + b . r = (K^T a) . c + b . r,        and        sum_t p_t V c_t = V sum_t p_t c_t,

so attention can read the latents as they are: the query is mapped once, and so is what comes out.
Transformers maps every cached latent at every step instead, which for DeepSeek-V2-Lite is 2 million products
a token, layer and step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["LatentProjection", "projection_of"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_CONVERTED = 1 << 20
"""Numbers of a weight that are converted at once."""
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class _Made(NamedTuple):
    """A dense weight, and the parameters it was made of, each with a number that changes as it does."""

    parameters: Sequence[tuple[Tensor, int]]
    weight: Tensor

    def is_of(self, parameters: Sequence[tuple[Tensor, int]]) -> bool:
        """Whether these are the very parameters, unchanged."""
        pairs = zip(self.parameters, parameters, strict=False)
        return len(parameters) == len(self.parameters) and all(
            old is new and version == now for (old, version), (new, now) in pairs
        )


_made: WeakKeyDictionary[nn.Module, _Made] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class LatentProjection:
    """What makes keys and values of latents.

    Args:
        weight (`torch.Tensor` of shape `(H, Dn + Dv, R)`): Rows of every head: those of its keys, then those
            of its values.
        key_dim (`int`): `Dn`, channels of a key that come from the latent.
        copied_bytes (`int`): What `weight` takes beside the model's own, if that is quantized.
    """

    weight: Tensor
    key_dim: int
    copied_bytes: int = 0

    @property
    def heads(self) -> int:
        """Heads of the expanded keys and values."""
        return self.weight.shape[0]

    @property
    def value_dim(self) -> int:
        """`Dv`, channels of a value."""
        return self.weight.shape[1] - self.key_dim

    def absorb(self, query: Tensor) -> Tensor:
        """Map the first channels of queries to where latents live.

        Args:
            query (`torch.Tensor` of shape `(B, H, q, Dn)`): Channels that meet `K c`.

        Returns:
            `torch.Tensor` of shape `(B, H, q, R)`: `K^T query`.
        """
        return _by_head(query, self.weight[:, : self.key_dim])

    def lift(self, outputs: Tensor) -> Tensor:
        """Map weighted sums of latents `(B, H, q, R)` to those of values, `(B, H, q, Dv)`."""
        return _by_head(outputs, self.weight[:, self.key_dim :].transpose(1, 2))

    def expand(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Make keys and values of all heads, as the model does.

        Args:
            latents (`torch.Tensor` of shape `(B, 1, n, R)`): In the dtype of the weight.
            rotated (`torch.Tensor` of shape `(B, 1, n, Dr)`): What all heads share.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Keys `(B, H, n, Dn + Dr)`, values `(B, H, n, Dv)`.
        """
        made = F.linear(latents[:, 0], self.weight.flatten(0, 1)).unflatten(-1, self.weight.shape[:2])
        keys, values = made.transpose(1, 2).split((self.key_dim, self.value_dim), dim=-1)
        return torch.cat((keys, rotated.expand(-1, self.heads, -1, -1)), dim=-1), values


def projection_of(module: Any, dtype: torch.dtype) -> LatentProjection | str:
    """The projection of an attention module with latents; what is in the way if it is more than a weight.

    A quantized weight is made dense once and kept, a copy of `kv_b_proj` per layer in `dtype`: unpacking it
    at every step would take longer than all the rest.

    Args:
        module (`torch.nn.Module`): Has `kv_b_proj`, `kv_lora_rank`, `qk_nope_head_dim` and `v_head_dim`.
        dtype (`torch.dtype`): Of the latents.
    """
    layer = module.kv_b_proj
    name = type(layer).__name__
    has_parts = next(layer.children(), None) is not None  # of an adapter, say, which may be switched
    if getattr(layer, "bias", None) is not None or has_parts or not _is_bare(layer):
        return f"kv_b_proj ({name}) is more than a weight: it has a bias, parts, hooks, or its own forward"
    if any(parameter.is_meta for parameter in layer.parameters()):
        return f"kv_b_proj ({name}) is not on a device"
    weight = _weight_of(layer, int(module.kv_lora_rank), dtype)
    key_dim = int(module.qk_nope_head_dim)
    rows = key_dim + int(module.v_head_dim)
    if weight.shape[0] % rows:
        return f"kv_b_proj has {weight.shape[0]} rows, which are not heads of {rows}"
    copied_bytes = 0 if layer not in _made else weight.nbytes
    return LatentProjection(weight.view(-1, rows, weight.shape[1]), key_dim, copied_bytes)


def _weight_of(layer: nn.Module, rank: int, dtype: torch.dtype) -> Tensor:
    """The weight `(rows, rank)` of a linear layer: its own, or what it makes of unit vectors."""
    own: Any = getattr(layer, "weight", None)
    kind = type(layer), type(own)
    if kind == (nn.Linear, nn.Parameter) and own.dtype in _DTYPES:
        weight: Tensor = own.detach()
        return weight
    parameters = [(parameter, parameter._version) for parameter in layer.parameters()]
    made = _made.get(layer)
    if made is None or made.weight.dtype != dtype or not made.is_of(parameters):
        units = torch.eye(rank, dtype=dtype, device=parameters[0][0].device)
        with torch.no_grad():
            made = _made[layer] = _Made(parameters, layer(units).T.contiguous())
    return made.weight


def _is_bare(layer: nn.Module) -> bool:
    """Whether nothing happens around a layer's product."""
    if any(getattr(layer, name) for name in _HOOKS):
        return False
    if "forward" not in vars(layer):
        return True
    # accelerate's, where several devices share a model: weights that stay on theirs may be read there
    return getattr(getattr(layer, "_hf_hook", None), "offload", True) is False


def _by_head(states: Tensor, weights: Tensor) -> Tensor:
    """`(B, H, q, n)` times `(H, n, m)`: `(B, H, q, m)`.

    On a GPU in the dtype of the weights. On a CPU in that of the states, a few heads at a time: weights that
    are converted all at once leave the processor's cache, which takes ten times as long.
    """
    batch_size, heads, length = states.shape[:3]
    states = states.transpose(0, 1).reshape(heads, batch_size * length, -1)
    if states.is_cpu:
        step = max(1, _CONVERTED // weights[0].numel())
        parts = zip(states.split(step), weights.split(step), strict=True)
        found = torch.cat([rows @ part.to(rows.dtype) for rows, part in parts])
    else:
        found = states.to(weights.dtype) @ weights
    return found.view(heads, batch_size, length, -1).transpose(0, 1)
