"""A backend of one's own, in one file: log-spaced 8-bit codes, then used by an unmodified `generate()`.

    python examples/add_a_backend.py

Everything else comes with it: beam search, padding, cropping, saving, honest bytes, attention over the packed
codes. The conformance suite (`kvcache_plugins.testing.BackendConformance`) checks a backend against all of
that; see `tests/test_examples.py`.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import kvcache_plugins as kvp
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.layers.codec import Codec, Encoded
from kvcache_plugins.layers.stream import StreamSpec
from kvcache_plugins.models.cache_argument import cache_of
from kvcache_plugins.quantizers.granularity import per_token_head


class MuLawCodec(Codec):
    """Companded int8: finer steps near zero, coarser ones for outliers (mu-law, ITU-T G.711)."""

    nbits, granularity, metadata_names, mu = 8, per_token_head(), ("scale",), 15.0

    def encode(self, states: Tensor, position: int, valid: Tensor | None = None) -> Encoded:
        states = states.nan_to_num(0.0, 65504.0, -65504.0)
        scale = states.abs().amax(-1, keepdim=True).clamp(2**-14, 65504.0).half().float()
        unit = (states / scale).clamp(-1, 1)
        companded = unit.sign() * (self.mu * unit.abs()).log1p() / math.log1p(self.mu)
        return Encoded((companded * 127).round().add(128).to(torch.uint8), {"scale": scale})

    def decode(self, encoded: Encoded, position: int) -> Tensor:
        companded = (encoded.codes.float() - 128) / 127
        unit = companded.sign() * ((1 + self.mu) ** companded.abs() - 1) / self.mu
        return unit * encoded.metadata["scale"]


@dataclass(frozen=True, kw_only=True)
class MuLawConfig(kvp.BackendConfig):
    """No options beyond those every backend has."""


class MuLawLayer(PackedLayer):
    """Keys and values alike: packed one token at a time, the newest `residual_length` kept exact."""

    def key_stream(self, head_dim: int) -> StreamSpec:
        return StreamSpec(MuLawCodec(), keep_recent=self.config.residual_length)

    value_stream = key_stream


@kvp.register_backend("mulaw")
class MuLawCache(kvp.KVCache):
    """Companded 8-bit codes per token and head.

    Paper: none; an example of a backend.
    Deviates: from nothing.
    Cost: `8 + 16 / head_dim` bits per value.
    Limits: least exact where all numbers of a vector are large.
    """

    config_class, layer_class = MuLawConfig, MuLawLayer


def main() -> None:
    """Generate with the new backend and print its report."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(__file__).parent / "models" / "tiny-llama-books"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("It was a dark and stormy night, and ", return_tensors="pt")
    out = model.generate(
        **inputs,
        max_new_tokens=400,
        do_sample=False,
        cache_implementation="quantized",
        cache_config={"backend": "mulaw"},
        return_dict_in_generate=True,
    )
    print(tokenizer.decode(out.sequences[0]))
    print(cache_of(out).report())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted: nothing is kept.", file=sys.stderr)
        sys.exit(130)
