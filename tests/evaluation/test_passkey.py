"""The passkey evaluation: what it counts, that it goes on where it ended, that two processes equal one."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvcache_plugins.cli import main
from kvcache_plugins.evaluation.passkey import display as passkey_display
from kvcache_plugins.evaluation.passkey import run as passkey
from kvcache_plugins.evaluation.passkey.filler import read_filler
from kvcache_plugins.evaluation.passkey.options import PasskeyOptions
from kvcache_plugins.evaluation.passkey.prompts import Trial, build_trials
from kvcache_plugins.evaluation.passkey.rows import build_rows, record_key
from kvcache_plugins.runs.cache_names import CacheNames
from kvcache_plugins.runs.journal import Journal
from kvcache_plugins.runs.results import read_results
from tests.launching import run_script

ROOT = Path(__file__).resolve().parents[2]
BUNDLED_MODEL = ROOT / "examples" / "models" / "tiny-llama-books"
DENSE = {"backend": "dense"}
KIVI = {"backend": "kivi", "nbits": 2, "residual_length": 32}
NEEDLE = " The key is {key}."  # of which the bundled model finds some, but not all
SMALL = ["--lengths", "128", "300", "--depths", "2", "--trials", "2", "--threads", "1", "--dtype", "fp32"]
SMALL += ["--needle", NEEDLE]


@pytest.fixture(autouse=True)
def _path_only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command puts this Python's tools on the path."""
    monkeypatch.setenv("PATH", os.environ["PATH"])


def _arguments(output: Path, *options: str, caches: tuple[dict[str, Any], ...] = (KIVI,)) -> list[str]:
    cache_config = ["--cache_config", *map(json.dumps, caches)]
    return ["--model", str(BUNDLED_MODEL), *SMALL, *cache_config, "--output", str(output), *options]


def _run(output: Path, *options: str, caches: tuple[dict[str, Any], ...] = (KIVI,)) -> dict[str, Any]:
    assert main(["eval", "passkey", *_arguments(output, *options, caches=caches)]) == 0
    return read_results(output)


