"""The loss of one side of one layer, and the precision that is chosen from all of them."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvcache_plugins import KVCache, build_cache
from kvcache_plugins.calibration import precision, sensitivity
from kvcache_plugins.calibration.precision import choose_precision
from kvcache_plugins.calibration.sensitivity import (
    BLOCK_TOKENS,
    Candidate,
    OneSidedLayer,
    candidates_of,
    measure_candidates,
)
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing import tiny_model
from tests.models.families import small_model

KIVI = {"backend": "kivi", "residual_length": 32}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def samples() -> Tensor:
    return torch.randint(3, 120, (2, 256), generator=torch.Generator().manual_seed(2))


def test_candidates(model: Any) -> None:
    names = [candidate.name for candidate in candidates_of(model, KIVI, (2, 4))]
    expected = [
        f"{layer} {rest}"
        for layer in (0, 1)
        for bits in (2, 4)
        for rest in (f"key {bits} post", f"key {bits} block", f"value {bits}")
    ]
    assert names == expected
    # what the user has decided is no choice, nor is a layer that is not packed
    fixed = candidates_of(model, {**KIVI, "rope_mode": "block", "skip_layers": [0]}, (2,))
    assert [candidate.name for candidate in fixed] == ["1 key 2", "1 value 2"]


def test_rotation_is_no_choice_without_one() -> None:
    found = candidates_of(tiny_model("gpt2"), KIVI, (2,))
    assert {candidate.rope_mode for candidate in found if candidate.side == "key"} == {"post"}


@pytest.mark.parametrize("option", ["nbits", "key_bits", "value_bits", "layer_overrides"])
def test_what_is_to_be_chosen_may_not_be_set(model: Any, option: str) -> None:
    with pytest.raises(ValueError, match=rf"--target_bits chooses \['{option}'\]"):
        candidates_of(model, {**KIVI, option: 2}, (2, 4))


@pytest.mark.parametrize("side", ["key", "value"])
def test_one_side_is_read_packed_and_the_other_exact(model: Any, side: str) -> None:
    packed: Any = build_cache(model, {**KIVI, "nbits": 2}).layers[0]
    keys, values = torch.randn(1, 2, 100, 16), torch.randn(1, 2, 100, 16)
    dense: Any = DynamicLayer()
    dense.update(keys[:, :, :96], values[:, :, :96])
    layer = OneSidedLayer(packed, side, dense)
    stream = packed.streams[("key", "value").index(side)]
    length = stream.packed_length  # new tokens are read exactly, and so are those that they push out
    assert length >= 64
    reads = dict(zip(("key", "value"), layer.update(keys[:, :, 96:], values[:, :, 96:]), strict=True))
    exact = {"key": keys, "value": values}
    other = "value" if side == "key" else "key"
    assert torch.equal(reads[other], exact[other])
    expected = torch.cat([stream.decode(0, length), exact[side][:, :, length:]], 2)
    assert torch.equal(reads[side], expected) and type(reads[side]) is Tensor
    assert not torch.equal(reads[side], exact[side])


@pytest.mark.parametrize("side", ["key", "value"])
def test_one_side_of_a_window(side: str) -> None:
    model = tiny_model("phi3", sliding_window=512, num_hidden_layers=1)
    ids = torch.randint(3, 120, (1, 720))
    prompt = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :600], **as_argument(prompt))
        exact, losses = copy.deepcopy(prompt), []
        for nbits in (4, 2):
            cache = copy.deepcopy(prompt)
            packed: Any = build_cache(model, {**KIVI, "nbits": nbits}).layers[0]
            cache.layers[0] = OneSidedLayer(packed, side, cache.layers[0])
            expected = copy.deepcopy(exact)
            for start in (600, 664):
                block = ids[:, start : start + 56]
                logits = model(block, **as_argument(cache)).logits
                reference = model(block, **as_argument(expected)).logits
            losses.append(float((logits - reference).norm() / reference.norm()))
    assert 0.001 < losses[0] < 0.4 * losses[1] < 0.4
    assert {candidate.nbits for candidate in candidates_of(model, KIVI, (2, 8))} == {2}, "8 are not worth it"
    longer = tiny_model("phi3", sliding_window=1024, num_hidden_layers=1)
    assert {candidate.nbits for candidate in candidates_of(longer, KIVI, (2, 8))} == {2, 8}


class _HalfPacked(DynamicCache):
    """The ordinary cache, with one side of one layer replaced by what a whole packed cache holds of it."""

    def __init__(self, config: Any, donor: KVCache, layer_idx: int, side: str) -> None:
        super().__init__(config=config)
        self.donor, self.layer_idx, self.side = donor, layer_idx, side

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        is_prompt = self.get_seq_length(layer_idx) == 0
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx != self.layer_idx:
            return keys, values
        held = self.donor.packed_layers[layer_idx]
        # new tokens are read exactly, and so are those that they push out of the window
        length = 0 if is_prompt else held.streams[("key", "value").index(self.side)].packed_length
        held.update(key_states, value_states)
        if not is_prompt:
            states = (keys if self.side == "key" else values).clone()
            stream = held.streams[("key", "value").index(self.side)]
            states[:, :, :length] = stream.decode(0, length)
            keys, values = (states, values) if self.side == "key" else (keys, states)
        return keys, values


@pytest.mark.parametrize("candidate", [Candidate(1, "key", 2, "post"), Candidate(0, "value", 3)])
@torch.no_grad()
def test_losses_are_divergences_from_the_dense_run(model: Any, samples: Tensor, candidate: Candidate) -> None:
    """Against a forward of prompt and blocks for each cache, and torch's divergence."""
    sample = samples[:1]
    donor = build_cache(model, {**KIVI, "nbits": candidate.nbits, **candidate.options})
    half = _HalfPacked(model.config, donor, candidate.layer_idx, candidate.side)
    rows: list[Tensor] = []
    for cache in (DynamicCache(config=model.config), half):
        model(input_ids=sample[:, :128], **as_argument(cache))
        logits = [
            model(input_ids=sample[:, start : start + BLOCK_TOKENS], **as_argument(cache)).logits[0]
            for start in range(128, 256, BLOCK_TOKENS)
        ]
        rows.append(torch.cat(logits).log_softmax(-1))
    expected = torch.nn.functional.kl_div(rows[1], rows[0], log_target=True, reduction="batchmean").item()
    ((_, loss),) = measure_candidates(model, sample, KIVI, [candidate])
    assert expected > 1e-5
    assert loss == pytest.approx(expected, rel=1e-3)


