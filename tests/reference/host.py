"""What the installed Transformers calls a cache."""

from __future__ import annotations

import inspect

from transformers import GenerationMixin

__all__ = ["CACHE"]

CACHE = (
    "cache"  # since 5.24
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
"""The keyword argument of models and of `generate()`."""
