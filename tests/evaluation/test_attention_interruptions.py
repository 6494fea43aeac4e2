"""`bench attention` that is stopped on its way keeps whole points: what is compared was timed in turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache_plugins.cli import main
from kvcache_plugins.evaluation.speed import outcomes
from kvcache_plugins.evaluation.speed.attention import run as attention_speed
from kvcache_plugins.evaluation.speed.attention.on_host import measure_on_host
from kvcache_plugins.evaluation.speed.options import AttentionOptions
from kvcache_plugins.runs.labels import DENSE
from kvcache_plugins.runs.results import read_results

BUNDLED_MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books"


class Clock:
    """Measures points as they are, and marks their rows by the number of the measurement."""

    def __init__(self) -> None:
        self.points: list[tuple[list[str], int]] = []
        self.stops_at = -1

    def __call__(
        self, config: Any, options: Any, caches: Any, shape: Any, *more: Any
    ) -> list[dict[str, Any]]:
        if len(self.points) == self.stops_at:
            self.stops_at = -1
            raise KeyboardInterrupt
        rows = measure_on_host(config, options, caches, shape, *more)
        self.points.append(([cache["backend"] for cache in caches], shape.length))
        for row in rows:
            row["median_ms"] = float(len(self.points))
        return rows


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(attention_speed, "measure_on_host", made)
    return made


def _bench(output: Path, *more: str, caches: tuple[str, ...] = ("int8",), model: Path | None = None) -> int:
    given = ["--preset", "tiny"] if model is None else ["--model", str(model)]
    given += ["--device", "cpu", "--threads", "1", "--warm_up", "0", "--no_plots", "--output", str(output)]
    given += ["--cache_config", *(json.dumps({"backend": backend}) for backend in caches)]
    sizes = ["--lengths", "96", "200", "--repeats", "2"]
    return main(["bench", "attention", *given, *sizes, *more])


def _medians(output: Path) -> list[float]:
    return [row["median_ms"] for row in read_results(output)["results"]]


def test_whole_points_are_kept(clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock.stops_at = 1
    assert _bench(tmp_path) == 130
    assert "goes on behind the last length and batch size" in capsys.readouterr().err
    assert not (tmp_path / "results.json").exists()
    assert _bench(tmp_path) == 0
    assert clock.points == [(["int8"], 96), (["int8"], 200)]
    assert _medians(tmp_path) == [1.0, 1.0, 2.0, 2.0]
    rows = read_results(tmp_path)["results"]
    assert [(row["label"], row["length"]) for row in rows] == [
        ("dense", 96), ("int8", 96), ("dense", 200), ("int8", 200),
    ]  # fmt: skip
    assert not (tmp_path / "progress").exists()
    # a finished run leaves nothing for the next one to go on with
    assert _bench(tmp_path) == 0 and _medians(tmp_path) == [3.0, 3.0, 4.0, 4.0]


def test_batch_sizes_are_points_of_their_own(clock: Clock, tmp_path: Path) -> None:
    clock.stops_at = 1
    assert _bench(tmp_path, "--batch_sizes", "1", "2") == 130
    assert _bench(tmp_path, "--batch_sizes", "2", "1") == 0
    rows = read_results(tmp_path)["results"]
    found = [(row["length"], row["batch_size"], row["median_ms"]) for row in rows[::2]]
    assert found == [(96, 2, 2.0), (96, 1, 1.0), (200, 2, 3.0), (200, 1, 4.0)]


def test_what_was_not_timed_in_turn_is_not_put_together(clock: Clock, tmp_path: Path) -> None:
    for caches in [("int8", "int4"), ("int8", "kivi")]:
        clock.stops_at = len(clock.points) + 1
        assert _bench(tmp_path, caches=caches) == 130
    clock.points.clear()
    assert _bench(tmp_path, caches=("int8", "kivi", "int4")) == 0
    assert clock.points == [(["int8", "kivi", "int4"], 96), (["int8", "kivi", "int4"], 200)]


def test_fewer_caches_go_on_with_what_was_kept(
    clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock.stops_at = 1
    assert _bench(tmp_path, caches=("int8", "int4")) == 130
    assert _bench(tmp_path, caches=("int4",)) == 0
    assert clock.points[1:] == [(["int4"], 200)]
    assert "kept: " in capsys.readouterr().out  # what int8 took at 96 tokens


@pytest.mark.parametrize(
    ("option", "value"), [("repeats", "3"), ("warm_up", "1"), ("threads", "2"), ("dtype", "fp32")]
)
def test_what_times_depend_on_is_a_setting(
    option: str, value: str, clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock.stops_at = 1
    assert _bench(tmp_path) == 130
    assert _bench(tmp_path, f"--{option}", value) == 2
    assert f"unfinished run with other settings ({option} was" in capsys.readouterr().err


def test_so_are_threads_that_nobody_asked_for(tmp_path: Path, clock: Clock) -> None:
    options = AttentionOptions(
        cache_config=[{"backend": "int8"}], lengths=[96, 200], preset="tiny", device="cpu", repeats=2
    )
    clock.stops_at = 1
    with pytest.raises(KeyboardInterrupt):
        attention_speed.measure_attention(options, output=tmp_path)
    torch.set_num_threads(2)
    with pytest.raises(ValueError, match=r"other settings \(threads was 1, is 2\)"):
        attention_speed.measure_attention(options, output=tmp_path)
    torch.set_num_threads(1)
    attention_speed.measure_attention(options, output=tmp_path)
    assert [length for _, length in clock.points] == [96, 200]


def test_times_of_another_machine_or_model_are_not_mixed(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock.stops_at = 1
    assert _bench(tmp_path) == 130
    assert _bench(tmp_path, model=BUNDLED_MODEL) == 2
    assert "model_digest was" in capsys.readouterr().err
    monkeypatch.setattr(outcomes, "machine_names", lambda device: {"device": "d", "cpu": "c"})
    assert _bench(tmp_path) == 2
    assert "unfinished run with other settings (cpu was" in capsys.readouterr().err


def test_results_that_cannot_be_written_are_not_lost(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as then:
        then.setattr(attention_speed, "write_results", full)
        assert _bench(tmp_path) == 2
    assert "No space left on device" in capsys.readouterr().err
    measured = len(clock.points)
    assert _bench(tmp_path) == 0
    assert len(clock.points) == measured == 2 and _medians(tmp_path) == [1.0, 1.0, 2.0, 2.0]


class Gpu:
    """Stands in for a timer, whose bandwidth is another one whenever it is asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def copy_gb_per_s(self) -> float:
        self.asked += 1
        return 1000.0 + self.asked