@torch.no_grad()
def test_predictions_are_taken_in_fp32(samples: Tensor) -> None:
    """What bf16 rounds off would be a loss of every candidate."""
    model = tiny_model("llama", dtype=torch.bfloat16)
    rows = sensitivity._predictions(model, samples[:1].split(64, dim=1), DynamicCache(config=model.config))
    torch.testing.assert_close(rows.exp().sum(-1), torch.ones(256), rtol=0, atol=1e-5)


def test_fewer_bits_lose_more(model: Any, samples: Tensor) -> None:
    for side in ("key", "value"):
        mode = "post" if side == "key" else None
        candidates = [Candidate(0, side, bits, mode) for bits in (2, 3, 4, 8)]
        losses = [loss for _, loss in measure_candidates(model, samples[:1], KIVI, candidates)]
        assert losses == sorted(losses, reverse=True) and losses[0] > 10 * losses[-1] >= 0


def test_hybrid_models(samples: Tensor) -> None:
    """Layers of other kinds keep their states between prompt and blocks."""
    for family, layers in {"gemma3_text": {1}, "qwen3_next": {1}, "falcon_h1": {0, 1}}.items():
        hybrid = tiny_model(family)
        candidates = candidates_of(hybrid, KIVI, (2, 8))
        assert {candidate.layer_idx for candidate in candidates} == layers
        coarse, fine = (Candidate(1, "value", nbits) for nbits in (2, 8))
        assert {coarse, fine} < set(candidates)
        losses = dict(measure_candidates(hybrid, samples[:1], KIVI, [coarse, fine]))
        assert losses[coarse] > losses[fine]


def test_a_prompt_of_which_nothing_is_packed(model: Any, samples: Tensor) -> None:
    with pytest.raises(ValueError, match=r"A sample of 60 tokens is too short.*'kivi' packs nothing"):
        list(measure_candidates(model, samples[:1, :60], KIVI, [Candidate(0, "key", 2, "post")]))


# -- the choice


def choose(model: Any, samples: Tensor, output: Path, target: float = 3.0) -> dict[str, Any]:
    return choose_precision(model, samples, KIVI, (2, 3, 4), target, output, {"text": "t"})


def test_the_chosen_precision_is_the_best_of_all(model: Any, samples: Tensor, tmp_path: Path) -> None:
    config = choose(model, samples, tmp_path)
    assert json.loads((tmp_path / "cache_config.json").read_text()) == config
    measured = json.loads((tmp_path / "precision.json").read_text())
    chosen = [entry for entry in measured["losses"] if entry["chosen"]]
    assert len(chosen) == 4 and sum(entry["nbits"] for entry in chosen) <= 12
    assert measured["average_bits"] == sum(entry["nbits"] for entry in chosen) / 4
    for entry in chosen:
        override = config["layer_overrides"][str(entry["layer_idx"])]
        assert override[f"{entry['side']}_bits"] == entry["nbits"]
        if entry["side"] == "key":
            assert override["rope_mode"] == entry["rope_mode"]
            rivals = [
                e["loss"] for e in measured["losses"]
                if (e["layer_idx"], e["side"], e["nbits"]) == (entry["layer_idx"], "key", entry["nbits"])
            ]  # fmt: skip
            assert len(rivals) == 2 and entry["loss"] == min(rivals)
    uniform = sum(
        min(e["loss"] for e in measured["losses"] if (e["layer_idx"], e["side"], e["nbits"]) == (i, side, 3))
        for i in range(2)
        for side in ("key", "value")
    )
    assert measured["summed_loss"] <= uniform


