"""What an artifact remembers of the model it was made from, and whether another model is the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ArtifactError
from ..models.decoder import decoder_config
from ..models.layer_plan import key_value_heads
from ..models.rotary import Rotary

__all__ = ["check_model", "check_rotary", "model_facts", "rotary_facts"]

_SAME_FREQUENCY = 1e-5
"""Relative difference of frequencies that fp32 on another device may cause; real differences are larger."""

_HELD_AS = (torch.float64, torch.bfloat16, torch.float16)
"""What the frequencies of either model may have been rounded to, with its weights: by `model.half()`."""


def model_facts(config: Any) -> dict[str, Any]:
    """Describe the decoder of a configuration by what its keys and values depend on.

    Vocabulary and weights are left out: an artifact made from a base model serves its fine-tunes.

    Args:
        config (`PreTrainedConfig`): Of the model, or of its decoder.

    Returns:
        `dict`: Plain values: `model_type`, `num_layers`, `num_key_value_heads`, `head_dim`, and a
            `fingerprint` of these for every layer and of the width and depth of the network.
    """
    config = decoder_config(config)
    heads = [list(key_value_heads(config, index)) for index in range(config.num_hidden_layers)]
    shape = {
        "model_type": config.model_type,
        "heads": heads,
        "query_heads": getattr(config, "num_attention_heads", None),
        "hidden_size": getattr(config, "hidden_size", None),
        "intermediate_size": getattr(config, "intermediate_size", None),
    }
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()
    return {
        "model_type": config.model_type,
        "num_layers": len(heads),
        "num_key_value_heads": heads[0][0],
        "head_dim": heads[0][1],
        "hidden_size": shape["hidden_size"],
        "fingerprint": digest[:16],
    }


def check_model(source: str, facts: Mapping[str, Any], config: Any) -> None:
    """Check that an artifact made from the model of `facts` belongs to the model of `config`.

    Raises:
        ArtifactError: Naming both models.
    """
    expected = model_facts(config)
    if facts != expected:
        raise ArtifactError(f"{source} was made for the model {facts!r}, not for {expected}.")


def rotary_facts(rotary: Rotary | None) -> dict[str, Any] | None:
    """Return the rotation of a layer as plain values, `None` if there is none."""
    return None if rotary is None else {"interleaved": rotary.interleaved, "inv_freq": list(rotary.inv_freq)}


def check_rotary(source: str, layer_idx: int, facts: Mapping[str, Any] | None, rotary: Rotary | None) -> None:
    """Check that the keys an artifact was made from were rotated as a layer's are.

    Raises:
        ArtifactError: Naming both rotations.
    """
    if facts is None and rotary is None:
        return
    try:
        shown = _shown(facts)
        made = torch.tensor([] if facts is None else facts["inv_freq"], dtype=torch.float64, device="cpu")
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{source}: the rotary parameters of layer {layer_idx} are damaged: {facts!r:.80}."
        ) from error
    if facts is not None and rotary is not None and bool(facts["interleaved"]) == rotary.interleaved:
        used = torch.tensor(rotary.inv_freq, dtype=torch.float64, device="cpu")
        if any(_are_same(made.to(kind), used) or _are_same(made, used.to(kind)) for kind in _HELD_AS):
            return
    raise ArtifactError(
        f"{source} was made for other rotary parameters in layer {layer_idx}: {shown}; "
        f"the model's are {_shown(rotary_facts(rotary))}."
    )


def _are_same(made: Tensor, used: Tensor) -> bool:
    """Whether frequencies agree as far as devices compute them alike."""
    return made.shape == used.shape and torch.allclose(
        made.double(), used.double(), rtol=_SAME_FREQUENCY, atol=0.0
    )


def _shown(facts: Mapping[str, Any] | None) -> str:
    if facts is None:
        return "no rotary embedding of a known layout"
    layout = "interleaved" if facts["interleaved"] else "half-split"
    frequencies = ", ".join(f"{frequency:.5g}" for frequency in facts["inv_freq"])
    return f"{layout} pairs of frequencies [{frequencies}]"
