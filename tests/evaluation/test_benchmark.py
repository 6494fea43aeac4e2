"""The speed benchmarks at tiny sizes: what they write, that they compare like with like, what they refuse.

Nothing is asserted about times; only that they are there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import traceback
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvcache_plugins import capacity
from kvcache_plugins.cli import main
from kvcache_plugins.estimation import MOST_NEW_TOKENS, estimate
from kvcache_plugins.evaluation.caches import new_cache
from kvcache_plugins.evaluation.speed import plots as speed_plots
from kvcache_plugins.evaluation.speed import tables as speed_tables
from kvcache_plugins.evaluation.speed import timing
from kvcache_plugins.evaluation.speed.attention import layers as attention_layers
from kvcache_plugins.evaluation.speed.attention import on_host as attention_on_host
from kvcache_plugins.evaluation.speed.attention import run as attention_speed
from kvcache_plugins.evaluation.speed.attention import states as attention_states
from kvcache_plugins.evaluation.speed.attention.dense_attention import (
    BASELINES,
    exact_attention,
    max_rel_error,
)
from kvcache_plugins.evaluation.speed.generation import largest_context, memory_prediction
from kvcache_plugins.evaluation.speed.generation import process as generation_process
from kvcache_plugins.evaluation.speed.generation import rounds as generation_rounds
from kvcache_plugins.evaluation.speed.generation import run as generation_speed
from kvcache_plugins.evaluation.speed.generation import worker as generation_worker
from kvcache_plugins.evaluation.speed.generation.memory_prediction import (
    longest_context,
    predicted_bytes,
    predicted_peak_bytes,
    prompt_and_new_tokens,
)
from kvcache_plugins.evaluation.speed.options import AttentionOptions, GenerationOptions
from kvcache_plugins.evaluation.speed.timing import HostStopwatch, Spread, StepTimer, time_in_turn
from kvcache_plugins.kernels import loader
from kvcache_plugins.runs import plotting
from kvcache_plugins.runs.results import check_document, read_results
from tests.kernels import fresh_process
from tests.models.encoders import encoder_decoder

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = str(ROOT / "examples" / "models" / "tiny-llama-books")
LOCRET = {"backend": "locret", "heads": f"{BUNDLED}-locret", "budget": 99}
BUNDLED_MODEL = ROOT / "examples" / "models" / "tiny-llama-books"
DENSE = {"backend": "dense"}
KIVI = {"backend": "kivi", "nbits": 2, "residual_length": 32}
KERNEL = "cpu" if loader.try_load() else "torch"


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
        stopwatch=HostStopwatch(),
        advance=lambda: rounds.append(None),
    )
    turns = [tuple(calls[i : i + 2]) for i in range(0, len(calls), 2)]
    assert len(turns) == 4 and set(turns) == {("a", "b"), ("b", "a")}, "each once a round, in no fixed order"
    assert len(rounds) == 4
    assert all(spread.p20_ms <= spread.median_ms <= spread.p80_ms for spread in spreads.values())


def test_rounds_that_warm_up_are_not_counted() -> None:
    times = {"a": iter([90.0, 80.0, 1.0, 2.0, 3.0]), "b": iter([70.0, 60.0, 4.0, 5.0, 9.0])}
    spreads = time_in_turn(times, repeats=3, warm_up=2, stopwatch=next)
    assert spreads == {"a": Spread.of([1.0, 2.0, 3.0]), "b": Spread.of([4.0, 5.0, 9.0])}


def test_what_every_call_takes_besides_is_added_to_all_times() -> None:
    assert Spread(2.0, 1.0, 3.0, 4.0).plus(0.5) == Spread(2.5, 1.5, 3.5, 4.5)


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
DEVICE_METRICS = {"attention_ms", "append_ms", "host_ms", "fraction_of_copy", "baselines_not_run"}


def test_attention_writes_results_table_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kivi = {"backend": "kivi", "nbits": 4, "residual_length": 32, "rope_mode": "block"}
    torch_int8 = {"backend": "int8", "kernel": "torch"}
    sizes = ["--preset", "tiny", "--lengths", "96", "200", "--batch_sizes", "1", "2", "--repeats", "2"]
    arguments = [*sizes, "--device", "cpu", "--threads", "1", *_caches({"backend": "INT8"}, torch_int8, kivi)]
    assert main(["bench", "attention", *arguments, "--output", str(tmp_path)]) == 0

    document = read_results(tmp_path)
    assert document["task"] == "bench attention"
    assert document["environment"]["threads"] == 1
    assert document["settings"]["num_attention_heads"] == 4
    assert (document["settings"]["device"], document["settings"]["requested_device"]) == ("cpu", "cpu")
    rows = document["results"]
    caches = [DENSE, {"backend": "int8"}, torch_int8, kivi]
    assert [row["cache_config"] for row in rows] == caches * 4
    points = [(row["length"], row["batch_size"]) for row in rows[::4]]
    assert points == [(96, 1), (96, 2), (200, 1), (200, 2)]
    for row in rows:
        assert set(row) >= ATTENTION_METRICS
        assert not set(row) & DEVICE_METRICS, "a CPU's results are what they were"
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
    assert "finished: 32 of 32 steps" in printed.err


def test_bytes_are_the_prediction_for_the_tokens_held() -> None:
    options = AttentionOptions(
        cache_config=[{"backend": "int4"}],
        lengths=[300],
        preset="tiny",
        device="cpu",
        dtype="fp32",
        repeats=2,
        warm_up=0,
    )
    dense, int4 = attention_speed.measure_attention(options)["results"]
    assert dense["kv_bytes"] == 2 * 2 * 301 * 64 * 4
    tail = 2 * 2 * 65 * 64 * 4
    codes = 2 * 2 * 256 * 64 // 2
    assert codes + tail < int4["kv_bytes"] < 1.5 * (codes + tail)


@pytest.mark.parametrize("length", [127, 128, 300])
@pytest.mark.parametrize("backend", ["int8", "int4", "kivi"])
def test_bytes_of_a_layer_are_those_of_a_model_of_one(backend: str, length: int) -> None:
    config = generation_worker.model_config(None, "tiny", 1)
    heads = attention_states.heads_of(config)
    shape = attention_states.AttentionShape(2, **heads, length=length, dtype=torch.bfloat16)
    states = attention_states.States.random(shape)
    layer = attention_layers.filled_layer(config, {"backend": backend}, shape, states, lambda period: 1)
    told: dict[str, Any] = {"dtype": torch.bfloat16, "max_cache_length": length + 1}
    expected = estimate(config, {"backend": backend}, length + 1, 2, **told)
    assert attention_layers.layer_bytes(config, {"backend": backend}, shape, layer) == expected


def test_a_step_on_the_host_is_what_was_timed_and_its_share_of_encoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def timed(candidates: dict[str, Any], **_: Any) -> dict[str, Spread]:
        return {name: Spread(2.0 + index, 1.0, 9.0, 3.0) for index, name in enumerate(candidates)}

    def error(step: attention_layers.LayerStep, keys: Any, values: Any) -> float:
        return 0.25 if type(step.layer).__name__ == "Int4Layer" else 0.5

    monkeypatch.setattr(attention_on_host, "time_in_turn", timed)
    monkeypatch.setattr(attention_on_host, "encode_ms", lambda step, period: 0.125)
    monkeypatch.setattr(attention_layers.LayerStep, "error", error)
    ticks = chain([1.0], repeat(7.0))
    monkeypatch.setattr(attention_speed, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    options = AttentionOptions(
        cache_config=[{"backend": "int8"}, {"backend": "int4"}], lengths=[64], preset="tiny", device="cpu"
    )
    dense, int8, int4 = attention_speed.measure_attention(options)["results"]
    assert list(dense["baseline_ms"].values()) == [2.0, 3.0, 4.0] and dense["median_ms"] == 2.0
    assert (int8["median_ms"], int8["p20_ms"], int8["p80_ms"], int4["median_ms"]) == (
        5.125,
        1.125,
        9.125,
        6.125,
    )
    assert (int8["encode_ms"], int8["max_rel_error"], int4["max_rel_error"]) == (0.125, 0.5, 0.25)
    assert [row["seconds"] for row in (dense, int8, int4)] == [2.0] * 3, "measured together"
    assert int8["ratio_to_best_dense"] == 5.125 / 2
    assert int8["gb_per_s"] == pytest.approx(int8["kv_bytes"] / 5.125e-3 / 1e9)


def test_an_error_is_that_of_attention_over_what_is_held() -> None:
    class Wrong(attention_layers.LayerStep):
        def attend(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(super().attend(keys, values))

    shape = attention_states.AttentionShape(1, 4, 2, 16, 16, 33, torch.float32)
    states = attention_states.States.random(shape)
    for kind, error in ((attention_layers.LayerStep, 0.0), (Wrong, 1.0)):
        step = kind(None, states)
        assert step.error(states.keys, states.values) == pytest.approx(error, abs=1e-5)


def test_a_period_is_that_of_the_stream_that_is_packed_in_longer_blocks() -> None:
    config = generation_worker.model_config(None, "tiny", 1)
    shape = attention_states.AttentionShape(
        1, **attention_states.heads_of(config), length=9, dtype=torch.bfloat16
    )
    for cache_config, period in ((KIVI, 32), ({"backend": "dense"}, 1)):
        layer = attention_layers.find_layer(new_cache(config, cache_config), cache_config)
        assert attention_layers.period_of(layer, shape) == period


def test_a_dense_step_writes_the_new_token_before_it_attends() -> None:
    shape = attention_states.AttentionShape(2, 4, 2, 16, 16, 33, torch.float32)
    states = attention_states.States.random(shape)
    expected = exact_attention(states.query, states.keys, states.values)
    for attend in BASELINES.values():
        step = attention_on_host._dense_step(attend, states)
        states.keys[:, :, -1:].zero_()
        states.values[:, :, -1:].zero_()
        torch.testing.assert_close(step(), expected)


def test_attention_of_a_model_and_of_transformers_own_cache() -> None:
    fp8 = {"backend": "fp8"}
    options = AttentionOptions(
        cache_config=[fp8], lengths=[150], model=str(BUNDLED_MODEL), device="cpu", repeats=1, warm_up=0
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
        def update(self, *states: object) -> tuple[object, ...]:
            calls[0] += 1
            clock[0] += 1.0 if calls[0] % 8 == 0 else 0.0
            clock[0] += 3.0 if calls[0] == 5 else 0.0  # an interruption, which is no encoding
            return states

    monkeypatch.setattr(attention_on_host.time, "perf_counter", lambda: clock[0])
    states = attention_states.States(*torch.zeros(3, 1, 1, 2, 4))
    step = attention_layers.LayerStep(Layer(), states)
    assert attention_on_host.encode_ms(step, 8) == pytest.approx(1000 / 8)
    assert attention_on_host.encode_ms(step, 1) == 0


# ---- generation ----


@pytest.mark.slow
def test_generation_writes_results_table_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--model", str(BUNDLED_MODEL), "--lengths", "300", "--max_new_tokens", "8", "--threads", "1"]
    arguments = [*sizes, "--device", "cpu", *_caches({"backend": "int8"})]
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
        assert row["fits"]
        assert row["ttft_ms"] >= row["prefill_ms"] > 0
        assert row["estimated_kv_bytes"] == row["kv_bytes"]
        assert row["estimated_peak_bytes"] == row["kv_bytes"] + 2 * 2 * 300 * 64 * 2
        assert row["device_peak_bytes"] is None
        assert row["peak_above_model_bytes"] in (None, row["peak_memory_bytes"] - row["memory_before_bytes"])
        assert row["ms_per_token"] > 0
        assert row["peak_memory_bytes"] >= row["memory_before_bytes"] > 10**8
    assert (tmp_path / "generate.png").read_bytes().startswith(b"\x89PNG")
    assert "int8" in capsys.readouterr().out


@pytest.mark.in_depth
def test_generation_of_an_encoder_decoder(tmp_path: Path) -> None:
    encoder_decoder("t5").save_pretrained(tmp_path / "model")
    sizes = [
        "--model",
        str(tmp_path / "model"),
        "--lengths",
        "300",
        "--max_new_tokens",
        "9",
        "--threads",
        "1",
    ]
    caches = _caches({"backend": "int8"}, {"backend": "quanto", "nbits": 4})
    arguments = [*sizes, "--device", "cpu", "--dtype", "fp32", *caches, "--output", str(tmp_path)]
    assert main(["bench", "generate", *arguments]) == 0
    document = read_results(tmp_path)
    dense, int8 = document["results"]
    # the first token of the decoder is given, the last one never read
    assert dense["kv_bytes"] == 2 * 2 * (9 + 300) * 64 * 4
    for row in (dense, int8):
        assert row["estimated_kv_bytes"] == row["kv_bytes"]
        assert row["ttft_ms"] > row["prefill_ms"] > 0 < row["ms_per_token"]
    assert (int8["kernel"], int8["fallback_reads"]) == ([KERNEL], 0)
    assert [entry["reason"] for entry in document["skipped"]] == [
        "transformers has it for decoder-only models alone"
    ]


@pytest.mark.parametrize("most", [1.3, 1.9, 8.0, 900.0])
def test_times_are_drawn_beside_numbers_however_close_they_are(
    most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(speed_plots, "save_figure", lambda figure, *_: drawn.append(figure))
    document = json.loads((ROOT / "examples" / "results" / "bench_attention.json").read_text())
    dense = next(row for row in document["results"] if row["cache_config"] == DENSE)
    rows = [{**dense, "length": length, "baseline_ms": {"a": ms}} for length, ms in ((64, 1.1), (128, most))]
    speed_plots.plot_attention(document | {"results": rows}, tmp_path / "attention.png")
    axis = drawn[0].axes[0].yaxis
    low, high = axis.get_view_interval()
    assert len([place for place in axis.get_majorticklocs() if low <= place <= high]) >= 2


_LAUNCHER = """
import os, resource, subprocess, sys
done = subprocess.run([sys.executable, "-m", *sys.argv[1:], str(os.getpid())])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(done.returncode)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit elsewhere")
def test_peak_memory_is_the_operating_systems(tmp_path: Path) -> None:
    """What `/usr/bin/time` would print: the maximum resident set of the process, seen by a small parent."""
    options = GenerationOptions(lengths=[1500], model=str(BUNDLED_MODEL), threads=1, max_new_tokens=8)
    # without native kernels: the system's figure would hold their compiler, a child of the worker, as well
    cache_config = {"backend": "int8", "kernel": "torch"}
    job = generation_process.make_job(options, cache_config, 1500, 2, torch.device("cpu"))
    (tmp_path / "job.json").write_text(json.dumps(job))
    worker = [generation_worker.__name__, str(tmp_path / "job.json"), str(tmp_path / "answer.json")]
    done = subprocess.run(
        [sys.executable, "-c", _LAUNCHER, *worker], cwd=ROOT, capture_output=True, text=True, check=True
    )
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["peak_memory_bytes"] == pytest.approx(1024 * int(done.stdout.split()[-1]), rel=0.1)
    assert answer["peak_memory_bytes"] >= answer["load_peak_bytes"] >= answer["memory_before_bytes"]
    with torch.device("meta"):
        config = generation_worker.model_config(str(BUNDLED_MODEL))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert answer["model_bytes"] == pytest.approx(2 * model.num_parameters(), rel=1e-3)


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    backend = job["cache_config"]["backend"]
    if backend == "hqq":
        raise generation_process.WorkerError("hqq ended with 1: no compiler")
    ms = {"dense": 10.0, "quanto": 100.0}.get(backend, 5.0)
    return {
        "ttft_ms": 51.0,
        "prefill_ms": 50.0,
        "step_ms": [ms, ms],
        "kv_bytes": 1000 if backend == "dense" else 250,
        "model_bytes": 10**6,
        "memory_before_bytes": 100,
        "load_peak_bytes": 120,
        "peak_memory_bytes": 170,
        "device_before_bytes": None,
        "device_peak_bytes": None,
        "kernel": None,
        "fallback_reads": None,
        "threads": 3,
        "parameters": 7,
        "seconds": 1.0,
    }


