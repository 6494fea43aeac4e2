"""The speed benchmarks on a GPU: their timing with a GPU that is played, and what only a real one can show.

The played GPU runs on the CPU and has a clock of its own, so that times are known; nothing is asserted about
real ones.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig

from kvcache_plugins.evaluation.pages.documents import find_results
from kvcache_plugins.evaluation.pages.page import render_page
from kvcache_plugins.evaluation.speed import devices
from kvcache_plugins.evaluation.speed import plots as speed_plots
from kvcache_plugins.evaluation.speed import tables as speed_tables
from kvcache_plugins.evaluation.speed.attention import flashinfer_baseline
from kvcache_plugins.evaluation.speed.attention import on_device as attention_on_device
from kvcache_plugins.evaluation.speed.attention import run as attention_speed
from kvcache_plugins.evaluation.speed.attention.dense_attention import (
    BASELINES,
    exact_attention,
    max_rel_error,
)
from kvcache_plugins.evaluation.speed.attention.device_baselines import dense_ways, record_ways
from kvcache_plugins.evaluation.speed.attention.device_timing import DeviceTimer, Recording
from kvcache_plugins.evaluation.speed.attention.layers import LayerStep
from kvcache_plugins.evaluation.speed.attention.states import AttentionShape, States
from kvcache_plugins.evaluation.speed.generation import worker as generation_worker
from kvcache_plugins.evaluation.speed.options import AttentionOptions
from kvcache_plugins.models.presets import PRESETS
from kvcache_plugins.runs.results import check_document, write_results

ROOT = Path(__file__).resolve().parents[2]
DENSE = {"backend": "dense"}
SHAPE = AttentionShape(2, 4, 2, 32, 32, 77, torch.float32)


class PlayedTimer(DeviceTimer):
    """A GPU with a cache of 64 KiB whose graphs are their calls made again."""

    def __init__(self, *, waits: bool = False, refuses: str | None = None, clock: list[float] | None = None):
        super().__init__(torch.device("cpu"))
        self.waits, self.refuses, self.clock = waits, refuses, clock

    def cache_bytes(self) -> int:
        return 1 << 16

    def synchronize(self) -> None:
        """The CPU never is ahead of itself."""

    def release(self) -> None:
        """There is nothing to give back."""

    def _memory(self) -> tuple[int, int]:
        return 8 << 20, 16 << 20

    def _capture(self, calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
        if self.refuses is not None:
            raise RuntimeError(self.refuses)
        return lambda: [call() for call in calls]

    def _waits(self, run: Callable[[], object]) -> bool:
        run()
        return self.waits

    def _elapsed(self, run: Callable[[], object]) -> float:
        now = time.perf_counter if self.clock is None else (lambda: self.clock[0])
        started = now()
        run()
        return 1000 * (now() - started)


# ---- the timer ----


def test_calls_of_a_graph_take_turns() -> None:
    clock, made = [0.0], []

    def call(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            made.append(name)
            clock[0] += seconds

        return run

    timer = PlayedTimer(clock=clock)
    recording = timer.record([call("a", 0.001), call("b", 0.002), call("c", 0.006)])
    assert (recording.is_graph, recording.calls, recording.note) == (True, 18, None)
    made.clear()
    assert timer.milliseconds(recording) == pytest.approx(3)
    assert made == ["a", "b", "c"] * 12, "once to keep the device busy, and once timed"


@pytest.mark.parametrize(
    ("behavior", "note"),
    [
        ({"waits": True}, "not captured: it waits for the device"),
        ({"refuses": "operation not permitted\nwhen capturing"}, "not captured: operation not permitted"),
    ],
    ids=["waits", "refused"],
)
def test_what_cannot_be_captured_is_timed_as_it_is(behavior: dict[str, Any], note: str) -> None:
    clock, made = [0.0], []

    def call() -> None:
        made.append(None)
        clock[0] += 0.004

    timer = PlayedTimer(clock=clock, **behavior)
    recording = timer.record([call, call])
    assert (recording.is_graph, recording.calls, recording.note) == (False, 2, note)
    made.clear()
    assert timer.milliseconds(recording) == pytest.approx(4)
    assert len(made) == 2


def test_a_window_tells_the_device_from_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device, host = [0.0], [0.0]
    monkeypatch.setattr(
        "kvcache_plugins.evaluation.speed.attention.device_timing.time.perf_counter", lambda: host[0]
    )

    def call() -> None:
        host[0] += 0.010
        device[0] += 0.030

    assert PlayedTimer(clock=device).window(call) == pytest.approx((10, 30))


def test_bandwidth_counts_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = PlayedTimer()

    def milliseconds(recording: Recording) -> float:
        recording.run()
        return 0.5

    monkeypatch.setattr(timer, "milliseconds", milliseconds)
    assert timer.copy_gb_per_s() == pytest.approx(2 * (1 << 20) / 0.5 / 1e6)  # an eighth of what is free


def test_sets_together_are_larger_than_the_cache() -> None:
    timer = PlayedTimer()
    assert timer.sets(1 << 16) == 3
    assert timer.sets(10_000) * 10_000 >= 3 << 16
    assert timer.sets(1 << 30) == 2, "one set must not be read twice in a row"
    assert timer.sets(1) == 64


# ---- the dense ways ----


def test_ways_that_do_not_run_or_do_not_attend_have_reasons() -> None:
    ways, reasons = dense_ways(SHAPE, torch.device("cpu"))
    assert reasons == {"flashinfer": "not installed"} or "flashinfer" in sys.modules

    def fails(states: States) -> Callable[[], Tensor]:
        raise torch.OutOfMemoryError("out of memory\nmore")

    ways |= {"zeros": lambda states: lambda: torch.zeros_like(states.query), "large": fails}
    sets = [States.random(SHAPE, seed=seed) for seed in range(2)]
    dense = record_ways(ways, reasons, sets, PlayedTimer())
    assert set(BASELINES) | {"sdpa_enable_gqa_math"} <= set(dense.recordings)
    assert set(dense.errors) == set(dense.recordings)
    assert max(dense.errors.values()) < 1e-4
    assert "not attention" in dense.not_run["zeros"]
    assert dense.not_run["large"] == "out of memory"
    assert dense.not_run["sdpa_enable_gqa_cudnn"], "a CPU has no cuDNN"
    assert set(dense.not_run) | set(dense.recordings) == set(ways) | set(reasons)
    with pytest.raises(RuntimeError, match=r"no dense attention runs on cpu: .*'large': 'out of memory'"):
        record_ways({"large": fails}, {}, sets, PlayedTimer())


def test_states_of_other_seeds_are_others() -> None:
    first, again, other = (States.random(SHAPE, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.keys, again.keys)
    assert not torch.isclose(first.keys, other.keys).any(-1).all()


class _Wrapper:
    """What the documentation says of FlashInfer's wrapper, for layout HND, in a few lines of torch."""

    def __init__(self, workspace: Tensor, kv_layout: str, use_tensor_cores: bool) -> None:
        assert (workspace.dtype, kv_layout) == (torch.uint8, "HND")
        if use_tensor_cores:
            raise RuntimeError("no such cores")

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert (indptr.dtype, indices.dtype, last_page_len.dtype) == (torch.int32,) * 3
        assert all(1 <= length <= page_size for length in last_page_len.tolist())
        self.plan_ = (indptr.tolist(), indices, last_page_len.tolist())
        self.page_shape = (num_kv_heads, page_size, head_dim)
        self.query_shape = (num_qo_heads, head_dim)

    def run(self, query: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        indptr, indices, last = self.plan_
        assert query.shape[1:] == self.query_shape
        outputs = []
        for row, (start, stop) in enumerate(itertools.pairwise(indptr)):
            held = []
            for tensor in pages:
                assert tensor.shape[1:] == self.page_shape
                own = tensor[indices[start:stop].long()].transpose(0, 1).flatten(1, 2)
                held.append(own[None, :, : own.shape[1] - self.page_shape[1] + last[row]])
            outputs.append(exact_attention(query[row, None, :, None], *held)[:, :, 0])
        return torch.cat(outputs)


@pytest.mark.parametrize("length", [77, 79, 80, 5])
def test_flashinfer_is_planned_for_the_states(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=_Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(flashinfer_baseline, "_WORKSPACE_BYTES", 16)
    shape = AttentionShape(3, 6, 2, 16, 16, length, torch.float32)
    ways, reasons = flashinfer_baseline.flashinfer_ways(shape, torch.device("cpu"))
    assert reasons == {"flashinfer_tensor_cores": "RuntimeError: no such cores"}
    states = States.random(shape)
    output = ways["flashinfer"](states)()
    exact = exact_attention(states.query, states.keys, states.values)
    assert output.shape == exact.shape
    assert max_rel_error(output, exact) < 1e-5


def test_no_state_of_flashinfer_breaks_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # as if it were not there
    device = torch.device("cpu")
    assert flashinfer_baseline.flashinfer_ways(SHAPE, device) == ({}, {"flashinfer": "not installed"})

    def broken(name: str) -> None:
        raise OSError("libcudart.so.99: cannot open")

    monkeypatch.setattr(flashinfer_baseline.importlib, "import_module", broken)
    ways, reasons = flashinfer_baseline.flashinfer_ways(SHAPE, device)
    assert ways == {}
    assert reasons["flashinfer"] == "cannot be imported: OSError: libcudart.so.99: cannot open"


# ---- attention ----

KIVI = {"backend": "kivi", "nbits": 4, "residual_length": 32}
DEVICE_KEYS = {
    "length", "batch_size", "median_ms", "p20_ms", "p80_ms", "baseline_ms", "ratio_to_best_dense", "kv_bytes",
    "ratio_to_sdpa_gqa", "gb_per_s", "bits_per_value", "memory_fraction", "max_rel_error", "kernel",
    "attention_ms", "append_ms", "append_host_ms", "host_ms", "fraction_of_copy", "sets", "note", "seconds",
}  # fmt: skip


def _measured(monkeypatch: pytest.MonkeyPatch, timer: DeviceTimer, *caches: dict[str, Any]) -> dict[str, Any]:
    monkeypatch.setattr(attention_speed, "_timer", lambda device: timer)
    options = AttentionOptions(
        cache_config=caches,
        lengths=[300],
        batch_sizes=[1, 2],
        preset="tiny",
        device="cpu",
        repeats=2,
        warm_up=0,
    )
    document = attention_speed.measure_attention(options)
    check_document(document)
    return document


def test_a_step_on_a_device_is_attention_and_append(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    document = _measured(monkeypatch, PlayedTimer(), {"backend": "int8"}, KIVI)
    copy = document["settings"]["copy_gb_per_s"]
    assert copy > 0
    rows = document["results"]
    assert [row["cache_config"] for row in rows] == [DENSE, {"backend": "int8"}, KIVI] * 2
    for row in rows:
        assert set(row) >= DEVICE_KEYS
        assert row["attention_ms"] > 0
        assert row["append_ms"] > 0
        assert row["median_ms"] == pytest.approx(row["attention_ms"] + row["append_ms"])
        best = min(row["baseline_ms"].values())
        assert row["ratio_to_best_dense"] == pytest.approx(row["median_ms"] / best)
        assert row["fraction_of_copy"] == pytest.approx(row["kv_bytes"] / row["attention_ms"] / 1e6 / copy)
        assert row["gb_per_s"] == pytest.approx(row["kv_bytes"] / row["median_ms"] / 1e6)
        assert 0 <= row["max_rel_error"] < 2e-2
        assert row["sets"] * row["kv_bytes"] >= 3 << 16
        assert row["note"] is None
    dense = rows[0]
    assert dense["kernel"] in dense["baseline_ms"]
    assert dense["baseline_ms"].keys() >= {*BASELINES, "sdpa_enable_gqa_math"}
    for name, ms in dense["baseline_ms"].items():
        assert ms == pytest.approx(dense["baseline_attention_ms"][name] + dense["append_ms"])
    assert "sdpa_packed_query_cudnn" in dense["baselines_not_run"]
    assert rows[1]["kernel"] in ("cpu", "torch")
    assert all(row["host_ms"] > 0 and row["append_host_ms"] > 0 for row in rows)

    table = speed_tables.attention_table(document)
    heads = [column.header for column in table.columns]
    assert {"attend\nms", "append\nms", "of copy"} <= set(heads)
    notes = speed_tables.footnotes(document)
    assert any(note.startswith("dense sdpa_packed_query_cudnn, 300 tokens, batch of 1: ") for note in notes)
    assert f"copy {copy:,.0f} GB/s" in notes[-1]
    speed_plots.plot_attention(document, tmp_path / "attention.png")
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")
    write_results(tmp_path, document)
    page = str(render_page(*find_results(tmp_path), "runs"))
    for word in ("attend ms", "append ms", "of a copy", "dense sdpa_packed_query_cudnn"):
        assert word in page


def test_columns_of_a_device_are_not_shown_for_a_cpu() -> None:
    document = json.loads((ROOT / "examples" / "results" / "bench_attention.json").read_text())
    heads = [column.header for column in speed_tables.attention_table(document).columns]
    assert not {"attend\nms", "append\nms", "launched\nby CPU ms", "of copy"} & set(heads)


def test_a_capture_that_fails_leaves_the_stream_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end raises as well, for which torch does not go back to the stream there was."""

    @contextmanager
    def graph(_: object) -> Iterator[None]:
        streams.append("of the capture")
        try:
            yield
        finally:
            raise RuntimeError("the capture was invalidated")

    def call() -> None:
        raise RuntimeError("an operation that no graph can hold")

    streams = ["before"]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    timer = DeviceTimer(torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"^an operation that no graph can hold$"):
        timer._capture([call])
    assert streams == ["before", "of the capture", "before"] and len(timer._failed) == 1


def test_what_is_not_captured_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    document = _measured(monkeypatch, PlayedTimer(refuses="no"), {"backend": "int8"})
    expected = "attention not captured: no; append not captured: no"
    assert [row["note"] for row in document["results"]] == [expected] * 4
    assert any(note.endswith(expected) for note in speed_tables.footnotes(document))


def test_a_small_layer_says_that_it_stays_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = PlayedTimer()
    monkeypatch.setattr(timer, "cache_bytes", lambda: 1 << 24)
    document = _measured(monkeypatch, timer, {"backend": "kivi", "nbits": 2})
    assert {row["sets"] for row in document["results"]} == {64}
    assert document["results"][1]["note"] == "so small that it stays in the GPU's cache"


def test_a_cache_that_fails_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = LayerStep.attend

    def fail(self: LayerStep, keys: Tensor, values: Tensor) -> Tensor:
        if type(self.layer).__name__ == "Int4Layer":
            raise RuntimeError("an illegal\naddress")
        return attend(self, keys, values)

    monkeypatch.setattr(LayerStep, "attend", fail)
    document = _measured(monkeypatch, PlayedTimer(), {"backend": "int8"}, {"backend": "int4"})
    assert [row["label"] for row in document["results"]] == ["dense", "int8"] * 2
    reasons = [entry["reason"] for entry in document["skipped"]]
    assert reasons[0] == "failed at 300 tokens: RuntimeError: an illegal address"
    assert len(reasons) == 2
    assert all(entry["is_failure"] for entry in document["skipped"])


def test_the_points_before_a_failure_of_the_gpu_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address gone astray is told when whatever is timed next waits for the device."""
    measure = attention_speed.measure_on_device

    def fail(config: Any, options: Any, caches: Any, shape: Any, *others: Any) -> Any:
        if shape.batch_size > 1:
            raise RuntimeError("an illegal address")
        return measure(config, options, caches, shape, *others)

    monkeypatch.setattr(attention_speed, "measure_on_device", fail)
    document = _measured(monkeypatch, PlayedTimer(), {"backend": "int8"}, {"backend": "int4"})
    assert [row["label"] for row in document["results"]] == ["dense", "int8", "int4"]
    reason = "failed at 300 tokens x 2: RuntimeError: an illegal address"
    assert [(entry["reason"], entry["is_failure"]) for entry in document["skipped"]] == [(reason, True)] * 2


def test_transformers_own_caches_are_timed_as_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    document = _measured(monkeypatch, PlayedTimer(), {"backend": "fp8"})
    if document["skipped"]:
        pytest.skip(document["skipped"][0]["reason"])
    row = document["results"][1]
    assert (row["attention_ms"], row["append_ms"], row["kernel"]) == (None, None, "transformers")
    assert "as launched" in row["note"]
    assert row["fraction_of_copy"] > 0


def test_appending_covers_whole_periods_of_encoding() -> None:
    """A layer whose every hundredth append takes a second of the device."""
    clock, counts = [0.0], [0, 0]

    def append(layer: int) -> Callable[[], None]:
        def run() -> None:
            counts[layer] += 1
            clock[0] += 1.0 if counts[layer] % 100 == 0 else 0.002

        return run

    tokens = attention_on_device._window(100)
    assert tokens == 100
    cost = attention_on_device._append(PlayedTimer(clock=clock), [append(0), append(1)], tokens, repeats=3)
    assert cost.device_ms == pytest.approx((1000 + 99 * 2) / 100)
    assert counts[1] == 2 * tokens
    assert [attention_on_device._window(period) for period in (1, 48, 128)] == [64, 96, 128]


def test_the_cpus_time_of_an_append_and_of_a_step_are_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    host = [0.0]
    monkeypatch.setattr(
        "kvcache_plugins.evaluation.speed.attention.device_timing.time.perf_counter", lambda: host[0]
    )

    def call() -> None:
        host[0] += 0.003

    timer = PlayedTimer(clock=[0.0])
    cost = attention_on_device._append(timer, [call, call], 64, repeats=1)
    assert (cost.host_ms, cost.device_ms) == (pytest.approx(3), 0)
    assert attention_on_device._host_ms(timer, call) == pytest.approx(3)


def test_a_dense_append_replaces_the_last_token() -> None:
    states = States.random(SHAPE, torch.device("cpu"), 0)
    held = [states.keys.clone(), states.values.clone()]
    attention_on_device._dense_append(states)()
    for found, before, new in zip((states.keys, states.values), held, states.new, strict=True):
        assert torch.equal(found, torch.cat((before[:, :, :-1], new), dim=2))


# ---- the device ----


def _gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_device_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpus(monkeypatch, 2)
    found = {given: str(devices.choose_device(given)) for given in ("auto", "cpu", "cuda", "cuda:1")}
    assert found == {"auto": "cuda:0", "cpu": "cpu", "cuda": "cuda:0", "cuda:1": "cuda:1"}
    with pytest.raises(ValueError, match=r"--device 'cuda:2' is not there: torch sees 2 GPUs"):
        devices.choose_device("cuda:2")
    _gpus(monkeypatch, 0)
    assert str(devices.choose_device("auto")) == "cpu"
    with pytest.raises(ValueError, match=r"--device 'cuda' is not there: torch sees 0 GPUs"):
        devices.choose_device("cuda")


def test_settings_say_whether_kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    status = types.SimpleNamespace(state="unavailable", reason="nobody asked", instruction_set=None)
    monkeypatch.setattr(devices.cuda_loader, "status", lambda: status)
    settings = devices.device_settings("cuda", torch.device("cuda", 0))
    assert settings["cuda_kernels"] == "unavailable: nobody asked"
    assert settings["device"] == "cuda:0" and "cpu_kernels" not in settings
    monkeypatch.setattr(devices.loader, "status", lambda: status)
    assert devices.device_settings("auto", torch.device("cpu")) == {
        "device": "cpu",
        "requested_device": "auto",
        "cpu_kernels": "unavailable: nobody asked",
    }
    assert devices.device_settings("cpu", torch.device("meta")).keys() == {"device", "requested_device"}


def test_settings_say_which_instructions_a_build_of_another_process_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = iter(["cached", "loaded"])
    loaded = []
    monkeypatch.setattr(devices.loader, "build", lambda: loaded.append("it"))
    monkeypatch.setattr(
        devices.loader,
        "status",
        lambda: types.SimpleNamespace(state=next(states), reason=None, instruction_set="portable"),
    )
    assert devices.device_settings("cpu", torch.device("cpu"))["cpu_kernels"] == "portable"
    assert loaded == ["it"]


# ---- generation ----


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("llama2-7b", 6.74),
        ("llama3-8b", 8.03),
        ("llama3.2-1b", 1.24),
        ("mistral-7b", 7.24),
        ("qwen2.5-7b", 7.62),
    ],
)
def test_presets_have_the_size_of_their_models(preset: str, billions: float) -> None:
    config = generation_worker.model_config(None, preset)
    hidden, heads = config.hidden_size, config.num_attention_heads
    projections = 2 * hidden * hidden + 2 * hidden * hidden * config.num_key_value_heads // heads
    layer = projections + 3 * hidden * config.intermediate_size
    tables = 1 if config.tie_word_embeddings else 2
    parameters = config.num_hidden_layers * layer + tables * config.vocab_size * hidden
    assert parameters / 1e9 == pytest.approx(
        billions, abs=0.006
    )  # norms and biases are a few hundred thousand
    _check_layers(preset, config)


@pytest.mark.parametrize(
    ("preset", "billions"), [("gemma2-9b", 9.24), ("gemma3-1b", 1.0), ("gemma3-12b", 11.77)]
)
def test_gemmas_have_the_size_of_their_models(preset: str, billions: float) -> None:
    config = generation_worker.model_config(None, preset)
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
    parameters = config.num_hidden_layers * layer + config.vocab_size * config.hidden_size
    assert parameters / 1e9 == pytest.approx(billions, abs=0.006)
    _check_layers(preset, config)


def test_gpt_oss_has_the_size_of_its_model() -> None:
    config = generation_worker.model_config(None, "gpt-oss-20b")
    hidden, heads = config.hidden_size, config.num_attention_heads
    attention = 2 * hidden * config.head_dim * (heads + config.num_key_value_heads)
    expert = 3 * hidden * config.intermediate_size
    layer = attention + config.num_local_experts * (expert + hidden)
    parameters = config.num_hidden_layers * layer + 2 * config.vocab_size * hidden
    assert parameters / 1e9 == pytest.approx(20.91, abs=0.006)
    _check_layers("gpt-oss-20b", config)


def test_deepseek_v2_lite_has_the_size_of_its_model() -> None:
    config = generation_worker.model_config(None, "deepseek-v2-lite")
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
    query = hidden * heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    attention = query + hidden * (rank + config.qk_rope_head_dim) + rank * rows
    attention += heads * config.v_head_dim * hidden
    experts = config.n_routed_experts + config.n_shared_experts
    sparse = 3 * hidden * config.moe_intermediate_size * experts + hidden * config.n_routed_experts
    layers = config.num_hidden_layers
    parameters = layers * attention + 3 * hidden * config.intermediate_size + (layers - 1) * sparse
    parameters += 2 * config.vocab_size * hidden
    assert parameters / 1e9 == pytest.approx(15.71, abs=0.006)
    _check_layers("deepseek-v2-lite", config)


def _check_layers(preset: str, config: Any) -> None:
    shortened = generation_worker.model_config(None, preset, 3)
    assert PRESETS[preset][1]["num_hidden_layers"] == config.num_hidden_layers > 3
    assert shortened.num_hidden_layers == 3


def _job(device: str, **changes: Any) -> dict[str, Any]:
    return {
        "cache_config": {"backend": "int8"},
        "length": 200,
        "batch_size": 2,
        "model": None,
        "preset": "tiny",
        "num_layers": 1,
        "compile": None,
        "dtype": "bfloat16",
        "device": device,
        "max_new_tokens": 8,
        "threads": None,
    } | changes


@pytest.mark.parametrize(
    ("backend", "device", "has_encoder", "by_generate"),
    [
        ("int8", "cuda", False, True),
        ("int8", "cpu", False, False),
        ("int8", "cuda", True, False),
        ("quanto", "cuda", False, False),
        ("dense", "cuda", False, False),
    ],
)
def test_generate_compiles_for_caches_of_ours_on_gpus(
    backend: str, device: str, has_encoder: bool, by_generate: bool
) -> None:
    modes: list[str] = []
    model = SimpleNamespace(
        device=torch.device(device),
        config=SimpleNamespace(is_encoder_decoder=has_encoder),
        compile=lambda mode: modes.append(mode),
    )
    given = generation_worker.compiled(model, "max-autotune", {"backend": backend})
    asked = [config.mode for config in given.values()]
    assert (asked, modes) == ((["max-autotune"], []) if by_generate else ([], ["max-autotune"]))


def test_a_preset_generates_with_as_many_layers_as_asked_for() -> None:
    answers = [generation_worker.measure(_job("cpu", num_layers=layers)) for layers in (1, 2)]
    # a layer: queries, keys, values and outputs, the feed-forward network, two norms
    layer = 256 * 256 * 2 + 2 * 256 * 128 + 3 * 256 * 512 + 2 * 256
    assert answers[1]["parameters"] - answers[0]["parameters"] == layer
    assert answers[1]["kv_bytes"] == 2 * answers[0]["kv_bytes"]
    assert answers[0]["device_peak_bytes"] is None
    assert len(answers[0]["step_ms"]) == 8 - 1 - generation_worker.WARM_UP_STEPS


@pytest.mark.parametrize("backend", ["dense", "int8"])
def test_a_compiled_model_has_its_graphs_before_it_is_measured(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[int] = []
    seen: list[tuple[str, int]] = []
    compile_model, generate = torch.nn.Module.compile, generation_worker.generate

    def compiled(model: torch.nn.Module, mode: str) -> None:
        compile_model(model, backend=lambda graph, inputs: graphs.append(0) or graph.forward)
        seen.append((mode, 0))

    def generated(*args: Any) -> Any:
        output = generate(*args)
        seen.append((f"{args[1].shape[1]} tokens", len(graphs)))
        return output

    monkeypatch.setattr(torch.nn.Module, "compile", compiled)
    monkeypatch.setattr(generation_worker, "generate", generated)
    job = _job("cpu", cache_config={"backend": backend}, compile="reduce-overhead", max_new_tokens=12)
    torch.compiler.reset()
    answer = generation_worker.measure(job)
    torch.compiler.reset()
    steps = [step for step, _ in seen]
    assert steps == ["reduce-overhead", *["200 tokens"] * 4]
    assert seen[1][1] > 0 and seen[2][1] == seen[3][1] == seen[4][1] == len(graphs)
    assert len(answer["step_ms"]) == 12 - 1 - generation_worker.WARM_UP_STEPS


# ---- a real GPU ----


@pytest.mark.cuda(simulated=False)
def test_what_decodes_is_compiled_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[int] = []

    def config(mode: str) -> CompileConfig:
        assert mode == "reduce-overhead"
        return CompileConfig(backend=lambda graph, inputs: graphs.append(0) or graph.forward, mode=None)

    monkeypatch.setattr(generation_worker, "CompileConfig", config)
    monkeypatch.setattr(torch.nn.Module, "compile", None)
    torch.compiler.reset()
    answer = generation_worker.measure(_job("cuda:0", compile="reduce-overhead"))
    torch.compiler.reset()
    assert graphs and answer["fallback_reads"] == 0


@pytest.fixture
def _without_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_CUDA_KERNELS", "1")


@pytest.mark.cuda
def test_a_graph_is_replayed_and_a_wait_is_seen() -> None:
    timer = DeviceTimer(torch.device("cuda", 0))
    counter = torch.zeros(1, device="cuda")
    recording = timer.record([lambda: counter.add_(1)])
    assert (recording.is_graph, recording.calls) == (True, 16)
    before = counter.item()
    assert timer.milliseconds(recording) > 0
    assert counter.item() == before + 32
    waiting = timer.record([lambda: counter.add_(1).item()])
    assert not waiting.is_graph
    assert "waits for the device" in (waiting.note or "")
    assert timer.record([lambda: counter.add_(1)]).is_graph, "nothing is left behind"


@pytest.mark.cuda
def test_a_gpu_has_a_bandwidth_and_a_cache() -> None:
    timer = DeviceTimer(torch.device("cuda", 0))
    assert timer.cache_bytes() >= (1 << 17 if torch.version.cuda == "simulated" else 1 << 20)
    assert timer.copy_gb_per_s() > 1
    host_ms, device_ms = timer.window(lambda: torch.zeros(1 << 20, device="cuda").add_(1))
    assert host_ms > 0
    assert device_ms > 0


@pytest.mark.cuda
@pytest.mark.usefixtures("_without_a_trial")
def test_attention_on_a_gpu() -> None:
    caches = [{"backend": "int8"}, {"backend": "kivi", "nbits": 2, "rope_mode": "block"}]
    options = AttentionOptions(
        cache_config=caches, lengths=[300], batch_sizes=[2], preset="tiny", device="cuda", repeats=2
    )
    document = attention_speed.measure_attention(options)
    assert document["settings"]["device"] == "cuda:0"
    dense, *packed = document["results"]
    assert set(BASELINES) <= set(dense["baseline_ms"])
    for row in packed:
        assert row["kernel"] == "cuda", document["settings"]["cuda_kernels"]
        assert row["max_rel_error"] < 2e-2
        assert "attention" not in (row["note"] or ""), "a step of attention must be part of a graph"
        assert row["median_ms"] == pytest.approx(row["attention_ms"] + row["append_ms"])


@pytest.mark.cuda
@pytest.mark.usefixtures("_without_a_trial")
def test_generation_on_a_gpu() -> None:
    answer = generation_worker.measure(_job("cuda:0", num_layers=2))
    assert answer["kernel"] == ["cuda"]
    assert answer["fallback_reads"] == 0
    assert answer["device_before_bytes"] >= answer["model_bytes"]
    assert answer["device_peak_bytes"] >= answer["device_before_bytes"] + answer["kv_bytes"]


@pytest.mark.cuda
def test_recordings_keep_what_they_read() -> None:
    """Every replay gives the same output, whatever was allocated since."""
    timer = DeviceTimer(torch.device("cuda", 0))
    ways, reasons = dense_ways(SHAPE, timer.device)
    sets = [States.random(SHAPE, timer.device, seed) for seed in range(2)]
    kept: list[Tensor] = []
    recording = timer.record([lambda: kept.append(ways["matmul"](sets[0])())])
    assert isinstance(recording, Recording)
    exact = exact_attention(sets[0].query, sets[0].keys, sets[0].values)
    assert record_ways(ways, reasons, sets, timer).errors["matmul"] < 1e-2
    kept[-1].zero_()
    timer.milliseconds(recording)
    assert max_rel_error(kept[-1], exact) < 1e-2
