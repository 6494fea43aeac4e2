"""`bench generate` that is stopped on its way keeps whole rounds: none is half of another hour."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache_plugins.cli import main
from kvcache_plugins.evaluation.speed import outcomes
from kvcache_plugins.evaluation.speed.generation import largest_context
from kvcache_plugins.evaluation.speed.generation import rounds as generation_rounds
from kvcache_plugins.evaluation.speed.generation.process import DidNotFitError, WorkerError
from kvcache_plugins.evaluation.speed.options import GenerationOptions
from kvcache_plugins.runs.labels import DENSE
from kvcache_plugins.runs.progress import silent
from kvcache_plugins.runs.results import read_results

BUNDLED_MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books"

Answer = Callable[[dict[str, Any], int], None]


class Machine:
    """Stands in for processes: every answer tells its number, whichever run it is of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[tuple[str, int]] = []
        self.before: Answer = lambda job, number: None
        monkeypatch.setattr(generation_rounds, "run_job", self)
        monkeypatch.setattr(largest_context, "run_job", self)

    def __call__(self, job: dict[str, Any]) -> dict[str, Any]:
        self.before(job, len(self.jobs))
        self.jobs.append((job["cache_config"]["backend"], job["length"]))
        ms = float(len(self.jobs))
        return {
            "ttft_ms": ms, "prefill_ms": ms, "step_ms": [ms], "kv_bytes": 1000, "model_bytes": 10**6,
            "memory_before_bytes": 100, "load_peak_bytes": 120, "peak_memory_bytes": 170, "threads": 1,
            "device_before_bytes": None, "device_peak_bytes": None, "kernel": None, "fallback_reads": None,
            "parameters": 7, "seconds": ms,
        }  # fmt: skip

    def stops_at(self, number: int) -> None:
        """Have Ctrl-C come in the place of an answer, once."""

        def before(job: dict[str, Any], count: int) -> None:
            if count == number:
                self.before = lambda job, count: None
                raise KeyboardInterrupt

        self.before = before


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def _bench(output: Path, *more: str) -> int:
    caches = [json.dumps({"backend": backend}) for backend in ("int8", "int4")]
    arguments = ["--cache_config", *caches, "--preset", "tiny", "--device", "cpu", "--no_plots", *more]
    return main(["bench", "generate", *arguments, "--output", str(output)])


ALL = [("dense", 64), ("int8", 64), ("int4", 64)]
LONGER = [("dense", 128), ("int8", 128), ("int4", 128)]