def test_an_encoder_that_hears_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder_decoder("whisper").config.save_pretrained(tmp_path)
    assert main(["bench", "generate", "--model", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "the encoder of WhisperConfig reads something else. Allowed are models that read text" in said


def test_generation_is_compared_and_failures_of_transformers_are_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("optimum.quanto")
    pytest.importorskip("hqq")
    monkeypatch.setattr(generation_rounds, "run_job", _answer)
    monkeypatch.setattr(
        "kvcache_plugins.evaluation.caches.why_unavailable", lambda config, cache_config: None
    )
    caches = [{"backend": "int8"}, {"backend": "quanto"}, {"backend": "hqq"}]
    options = GenerationOptions(cache_config=caches, lengths=[64], repeats=2)
    document = generation_speed.measure_generation(options)
    dense, int8, quanto = document["results"]
    assert (int8["ratio_to_dense"], int8["ratio_to_quanto"], quanto["ratio_to_dense"]) == (0.5, 0.05, 10)
    assert (int8["bits_per_value"], dense["bits_per_value"]) == (4, 16)
    assert int8["seconds"] == 2
    assert (int8["ttft_ms"], int8["prefill_ms"], int8["peak_above_model_bytes"]) == (51, 50, 70)
    values = 8 * 2 * 2 * (64 + 64 - 1) * 64  # of 64 tokens at 4.5 bits and 63 at 16
    assert quanto["estimated_kv_bytes"] == values // 127 * (64 * 4.5 + 63 * 16) / 8
    assert quanto["estimated_peak_bytes"] is None  # which decodes and encodes all of a layer at once
    assert int8["estimated_kv_bytes"] == estimate(
        generation_worker.model_config(None), {"backend": "int8"}, 64 + 64 - 1, dtype=torch.bfloat16
    )
    assert document["environment"]["threads"] == 3
    reason = "failed at 64 tokens: hqq ended with 1: no compiler"
    assert document["skipped"] == [{"cache_config": {"backend": "hqq"}, "reason": reason, "is_failure": True}]


def test_answers_of_all_rounds_are_put_together() -> None:
    answer = _answer({"cache_config": DENSE}) | {"load_peak_bytes": 600}
    answers = [
        answer
        | {"step_ms": [1.0, 2.0, 3.0], "ttft_ms": 20.0, "prefill_ms": 10.0, "seconds": 2.0}
        | {"memory_before_bytes": 500, "peak_memory_bytes": 900, "kv_bytes": 7},
        answer
        | {"step_ms": [5.0, 6.0, 13.0], "ttft_ms": 30.0, "prefill_ms": 16.0, "seconds": 3.0}
        | {"memory_before_bytes": 400, "peak_memory_bytes": 700, "kv_bytes": 8},
    ]
    row = generation_speed._measured(answers)
    assert (row["ms_per_token"], row["ms_per_token_mean"], row["p20_ms"], row["p80_ms"]) == (4, 5, 2, 6)
    assert (row["ttft_ms"], row["prefill_ms"], row["seconds"], row["kv_bytes"]) == (25, 13, 5, 8)
    assert (row["memory_before_bytes"], row["peak_memory_bytes"]) == (500, 900)
    assert (row["peak_above_model_bytes"], row["device_peak_bytes"]) == (400, None)
    on_device = [
        answer | {"device_before_bytes": before, "device_peak_bytes": peak}
        for before, peak in ((10, 90), (50, 95), (30, 85))
    ]
    row = generation_speed._measured(on_device)
    assert (row["device_peak_bytes"], row["peak_above_model_bytes"]) == (95, 80)


def test_times_are_compared_with_the_same_times_of_others() -> None:
    sizes = (("dense", 1000, 10.0, 100.0), ("int8", 500, 5.0, 150.0), ("quanto", 250, 20.0, 200.0))
    rows = [
        {"cache_config": {"backend": name}, "fits": True, "kv_bytes": kv_bytes, "ms_per_token": step}
        | {"prefill_ms": prefill, "ttft_ms": 10 * prefill - 500, "estimated_kv_bytes": 9}
        for name, kv_bytes, step, prefill in sizes
    ]
    _, int8, quanto = generation_speed._compare(rows, 16)
    assert (int8["memory_fraction"], int8["bits_per_value"]) == (0.5, 8)
    assert (int8["ratio_to_dense"], int8["prefill_ratio_to_dense"], int8["ratio_to_quanto"]) == (
        0.5,
        1.5,
        0.25,
    )
    assert (quanto["ratio_to_dense"], quanto["prefill_ratio_to_dense"], quanto["ratio_to_quanto"]) == (
        2,
        2,
        1,
    )


def test_the_peak_has_the_exact_states_of_a_layer_for_all_rows() -> None:
    config = generation_worker.model_config(None, "gemma2-9b", 2)
    held = predicted_bytes(config, {"backend": "int8"}, 300, 3, torch.bfloat16, None, 8)
    peak = predicted_peak_bytes(config, {"backend": "int8"}, 300, 8, 3, torch.bfloat16)
    assert held is not None
    assert peak == held + 3 * 300 * 8 * (256 + 256) * 2


def test_the_peak_of_an_encoder_decoder_has_the_states_of_what_the_encoder_read() -> None:
    config = generation_worker.model_config(None, "flan-t5-large", 2)
    held = predicted_bytes(config, DENSE, 1, 3, torch.bfloat16, 300, 8)
    assert held is not None
    peak = predicted_peak_bytes(config, DENSE, 300, 8, 3, torch.bfloat16)
    assert peak == held + 3 * 300 * 16 * (64 + 64) * 2


def test_the_peak_is_that_of_the_widest_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    config = generation_worker.model_config(None, "gemma2-9b", 3)
    held = predicted_bytes(config, DENSE, 300, 1, torch.bfloat16, None, 8)
    assert held is not None
    shapes = [(2, 64, 64), (4, 64, 32), (2, 64, 64)]
    monkeypatch.setattr(memory_prediction, "key_value_heads", lambda _, layer_idx: shapes[layer_idx])
    peak = predicted_peak_bytes(config, DENSE, 300, 8, 1, torch.bfloat16)
    assert peak == held + 300 * 4 * (64 + 32) * 2


def test_the_largest_context_is_compared_with_the_dense_one_of_as_many_rows() -> None:
    options = GenerationOptions(
        cache_config=[], lengths=[64], batch_sizes=[1, 4], memory_gb=0.021, preset="tiny", device="cpu"
    )
    config, caches = generation_worker.model_config(None, "tiny"), [DENSE, {"backend": "int8"}]
    outcomes = generation_rounds.Outcomes(None, options, config, torch.device("cpu"), caches)
    entries = largest_context.largest_contexts(config, options, caches, 10**6, torch.device("cpu"), outcomes)
    assert [entry["batch_size"] for entry in entries] == [1, 1, 4, 4]
    for dense, int8 in (entries[:2], entries[2:]):
        assert dense["of_dense"] == 1 and int8["of_dense"] == int8["tokens"] / dense["tokens"] > 1.5
    assert entries[0]["tokens"] // 4 == entries[2]["tokens"]


def test_a_stopwatch_clears_the_processors_caches_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(timing.CacheFlusher, "__call__", lambda self: done.append("flushed"))
    clock = SimpleNamespace(perf_counter=lambda: done.append("clock") or float(len(done)))
    monkeypatch.setattr(timing, "time", clock)
    assert HostStopwatch()(lambda: done.append("called")) == 2000
    assert done == ["flushed", "clock", "called", "clock"]


def test_what_is_flushed_is_larger_than_the_largest_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_LEAST_FLUSH_BYTES", 1000)
    monkeypatch.setattr(timing, "_largest_cache_bytes", lambda: 4096)
    assert timing.CacheFlusher()._buffer.nbytes == 8192
    monkeypatch.setattr(timing, "_largest_cache_bytes", lambda: 0)
    assert timing.CacheFlusher()._buffer.nbytes == 1000


def test_a_table_shows_the_dense_ways_beside_the_best_of_them() -> None:
    row = {
        "cache_config": DENSE, "label": "dense", "length": 64, "batch_size": 1, "kernel": "matmul",
        "median_ms": 2.0, "p20_ms": 1.5, "p80_ms": 2.5, "ratio_to_best_dense": 1.0, "kv_bytes": 2**21,
        "ratio_to_sdpa_gqa": 0.25, "baseline_ms": {"sdpa_enable_gqa": 8.0, "matmul": 2.0, "other": 4.0},
        "baseline_spread_ms": {"sdpa_enable_gqa": [7.0, 9.0], "matmul": [1.5, 2.5], "other": [3.0, 5.0]},
    }  # fmt: skip
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "key_dim": 64, "dtype": "bf16"}
    settings = {"model": None, "preset": "tiny"} | heads
    table = speed_tables.attention_table({"settings": settings, "results": [row]})
    shown = {
        str(column.header).replace("\n", " "): [str(cell) for cell in column.cells]
        for column in table.columns
    }
    assert shown["cache"] == ["dense sdpa_enable_gqa", "dense matmul", "dense other"]
    assert shown["median ms"] == ["8.000", "2.000", "4.000"]
    assert shown["p20 - p80"] == ["7.000 - 9.000", "1.500 - 2.500", "3.000 - 5.000"]
    assert shown["of best dense"] == ["4.00", "1.00", "2.00"]
    assert shown["of sdpa gqa"] == ["1.000", "0.250", "0.500"]


def test_tables_show_bytes_in_mebibytes_and_each_ratio_in_its_column() -> None:
    row = {
        "cache_config": DENSE, "label": "dense", "length": 64, "batch_size": 1, "fits": True, "kernel": None,
        "ttft_ms": 30.0, "prefill_ms": 20.0, "prefill_ratio_to_dense": 1.25, "ms_per_token": 3.0,
        "ratio_to_dense": 0.75, "ratio_to_quanto": 0.5, "kv_bytes": 3 * 2**20, "bits_per_value": 4.0,
        "estimated_kv_bytes": 2 * 2**20, "peak_memory_bytes": 2**30,
    }  # fmt: skip
    settings = {"model": "m", "parameters": 10**6, "dtype": "bf16", "max_new_tokens": 8}
    table = speed_tables.generation_table({"settings": settings, "results": [row]})
    shown = [(str(column.header).replace("\n", " "), str(next(column.cells))) for column in table.columns]
    assert shown == [
        ("tokens", "64"), ("cache", "dense"), ("first token ms", "30"), ("prefill ms", "20"),
        ("of dense", "1.25"), ("ms per token", "3.0"), ("of dense", "0.75"), ("of quanto", "0.500"),
        ("cache", "3.0"), ("esti- mate", "2.0"), ("bits per value", "4.00"), ("process peak", "1,024.0"),
    ]  # fmt: skip


@pytest.mark.parametrize(("backend", "status"), [("int8", 1), ("quanto", 0)])
def test_a_failure_of_ours_is_told_after_the_rest(
    backend: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One of transformers' own stands in the results alone."""

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        if job["cache_config"]["backend"] == backend:
            raise generation_process.WorkerError(f"{backend} ended with -6: illegal address")
        return _answer(job)

    monkeypatch.setattr(generation_rounds, "run_job", answer)
    monkeypatch.setattr("kvcache_plugins.evaluation.caches.why_unavailable", lambda *_: None)
    arguments = ["--lengths", "64", "--no_plots", "--output", str(tmp_path)]
    caches = _caches({"backend": backend}, {"backend": "int4"})
    assert main(["bench", "generate", *arguments, *caches]) == status
    document = read_results(tmp_path)
    assert [row["label"] for row in document["results"]] == ["dense", "int4"]
    reason = f"failed at 64 tokens: {backend} ended with -6: illegal address"
    entry = {"cache_config": {"backend": backend}, "reason": reason, "is_failure": True}
    assert document["skipped"] == [entry]
    assert (f"error: {backend} {reason}" in capsys.readouterr().err) == (status == 1)


def test_a_failure_of_the_dense_cache_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: dict[str, Any]) -> None:
        raise generation_process.WorkerError(f"{job['cache_config']['backend']} ended with -9: nothing")

    monkeypatch.setattr(generation_rounds, "run_job", fail)
    options = GenerationOptions(cache_config=[{"backend": "int8"}], lengths=[64])
    with pytest.raises(RuntimeError, match="dense ended with -9"):
        generation_speed.measure_generation(options)


def test_a_dense_cache_that_does_not_compile_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It keeps what CUDA graphs return, which torch refuses."""

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        if job["cache_config"]["backend"] == "dense":
            raise generation_process.WorkerError("dense ended with 1: has been overwritten")
        return _answer(job)

    monkeypatch.setattr(generation_rounds, "run_job", answer)
    arguments = ["--lengths", "64", "--compile", "reduce-overhead", "--output", str(tmp_path)]
    assert main(["bench", "generate", *arguments, *_caches({"backend": "int8"})]) == 0
    document = read_results(tmp_path)
    dense, int8 = document["results"]
    reason = "failed at 64 tokens: dense ended with 1: has been overwritten"
    assert (dense["fits"], dense["reason"], dense["ms_per_token"]) == (False, reason, None)
    assert (int8["ms_per_token"], int8["ratio_to_dense"]) == (5, None)
    assert document["skipped"] == []
    assert reason in " ".join(capsys.readouterr().out.split())


def test_a_point_that_does_not_fit_is_a_result_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[tuple[str, int, int]] = []

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        point = (job["cache_config"]["backend"], job["length"], job["batch_size"])
        tried.append(point)
        if point[0] == "dense" and point[1] * point[2] > 100:
            raise generation_process.DidNotFitError("did not fit: killed")
        return _answer(job)

    monkeypatch.setattr(generation_rounds, "run_job", answer)
    sizes = ["--lengths", "64", "256", "--batch_sizes", "1", "2", "--output", str(tmp_path)]
    assert main(["bench", "generate", *sizes, *_caches({"backend": "int8"})]) == 0
    document = read_results(tmp_path)
    rows = {(row["label"], row["length"], row["batch_size"]): row for row in document["results"]}
    fits = {point: row["fits"] for point, row in rows.items()}
    assert fits == {
        ("dense", 64, 1): True, ("dense", 64, 2): False, ("dense", 256, 1): False, ("dense", 256, 2): False,
        ("int8", 64, 1): True, ("int8", 64, 2): True, ("int8", 256, 1): True, ("int8", 256, 2): True,
    }  # fmt: skip
    lost = rows["dense", 64, 2]
    assert (lost["reason"], lost["ms_per_token"], lost["kv_bytes"]) == ("did not fit: killed", None, None)
    assert lost["estimated_kv_bytes"] == 8 * 2 * 2 * 2 * (64 + 64 - 1) * 64 * 2
    # compared with the bytes the dense cache would have had, and with no time it never took
    int8 = rows["int8", 64, 2]
    assert int8["memory_fraction"] == 250 / lost["estimated_kv_bytes"]
    assert (int8["ratio_to_dense"], int8["prefill_ratio_to_dense"]) == (None, None)
    # larger than what did not fit in both ways: not even tried
    assert ("dense", 256, 2) not in tried
    assert ("dense", 256, 1) in tried
    assert "not tried: 64 tokens with a batch of 2" in rows["dense", 256, 2]["reason"]
    assert (tmp_path / "generate.png").exists()
    printed = capsys.readouterr().out
    assert printed.count("did not fit") >= 4
    for head in ("tokens", "batch", "its peak,", "process"):
        assert head in printed  # nothing was squeezed out of a table as wide as a file's


def test_nothing_that_fits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: dict[str, Any]) -> None:
        raise generation_process.DidNotFitError("did not fit: killed")

    monkeypatch.setattr(generation_rounds, "run_job", fail)
    with pytest.raises(ValueError, match="no measurement fitted the memory: did not fit: killed"):
        generation_speed.measure_generation(GenerationOptions(cache_config=[], lengths=[64]))


@pytest.mark.parametrize("sizes", [{"lengths": [10**12]}, {"lengths": [64], "max_new_tokens": 10**12}])
def test_what_no_memory_holds_is_told_before_a_model_is_built(
    sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_rounds, "run_job", lambda job: pytest.fail("started"))
    options = GenerationOptions(cache_config=[{"backend": "int8"}], **sizes)
    with pytest.raises(ValueError, match=r"not tried: prompt and cache take [\d,.]+ GB, cpu has [\d.]+ GB"):
        generation_speed.measure_generation(options)


@pytest.mark.parametrize("status", [-9, 137, generation_process.OUT_OF_MEMORY])
def test_a_killed_process_did_not_fit(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], status, stdout="", stderr="can't allocate memory")
    monkeypatch.setattr(generation_process.subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(generation_process.DidNotFitError, match="did not fit"):
        generation_process.run_job({"cache_config": DENSE})


def test_a_refused_allocation_is_told_from_other_failures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.json").write_text("{}")
    files = [str(tmp_path / "job.json"), str(tmp_path / "answer.json")]
    # the worker offers itself to the system's killer first, which must not happen to the tests
    monkeypatch.setattr(Path, "write_text", lambda self, text: None)
    monkeypatch.setattr(generation_worker, "measure", lambda job: torch.empty(2**60, dtype=torch.uint8))
    assert generation_worker.main(files) == generation_process.OUT_OF_MEMORY
    assert "memory" in capsys.readouterr().err

    def fail(job: dict[str, Any]) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(generation_worker, "measure", fail)
    with pytest.raises(RuntimeError, match="something else"):
        generation_worker.main(files)


EVICTING = [
    {"backend": "knorm", "budget": 60, "chunk_size": 64},
    {"backend": "snapkv", "budget": 0.25},
    {"backend": "streaming_llm", "budget": 60, "chunk_size": 64, "evict_at_decode": True},
]


@pytest.mark.parametrize("cache_config", EVICTING, ids=lambda c: c["backend"])
def test_bytes_of_a_cache_that_evicts_are_predicted_with_what_it_generates(
    cache_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is evicted from, generated tokens are not, unless that is asked for."""
    options = GenerationOptions(
        cache_config=[cache_config], lengths=[130], max_new_tokens=90, preset="tiny", device="cpu"
    )
    # in this process
    monkeypatch.setattr(
        generation_rounds, "run_job", lambda job: generation_worker.measure(job) | {"seconds": 1.0}
    )
    dense, evicting = generation_speed.measure_generation(options)["results"]
    assert (dense["estimated_kv_bytes"], evicting["estimated_kv_bytes"]) == (
        dense["kv_bytes"],
        evicting["kv_bytes"],
    )
    states = dense["estimated_peak_bytes"] - dense["kv_bytes"]  # one layer's exact ones
    largest = evicting["kv_bytes"]
    if "evict_at_decode" in cache_config:  # 60 + 64 tokens, before it makes room
        told: dict[str, Any] = {"dtype": torch.bfloat16, "max_cache_length": 130 + 89, "new_tokens": 65}
        largest = estimate(generation_worker.model_config(None, "tiny"), cache_config, 130, **told)
        assert largest > evicting["kv_bytes"]
    assert evicting["estimated_peak_bytes"] == largest + states


def test_more_new_tokens_than_are_predicted_of_a_cache_that_evicts(monkeypatch: pytest.MonkeyPatch) -> None:
    config, many = generation_worker.model_config(None), MOST_NEW_TOKENS + 1
    assert predicted_bytes(config, EVICTING[0], 64, 1, torch.bfloat16, None, many) is None
    assert predicted_bytes(config, DENSE, 64, 1, torch.bfloat16, None, many) == (64 + many - 1) * 4096
    monkeypatch.setattr(memory_prediction, "MOST_NEW_TOKENS", 9)
    found = [predicted_bytes(config, EVICTING[0], 64, 1, torch.bfloat16, None, count) for count in (9, 10)]
    assert found[0] and found[1] is None


def test_what_cannot_be_predicted_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation_rounds, "run_job", lambda job: pytest.fail("started"))

    def refuse(config: Any, cache_config: dict[str, Any], tokens: int, *others: Any) -> int:
        if tokens == 128:
            raise ValueError("budget must be something else")
        return 1000

    monkeypatch.setattr(generation_speed, "predicted_bytes", refuse)
    options = GenerationOptions(cache_config=[], lengths=[64, 128], preset="tiny", device="cpu")
    with pytest.raises(ValueError, match="budget must be something else"):
        generation_speed.measure_generation(options)


