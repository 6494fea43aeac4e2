"""Limits that several ways of attending agree on."""

from __future__ import annotations

import torch

__all__ = ["GPU_TILES", "KERNEL_DTYPES", "MOST_QUERIES", "TILE_SCORES", "tile_scores"]

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of queries, for kernels."""
MOST_QUERIES = 8
"""Query tokens up to which one pass over the codes is bound by reading them, on any processor."""
TILE_SCORES = 1 << 22
"""Logits in a tile of torch's attention: 16 MB in fp32."""
GPU_TILES = 16
"""How much larger tiles are on GPUs, where a launch takes as long as thousands of products."""


def tile_scores(*, is_cpu: bool) -> int:
    """Logits in a tile on a CPU, or on a GPU."""
    return TILE_SCORES if is_cpu else GPU_TILES * TILE_SCORES