def test_whole_rounds_are_kept(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--lengths", "64", "128", "--repeats", "2"]
    machine.stops_at(8)  # in the third round, behind two of its caches
    assert _bench(tmp_path, *sizes) == 130
    assert machine.jobs == ALL + ALL + LONGER[:2]
    assert not (tmp_path / "results.json").exists()
    machine.jobs.clear()
    assert _bench(tmp_path, *sizes) == 0
    assert machine.jobs == LONGER + LONGER
    rows = {(row["label"], row["length"]): row for row in read_results(tmp_path)["results"]}
    # answers 1 and 4 before the interruption, 1 and 4 behind it
    assert [rows["dense", length]["ms_per_token"] for length in (64, 128)] == [2.5, 2.5]
    assert rows["int4", 64]["ratio_to_dense"] == rows["int4", 128]["ratio_to_dense"] == 4.5 / 2.5
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert "finished: 12 of 12 steps" in capsys.readouterr().err


def test_more_repeats_and_lengths_go_on_with_what_was_kept(machine: Machine, tmp_path: Path) -> None:
    machine.stops_at(4)
    assert _bench(tmp_path, "--lengths", "64", "--repeats", "2") == 130
    machine.jobs.clear()
    assert _bench(tmp_path, "--lengths", "64", "128", "--repeats", "1", "--time_limit", "900") == 0
    assert machine.jobs == LONGER


def test_another_cache_needs_rounds_of_its_own(machine: Machine, tmp_path: Path) -> None:
    machine.stops_at(3)
    assert _bench(tmp_path, "--lengths", "64", "128") == 130
    machine.jobs.clear()
    assert _bench(tmp_path, "--lengths", "64", "--cache_config", '{"backend": "float8"}') == 0
    assert [name for name, _ in machine.jobs] == ["dense", "int8", "int4", "float8"]


def _continued(machine: Machine, output: Path, backend: str, error: Exception) -> dict[str, Any]:
    """Results of a run in which a cache fails at the first length, and which is stopped at the second."""

    def before(job: dict[str, Any], number: int) -> None:
        if job["length"] == 128:
            raise KeyboardInterrupt
        if job["cache_config"]["backend"] == backend:
            raise error

    machine.before = before
    assert _bench(output, "--lengths", "64", "128") == 130
    machine.before = lambda job, number: None
    machine.jobs.clear()
    assert _bench(output, "--lengths", "64", "128") == 0
    return read_results(output)


def test_what_failed_is_tried_again_with_all_of_its_round(machine: Machine, tmp_path: Path) -> None:
    document = _continued(machine, tmp_path, "int4", WorkerError("int4 ended with 1: no compiler"))
    assert machine.jobs == ALL + LONGER
    assert document["skipped"] == [] and len(document["results"]) == 6


def test_what_did_not_fit_is_not_tried_again(machine: Machine, tmp_path: Path) -> None:
    document = _continued(machine, tmp_path, "dense", DidNotFitError("did not fit: killed"))
    assert machine.jobs == LONGER[1:]  # nor what is larger
    assert [row["reason"] for row in document["results"] if row["label"] == "dense"] == [
        "did not fit: killed",
        "not tried: 64 tokens with a batch of 1 did not fit",
    ]


def test_verified_contexts_are_kept(machine: Machine, tmp_path: Path) -> None:
    asked = ["--lengths", "64", "--memory_gb", "0.0011", "--verify_memory"]
    machine.stops_at(5)
    assert _bench(tmp_path, *asked) == 130
    verified = machine.jobs[3:]
    assert [name for name, _ in verified] == ["dense", "int8"]
    machine.jobs.clear()
    assert _bench(tmp_path, *asked) == 0
    assert [name for name, _ in machine.jobs] == ["int4"]
    entries = read_results(tmp_path)["largest_context"]
    assert [entry["measured_kv_bytes"] for entry in entries] == [1000] * 3


def test_a_run_of_other_settings_is_not_continued(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.stops_at(3)
    assert _bench(tmp_path, "--lengths", "64", "128") == 130
    kept = (tmp_path / "progress" / "records-0.jsonl").read_bytes()
    assert _bench(tmp_path, "--lengths", "64", "--max_new_tokens", "9") == 2
    said = capsys.readouterr().err
    assert "unfinished run with other settings (max_new_tokens was 64, is 9)" in said
    assert (tmp_path / "progress" / "records-0.jsonl").read_bytes() == kept


@pytest.mark.parametrize(("option", "value"), [("threads", "2"), ("dtype", "fp32"), ("num_layers", "1")])
def test_what_an_answer_depends_on_is_a_setting(
    option: str, value: str, machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.stops_at(3)
    assert _bench(tmp_path, "--lengths", "64", "128") == 130
    assert _bench(tmp_path, "--lengths", "64", "128", f"--{option}", value) == 2
    assert f"unfinished run with other settings ({option} was" in capsys.readouterr().err


def test_answers_of_another_machine_or_model_are_not_mixed(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(BUNDLED_MODEL, tmp_path / "model")
    arguments = ["--model", str(model), "--device", "cpu", "--no_plots", "--lengths", "64", "128"]
    arguments += ["--cache_config", '{"backend": "int8"}', "--output", str(tmp_path / "out")]
    machine.stops_at(2)
    assert main(["bench", "generate", *arguments]) == 130
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(outcomes, "machine_names", lambda device: {"device": "d", "cpu": "c"})
        assert main(["bench", "generate", *arguments]) == 2
    assert "unfinished run with other settings (cpu was" in capsys.readouterr().err
    (model / "generation_config.json").write_text('{"top_k": 7}')
    assert main(["bench", "generate", *arguments]) == 2
    assert "unfinished run with other settings (model_digest was" in capsys.readouterr().err


def test_every_batch_size_is_measured(machine: Machine, tmp_path: Path) -> None:
    assert _bench(tmp_path, "--lengths", "64", "--batch_sizes", "1", "2") == 0
    assert machine.jobs == ALL + ALL
    rows = read_results(tmp_path)["results"]
    assert [(row["batch_size"], row["ms_per_token"]) for row in rows] == [
        (1, 1.0), (1, 2.0), (1, 3.0), (2, 4.0), (2, 5.0), (2, 6.0),
    ]  # fmt: skip


@pytest.mark.parametrize(("memory", "is_tried"), [(799_999, False), (800_000, True)])
def test_the_prompts_of_all_rows_must_fit(
    memory: int, is_tried: bool, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_rounds, "machine_bytes", lambda device: memory)
    options = GenerationOptions(lengths=[1000], cache_config=[])
    outcomes = generation_rounds.Outcomes(None, options, None, torch.device("cpu"), [DENSE])
    rounds = generation_rounds.Rounds(options, torch.device("cpu"), [DENSE], outcomes, silent)
    assert bool(rounds.run(1000, 100, [None])) == is_tried == bool(machine.jobs)
    assert (rounds.reason(0, 1000, 100) is None) == is_tried


def test_nothing_is_kept_of_a_run_that_fitted_nowhere(machine: Machine, tmp_path: Path) -> None:
    assert _bench(tmp_path / "new", "--lengths", str(10**12)) == 2
    assert machine.jobs == [] and not (tmp_path / "new").exists()