def test_layers_that_take_no_shapes_are_measured_without_a_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(config: Any, cache_config: dict[str, Any], *others: Any, **told: Any) -> int:
        if cache_config != DENSE:
            raise NotImplementedError("nonzero\n  of a meta tensor")
        return 1000

    monkeypatch.setattr(memory_prediction, "estimate", refuse)
    monkeypatch.setattr(capacity, "estimate", refuse)
    monkeypatch.setattr(generation_rounds, "run_job", _answer)
    options = GenerationOptions(
        cache_config=[{"backend": "int8"}], lengths=[64], memory_gb=0.1, preset="tiny", device="cpu"
    )
    document = generation_speed.measure_generation(options)
    check_document(document)
    dense, int8 = document["results"]
    said = "not predicted: NotImplementedError: nonzero of a meta tensor"
    assert "note" not in dense and int8["note"] == document["largest_context"][1]["note"] == said
    assert (int8["kv_bytes"], int8["estimated_kv_bytes"], int8["estimated_peak_bytes"]) == (250, None, None)
    assert f"{int8['label']}, 64 tokens, batch of 1: {said}" in speed_tables.footnotes(document)
    speed_tables.generation_table(document)


# ---- the largest context ----


@pytest.mark.parametrize(
    "cache_config", [DENSE, {"backend": "int8"}, {"backend": "kivi", "nbits": 2}], ids=lambda c: c["backend"]
)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_one_token_more_than_the_largest_context_does_not_fit(
    cache_config: dict[str, Any], batch_size: int
) -> None:
    config = generation_worker.model_config(None)
    room = 50_000_000
    tokens = longest_context(config, cache_config, room, batch_size, torch.bfloat16)
    assert tokens is not None
    held, more = (
        predicted_bytes(config, cache_config, count, batch_size, torch.bfloat16)
        for count in (tokens, tokens + 1)
    )
    assert held is not None
    assert more is not None
    assert held <= room < more
    if cache_config == DENSE:
        assert tokens == room // (batch_size * 8 * 2 * 2 * 64 * 2)


