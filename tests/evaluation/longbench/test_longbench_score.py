"""The metric of the package `evaluate`, and what the package is without its optional dependencies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import fresh_process

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "kvcache_plugins" / "evaluation" / "longbench"

_LOAD = f"""
import json
import evaluate

folder = {str(FOLDER / "longbench_score")!r}
qasper = evaluate.load(folder, "qasper").compute(
    predictions=["cat", "dog", "cat dog"],
    references=[["cat"], ["cat", "bird"], ["cat"]],
    lengths=[1, 5000, 2],
)
trec = evaluate.load(folder, "trec").compute(
    predictions=["City Food"], references=[["City"]], all_classes=["City", "Food"]
)
try:
    evaluate.load(folder, "qaspar")
except ValueError as error:
    print(json.dumps([qasper, trec, str(error)]))
"""


def test_evaluate_loads_the_metric_without_a_network(tmp_path: Path) -> None:
    pytest.importorskip("evaluate", reason="part of the extra 'eval'")
    offline = {"HF_EVALUATE_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _LOAD],
        env=os.environ | offline | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    qasper, trec, error = json.loads(done.stdout.splitlines()[-1])
    assert qasper == {"score": 55.56, "score_by_length": {"0-4k": 83.33, "4-8k": 0.0, "8k+": None}}
    assert trec == {"score": 50.0}
    assert "Did you mean 'qasper'" in error


def test_the_package_imports_without_the_extra() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in FOLDER.rglob("*.py")
        if path.stem != "__init__"
    ]
    assert len(names) > 10
    # as if nothing of ours had been imported, with them or without
    missing = (
        "import sys\n"
        "for name in [name for name in sys.modules if name.startswith('kvcache_plugins')]:\n"
        "    del sys.modules[name]\n"
    )
    missing += "".join(
        f"sys.modules[{name!r}] = None\n" for name in ("jieba", "datasets", "matplotlib", "evaluate")
    )
    code = missing + "".join(f"import {name}\n" for name in names)
    done = fresh_process.run(code)
    assert done.returncode == 0, done.stderr
