"""How many tokens fit: one more does not, whatever the cache, and what is told is what a cache takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import kvcache_plugins as kvp
from kvcache_plugins.capacity import LONGEST
from kvcache_plugins.cli import main
from kvcache_plugins.layers.view import StreamView
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.presets import preset_config
from kvcache_plugins.testing import tiny_model

MODEL = Path(__file__).parents[1] / "examples" / "models" / "tiny-llama-books"
CONFIG = AutoConfig.from_pretrained(MODEL)
DENSE = {"backend": "dense"}
EVICTING = {"backend": "knorm", "budget": 256, "storage": {"backend": "int4"}}
CACHES = [
    DENSE,
    {"backend": "int8"},
    {"backend": "int4", "smooth": 0.5},
    {"backend": "kivi", "nbits": 2},
    {"backend": "kivi", "nbits": 4, "q_group_size": 64, "residual_length": 192},
    {"backend": "kvquant", "nbits": 3, "calibration": "normal_float"},
    {**EVICTING, "budget": 0.25},
]
MAKING_ROOM: list[dict[str, Any]] = [
    {"backend": "streaming_llm", "budget": 64, "evict_at_decode": True},
    {"backend": "tova", "budget": 40, "evict_at_decode": True, "layer_overrides": {"0": {"budget": 64}}},
    {"backend": "knorm", "budget": 64, "evict_at_decode": True, "storage": {"backend": "int8"}},
]


def named(cache_config: dict[str, Any]) -> str:
    return " ".join(map(str, cache_config.values()))


@pytest.mark.parametrize("cache_config", CACHES, ids=named)
@pytest.mark.parametrize(("batch_size", "new_tokens"), [(1, 1), (3, 70)])
def test_one_token_more_does_not_fit(cache_config: dict[str, Any], batch_size: int, new_tokens: int) -> None:
    room = 6_000_000
    told: dict[str, Any] = {"batch_size": batch_size, "new_tokens": new_tokens, "dtype": torch.bfloat16}
    tokens = kvp.most_tokens(CONFIG, cache_config, room, **told)
    assert tokens is not None and tokens > 300

    def needed(count: int) -> int:
        return kvp.estimate(CONFIG, cache_config, count, max_cache_length=count + new_tokens - 1, **told)

    assert needed(tokens) <= room < needed(tokens + 1)
    if cache_config == DENSE:
        assert tokens == room // (batch_size * 6 * 2 * 2 * 64 * 2) - (new_tokens - 1)


@pytest.mark.parametrize("cache_config", CACHES, ids=named)
def test_more_tokens_take_no_fewer_bytes(cache_config: dict[str, Any]) -> None:
    """On which the search relies: windows that are packed all at once must not make room."""
    sizes = [
        kvp.estimate(CONFIG, cache_config, tokens, max_cache_length=tokens)
        for multiple in (1, 32, 64, 96, 128, 192, 256, 320, 384)
        for tokens in range(max(1, multiple - 2), multiple + 3)
    ]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("cache_config", MAKING_ROOM, ids=named)
def test_what_makes_room_while_it_generates_counts_at_its_largest(cache_config: dict[str, Any]) -> None:
    """Not at the end, where it may just have made room; and more tokens still take no fewer bytes."""
    told: dict[str, Any] = {"new_tokens": 100, "dtype": torch.float32}
    counts = (1, 20, 28, 29, 30, 31, 63, 64, 65, 93, 94, 95, 200, 1000)
    largest = [kvp.estimate(CONFIG, cache_config, tokens, at_peak=True, **told) for tokens in counts]
    assert largest == sorted(largest)
    on_the_way: list[int] = []
    cache = kvp.build_cache(model := tiny_model("llama"), cache_config)
    prompt = torch.randint(3, 120, (1, 150), generator=torch.Generator().manual_seed(0))

    def watch(*_: Any) -> torch.Tensor:
        on_the_way.append(cache.kv_bytes())
        return torch.zeros(1, dtype=torch.bool)

    given: dict[str, Any] = {"max_new_tokens": 100, "do_sample": False, "stopping_criteria": [watch]}
    model.generate(prompt, **as_argument(cache), **given, eos_token_id=None)
    ends = {peak: kvp.estimate(model, cache_config, 150, at_peak=peak, **told) for peak in (False, True)}
    assert ends == {False: on_the_way[-1], True: max(on_the_way)} and ends[False] < ends[True]
    room = max(on_the_way)
    assert kvp.most_tokens(model, cache_config, room, **told) is None
    fits = kvp.most_tokens(model, cache_config, room - 1, **told)
    assert fits is not None and fits < 150


def test_a_model_of_its_own_dtype() -> None:
    model = tiny_model("llama")  # fp32, as nothing says otherwise
    per_token = 2 * 2 * 2 * 16 * 4
    assert kvp.most_tokens(model, DENSE, 1000 * per_token) == 1000
    assert kvp.most_tokens(model, DENSE, 1000 * per_token, dtype=torch.bfloat16) == 2000


def test_ends() -> None:
    assert kvp.most_tokens(CONFIG, DENSE, 1) == 0
    first, last = (kvp.estimate(CONFIG, DENSE, tokens) for tokens in (1, LONGEST))
    found = [kvp.most_tokens(CONFIG, DENSE, room) for room in (first - 1, first, last - 1, last)]
    assert found == [0, 1, LONGEST - 1, None]
    assert kvp.most_tokens(CONFIG, EVICTING, 10**6) is None, "it holds its budget, however long the prompt"
    assert kvp.estimate(CONFIG, EVICTING, LONGEST) < 10**6


def test_states_without_data_are_scored_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there may be: cut into slabs, of which memory has need, they would take hours."""
    read, pieces = StreamView.read, []

    def counted(self: StreamView, start: int, stop: int) -> torch.Tensor:
        pieces.append((start, stop))
        return read(self, start, stop)

    monkeypatch.setattr(StreamView, "read", counted)
    for backend in ("expected_attention", "keydiff", "lagkv"):
        cache_config = {"backend": backend, "budget": 256, "sink_length": 4, "storage": {"backend": "int8"}}
        pieces.clear()
        kvp.estimate(CONFIG, cache_config, 2**20)
        assert len(pieces) <= 10 * CONFIG.num_hidden_layers
    assert kvp.most_tokens(CONFIG, {**cache_config, "backend": "keydiff"}, 10**7) is None