def test_the_largest_context_has_ends() -> None:
    config = generation_worker.model_config(None)
    assert [longest_context(config, DENSE, room, 1, torch.bfloat16) for room in (100, 0, -5)] == [0, 0, 0]
    assert longest_context(config, DENSE, 2**60, 1, torch.bfloat16) is None
    many = MOST_NEW_TOKENS + 1
    assert predicted_bytes(config, {"backend": "hqq"}, 9, 1, torch.bfloat16, None, many) is None
    offloaded = {"backend": "int8", "offload": True}
    assert predicted_peak_bytes(config, offloaded, 8, 9, 1, torch.bfloat16) is None, "of no one memory"


def test_largest_contexts_are_predicted_verified_and_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optimum.quanto")
    jobs: list[dict[str, Any]] = []

    def verify(job: dict[str, Any]) -> dict[str, Any]:
        jobs.append(job)
        if job["cache_config"] == DENSE:
            raise generation_process.DidNotFitError("did not fit: killed")
        return _answer(job)

    monkeypatch.setattr(generation_rounds, "run_job", _answer)
    monkeypatch.setattr(largest_context, "run_job", verify)
    monkeypatch.setattr(
        "kvcache_plugins.evaluation.caches.why_unavailable", lambda config, cache_config: None
    )
    sizes = ["--lengths", "64", "--memory_gb", "0.021", "--verify_memory", "--output", str(tmp_path)]
    caches = _caches({"backend": "int8"}, {"backend": "quanto"}, {"backend": "int8", "offload": True})
    assert main(["bench", "generate", *sizes, *caches]) == 0
    document = read_results(tmp_path)
    dense, int8, quanto, offloaded = document["largest_context"]
    # 21 MB without the model's one leave 20 MB; a dense token takes 8 layers x 2 x 2 heads x 64 x 2 bytes
    assert dense["tokens"] == 20_000_000 // 4096
    assert dense["note"] == "did not fit: killed"
    assert 1.8 < int8["of_dense"] < 2
    assert int8["kv_bytes"] <= 20_000_000
    assert (int8["peak_memory_bytes"], int8["peak_above_model_bytes"], int8["note"]) == (170, 70, None)
    assert 3.5 < quanto["of_dense"] < 16 / 4.5
    assert int8["kv_bytes"] < quanto["kv_bytes"] <= 20_000_000
    assert (offloaded["tokens"], offloaded["of_dense"]) == (None, None)
    assert "rests in the host's memory" in offloaded["note"]
    held = {job["cache_config"]["backend"]: job["length"] + job["max_new_tokens"] - 1 for job in jobs}
    assert held == {"dense": dense["tokens"], "int8": int8["tokens"], "quanto": quanto["tokens"]}
    assert (document["settings"]["memory_gb"], document["settings"]["verify_memory"]) == (0.021, True)
    printed = capsys.readouterr().out
    assert f"{int8['tokens']:,}" in printed
    assert "0.021 GB" in printed
    assert (tmp_path / "generate.png").exists()


