"""The model card of a calibration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["model_card"]

_CARD = """\
---
library_name: kvcache-plugins
tags: [kv-cache, kvquant, quantization]
---
# KVQuant calibration of a key-value cache

Ranges of key channels and non-uniform levels of keys and values, for the backend `kvquant` of
`kvcache_plugins`, after KVQuant (arXiv 2401.18079).

```python
import kvcache_plugins

model.generate(
    **inputs,
    cache_implementation="quantized",
    cache_config={{"backend": "kvquant", "nbits": {nbits_used}, "calibration": "DIRECTORY_OR_HUB_ID"}},
)
```

| | |
|---|---|
| model | `{model_type}`: {num_layers} layers, {num_key_value_heads} kv heads of {head_dim} channels |
| bits | {nbits} |
| outliers kept exact | {outliers} of each vector |
| first tokens kept exact | {sink_length} |
| text | {num_samples} samples of {sequence_length} tokens of {text_source} |
| sha256 of the text | `{text_sha256}` |
| weight of an error | {weight} |
| made with | {versions} |

`scales.safetensors` and `scales.json` hold static scales of the same text, for the same `calibration` of the
backends `float8` with `scale="head"` or `"tensor"` and `int8` with `granularity="head"` or `"tensor"`.
`cache_config.json`, if it was made with `--target_bits`, are the bits of every layer, as a `cache_config`.
"""
_WEIGHTS = {
    "fisher_scale": "squared gradient of the loss times squared scale of the vector (the paper, appendix E)",
    "fisher": "squared gradient of the loss",
    "none": "the same for all",
}


def model_card(facts: Mapping[str, Any]) -> str:
    """Return a card in Markdown that says what an artifact with these facts is and how to use it."""
    model = facts["model"]
    return _CARD.format(
        nbits_used=3 if 3 in facts["nbits"] else max(facts["nbits"]),
        nbits=", ".join(map(str, sorted(facts["nbits"]))),
        outliers=f"{facts['outlier_fraction']:.3g}",
        sink_length=facts["sink_length"],
        num_samples=facts.get("num_samples", "?"),
        sequence_length=facts.get("sequence_length", "?"),
        text_source=facts.get("text_source", "unknown origin"),
        text_sha256=facts.get("text_sha256", "?"),
        weight=_WEIGHTS.get(str(facts.get("weight")), "?"),
        versions=facts.get("versions", "?"),
        **{name: model[name] for name in ("model_type", "num_layers", "num_key_value_heads", "head_dim")},
    )