def test_a_decoder_beside_what_its_encoder_has_read() -> None:
    config = preset_config("flan-t5-large", num_layers=2)
    room = kvp.estimate(config, {"backend": "int8"}, 500, encoder_tokens=200, max_cache_length=500)
    assert 500 <= (kvp.most_tokens(config, {"backend": "int8"}, room, encoder_tokens=200) or 0) < 564
    with pytest.raises(ValueError, match="encoder_tokens must be an integer >= 1, got None"):
        kvp.most_tokens(config, {"backend": "int8"}, room)


@pytest.mark.parametrize("given", [0, -1, 1.5, "8", True, None])
def test_wrong_bytes(given: Any) -> None:
    with pytest.raises(ValueError, match=rf"memory_bytes must be an integer >= 1, got {given!r}"):
        kvp.most_tokens(CONFIG, DENSE, given)


def test_an_offloaded_cache_has_two_memories() -> None:
    with pytest.raises(ValueError, match="offload=True keeps codes in the host's memory"):
        kvp.most_tokens(CONFIG, {"backend": "int8", "offload": True}, 10**6)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    caches = [json.dumps(cache_config) for cache_config in ({"backend": "int8"}, EVICTING)]
    command = ["estimate", "--model", str(MODEL), "--memory_gb", "0.01", "--new_tokens", "9"]
    command += ["--dtype", "bf16", "--batch_size", "2", "--cache_config", *caches]
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["cache_config"]["backend"] for row in rows] == ["dense", "int8", "knorm"]
    for row in rows:
        told = {"batch_size": 2, "new_tokens": 9, "dtype": torch.bfloat16}
        assert row["tokens"] == kvp.most_tokens(CONFIG, row["cache_config"], 10**7, **told)
        assert (row["memory_gb"], row["batch_size"], row["new_tokens"]) == (0.01, 2, 9)
    dense, packed, evicting = rows
    assert dense["of_dense"] == 1.0 and packed["of_dense"] == packed["tokens"] / dense["tokens"] > 1.5
    assert evicting["tokens"] is None and evicting["of_dense"] is None
    positions = CONFIG.max_position_embeddings
    for row in rows:
        is_beyond = row["tokens"] is None or row["tokens"] + 8 > positions
        assert row["note"] == (f"beyond the model's {positions:,} positions" if is_beyond else None)
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "0.01 GB for the cache" in " ".join(said.split())
    assert "any number" in said and str(packed["tokens"]) in said


@pytest.mark.parametrize("given", ["0", "-3", "nan", "inf", "1e30"])
def test_a_wrong_size(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--memory_gb", given]) == 2
    assert capsys.readouterr().err.startswith("error: --memory_gb must be a number above 0 and at most")