def test_the_table_of_contexts_says_what_the_model_takes() -> None:
    row = {
        "label": "dense",
        "batch_size": 1,
        "tokens": 1234,
        "of_dense": 1.0,
        "kv_bytes": 2**21,
        "note": None,
    }
    settings = {"model_bytes": 3 * 2**20, "memory_gb": 0.5}
    table = speed_tables.context_table({"settings": settings, "largest_context": [row]})
    assert str(table.title).startswith("largest context: model (3 MiB) and cache in 0.5 GB;")
    assert [str(next(column.cells)) for column in table.columns] == ["dense", "1,234", "1.00", "2.0"]


def test_a_largest_context_that_cannot_be_told_leaves_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(config: Any, cache_config: dict[str, Any], *others: Any) -> int:
        if cache_config != DENSE:
            raise ValueError("a budget of 1 token")
        return 5000

    def fail(job: dict[str, Any]) -> None:
        raise generation_process.WorkerError("dense had not ended after 9 s (--time_limit)")

    monkeypatch.setattr(generation_rounds, "run_job", _answer)
    monkeypatch.setattr(largest_context, "longest_context", refuse)
    monkeypatch.setattr(largest_context, "run_job", fail)
    options = GenerationOptions(
        cache_config=[{"backend": "int8"}], lengths=[64], memory_gb=0.1, verify_memory=True, device="cpu"
    )
    document = generation_speed.measure_generation(options)
    check_document(document)
    assert [row["kv_bytes"] for row in document["results"]] == [1000, 250]
    dense, int8 = document["largest_context"]
    assert dense["tokens"] == 5000
    assert dense["note"] == "not verified: dense had not ended after 9 s (--time_limit)"
    assert (int8["tokens"], int8["note"]) == (None, "not predicted: a budget of 1 token")


