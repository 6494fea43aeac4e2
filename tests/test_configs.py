"""Every file under configs/ holds options that its evaluation takes, and is listed in the table there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcache_plugins.cli.options import merge_options
from kvcache_plugins.evaluation.longbench.options import LongBenchOptions
from kvcache_plugins.evaluation.passkey.options import PasskeyOptions
from kvcache_plugins.evaluation.perplexity.options import PerplexityOptions
from kvcache_plugins.registry import TRANSFORMERS_BACKENDS, get_backend
from kvcache_plugins.training.parsing import parse_arguments

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
TRAININGS = sorted((CONFIGS / "locret").glob("*.yaml"))
EVALUATIONS = [path for path in FILES if path not in TRAININGS]
OPTIONS: dict[str, Any] = {
    "longbench": LongBenchOptions,
    "passkey": PasskeyOptions,
    "perplexity": PerplexityOptions,
}


def _name(path: Path) -> str:
    return path.relative_to(CONFIGS).as_posix()


def test_every_evaluation_has_one() -> None:
    assert {path.parent.name for path in EVALUATIONS} == set(OPTIONS)


@pytest.mark.parametrize("path", EVALUATIONS, ids=_name)
def test_options_are_those_of_the_evaluation(path: Path) -> None:
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    options = OPTIONS[path.parent.name].from_dict(merge_options({}, str(path)))
    for name, value in given.items():
        if name != "cache_config":
            assert options.settings()[name] == value
    assert options.cache_configs[0] == {"backend": "dense"} and len(options.cache_configs) > 1
    for cache_config in options.cache_configs[1:]:
        backend = cache_config["backend"]
        if backend not in TRANSFORMERS_BACKENDS:
            rest = {name: value for name, value in cache_config.items() if name != "backend"}
            get_backend(backend).config_class.from_dict(rest)


@pytest.mark.parametrize(
    ("name", "excluded", "given"),
    [
        ("longbench/kivi_mistral_7b.yaml", "dataset", {"data_dir": str(CONFIGS)}),
        ("passkey/locret_llama31_8b.yaml", "filler_text", {"filler_files": ["book.txt"]}),
    ],
)
def test_an_option_of_the_command_line_takes_the_place_of_what_it_excludes(
    name: str, excluded: str, given: dict[str, Any]
) -> None:
    path = CONFIGS / name
    assert excluded in yaml.safe_load(path.read_text(encoding="utf-8"))
    settings = OPTIONS[path.parent.name].from_dict(merge_options(given, str(path))).settings()
    assert settings.items() >= given.items() and settings[excluded] is None
    text = yaml.safe_load(path.read_text(encoding="utf-8"))[excluded]
    with pytest.raises(ValueError, match="exclude each other"):
        OPTIONS[path.parent.name].from_dict(merge_options(given | {excluded: text}, str(path)))


@pytest.mark.parametrize("path", TRAININGS, ids=_name)
def test_options_are_those_of_the_training(path: Path) -> None:
    options, training = parse_arguments(["--config", str(path), "--output", "unused", "--bf16", "false"])
    for name, value in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        if name != "bf16":  # transformers asks whether this machine can
            assert getattr(options if hasattr(options, name) else training, name) == value
    assert not (ROOT / "unused").exists()


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_comments_give_command_numbers_and_source(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    place = f"configs/{_name(path)}"
    script = "train_locret.py" if path in TRAININGS else f"eval_{path.parent.name}.py"
    assert re.search(
        rf"^#   python scripts/{re.escape(script)} --config {re.escape(place)}\b", text, re.MULTILINE
    )
    assert (ROOT / "scripts" / script).exists()
    assert "# Source: " in text and re.search(r"^# .*[Pp]ublished", text, re.MULTILINE)


def test_the_table_lists_all_of_them() -> None:
    table = (CONFIGS / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[\S+\]\((\S+)\)", table, re.MULTILINE)) == [_name(path) for path in FILES]
