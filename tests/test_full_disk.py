"""A disk that takes no more: what was kept stays whole, and the error names the file.

Nobody has to be root for one: a process may limit how large its files get. What fits is then written, and the
rest fails, as on a full disk.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcache_plugins.artifacts.files import naming
from tests.kernels import fresh_process

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "models" / "tiny-llama-books"

_START = """
import resource, signal, sys
from pathlib import Path

sys.dont_write_bytecode = True  # half of a module's would be left for others to read
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]


def told(work, room):
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
    try:
        work()
        said = None
    except OSError as error:
        said = error
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    print(said)  # into a file, too


output = Path({output!r})
"""


def _run(code: str, output: Path) -> list[str]:
    """Run code that may call `told(work, room)`, and return the lines that it prints."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = fresh_process.run(_START.format(output=str(output)) + code, environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(("room", "length"), [(10, 100), (300, 500), (5_000, 8_000), (20_000, 30_000)])
def test_a_journal_holds_whole_records(room: int, length: int, tmp_path: Path) -> None:
    """Of more than a buffer and of less, most of which has found room."""
    code = f"""
from kvcache_plugins.runs.journal import Journal

journal = Journal(output, {{"length": 1}})
journal.add("a", {{"x": 1}})
path = output / "progress" / "records-0.jsonl"
told(lambda: journal.add("b", {{"x": "y" * {length}}}), path.stat().st_size + {room})
print(path.read_text().count("\\n"), path.read_text().endswith("\\n"), "b" in journal)
journal.add("c", {{"x": 3}})
again = Journal(output, {{"length": 1}})
print(sorted(key for key in "abc" if key in again))
"""
    path = tmp_path / "progress" / "records-0.jsonl"
    assert _run(code, tmp_path) == [
        f"[Errno 27] File too large: {str(path)!r}",
        "2 True False",
        "['a', 'c']",
    ]


def test_predictions_are_whole_rows(tmp_path: Path) -> None:
    code = """
from kvcache_plugins.evaluation.longbench.prediction_files import append_prediction

path = output / "trec.jsonl"
append_prediction(path, {"pred": "a"})
told(lambda: append_prediction(path, {"pred": "b" * 600}), path.stat().st_size + 400)
append_prediction(path, {"pred": "c"})
"""
    path = tmp_path / "trec.jsonl"
    assert _run(code, tmp_path) == [f"[Errno 27] File too large: {str(path)!r}"]
    assert path.read_text() == '{"pred": "a"}\n{"pred": "c"}\n'


def test_errors_name_the_file_that_was_to_be_written(tmp_path: Path) -> None:
    """Not the one that it is called until it is complete."""
    code = """
import torch
from kvcache_plugins.artifacts.files import naming, write_json, write_tensors
from kvcache_plugins.artifacts.folders import replacing


def save():
    with naming(output / "state.pt"):
        torch.save({"a": torch.zeros(4000)}, output / "state.pt")


def replace():
    with replacing(output / "artifact") as folder:
        write_tensors(folder / "a.safetensors", {"a": torch.zeros(4000)})


def replace_card():
    with replacing(output / "artifact") as folder:
        (folder / "README.md").write_text("x" * 4000)


told(lambda: write_tensors(output / "a.safetensors", {"a": torch.zeros(4000)}), 2000)
told(lambda: write_json(output / "a.json", {"a": "x" * 4000}), 2000)
told(replace, 2000)
told(replace_card, 2000)
told(save, 2000)
"""
    *plain, torch_error = _run(code, tmp_path)
    names = ("a.safetensors", "a.json", "artifact/a.safetensors", "artifact")
    assert plain == [f"[Errno 27] File too large: {str(tmp_path / name)!r}" for name in names]
    assert torch_error.startswith("[Errno 5] torch cannot write it (")
    assert torch_error.endswith(f": {str(tmp_path / 'state.pt')!r}")
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"], "torch writes into the file itself"


@pytest.mark.parametrize("error", [OSError("no room"), ConnectionRefusedError(111, "Connection refused")])
def test_errors_of_something_else_stay_what_they_are(error: OSError, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as raised, naming(tmp_path):
        raise error
    assert raised.value is error


_COMMANDS = {
    "calibrate": (
        ["calibrate", "--dataset", "pydoc", "--num_samples", "2", "--sequence_length", "64"],
        {2_000: "progress/statistics.safetensors"},
    ),
    "train-locret": (
        [
            "train-locret", "--dataset", "synthetic", "--sequence_length", "128", "--eval_examples", "1",
            "--hidden_dim", "16", "--max_steps", "1", "--save_steps", "1", "--disable_tqdm", "true",
            "--use_cpu", "true", "--no_plots",
        ],
        {20_000: "checkpoint-1/model.safetensors", 300_000: ""},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _COMMANDS)
def test_commands_name_it_as_well(name: str, tmp_path: Path) -> None:
    command, rooms = _COMMANDS[name]
    for room, file in rooms.items():
        output = tmp_path / str(room)
        code = f"""
from kvcache_plugins.cli import main

sys.stderr = sys.stdout
resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, most))
print(main({[*command, "--model", str(MODEL)]!r} + ["--output", str(output)]))
"""
        *_, error, status = _run(code, output)
        assert status == "2", error
        assert error.startswith("error: [Errno ") and error.endswith(f": {str(output / file)!r}")