@pytest.mark.parametrize("backend", ["knorm", "snapkv"])
def test_the_largest_context_of_a_fraction_counts_what_is_generated(backend: str) -> None:
    config = generation_worker.model_config(None)
    cache_config = {"backend": backend, "budget": 0.25, "sink_length": 0}
    room = 10_000_000
    tokens = longest_context(config, cache_config, room, 1, torch.bfloat16)
    assert tokens is not None
    held = []
    for count in (tokens, tokens + 1, tokens + 4):
        prompt, new_tokens = prompt_and_new_tokens(count)
        assert (prompt + new_tokens - 1, new_tokens) == (count, 8)
        held.append(estimate(config, cache_config, prompt, dtype=torch.bfloat16, new_tokens=new_tokens))
    assert held[0] <= room < held[1] <= held[2]
    assert [prompt_and_new_tokens(count) for count in (1, 7, 8)] == [(1, 1), (1, 7), (1, 8)]


def test_no_process_is_started_that_the_machine_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_rounds, "run_job", _answer)
    monkeypatch.setattr(largest_context, "run_job", lambda job: pytest.fail("started"))
    monkeypatch.setattr(largest_context, "machine_bytes", lambda device: 10**8)
    options = GenerationOptions(cache_config=[], lengths=[64], memory_gb=1, verify_memory=True)
    document = generation_speed.measure_generation(options)
    check_document(document)
    (dense,) = document["largest_context"]
    assert dense["tokens"] == (10**9 - 10**6) // 4096
    assert "not verified: this machine has 0.1 GB" in dense["note"]
    assert "131,072 positions" in dense["note"]
    columns = [column.header for column in speed_tables.context_table(document).columns]
    assert "device\npeak" not in columns  # there is none on a CPU