def test_losses_are_means_over_the_samples(model: Any, samples: Tensor, tmp_path: Path) -> None:
    choose(model, samples, tmp_path)
    measured = json.loads((tmp_path / "precision.json").read_text())["losses"]
    candidates = candidates_of(model, KIVI, (2, 3, 4))
    losses = [dict(measure_candidates(model, sample[None], KIVI, candidates)) for sample in samples]
    assert len(measured) == len(candidates)
    for candidate, entry in zip(candidates, measured, strict=True):
        first, second = (loss[candidate] for loss in losses)
        assert first != second and entry["loss"] == pytest.approx((first + second) / 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache_config.json", "precision.json"]


def test_predictions_that_are_no_numbers_are_nothing_to_choose_by(
    model: Any, samples: Tensor, tmp_path: Path
) -> None:
    damaged = copy.deepcopy(model)
    damaged.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"predictions of a calibration must be finite; use --dtype"):
        choose(damaged, samples, tmp_path)
    assert not (tmp_path / "cache_config.json").exists()


def test_it_is_ready_to_use(model: Any, samples: Tensor, tmp_path: Path) -> None:
    config = choose(model, samples, tmp_path, target=2.5)
    cache = build_cache(model, config)
    bits = [b for layer in cache.packed_layers for b in (layer.config.key_bits, layer.config.value_bits)]
    assert sum(bits) / len(bits) <= 2.5 and len(set(bits)) > 1
    with torch.no_grad():
        model(samples[:, :100], **as_argument(cache))
    assert cache.get_seq_length() == 100


def test_finished_measurements_are_not_repeated(
    model: Any, samples: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = choose(model, samples, tmp_path / "whole")
    measure = precision.measure_candidates
    seen: list[str] = []

    def interrupted(*args: Any) -> Any:
        for count, found in enumerate(measure(*args)):
            if count == 7:
                raise KeyboardInterrupt
            yield found

    def watched(*args: Any) -> Any:
        for found in measure(*args):
            seen.append(found[0].name)
            yield found

    monkeypatch.setattr(precision, "measure_candidates", interrupted)
    with pytest.raises(KeyboardInterrupt):
        choose(model, samples, tmp_path / "cut")
    assert not (tmp_path / "cut" / "cache_config.json").exists()
    monkeypatch.setattr(precision, "measure_candidates", watched)
    for cache in ({**KIVI, "residual_length": 0}, {**KIVI, "skip_layers": [0]}):
        with pytest.raises(ValueError, match="cache_config was"):
            choose_precision(model, samples, cache, (2, 3, 4), 3.0, tmp_path / "cut", {"text": "t"})
    assert choose(model, samples, tmp_path / "cut") == whole
    assert len(seen) == 2 * 18 - 7
    for name in ("cache_config.json", "precision.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_measurements_are_kept_by_the_tokens_they_are_of(
    model: Any, samples: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which samples are judged on depends on how many are."""
    whole = choose(model, samples, tmp_path / "whole")
    measure, measured = precision.measure_candidates, 0

    def interrupted(*args: Any) -> Any:
        yield from itertools.islice(measure(*args), 7)
        raise KeyboardInterrupt

    def counted(*args: Any) -> Any:
        nonlocal measured
        for found in measure(*args):
            measured += 1
            yield found

    monkeypatch.setattr(precision, "measure_candidates", interrupted)
    with pytest.raises(KeyboardInterrupt):
        choose(model, samples[1:], tmp_path / "cut")
    monkeypatch.setattr(precision, "measure_candidates", counted)
    assert choose(model, samples, tmp_path / "cut") == whole
    assert measured == 2 * 18 - 7
    name = "precision.json"
    assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("family", ["jamba", "falcon_h1", "llama"])
def test_recurrent_layers_are_read_one_token_at_a_time(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jamba begins anew in a call of several tokens, which would hide what a cache loses."""
    model = small_model("jamba") if family == "jamba" else tiny_model(family)
    sample = torch.randint(3, 120, (1, 160), generator=torch.Generator().manual_seed(2))
    candidates = candidates_of(model, KIVI, (2,))[:2]
    calls: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    found = dict(measure_candidates(model, sample, KIVI, candidates))
    hook.remove()
    assert max(calls) == (BLOCK_TOKENS if family == "llama" else 1)
    monkeypatch.setattr(sensitivity, "BLOCK_TOKENS", 1)
    singly = dict(measure_candidates(model, sample, KIVI, candidates))
    assert (found == singly) == (family != "llama") and min(found.values()) > 0
