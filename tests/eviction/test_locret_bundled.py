"""The bundled heads on the bundled model: what they keep of a text holds what will be asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache_plugins.evaluation.passkey.answers import ask_afterwards, ask_with_prompt
from kvcache_plugins.evaluation.passkey.options import PasskeyOptions
from kvcache_plugins.evaluation.passkey.prompts import Trial, build_trials
from kvcache_plugins.runs.loading import Subject, load_subject, load_tokenizer
from tests.eviction.feeding import bound_cache, chunks_of, feed

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "examples" / "models"
FILLER = ROOT / "LICENSE"  # the same for every Python, as its language reference is not
LENGTH, BUDGET = 1024, 128
HEADS = str(MODELS / "tiny-llama-books-locret")
LOCRET = {"backend": "locret", "heads": HEADS, "budget": BUDGET, "chunk_size": BUDGET}
KNORM = {"backend": "knorm", "budget": BUDGET, "chunk_size": BUDGET}
PACKED = {"backend": "int4", "key_bits": 8, "value_bits": 4, "residual_length": 0}


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject(_options())


def _options(**options: Any) -> PasskeyOptions:
    model = str(MODELS / "tiny-llama-books")
    return PasskeyOptions(model=model, dtype="fp32", lengths=(LENGTH,), threads=1, **options)


def _trials(**options: Any) -> list[Trial]:
    chosen = _options(**options)
    return build_trials(chosen, FILLER.read_text(encoding="utf-8"), load_tokenizer(chosen))


def _right(subject: Subject, config: dict[str, Any], trials: list[Trial]) -> int:
    if trials[0].question:
        return sum(record["is_right"] for record in ask_afterwards(subject, config, trials, 8))
    return sum(ask_with_prompt(subject, config, [trial], 8)[0]["is_right"] for trial in trials)


@pytest.mark.parametrize(
    "options",
    [{"depths": 4, "trials": 1}, {"facts": 4, "trials": 1}],
    ids=["question-in-the-prompt", "four-facts-asked-for-afterwards"],
)
def test_an_eighth_of_the_tokens_is_enough(subject: Subject, options: dict[str, Any]) -> None:
    trials = _trials(**options)
    assert len(trials) == 4
    caches = {"dense": {"backend": "dense"}, "locret": LOCRET, "knorm": KNORM}
    right = {name: _right(subject, config, trials) for name, config in caches.items()}
    assert right["dense"] == right["locret"] == 4
    assert right["knorm"] <= 1


def test_packed_it_still_is(subject: Subject) -> None:
    trials = _trials(facts=4, trials=1)
    assert _right(subject, {**LOCRET, "storage": PACKED}, trials) >= 3


def test_heads_find_the_keys_before_they_are_asked_for(subject: Subject) -> None:
    tokenizer, trials = subject.tokenizer, _trials(facts=4, trials=1)
    pieces = [tokenizer.decode([token]) for token in trials[0].ids]
    stops, text = torch.tensor([len(piece) for piece in pieces]).cumsum(0), "".join(pieces)
    digits = {
        int((stops <= text.index(trial.key) + digit).sum()) for trial in trials for digit in range(5)
    }  # where each fact is told for the first time

    def share(config: dict[str, Any]) -> float:
        """Part of the digits that a layer holds in some head, on average."""
        cache = bound_cache(subject.model, config, LENGTH)
        feed(subject.model, cache, torch.tensor([trials[0].ids]), chunks_of(LENGTH, BUDGET))
        held = [set(layer.ledger.positions.flatten().tolist()) for layer in cache.evicting_layers]
        return sum(len(digits & positions) for positions in held) / len(held) / len(digits)

    assert share(LOCRET) > 0.6 > 0.3 > share(KNORM)