def test_a_measurement_ends_with_the_process_that_started_it() -> None:
    """A signal may end that one before it can stop this one."""
    code = "from kvcache_plugins.evaluation.speed.generation.worker import end_with\nend_with({})"
    assert fresh_process.run(code.format(1), timeout=30).returncode == 1
    with pytest.raises(subprocess.TimeoutExpired):
        fresh_process.run(code.format("__import__('os').getppid()"), timeout=1.5)


def test_a_process_that_fails_says_why() -> None:
    job = {
        "model": "no/such/model",
        "cache_config": DENSE,
        "compile": None,
        "threads": None,
        "dtype": "float32",
        "device": "cpu",
    }
    said = r"^dense ended with 1: (\w+\.)*\w+(Error|Exception)?: .*no/such/model"
    with pytest.raises(generation_process.WorkerError, match=said) as failure:
        generation_process.run_job(job)
    assert "File " not in str(failure.value)
    assert "^^^" not in str(failure.value)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("budget must exceed 4"), "ValueError: budget must exceed 4"),
        (RuntimeError("first line\n\n  second line"), "RuntimeError: first line second line"),
        (NotImplementedError(), "NotImplementedError"),
        (torch.OutOfMemoryError("no room"), "torch.OutOfMemoryError: no room"),
        (RuntimeError("word " * 200), f"RuntimeError: {'word ' * 59}..."),
    ],
)
def test_what_a_process_said_last_is_its_exception(error: Exception, said: str) -> None:
    def fail() -> None:
        raise KeyError("some other one")

    try:
        try:
            fail()
        except KeyError:
            raise error  # noqa: B904  # two tracebacks, one after the other
    except type(error):
        text = f"UserWarning: slow\n  warn()\n{traceback.format_exc()}"
    assert "During handling" in text
    assert generation_process.last_said(text) == said