def test_points_of_a_gpu_have_one_bandwidth_and_failures_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points: list[int] = []
    fails_at, stops_at = 200, 300

    def measure(
        config: Any, options: Any, caches: Any, shape: Any, timer: Any, copy: float, *more: Any
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        points.append(shape.length)
        if shape.length == stops_at:
            raise KeyboardInterrupt
        rows = [{"cache_config": each, "copy": copy} for each in (DENSE, *caches)]
        if shape.length != fails_at:
            return rows, []
        return rows[:1], [{"cache_config": caches[0], "reason": "x", "is_failure": True}]

    gpu = Gpu()
    monkeypatch.setattr(attention_speed, "_timer", lambda device: gpu)
    monkeypatch.setattr(attention_speed, "measure_on_device", measure)
    options = AttentionOptions(
        cache_config=[{"backend": "int8"}], lengths=[96, 200, 300], preset="tiny", device="cpu"
    )
    with pytest.raises(KeyboardInterrupt):
        attention_speed.measure_attention(options, output=tmp_path)
    assert points == [96, 200, 300]
    points.clear()
    fails_at = stops_at = 0
    document = attention_speed.measure_attention(options, output=tmp_path)
    assert points == [200, 300]
    assert [row["copy"] for row in document["results"]] == [1001.0] * 6
    assert document["settings"]["copy_gb_per_s"] == 1001.0 and not document["skipped"]
    attention_speed.measure_attention(options, output=tmp_path)
    assert gpu.asked == 2