def _measured(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in document["results"]]


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    """The prompts that `SMALL` asks for."""
    options = PasskeyOptions(model="m", lengths=[128, 300], depths=2, trials=2, needle=NEEDLE)
    return build_trials(options, read_filler(options), AutoTokenizer.from_pretrained(BUNDLED_MODEL))


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of an undisturbed run in this process."""
    return _run(tmp_path_factory.mktemp("passkey"), "--no_plots")


def test_dense_equals_a_plain_greedy_loop(document: dict[str, Any], trials: list[Trial]) -> None:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    right = {}
    for trial in trials:
        ids = list(trial.ids)
        with torch.inference_mode():
            for _ in range(8):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        answer = tokenizer.decode(ids[trial.length :])
        digits = "".join(c if c.isdecimal() else " " for c in answer).split()
        right[trial.length, trial.depth, trial.index] = digits[:1] == [trial.key]
    row = document["results"][0]
    assert row["cache_config"] == DENSE
    assert row["accuracy"] == sum(right.values()) / len(right)
    assert 0 < row["accuracy"] < 1, "both answers must occur"
    for cell in row["grid"]:
        both = [right[cell["length"], cell["depth"], index] for index in (0, 1)]
        assert cell["accuracy"] == sum(both) / 2
    assert len(row["grid"]) == 4


def test_the_dtype_is_that_of_the_model(tmp_path: Path) -> None:
    few = ["--lengths", "128", "--depths", "1", "--trials", "1", "--no_plots"]
    assert _run(tmp_path, "--dtype", "auto", *few)["settings"]["dtype"] == "bfloat16"


def test_results(document: dict[str, Any]) -> None:
    assert document["task"] == "passkey" and document["skipped"] == []
    settings = document["settings"]
    assert settings["lengths"] == [128, 300] and "{key}" in settings["needle"]
    assert len(settings["filler_sha256"]) == 64
    dense, kivi = document["results"]
    assert kivi["cache_config"] == KIVI and kivi["label"] == "kivi 2-bit residual_length=32"
    for row in (dense, kivi):
        assert set(row["by_length"]) == {"128", "300"} and set(row["by_depth"]) == {"0", "0.5"}
        for shares in (row["by_length"].values(), row["by_depth"].values()):
            assert sum(shares) / 2 == pytest.approx(row["accuracy"])
        assert row["trials"] == 8 and row["seconds"] > 0
        assert row["stderr"] == pytest.approx((row["accuracy"] * (1 - row["accuracy"]) / 8) ** 0.5)
    # six layers, keys and values, two heads of 64 channels, four bytes: for 300 tokens and 7 of the answer
    assert dense["kv_bytes"] == 6 * 2 * 2 * 64 * 4 * (300 + 7)
    assert (dense["memory_fraction"], dense["bits_per_value"]) == (1, 32)
    assert kivi["memory_fraction"] == pytest.approx(kivi["kv_bytes"] / dense["kv_bytes"], rel=0.02)
    assert kivi["bits_per_value"] == pytest.approx(32 * kivi["memory_fraction"])
    assert kivi["memory_fraction_by_length"]["300"] == kivi["memory_fraction"] < 0.5


def test_prompts_go_to_generate_as_they_are(
    tmp_path: Path, trials: list[Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    load = passkey.load_subject

    def loaded(*arguments: Any) -> Any:
        subject = load(*arguments)
        generate = subject.model.generate

        def recorded(**arguments: Any) -> Any:
            given.append(arguments)
            return generate(**arguments)

        subject.model.generate = recorded
        return subject

    monkeypatch.setattr(passkey, "load_subject", loaded)
    _run(tmp_path, "--no_plots", "--batch_size", "3")
    prompts = [tuple(row) for call in given for row in call["input_ids"].tolist()]
    assert prompts == [trial.ids for trial in trials] * 2, "every cache gets all of them, in order"
    assert [call["input_ids"].shape[0] for call in given] == [3, 1, 3, 1] * 2
    assert all(call["attention_mask"].all() and call["do_sample"] is False for call in given)
    assert [call.get("cache_config") for call in given] == [None] * 4 + [KIVI] * 4


def test_batches_give_the_same_answers(document: dict[str, Any], tmp_path: Path) -> None:
    batched = _measured(_run(tmp_path, "--no_plots", "--batch_size", "3"))
    for row, one_by_one in zip(batched, _measured(document), strict=True):
        assert row["grid"] == one_by_one["grid"]
        assert row["bits_per_value"] == pytest.approx(one_by_one["bits_per_value"], rel=0.02)


# ---- interruptions and processes ----


def test_an_interrupted_run_goes_on(
    document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    ask = passkey.ask_with_prompt

    def interrupted(subject: Any, cache_config: Any, batch: list[Trial], tokens: int) -> Any:
        if len(asked) == 11:
            raise KeyboardInterrupt
        asked.append((cache_config["backend"], batch[0].length, batch[0].depth, batch[0].index))
        return ask(subject, cache_config, batch, tokens)

    monkeypatch.setattr(passkey, "ask_with_prompt", interrupted)
    assert main(["eval", "passkey", *_arguments(tmp_path, "--no_plots")]) == 130
    assert not (tmp_path / "results.json").exists() and (tmp_path / "progress").exists()

    first = list(asked)
    monkeypatch.setattr(
        passkey, "ask_with_prompt", lambda *a: (asked.append((a[1]["backend"], a[2][0])), ask(*a))[1]
    )
    assert _measured(_run(tmp_path, "--no_plots")) == _measured(document)
    assert (len(first), len(asked)) == (11, 16), "nothing is asked twice"
    assert not (tmp_path / "progress").exists()


def test_other_settings_do_not_continue_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(passkey, "ask_with_prompt", _stopped_after_one())
    assert main(["eval", "passkey", *_arguments(tmp_path, "--no_plots")]) == 130
    assert main(["eval", "passkey", *_arguments(tmp_path, "--no_plots", "--seed", "7")]) == 2
    assert "seed was 0, is 7" in capsys.readouterr().err


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _stopped_after_one() -> Callable[..., Any]:
    """A run that answers once: without a record there would be nothing to go on with."""
    ask, asked = passkey.ask_with_prompt, []

    def answer(*given: Any) -> Any:
        if asked:
            raise KeyboardInterrupt
        asked.append(given)
        return ask(*given)

    return answer


def _retouch(path: Path) -> None:
    """Change the weights of a file, as a further step of training does."""
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    save_file({name: weight * 1.1 for name, weight in load_file(path).items()}, path, facts)


def test_a_model_that_has_changed_does_not_continue_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(BUNDLED_MODEL, tmp_path / "model")
    command = ["eval", "passkey", *_arguments(tmp_path / "out", "--no_plots"), "--model", str(model)]
    with monkeypatch.context() as stopped:
        stopped.setattr(passkey, "ask_with_prompt", _stopped_after_one())
        assert main(command) == 130
    _retouch(model / "model.safetensors")
    assert main(command) == 2
    assert "an unfinished run with other settings (model_digest was" in capsys.readouterr().err


def test_heads_that_have_changed_are_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = shutil.copytree(BUNDLED_MODEL.with_name("tiny-llama-books-locret"), tmp_path / "heads")
    cache = {"backend": "locret", "heads": str(heads), "budget": 96}
    asked: list[str] = []
    ask = passkey.ask_with_prompt

    def counted(*arguments: Any) -> Any:
        if len(asked) == 14:
            raise KeyboardInterrupt
        asked.append(arguments[1]["backend"])
        return ask(*arguments)

    monkeypatch.setattr(passkey, "ask_with_prompt", counted)
    command = ["eval", "passkey", *_arguments(tmp_path / "out", "--no_plots", caches=(cache,))]
    assert main(command) == 130 and asked == ["dense"] * 8 + ["locret"] * 6
    _retouch(heads / "model.safetensors")
    asked = ["before"] * 15
    assert main(command) == 0
    assert asked[15:] == ["locret"] * 8, "all of the new heads, nothing of the dense cache"
    assert not (tmp_path / "out" / "progress").exists(), "nobody needs the old ones"


@pytest.mark.slow
def test_two_processes_equal_one(
    document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run_script("eval_passkey.py", *_arguments(tmp_path, "--no_plots"), processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kivi 2-bit") == 1, "one process prints the table"
    assert _measured(read_results(tmp_path)) == _measured(document)


@pytest.mark.parametrize("backend", ["fp8", "int8"])
def test_a_failure_of_transformers_is_noted_and_ours_stops_the_run(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = passkey.ask_with_prompt

    def failing(subject: Any, cache_config: Any, batch: list[Trial], tokens: int) -> Any:
        if cache_config["backend"] == backend and batch[0].length == 300:
            raise RuntimeError("no such\nshape")
        return ask(subject, DENSE if cache_config["backend"] == "fp8" else cache_config, batch, tokens)

    monkeypatch.setattr(passkey, "ask_with_prompt", failing)
    monkeypatch.setattr(
        "kvcache_plugins.evaluation.caches.why_unavailable", lambda *_: None
    )  # fp8 came with a later transformers
    arguments = ["eval", "passkey", *_arguments(tmp_path, "--no_plots", caches=({"backend": backend}, KIVI))]
    if backend == "int8":
        with pytest.raises(RuntimeError, match="no such"):
            main(arguments)
        return
    with monkeypatch.context() as stopped:
        stopped.setattr(passkey, "write_results", _interrupt)
        assert main(arguments) == 130
    again = shutil.copytree(tmp_path, tmp_path.with_name("again"))
    assert main(arguments) == 0
    found = read_results(tmp_path)
    assert [row["cache_config"] for row in found["results"]] == [DENSE, KIVI]
    assert found["skipped"] == [
        {
            "cache_config": {"backend": "fp8"},
            "reason": "failed at 300 tokens: no such shape",
            "is_failure": True,
        }
    ]
    backend = "none"  # the failure was of that hour; what has failed is tried again
    arguments[arguments.index("--output") + 1] = str(again)
    assert main(arguments) == 0
    assert [row["trials"] for row in read_results(again)["results"]] == [8, 8, 8]
    assert read_results(again)["skipped"] == []


def _answered(subject: Any, cache_config: Any, batch: list[Trial], tokens: int) -> list[dict[str, Any]]:
    """Stands in for a model."""
    measured = {"answer": "7", "is_right": True, "kv_bytes": 100, "cached_tokens": 10, "seconds": 1.0}
    return [dict(measured) for _ in batch]


def test_a_batch_of_which_a_part_was_kept_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Journal.add

    def stopping(self: Journal, key: str, record: Any) -> Any:
        add(self, key, record)
        if len(self) == 5:  # the second of the second batch
            raise KeyboardInterrupt

    monkeypatch.setattr(passkey, "ask_with_prompt", _answered)
    with monkeypatch.context() as stopped:
        stopped.setattr(Journal, "add", stopping)
        arguments = _arguments(tmp_path, "--no_plots", "--batch_size", "3", "--trials", "3")
        assert main(["eval", "passkey", *arguments]) == 130
    document = _run(tmp_path, "--no_plots", "--batch_size", "3", "--trials", "3")
    assert [row["trials"] for row in document["results"]] == [12, 12]


def test_another_filler_in_the_same_file_does_not_continue_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(passkey, "ask_with_prompt", _answered)
    monkeypatch.setattr(passkey, "write_results", _interrupt)
    filler = tmp_path / "filler.txt"
    arguments = _arguments(tmp_path / "out", "--no_plots", "--filler_files", str(filler))
    for text, status in (("One two three. " * 200, 130), ("Two three four. " * 200, 2)):
        filler.write_text(text)
        assert main(["eval", "passkey", *arguments]) == status
    assert "unfinished run with other settings (filler_sha256 was" in capsys.readouterr().err


def test_trials_are_put_together(tmp_path: Path) -> None:
    names = CacheNames([DENSE, KIVI])
    trials = [Trial(length, depth, 0, "12345", ()) for length in (300, 100) for depth in (0.0, 0.5)]
    journal = Journal(tmp_path, {})
    for name, sizes in ((names[DENSE], (1200, 1200, 400, 400)), (names[KIVI], (320, 280, 200, 200))):
        for trial, kv_bytes in zip(trials, sizes, strict=True):
            measured = {"kv_bytes": kv_bytes, "cached_tokens": trial.length, "seconds": 2.0}
            is_right = trial.length == 300 and trial.depth == 0
            journal.add(record_key(name, trial), measured | {"is_right": is_right})
    (dense, kivi), failed = build_rows(journal, names, trials, 16, 1)
    assert failed == []
    assert (dense["kv_bytes"], dense["memory_fraction"], dense["bits_per_value"]) == (1200, 1, 16)
    assert (kivi["kv_bytes"], kivi["memory_fraction"], kivi["bits_per_value"]) == (300, 0.25, 4)
    assert kivi["memory_fraction_by_length"] == {"300": 0.25, "100": 0.5}
    assert (kivi["accuracy"], kivi["trials"], kivi["seconds"]) == (0.25, 4, 8.0)
    assert kivi["by_length"] == {"300": 0.5, "100": 0} and kivi["by_depth"] == {"0": 0.5, "0.5": 0}
    assert [cell["accuracy"] for cell in kivi["grid"]] == [1, 0, 0, 0]


@pytest.mark.parametrize(("question", "most"), [(0, 4088), (10, 4078)])
def test_prompt_question_and_answer_may_fill_all_positions(question: int, most: int) -> None:
    config = AutoConfig.from_pretrained(BUNDLED_MODEL)
    passkey._check_positions(PasskeyOptions(model="m", lengths=[100, most]), config, question)
    with pytest.raises(ValueError, match=f"--lengths must be at most {most}: .* got {most + 1}"):
        passkey._check_positions(PasskeyOptions(model="m", lengths=[most + 1]), config, question)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "4090"], "--lengths must be at most 4088: the model has 4096 positions"),
        (["--max_new_tokens", "5000"], "--max_new_tokens must be below the model's 4096 positions, got 5000"),
        (["--cache_config", '{"backend": "quanto", "foo": 1}'], "'foo': 1} is not what transformers' own"),
        (["--lengths", "20"], "--lengths must be above"),
        (["--trials", "100000000"], "2 --lengths make 400,000,000 prompts of 85,600,000,000 tokens in all"),
        (["--needle", " The pass key is lost."], "--needle must hold {key}"),
        (["--needle", " The code of {name} is {key}."], "--needle must hold {name} with several --facts"),
        (["--question", " What is {name}'s code?"], "--question must hold {name} with several"),
        (["--filler_files", "{tmp}/missing.txt"], "missing.txt"),
        (["--filler_files", "{tmp}/empty.txt"], "empty.txt"),
        (["--filler_files", "{tmp}/short.txt"], "The filler has"),
        (["--cache_config", '{"backend": "kivi", "nbit": 2}'], "nbit"),
        (["--output", "{tmp}/short.txt"], "--output must be a directory"),
    ],
)
def test_errors_come_before_the_model(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "short.txt").write_text("Too short.")
    monkeypatch.setattr(passkey, "load_subject", lambda *_: pytest.fail("the model was loaded"))
    options = [option.replace("{tmp}", str(tmp_path)) for option in options]
    assert main(["eval", "passkey", *_arguments(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_model_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "passkey"]) == 2
    assert capsys.readouterr().err.startswith("error: --model must name the model")


# ---- showing ----


@pytest.mark.parametrize("panels", [1, 10, 13])
def test_picture_and_table_of_any_number_of_caches(
    document: dict[str, Any], tmp_path: Path, panels: int
) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread
    from rich.console import Console

    many = copy.deepcopy(document)
    rows = [many["results"][0], *(copy.deepcopy(many["results"][1]) for _ in range(panels - 1))]
    for index, row in enumerate(rows):
        row["label"] = f"cache {index}"
    many["results"] = rows
    passkey_display.plot_passkey(many, tmp_path / "a" / "passkey.png")
    height, width = imread(tmp_path / "a" / "passkey.png").shape[:2]
    assert 300 < height < 2000 and 400 < width < 2600
    console = Console(width=160, record=True, file=(tmp_path / "table").open("w"))
    console.print(passkey_display.passkey_table(many))
    text = console.export_text()
    assert all(f" cache {index} " in text for index in range(panels))
    assert f"{rows[0]['kv_bytes']:,}" in text


def test_the_command_writes_all_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    _run(tmp_path, "--lengths", "128", "--depths", "1", "--trials", "1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["passkey.png", "results.json"]
    shown = capsys.readouterr().out
    assert "kivi 2-bit" in shown and "passkey.png" in shown and "1 trials, 1 at each of 1 depths" in shown
