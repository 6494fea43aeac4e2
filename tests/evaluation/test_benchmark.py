"""The speed benchmarks at tiny sizes: what they write, that they compare like with like, what they refuse.

Nothing is asserted about times; only that they are there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging as transformers_logging

from kvcache_plugins.cli import main
from kvcache_plugins.evaluation import attention_speed, generation_speed, generation_worker, speed_plots
from kvcache_plugins.evaluation.dense_attention import BASELINES, exact_attention, max_rel_error
from kvcache_plugins.evaluation.results import read_results
from kvcache_plugins.evaluation.speed_options import AttentionOptions, GenerationOptions
from kvcache_plugins.evaluation.timing import Spread, StepTimer, time_in_turn

ROOT = Path(__file__).resolve().parents[2]
BUNDLED_MODEL = ROOT / "examples" / "models" / "tiny-llama-books"
DENSE = {"backend": "dense"}


@pytest.fixture(autouse=True)
def _quiet_only_here() -> Iterator[None]:
    """The command silences transformers, which must not reach other tests: they look for deprecations."""
    verbosity = transformers_logging.get_verbosity()
    yield
    transformers_logging.set_verbosity(verbosity)


def _caches(*cache_configs: dict[str, Any]) -> list[str]:
    return ["--cache_config", *map(json.dumps, cache_configs)]


# ---- the dense ways ----


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_baselines_agree(heads: int, kv_heads: int) -> None:
    query = torch.randn(2, heads, 1, 32, dtype=torch.bfloat16)
    keys, values = torch.randn(2, 2, kv_heads, 77, 32, dtype=torch.bfloat16)
    outputs = {name: attend(query, keys, values) for name, attend in BASELINES.items()}
    exact = exact_attention(query, keys, values)
    repeated = (states.float().repeat_interleave(heads // kv_heads, dim=1) for states in (keys, values))
    torch.testing.assert_close(
        exact, torch.nn.functional.scaled_dot_product_attention(query.float(), *repeated)
    )
    for output in outputs.values():
        assert output.shape == (2, heads, 1, 32)
        torch.testing.assert_close(output.float(), exact, atol=1e-2, rtol=1e-2)


def test_error_is_relative_to_the_largest_entry() -> None:
    assert max_rel_error(torch.tensor([1.0, 4.5]), torch.tensor([1.0, -4.0])) == pytest.approx(8.5 / 4)


# ---- timing ----


def test_candidates_are_timed_in_turn() -> None:
    calls: list[str] = []
    rounds: list[None] = []
    spreads = time_in_turn(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        repeats=3,
        warm_up=1,
        device=torch.device("cpu"),
        advance=lambda: rounds.append(None),
    )
    assert calls == ["a", "b"] * 4
    assert len(rounds) == 4
    assert all(spread.p20_ms <= spread.median_ms <= spread.p80_ms for spread in spreads.values())


def test_spread_of_known_times() -> None:
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0, 5.0)
    assert Spread.of([0.0, 1.0, 2.0, 3.0, 4.0, 20.0]) == Spread(2.5, 1.0, 4.0, 5.0)


def test_step_timer_splits_prefill_from_decoding() -> None:
    timer = StepTimer()
    timer.times = [1.0, 3.0, 3.5, 4.5]
    assert timer.prefill_ms() == 2000
    assert timer.decode_ms() == [500, 1000]


# ---- attention ----

ATTENTION_METRICS = {
    "length", "batch_size", "median_ms", "p20_ms", "p80_ms", "baseline_ms", "ratio_to_best_dense", "kv_bytes",
    "ratio_to_sdpa_gqa", "gb_per_s", "bits_per_value", "memory_fraction", "max_rel_error", "kernel",
    "encode_ms", "seconds",
}  # fmt: skip


def test_attention_writes_results_table_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kivi = {"backend": "kivi", "nbits": 4, "residual_length": 32, "rope_mode": "block"}
    torch_int8 = {"backend": "int8", "kernel": "torch"}
    sizes = ["--preset", "tiny", "--lengths", "96", "200", "--batch_sizes", "1", "2", "--repeats", "2"]
    arguments = [*sizes, "--threads", "1", *_caches({"backend": "INT8"}, torch_int8, kivi)]
    assert main(["bench", "attention", *arguments, "--output", str(tmp_path)]) == 0

    document = read_results(tmp_path)
    assert document["task"] == "bench attention"
    assert document["environment"]["threads"] == 1
    assert document["settings"]["num_attention_heads"] == 4
    rows = document["results"]
    caches = [DENSE, {"backend": "int8"}, torch_int8, kivi]
    assert [row["cache_config"] for row in rows] == caches * 4
    points = [(row["length"], row["batch_size"]) for row in rows[::4]]
    assert points == [(96, 1), (96, 2), (200, 1), (200, 2)]
    for row in rows:
        assert set(row) >= ATTENTION_METRICS
        assert set(row["baseline_ms"]) == set(BASELINES)
        best = min(row["baseline_ms"].values())
        assert row["ratio_to_best_dense"] == pytest.approx(row["median_ms"] / best)
        assert row["ratio_to_sdpa_gqa"] == pytest.approx(
            row["median_ms"] / row["baseline_ms"]["sdpa_enable_gqa"]
        )
        assert 0 <= row["max_rel_error"] < 2e-2
        assert row["kv_bytes"] / row["memory_fraction"] == pytest.approx(
            2 * row["batch_size"] * 2 * (row["length"] + 1) * 64 * 2
        )
    assert all(row["memory_fraction"] < 1 for row in rows if row["length"] == 200 and row["label"] != "dense")
    for dense, _, torch_row, _ in zip(*[iter(rows)] * 4, strict=True):
        assert (dense["memory_fraction"], dense["bits_per_value"]) == (1, 16)
        assert dense["ratio_to_best_dense"] == 1
        assert dense["kernel"] in BASELINES
        assert torch_row["kernel"] == "torch"

    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    for word in ("sdpa_packed_query", "kivi 4-bit", "best dense", "results.json", "attention.png"):
        assert word in printed.out
    assert "int8" in printed.err


def test_bytes_are_the_prediction_for_the_tokens_held() -> None:
    options = AttentionOptions(
        cache_config=[{"backend": "int4"}], lengths=[300], preset="tiny", dtype="fp32", repeats=2, warm_up=0
    )
    dense, int4 = attention_speed.measure_attention(options)["results"]
    assert dense["kv_bytes"] == 2 * 2 * 301 * 64 * 4
    tail = 2 * 2 * 65 * 64 * 4
    codes = 2 * 2 * 256 * 64 // 2
    assert codes + tail < int4["kv_bytes"] < 1.5 * (codes + tail)


def test_attention_of_a_model_and_of_transformers_own_cache() -> None:
    fp8 = {"backend": "fp8"}
    options = AttentionOptions(
        cache_config=[fp8], lengths=[150], model=str(BUNDLED_MODEL), repeats=1, warm_up=0
    )
    document = attention_speed.measure_attention(options)
    if document["skipped"]:
        pytest.skip(document["skipped"][0]["reason"])
    assert [row["cache_config"] for row in document["results"]] == [DENSE, fp8]
    assert document["results"][1]["kernel"] == "transformers"


def test_encoding_that_comes_rarely_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose every eighth update takes a second costs an eighth of it per token."""
    clock = [0.0]
    calls = [0]

    class Layer:
        def update(self, *states: object) -> None:
            calls[0] += 1
            clock[0] += 1.0 if calls[0] % 8 == 0 else 0.0
            clock[0] += 3.0 if calls[0] == 5 else 0.0  # an interruption, which is no encoding

    monkeypatch.setattr(attention_speed.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(attention_speed._Step, "period", 8)
    step = attention_speed._Step.__new__(attention_speed._Step)
    step.layer, step.new = Layer(), ()
    assert step.encode_ms() == pytest.approx(1000 / 8)


# ---- generation ----


@pytest.mark.slow
def test_generation_writes_results_table_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--model", str(BUNDLED_MODEL), "--lengths", "300", "--max_new_tokens", "8", "--threads", "1"]
    arguments = [*sizes, *_caches({"backend": "int8"})]
    assert main(["bench", "generate", *arguments, "--output", str(tmp_path)]) == 0
    document = read_results(tmp_path)
    assert document["task"] == "bench generate"
    assert document["environment"]["threads"] == 1
    dense, int8 = document["results"]
    assert (dense["cache_config"], int8["cache_config"]) == (DENSE, {"backend": "int8"})
    assert dense["kv_bytes"] == 6 * 2 * 2 * (300 + 8 - 1) * 64 * 2
    assert int8["memory_fraction"] < 1
    assert (dense["ratio_to_dense"], dense["prefill_ratio_to_dense"], dense["ratio_to_quanto"]) == (
        1,
        1,
        None,
    )
    for row in (dense, int8):
        assert row["prefill_ms"] > 0
        assert row["ms_per_token"] > 0
        assert row["peak_memory_bytes"] >= row["memory_before_bytes"] > 10**8
    assert (tmp_path / "generate.png").read_bytes().startswith(b"\x89PNG")
    assert "int8" in capsys.readouterr().out


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    backend = job["cache_config"]["backend"]
    if backend == "hqq":
        raise generation_speed.WorkerError("hqq ended with 1: no compiler")
    ms = {"dense": 10.0, "quanto": 100.0}.get(backend, 5.0)
    return {
        "prefill_ms": 50.0,
        "step_ms": [ms, ms],
        "kv_bytes": 1000 if backend == "dense" else 250,
        "memory_before_bytes": 1,
        "peak_memory_bytes": 2,
        "kernel": None,
        "fallback_reads": None,
        "threads": 3,
        "parameters": 7,
        "seconds": 1.0,
    }


def test_generation_is_compared_and_failures_of_transformers_are_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation_speed, "_run", _answer)
    monkeypatch.setattr(generation_speed, "why_unavailable", lambda config, cache_config: None)
    caches = [{"backend": "int8"}, {"backend": "quanto"}, {"backend": "hqq"}]
    options = GenerationOptions(cache_config=caches, lengths=[64], repeats=2)
    document = generation_speed.measure_generation(options)
    dense, int8, quanto = document["results"]
    assert (int8["ratio_to_dense"], int8["ratio_to_quanto"], quanto["ratio_to_dense"]) == (0.5, 0.05, 10)
    assert (int8["bits_per_value"], dense["bits_per_value"]) == (4, 16)
    assert int8["seconds"] == 2
    assert document["environment"]["threads"] == 3
    reason = "failed at 64 tokens: hqq ended with 1: no compiler"
    assert document["skipped"] == [{"cache_config": {"backend": "hqq"}, "reason": reason}]


