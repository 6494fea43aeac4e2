"""What is installed and how: metadata, scripts, licence."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvcache_plugins

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("scripts/quickstart.sh", "scripts/test.sh", ".ci/run")


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    # part of Python since 3.11; before, pytest itself brings it under its old name
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    document: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return document


def _names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[ ]", requirement)[0] for requirement in requirements}


def test_metadata(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    assert project["name"] == "kvcache-plugins"
    assert project["license"] == "Apache-2.0"
    assert project["requires-python"] == ">=3.10"
    assert {"torch>=2.11", "transformers>=5.17"} <= set(project["dependencies"])
    assert project["dependencies"][2:] == [
        "accelerate",
        "safetensors",
        "numpy",
        "psutil",
        "filelock",
        "huggingface_hub",
        "tqdm",
        "rich",
        "pyyaml",
    ]


def test_extras(pyproject: dict[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"]
    assert set(extras) == {"eval", "train", "quanto", "hqq", "plots", "cuda", "lm_eval", "dev", "all"}
    assert _names(extras["eval"]) == {"datasets", "evaluate", "jieba"}
    assert _names(extras["train"]) == {"datasets"}
    assert _names(extras["quanto"]) == {"optimum-quanto"}
    assert {"pytest", "pytest-xdist", "hypothesis", "rouge", "ruff", "mypy", "pre-commit"} <= _names(
        extras["dev"]
    )
    everything = re.fullmatch(r"kvcache-plugins\[(.*)\]", extras["all"][0])
    assert everything is not None
    assert set(everything[1].split(",")) == set(extras) - {"all", "cuda"}  # which not every machine can have


def test_version_is_a_literal_so_that_building_imports_nothing(pyproject: dict[str, Any]) -> None:
    assert pyproject["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "kvcache_plugins.__version__"}
    tree = ast.parse((ROOT / "kvcache_plugins" / "__init__.py").read_text(encoding="utf-8"))
    assigned = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert ast.literal_eval(assigned["__version__"]) == kvcache_plugins.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", kvcache_plugins.__version__)


def test_console_script_leads_to_a_function(pyproject: dict[str, Any]) -> None:
    module, _, function = pyproject["project"]["scripts"]["kvcache-plugins"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_entry_point_group_is_the_one_documented(pyproject: dict[str, Any]) -> None:
    from kvcache_plugins.registry import ENTRY_POINT_GROUP

    assert f'entry-points."{ENTRY_POINT_GROUP}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "entry-points" not in pyproject["project"]  # our own backends are found by file name


def test_types_are_shipped(pyproject: dict[str, Any]) -> None:
    assert (ROOT / "kvcache_plugins" / "py.typed").exists()
    assert "py.typed" in pyproject["tool"]["setuptools"]["package-data"]["kvcache_plugins"]


def test_every_folder_with_code_is_a_package() -> None:
    """A folder without `__init__.py` would work from a checkout and be missing from an installation."""
    folders = {path.parent for path in (ROOT / "kvcache_plugins").rglob("*.py")}
    assert [folder.name for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_nothing_stray_is_kept_at_the_top() -> None:
    git = shutil.which("git")
    tracked = git and subprocess.run([git, "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if not tracked or tracked.returncode:
        pytest.skip("not a checkout that git reads")
    top = {path.partition("/")[0] for path in tracked.stdout.splitlines() if not path.startswith(".")}
    folders = {"kvcache_plugins", "examples", "tests", "configs", "scripts"}
    assert top == folders | {"pyproject.toml", "README.md", "LICENSE"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_can_be_run(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_setup_pins_are_allowed_by_the_metadata() -> None:
    text = (ROOT / "scripts" / "_setup.sh").read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", str(ROOT / "scripts" / "_setup.sh")], check=True)
    pins = dict(re.findall(r'^KVCACHE_DEFAULT_(\w+)_VERSION="([\d.]+)"$', text, flags=re.MULTILINE))
    assert set(pins) == {"TORCH", "TRANSFORMERS"}
    lowest = {"TORCH": (2, 11), "TRANSFORMERS": (5, 17)}
    for name, pin in pins.items():
        assert tuple(map(int, pin.split(".")))[:2] >= lowest[name]
    assert "://" not in text  # where packages come from is for pip's configuration to say


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, ".venv"),
        ({"KVCACHE_TRANSFORMERS_VERSION": "5.17.0"}, ".venv-5.17.0"),
        ({"KVCACHE_TORCH_VERSION": "2.11.0"}, ".venv-torch-2.11.0"),
        (
            {"KVCACHE_TRANSFORMERS_VERSION": "5.17.0", "KVCACHE_TORCH_VERSION": "2.11.0"},
            ".venv-5.17.0-torch-2.11.0",
        ),
        ({"KVCACHE_VENV": "elsewhere/env"}, "elsewhere/env"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_combination_of_versions_has_its_own_environment(
    variables: dict[str, str], folder: str, tmp_path: Path
) -> None:
    """Sourcing decides on the directory and touches nothing; relative to the checkout, or to the current
    folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVCACHE_")}
    command = f'source "{ROOT}/scripts/_setup.sh" && printf %s "$VENV_DIR"'
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=tmp_path,
        env=inherited | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    base = tmp_path if "KVCACHE_VENV" in variables else ROOT
    assert done.stdout == str(base / folder)


def test_licence_is_the_plain_text() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert re.findall(r"^ *Copyright (?!License|notice)(.+)$", text, flags=re.MULTILINE)[-1:] == [
        "the kvcache_plugins authors"
    ]