def test_what_a_process_said_last_without_a_traceback() -> None:
    assert generation_process.last_said("") == ""
    text = "terminate called after throwing an instance of 'c10::Error'\n  what():  illegal address\n"
    assert generation_process.last_said(text) == " ".join(text.split())
    assert len(generation_process.last_said("word " * 200).split()) == 60


@pytest.mark.skipif(os.name != "posix", reason="a script of the shell")
def test_a_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    said = r"^int8 had not ended after 0\.2 s \(--time_limit\)$"
    with pytest.raises(generation_process.WorkerError, match=said):
        generation_process.run_job({"cache_config": {"backend": "int8"}, "time_limit": 0.2})


def test_random_model_is_the_one_promised() -> None:
    config = generation_worker.model_config(None)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (8, 8, 2)
    assert config.head_dim == 64
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == pytest.approx(50e6, rel=0.05)


def test_tied_weights_of_a_model_count_once_and_its_buffers_too() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False), torch.nn.Linear(8, 4, bias=False))
    model[1].weight = torch.nn.Parameter(model[0].weight.detach())  # another parameter of the same bytes
    model.register_buffer("scale", torch.zeros(16))
    assert generation_worker.model_bytes(model) == 4 * (8 * 4 + 16)


# ---- options ----


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["attention", "--preset", "llama3"], ["--preset", "'llama3'", "llama3-8b"]),
        (["attention", "--preset", "deepseek-v2-lite"], ["--preset deepseek-v2-lite", "bench generate"]),
        (["attention", "--preset", "flan-t5-large"], ["bench attention serves decoder-only", "T5Config"]),
        (["generate", "--preset", "flan-t5-large", "--memory_gb", "9"], ["--memory_gb", "--encoder_tokens"]),
        (["attention", "--lengths", "0"], ["--lengths", ">= 1", "0"]),
        (["attention", "--batch_sizes", "1", "-2"], ["--batch_sizes", ">= 1", "-2"]),
        (["attention", "--batch_sizes", "1", "1"], ["--batch_sizes must differ from each other, got [1, 1]"]),
        (["generate", "--lengths", "64", "64"], ["--lengths must differ from each other, got [64, 64]"]),
        (["attention", "--dtype", "int8"], ["--dtype", "bf16", "'int8'"]),
        (["attention", "--repeats", "0"], ["--repeats", "0"]),
        (["attention", "--warm_up", "-1"], ["--warm_up", ">= 0", "-1"]),
        (["attention", "--threads", "0"], ["--threads", "0"]),
        (["attention", "--threads", "9999"], ["--threads", "at most 1024", "9999"]),
        (["attention", "--preset", "tiny", "--model", "x"], ["--preset", "--model"]),
        (["attention", "--model", "no/such/model"], ["no/such/model"]),
        (["attention", "--model", "./nowhere"], ["--model must be a directory", "'./nowhere'"]),
        (["attention", "--device", "gpu"], ["--device", "auto", "cuda", "'gpu'"]),
        (["attention", "--device", "cuda:99"], ["--device", "cuda:99", "GPUs"]),
        (["attention", "--cache_config", "{"], ["--cache_config", "JSON"]),
        (["attention", *_caches({"backend": "kivvi"})], ["kivvi", "kivi"]),
        (["attention", *_caches({"backend": "kivi", "nbits": 5})], ["nbits", "5"]),
        (["attention", *_caches({"backend": "int8", "skip_layers": list(range(32))})], ["skip_layers"]),
        (["attention", *_caches({"backend": "int8", "offload": True})], ["offload must be false"]),
        (["attention", *_caches({"backend": "h2o", "budget": 99})], ["'h2o' chooses by", "bench generate"]),
        (["attention", *_caches({"backend": "sirllm", "budget": 99})], ["'sirllm' chooses by", "'knorm'"]),
        (["attention", "--model", BUNDLED, *_caches(LOCRET)], ["'locret' chooses by", "without a model"]),
        (["attention", "--config", "no_such.yaml"], ["no_such.yaml"]),
        (["generate", "--max_new_tokens", "3"], ["--max_new_tokens", ">= 8", "3"]),
        (["generate", "--lengths", "0"], ["--lengths", "0"]),
        (["generate", "--device", "gpu"], ["--device", "cuda", "'gpu'"]),
        (["generate", "--preset", "llama3"], ["--preset", "'llama3'", "llama3-8b"]),
        (["generate", "--preset", "tiny", "--model", "x"], ["--preset", "--model"]),
        (["generate", "--num_layers", "2"], ["--num_layers", "--preset"]),
        (["generate", "--preset", "tiny", "--num_layers", "0"], ["--num_layers", ">= 1", "0"]),
        (["generate", "--preset", "tiny", "--num_layers", "99999999"], ["--num_layers", "at most 1000"]),
        (["attention", "--lengths", "64", "10000000000000"], ["--lengths 10000000000000", "GB in all"]),
        (["generate", "--device", "cuda:99"], ["--device", "cuda:99", "GPUs"]),
        (["generate", "--memory_gb", "0"], ["--memory_gb", "above 0", "0.0"]),
        (["generate", "--memory_gb", "nan"], ["--memory_gb", "nan"]),
        (["generate", "--memory_gb", "1e300"], ["--memory_gb", "at most 1000000000", "1e+300"]),
        (["generate", "--time_limit", "0"], ["--time_limit", "above 0", "0.0"]),
        (["generate", "--compile", "fast"], ["--compile", "reduce-overhead", "fast"]),
        (["generate", "--verify_memory"], ["--verify_memory", "--memory_gb"]),
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
        "preset: tiny\ndevice: cpu\nlengths: [64]\nrepeats: 9\nwarm_up: 0\n"
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
        plotting.importlib.util,
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
