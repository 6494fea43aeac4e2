"""A mask of one's own must be for the tokens that a cache holds: no other is left out silently."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache_plugins import build_cache
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing import tiny_model

SEEN = 100
PACKED = {"int8": {}, "kivi": {"nbits": 4, "residual_length": 32}, "int4": {}}
EVICTING: dict[str, dict[str, Any]] = {name: {"budget": 40} for name in ("h2o", "snapkv", "tova")}
EVICTING["knorm"] = {"budget": 40, "storage": {"backend": "int8"}}


def logits(backend: str, columns: int | None) -> torch.Tensor:
    """Of one token more, whose mask has so many columns, those in the middle hidden."""
    model = tiny_model("llama")
    torch.manual_seed(0)
    tokens = torch.randint(3, model.config.vocab_size, (1, SEEN + 1))
    cache = build_cache(model, {"backend": backend, **(PACKED | EVICTING)[backend]})
    cache.bind(model, prompt_length=SEEN)
    mask = None
    if columns is not None:
        mask = torch.ones(1, 1, 1, columns, dtype=torch.bool)
        mask[..., 10:-8] = False
    with torch.no_grad():
        model(tokens[:, :SEEN], **as_argument(cache))
        found: torch.Tensor = model(tokens[:, SEEN:], **as_argument(cache), attention_mask=mask).logits
    return found


@pytest.mark.parametrize("backend", [*PACKED, *EVICTING])
def test_a_mask_of_what_is_held_is_followed(backend: str) -> None:
    held = 41 if backend in EVICTING else SEEN + 1
    assert (logits(backend, held) - logits(backend, None)).norm() > 1e-3


@pytest.mark.parametrize(
    ("backend", "columns"),
    [(name, columns) for name in PACKED for columns in (SEEN - 20, SEEN + 50)]
    + [(name, SEEN + 1) for name in EVICTING],
)
def test_a_mask_of_other_tokens_is_refused(backend: str, columns: int) -> None:
    held = 41 if backend in EVICTING else SEEN + 1
    said = f"attention_mask is for {columns} tokens, but layer 0 holds {held}, those of this call included"
    with pytest.raises(ValueError, match=said):
        logits(backend, columns)
