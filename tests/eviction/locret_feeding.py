"""Random retaining heads for the tiny models, and what they make of a text."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from kvcache_plugins.backends.locret import LocretCache
from kvcache_plugins.retaining.configuration import RetainingHeadsConfig
from kvcache_plugins.retaining.heads import RetainingHeads
from kvcache_plugins.retaining.loading import load_heads
from tests.eviction.feeding import bound_cache

__all__ = ["WIDTH", "bound_locret", "features_of", "heads_of", "locret", "scores_of"]

WIDTH = 24
_folders: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def _folder(description: str, seed: int) -> str:
    """Saved heads, which are removed when the process ends."""
    _folders.append(tempfile.TemporaryDirectory(prefix="locret-heads-"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        RetainingHeads(RetainingHeadsConfig.from_json_file(description)).save_pretrained(_folders[-1].name)
    return _folders[-1].name
