"""One run at a time in an output directory."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import filelock
import pytest

from kvcache_plugins.cli import main
from kvcache_plugins.runs.output_lock import writing_alone

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "models" / "tiny-llama-books"
_HOLD = """
import sys
from pathlib import Path

from kvcache_plugins.runs.output_lock import writing_alone

with writing_alone(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["well", "killed"])
def test_another_process_keeps_us_out_until_it_ends(end: str, tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=r"^--output: another run is writing to '.*'\. Wait for its end"):
            writing_alone(tmp_path).__enter__()
    finally:
        if end == "killed":
            other.kill()
        other.communicate()
    with writing_alone(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_was_made_for_nothing_goes(tmp_path: Path) -> None:
    for raises in (False, True):
        try:
            with writing_alone(tmp_path / "a" / "new"):
                assert (tmp_path / "a" / "new").is_dir()
                if raises:
                    raise KeyError
        except KeyError:
            assert raises
        assert not (tmp_path / "a" / "new").exists()
    (tmp_path / "old").mkdir()
    with writing_alone(tmp_path / "old"):
        pass
    assert (tmp_path / "old").is_dir(), "it was there before"
    with writing_alone(tmp_path / "full"):
        (tmp_path / "full" / "file").touch()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]


def test_what_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for output in (tmp_path / "link", tmp_path / ("x" * 300)):
        with pytest.raises(
            ValueError, match=r"--output must be a directory that can be written to, got '.*': \w"
        ):
            writing_alone(output).__enter__()


def test_the_first_process_of_a_run_locks_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writing_alone(tmp_path):
        monkeypatch.setenv("RANK", "1")
        with writing_alone(tmp_path):
            pass
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(ValueError, match="another run"):
            writing_alone(tmp_path).__enter__()


def test_a_file_system_without_locks_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(code: int) -> Any:
        def fail(*args: Any, **options: Any) -> None:
            raise OSError(code, os.strerror(code))

        return fail

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire(errno.ENOLCK))
    said = r"has no locks \(No locks available\): nothing keeps a second run"
    with pytest.warns(UserWarning, match=said), writing_alone(tmp_path):
        pass
    monkeypatch.setattr(filelock.FileLock, "acquire", acquire(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        writing_alone(tmp_path).__enter__()


@pytest.mark.parametrize("command", ["perplexity", "passkey", "longbench", "calibrate", "train-locret"])
def test_every_command_that_can_be_continued_is_alone(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("\n\n".join(topics[name] for name in sorted(topics)[:20]), encoding="utf-8")
    row = {"question": "q", "context": "c", "answer_prefix": "a:", "answers": ["a"], "all_classes": None}
    (tmp_path / "hotpotqa.jsonl").write_text(json.dumps(row | {"length": 1, "_id": "1", "max_new_tokens": 2}))
    own: dict[str, list[str]] = {
        "perplexity": ["eval", "perplexity", "--dataset", "text", "--text_files", str(text)],
        "passkey": ["eval", "passkey", "--lengths", "300"],
        "longbench": ["eval", "longbench", "--data_dir", str(tmp_path), "--tasks", "hotpotqa"],
        "calibrate": ["calibrate", "--text_files", str(text)],
        "train-locret": ["train-locret", "--text_files", str(text), "--use_cpu", "true", "--no_plots"],
    }
    for module in ("models.pretrained", "training.job"):
        load = f"kvcache_plugins.{module}.load_model"
        monkeypatch.setattr(load, lambda *args, **options: pytest.fail("the model was loaded"))
    arguments = [*own[command], "--model", str(MODEL), "--output", str(output)]
    with writing_alone(output):
        assert main(arguments) == 2
    option = "output_dir" if command == "train-locret" else "output"
    assert f"error: --{option}: another run is writing to '{output}'" in capsys.readouterr().err
    assert not output.exists(), "nothing was written"
