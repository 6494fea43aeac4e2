"""The shape of the code base: imports run one way, files hold one idea, public things are documented."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "kvcache_plugins"
FILES = sorted(PACKAGE.rglob("*.py"))

# A unit may import units to its left (and itself). Backends are reached by name through the registry only.
ORDER = (
    "errors", "undoing", "fresh_processes", "compilation", "device_dtypes", "dtype_names", "registry",
    "config", "quantizers", "models", "kernels", "layers", "attention", "report", "artifacts", "saved",
    "sending", "cache", "encoder_decoder", "building", "persistence", "transformers_caches", "estimation",
    "capacity", "eviction", "retaining", "backends", "prompt_chunks", "runs", "evaluation", "calibration",
    "training", "encoder_calls", "cache_requests", "generation_calls", "image_calls", "assistant_calls",
    "integration", "testing", "cli", "__init__", "__main__",
)  # fmt: skip
# Deferred imports that would close a circle at import time, with the reason.
DEFERRED = {
    ("saved", "persistence"): "KVCache.save_pretrained is the public name of a function that needs KVCache",
    ("saved", "cache"): "what is loaded, for the type checker only",
    ("saved", "encoder_decoder"): "what is loaded, for the type checker only",
    ("__init__", "*"): "public names are loaded at first use",
    ("integration", "attention"): "loaded when a cache of ours exists",
}


def unit(path: Path) -> str:
    """First component of a module's path inside the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_units(path: Path) -> set[tuple[str, bool]]:
    """Units a file imports, and whether the import sits inside a function or a type-checking block."""
    found = set()
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            depth = len(path.relative_to(PACKAGE).parts) - node.level
            parts = [*path.relative_to(PACKAGE).parts[:depth], *(node.module or "").split(".")]
            names = [parts[0]] if parts[0] else [alias.name for alias in node.names]
            found |= {(name, id(node) not in top) for name in names}
        assert not (
            isinstance(node, (ast.Import, ast.ImportFrom)) and "kvcache_plugins" in ast.unparse(node)
        ), f"{path.name}: import inside the package must be relative"
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    here = unit(path)
    for there, deferred in imported_units(path):
        if there == here or (deferred and ((here, there) in DEFERRED or (here, "*") in DEFERRED)):
            continue
        if here == "registry" and deferred and there == "cache":
            continue  # for the type checker only
        assert ORDER.index(there) < ORDER.index(here), f"{path.name} imports {there}, which lies above {here}"


def imports_a_backend(source: str) -> bool:
    """Whether a file in `backends/` imports from there, however it spells it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = node.module.split(".")[:1] if node.module else [alias.name for alias in node.names]
            if node.level == 1 or "backends" in above:
                return True
    return False


def test_backends_do_not_import_one_another() -> None:
    assert [path for path in (PACKAGE / "backends").glob("*.py") if imports_a_backend(path.read_text())] == []
    for line in (
        "from .int4 import Int4Config",
        "from . import int4",
        "from ..backends.int4 import Int4Config",
        "from ..backends import int4",
        "def late():\n    from .. import backends",
    ):
        assert imports_a_backend(line), line
    assert not imports_a_backend("from ..quantizers import float8\nfrom .. import cache")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_no_file_is_a_drawer() -> None:
    assert not [path for path in FILES if path.stem in ("utils", "helpers", "common", "misc")]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_public_names_are_documented(path: Path) -> None:
    name = ".".join(("kvcache_plugins", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    )
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    for item in getattr(module, "__all__", []):
        thing = getattr(module, item)
        if callable(thing):
            assert (thing.__doc__ or "").strip(), f"{name}.{item} has no docstring"
        for method, function in vars(thing).items() if inspect.isclass(thing) else ():
            # the name of a test says what it shows
            if inspect.isfunction(function) and not method.startswith(("_", "test_")):
                assert inspect.getdoc(getattr(thing, method)), f"{name}.{item}.{method} has no docstring"