def test_a_failure_of_ours_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: dict[str, Any]) -> None:
        raise generation_speed.WorkerError(f"{job['cache_config']['backend']} ended with -9: nothing")

    monkeypatch.setattr(generation_speed, "_run", fail)
    options = GenerationOptions(cache_config=[{"backend": "int8"}], lengths=[64])
    with pytest.raises(RuntimeError, match="dense ended with -9"):
        generation_speed.measure_generation(options)


def test_a_process_that_fails_says_why() -> None:
    job = {"model": "no/such/model", "cache_config": DENSE, "threads": None, "dtype": "float32"}
    with pytest.raises(generation_speed.WorkerError, match=r"dense ended with 1: .*no/such/model"):
        generation_speed._run(job)


def test_random_model_is_the_one_promised() -> None:
    config = generation_worker.model_config(None)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (8, 8, 2)
    assert config.head_dim == 64
    with torch.device("meta"):
        model = generation_worker.AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == pytest.approx(50e6, rel=0.05)


# ---- options ----


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["attention", "--preset", "llama3"], ["--preset", "'llama3'", "llama3-8b"]),
        (["attention", "--lengths", "0"], ["--lengths", ">= 1", "0"]),
        (["attention", "--batch_sizes", "1", "-2"], ["--batch_sizes", ">= 1", "-2"]),
        (["attention", "--dtype", "int8"], ["--dtype", "bf16", "'int8'"]),
        (["attention", "--repeats", "0"], ["--repeats", "0"]),
        (["attention", "--warm_up", "-1"], ["--warm_up", ">= 0", "-1"]),
        (["attention", "--threads", "0"], ["--threads", "0"]),
        (["attention", "--preset", "tiny", "--model", "x"], ["--preset", "--model"]),
        (["attention", "--model", "no/such/model"], ["no/such/model"]),
        (["attention", "--cache_config", "{"], ["--cache_config", "JSON"]),
        (["attention", *_caches({"backend": "kivvi"})], ["kivvi", "kivi"]),
        (["attention", *_caches({"backend": "kivi", "nbits": 5})], ["nbits", "5"]),
        (["attention", *_caches({"backend": "int8", "skip_layers": list(range(32))})], ["skip_layers"]),
        (["attention", "--config", "no_such.yaml"], ["no_such.yaml"]),
        (["generate", "--max_new_tokens", "3"], ["--max_new_tokens", ">= 8", "3"]),
        (["generate", "--lengths", "0"], ["--lengths", "0"]),
        (["generate", *_caches({"backend": "int8", "budget": 3})], ["budget"]),
        (["generate", "--output", str(ROOT / "README.md")], ["--output", "README.md"]),
    ],
)  # fmt: skip
def test_errors_name_option_value_and_allowed(
    arguments: list[str],
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert all(word in error for word in said), error
    assert list(tmp_path.iterdir()) == []


def test_a_file_gives_options_and_the_command_line_overrides_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.yaml"
    file.write_text(
        "preset: tiny\nlengths: [64]\nrepeats: 9\nwarm_up: 0\n"
        "cache_config:\n  - backend: Float8\n    format: e5m2\n"
    )
    arguments = ["--config", str(file), "--repeats", "1", "--no_plots", "--output", str(tmp_path / "out")]
    assert main(["bench", "attention", *arguments]) == 0
    document = read_results(tmp_path / "out")
    settings = document["settings"]
    assert (settings["preset"], settings["lengths"], settings["repeats"]) == ("tiny", [64], 1)
    assert document["results"][1]["cache_config"] == {"backend": "float8", "format": "e5m2"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["results.json"]
    capsys.readouterr()

    for text, said in (
        ("repeat: 3\n", "repeats"),
        ("- 1\n", "by name"),
        ("a: [\n", "YAML"),
        ("lengths: x", "'x'"),
    ):
        file.write_text(text)
        assert main(["bench", "attention", "--config", str(file)]) == 2
        assert said in capsys.readouterr().err


def test_a_missing_matplotlib_is_told_before_the_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        speed_plots.importlib.util,
        "find_spec",
        lambda name: None if name == "matplotlib" else find_spec(name),
    )
    assert main(["bench", "attention", "--preset", "tiny"]) == 2
    error = capsys.readouterr().err
    assert "kvcache-plugins[plots]" in error
    assert "--no_plots" in error


@pytest.mark.parametrize("kind", ["attention", "generate"])
def test_script_is_the_sub_command(kind: str, tmp_path: Path) -> None:
    script = ROOT / "scripts" / "benchmark.py"
    assert os.access(script, os.X_OK)
    done = subprocess.run(
        [sys.executable, str(script), kind, "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--cache_config" in done.stdout
