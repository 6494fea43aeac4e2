"""What cannot be done is said before anything is observed, and leaves no file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcache_plugins.calibration import calibrate as job
from kvcache_plugins.calibration.calibrate import calibrate_subject
from kvcache_plugins.calibration.options import CalibrationOptions
from kvcache_plugins.calibration.sensitivity import check_candidates
from kvcache_plugins.cli import main
from kvcache_plugins.runs.language_reference import read_language_reference
from kvcache_plugins.runs.loading import Subject, load_subject
from kvcache_plugins.runs.model_options import ModelOptions
from kvcache_plugins.testing import tiny_model

MODEL = str(Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books")
PACKS_NOTHING = r"--sequence_length {} is too short to judge .* '{}' packs nothing. Take {} or more"
# options of the command, further options of the cache, what is said
REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "short": ({"sequence_length": 160}, {}, PACKS_NOTHING.format(160, "kvquant", 384)),
    "short by one": ({"sequence_length": 383}, {}, PACKS_NOTHING.format(383, "kvquant", 384)),
    "what is possible": ({"sequence_length": 160, "backend": "kivi"}, {"residual_length": 32}, None),
    "kivi values short": (
        {"sequence_length": 257, "backend": "kivi"},
        {},
        PACKS_NOTHING.format(257, "kivi", 258),
    ),
    "misspelt": ({}, {"residual_lenght": 0}, "'residual_lenght' is not an option.*residual_length"),
    "kivi misspelt": ({"backend": "kivi"}, {"q_group": 32}, "'q_group' is not an option.*q_group_size"),
    "wrong value": ({}, {"residual_length": -1}, "residual_length must be .* got -1"),
    "wrong layer": ({}, {"skip_layers": [9]}, "skip_layers must name layers from -6 to 5, got 9"),
    "no layer": ({}, {"skip_layers": list(range(6))}, "has nothing to choose.* packs no layer"),
    "bits": ({}, {"key_bits": 2}, r"--target_bits chooses \['key_bits'\]"),
}


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject(ModelOptions(model=MODEL, dtype="fp32"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "reference.txt"
    path.write_text(read_language_reference()[:20000], encoding="utf-8")
    return str(path)


class Observed(Exception):
    """Stands for the passes and the measurements, which every accepted request comes to."""


@pytest.mark.filterwarnings("ignore:The backend 'kvquant' packs none:UserWarning")
@pytest.mark.parametrize("name", REQUESTS)
def test_a_precision_that_cannot_be_chosen(
    name: str, subject: Subject, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def observe(*args: Any) -> None:
        raise Observed

    for work in ("_observe", "_choose"):
        monkeypatch.setattr(job, work, observe)
    given, cache, said = REQUESTS[name]
    options: dict[str, Any] = {"num_samples": 2, "sequence_length": 400, "target_bits": 3.0} | given
    if cache:
        options["cache_config"] = [{"backend": given.get("backend", "kvquant"), **cache}]
    request = CalibrationOptions(model=MODEL, dtype="fp32", text_files=[text], **options)
    with pytest.raises(ValueError if said else Observed, match=said):
        calibrate_subject(subject, request, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("backend", ["kvquant", "kivi"])
def test_the_least_length_is_the_one_that_is_measured(backend: str) -> None:
    """Of kvquant, 64 tokens beyond the window of half a sample; of kivi's values, one."""
    model = tiny_model("llama")
    config = {"backend": backend, "residual_length": 32}
    config |= {"calibration": "normal_float"} if backend == "kvquant" else {}
    least = {"kvquant": 2 * 96, "kivi": 2 * 33}[backend]
    check_candidates(model, config, (2, 4), least)
    with pytest.raises(ValueError, match=PACKS_NOTHING.format(least - 1, backend, least)):
        check_candidates(model, config, (2, 4), least - 1)


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        ({"calibration": "elsewhere"}, "must not set 'calibration', got 'elsewhere'"),
        ({"outlier_fraction": 0.02}, r"must have the 'outlier_fraction' 0\.01 .* got 0\.02"),
    ],
)
def test_a_precision_is_of_the_artifact_that_is_made(cache: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CalibrationOptions(model=MODEL, target_bits=3.0, cache_config=[{"backend": "kvquant", **cache}])


@pytest.mark.parametrize("backend", ["kvquant", "kivi"])
def test_the_command_leaves_nothing(
    backend: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "calibrate", "--model", MODEL, "--dtype", "fp32", "--text_files", text, "--num_samples", "2",
        "--sequence_length", "160", "--target_bits", "3", "--backend", backend,
        "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    assert main(arguments) == 2
    assert "--sequence_length 160 is too short" in capsys.readouterr().err
    misspelt = json.dumps({"backend": backend, "residual_lenght": 0})
    assert main([*arguments, "--cache_config", misspelt]) == 2
    assert "residual_length" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
