"""Bits chosen for KVQuant are worth more than the same number everywhere."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from kvcache_plugins import build_cache
from kvcache_plugins.calibration.calibrate import calibrate_subject
from kvcache_plugins.calibration.options import CalibrationOptions
from kvcache_plugins.runs.language_reference import UNSEEN_TOPICS, read_language_reference
from kvcache_plugins.runs.loading import Subject, load_subject
from kvcache_plugins.runs.model_options import ModelOptions
from tests.reference.fidelity import fidelity

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books"
TARGET = 3.0


@lru_cache(maxsize=1)
def subject() -> Subject:
    return load_subject(ModelOptions(model=str(MODEL), dtype="fp32"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is left of the language reference when the text of the comparison is taken out."""
    path = tmp_path_factory.mktemp("text") / "seen.txt"
    seen = [topics[name] for name in sorted(topics) if name not in UNSEEN_TOPICS]
    path.write_text("\n\n".join(seen), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_chosen_bits_beat_uniform_ones_on_unseen_text(seed: int, text: Path, tmp_path: Path) -> None:
    """At the same average and with the same levels, whichever samples the choice was made on."""
    base: dict[str, Any] = {"backend": "kvquant", "residual_length": 0}
    options = CalibrationOptions(
        model=str(MODEL),
        dtype="fp32",
        text_files=[str(text)],
        num_samples=4,
        sequence_length=256,
        seed=seed,
        target_bits=TARGET,
        precision_samples=1,
        cache_config=[base],
    )
    model = subject().model
    calibrate_subject(subject(), options, tmp_path)
    chosen = json.loads((tmp_path / "cache_config.json").read_text())
    bits = [bits for override in chosen["layer_overrides"].values() for bits in override.values()]
    assert len(bits) == 2 * model.config.num_hidden_layers
    assert sum(bits) <= TARGET * len(bits) and len(set(bits)) > 1

    token_ids = torch.tensor(subject().encode(read_language_reference()))
    uniform = {**base, "nbits": 3, "calibration": str(tmp_path)}

    def divergence(config: dict[str, Any]) -> float:
        return fidelity(model, token_ids, lambda: build_cache(model, config), max_windows=1)["kl"]

    assert 0 < divergence(chosen) < 0.8 * divergence(uniform)
