"""Each technique of KVQuant earns its place, on a model whose keys and values were made hard to store.

A bias of 100 on four channels of the key projection adds the same number to every score of a query, so
attention hardly changes, but whoever shares a scale between channels loses the others. One value channel is
scaled by 30, and the output projection undoes it.
"""

from __future__ import annotations

import copy
from functools import lru_cache, partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch import nn

from kvcache_plugins.backends.kvquant import KVQuantCache, KVQuantLayer
from kvcache_plugins.calibration.calibrate import calibrate_subject
from kvcache_plugins.calibration.options import CalibrationOptions
from kvcache_plugins.layers.nonuniform import NonUniformCodec, TokenNonUniformCodec, UnrotatedCodec
from kvcache_plugins.layers.stream import StreamSpec
from kvcache_plugins.runs.language_reference import UNSEEN_TOPICS
from kvcache_plugins.runs.loading import Subject, load_subject
from kvcache_plugins.runs.model_options import ModelOptions
from tests.reference.fidelity import fidelity

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books"
UNIFORM = torch.linspace(-1, 1, 8)
OPTIONS = {"nbits": 3, "residual_length": 0}


@lru_cache(maxsize=1)
def hard_subject() -> Subject:
    subject = load_subject(ModelOptions(model=str(MODEL), dtype="fp32"))
    model = copy.deepcopy(subject.model)
    for layer in model.model.layers:
        attention = layer.self_attn
        projection = attention.k_proj
        projection.bias = nn.Parameter(torch.zeros(projection.out_features))
        with torch.no_grad():
            # the slowest rotary pairs of both heads, where a constant key stays nearly constant
            projection.bias[[30, 31, 94, 95]] = 100.0
            attention.v_proj.weight[5] *= 30
            for head in range(4):  # of the group that reads key-value head 0
                attention.o_proj.weight[:, 64 * head + 5] /= 30
    return Subject(model, subject.tokenizer, subject.shard)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[float, str]:
    folder = tmp_path_factory.mktemp("hard")
    text = folder / "text.txt"
    seen = [topics[name] for name in sorted(topics) if name not in UNSEEN_TOPICS]
    text.write_text("\n\n".join(seen), encoding="utf-8")
    found = {}
    for fraction in (0.01, 0.0):
        options = CalibrationOptions(
            model=str(MODEL),
            text_files=[str(text)],
            num_samples=6,
            sequence_length=256,
            nbits=[3],
            outlier_fraction=fraction,
        )
        found[fraction] = str(folder / f"outliers-{fraction}")
        calibrate_subject(hard_subject(), options, Path(found[fraction]))
    return found


def codec_of(spec: StreamSpec) -> NonUniformCodec:
    codec = spec.codec.inner if isinstance(spec.codec, UnrotatedCodec) else spec.codec
    assert isinstance(codec, NonUniformCodec)
    return codec


class UniformLayer(KVQuantLayer):
    """Evenly spaced levels in place of fitted ones."""

    def key_stream(self, head_dim: int) -> StreamSpec:
        return self._even(super().key_stream(head_dim))

    def value_stream(self, head_dim: int) -> StreamSpec:
        return self._even(super().value_stream(head_dim))

    def _even(self, spec: StreamSpec) -> StreamSpec:
        codec = codec_of(spec)
        codec.codebook = codec.levels = UNIFORM
        return spec


class TokenKeysLayer(KVQuantLayer):
    """One range per token for keys too, in place of one per channel."""

    def key_stream(self, head_dim: int) -> StreamSpec:
        spec = super().key_stream(head_dim)
        codec = codec_of(spec)
        assert isinstance(spec.codec, UnrotatedCodec)
        spec.codec.__init__(  # type: ignore[misc]
            TokenNonUniformCodec(codec.nbits, codec.codebook, None, codec.per_side),
            spec.codec.rotary,
            spec.codec.padding,
        )
        return spec


def with_layers(layers: type[KVQuantLayer]) -> type[KVQuantCache]:
    return type(layers.__name__, (KVQuantCache,), {"layer_class": layers})


@pytest.fixture(scope="module")
def distances(artifacts: dict[float, str]) -> dict[str, dict[str, float]]:
    subject = hard_subject()
    text = "\n\n".join(topics[name] for name in UNSEEN_TOPICS if name in topics)
    token_ids = torch.tensor(subject.encode(text))
    cases: dict[str, tuple[type[KVQuantCache], dict[str, Any]]] = {
        "all": (KVQuantCache, {"calibration": artifacts[0.01]}),
        "no outliers": (KVQuantCache, {"calibration": artifacts[0.0], "outlier_fraction": 0.0}),
        "uniform levels": (with_layers(UniformLayer), {"calibration": artifacts[0.01]}),
        "keys per token": (with_layers(TokenKeysLayer), {"calibration": artifacts[0.01]}),
    }
    return {
        name: fidelity(
            subject.model, token_ids, partial(cache_class, subject.model, **OPTIONS, **given), max_windows=1
        )
        for name, (cache_class, given) in cases.items()
    }


def test_three_bits_stay_within_three_percent_of_the_dense_perplexity(
    distances: dict[str, dict[str, float]],
) -> None:
    found = distances["all"]
    assert found["kl"] > 1e-5, "the cache was not read"
    assert abs(found["nll"] - found["dense_nll"]) < torch.tensor(1.03).log()


@pytest.mark.parametrize("dropped", ["no outliers", "uniform levels", "keys per token"])
def test_dropping_one_is_measurably_worse(distances: dict[str, dict[str, float]], dropped: str) -> None:
    assert distances[dropped]["kl"] > 1.15 * distances["all"]["kl"]
