"""Random packed tokens as KVQuant stores them, for the check of the CUDA kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..quantizers.nonuniform import normal_float_codebook
from ..quantizers.packing import BLOCK_TOKENS, pack_keys, pack_values
from .layout import FORMATS, Side, SideLayout

__all__ = ["random_levels"]


def random_levels(
    shape: tuple[int, int, int], nbits: int, head_dim: int, exact: list[Tensor], generator: torch.Generator
) -> tuple[Tensor, Side, Side]:
    """Make records, keys and values.

    Args:
        shape (`tuple[int, int, int]`): Rows, heads and blocks.
        nbits (`int`): 2 to 4.
        head_dim (`int`): Channels.
        exact (`list[torch.Tensor]`): Tokens after the packed ones, of keys and of values.
        generator (`torch.Generator`): Of random numbers.
    """
    rows, heads, blocks = shape
    levels = normal_float_codebook(nbits).bfloat16().float()
    size = (2, *shape, BLOCK_TOKENS, head_dim)
    codes = torch.randint(0, 2**nbits, size, dtype=torch.uint8, generator=generator)
    scale = (torch.rand(*shape, BLOCK_TOKENS, generator=generator) + 0.5).half()
    offset = (torch.randn(*shape, BLOCK_TOKENS, generator=generator) / 4).half()
    parts = [pack_keys(codes[0], nbits), pack_values(codes[1], nbits)]
    parts += [part.contiguous().view(torch.uint8) for part in (scale, offset)]
    places = [0, *torch.tensor([part.shape[-1] for part in parts]).cumsum(0).tolist()]
    parts.append(torch.zeros(*shape, -places[-1] % 64, dtype=torch.uint8))
    common = (blocks * BLOCK_TOKENS, nbits, FORMATS["nonuniform"], head_dim)
    key_outliers, value_outliers = (_random_outliers(shape, head_dim, generator) for _ in range(2))
    keys = Side(
        SideLayout(*common, BLOCK_TOKENS, head_dim, 2, 0, places[0], rotary_dim=head_dim),
        [exact[0]],
        levels=levels,
        channel_scale=torch.rand(1, heads, head_dim, generator=generator) + 0.5,
        channel_offset=torch.randn(1, heads, head_dim, generator=generator) / 2,
        inv_freq=10000.0 ** -torch.linspace(0, 1, head_dim // 2, dtype=torch.float64),
        positions=-torch.arange(rows),
        outliers=key_outliers[0],
        outlier_starts=key_outliers[1],
    )
    values = Side(
        SideLayout(*common, 1, 1, 2, 0, *places[1:4]),
        [exact[1]],
        levels=levels,
        outliers=value_outliers[0],
        outlier_starts=value_outliers[1],
    )
    return torch.cat(parts, dim=-1), keys, values


def _random_outliers(
    shape: tuple[int, int, int], head_dim: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """One number in a hundred of every block and head."""
    rows, heads, blocks = shape
    size = BLOCK_TOKENS * head_dim
    count = size // 100
    drawn = torch.rand(rows, blocks, heads, size, generator=generator)
    chosen = drawn.topk(count, dim=-1).indices.sort(-1).values
    place = chosen // head_dim << 10 | chosen % head_dim
    residual = (3 * torch.randn(chosen.shape, generator=generator)).half().view(torch.int16).int() & 0xFFFF
    starts = torch.arange(heads + 1, dtype=torch.int16) * count
    return (place.int() << 16 | residual).flatten(2), starts.expand(rows, blocks, -1).contiguous()
