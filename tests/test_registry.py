"""The registry: which names exist, which may be taken, and what is imported to say so."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcache_plugins as kvp
from kvcache_plugins import registry
from kvcache_plugins.cli import main
from kvcache_plugins.evaluation.caches import split_available
from kvcache_plugins.registry import get_backend, list_backends, register_backend, suggest
from kvcache_plugins.testing import tiny_model
from tests.kernels import fresh_process


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Iterator[None]:
    yield
    for name in ("mine", "theirs"):
        registry._registered.pop(name, None)


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Pretend that installed packages announce backends: `{name: "module:attribute"}`."""

    def announce(**values: str) -> None:
        points = [EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in values.items()]
        asked = []

        def found(*, group: str) -> list[EntryPoint]:
            asked.append(group)
            return points if group == registry.ENTRY_POINT_GROUP else []

        monkeypatch.setattr("importlib.metadata.entry_points", found)
        registry._entry_points.cache_clear()

    yield announce
    registry._entry_points.cache_clear()


class Mine(kvp.Int8Cache):
    """A backend of a third party."""


class Other(kvp.Int8Cache):
    """Another."""


# -- names


def test_names_are_sorted_and_ours() -> None:
    names = list_backends()
    assert names == sorted(names)
    assert {"float8", "int4", "int8", "kivi"} <= set(names)
    assert not {"quanto", "hqq", "fp8", "dense", "__init__"} & set(names)


@pytest.mark.parametrize("name", ["kivi", "KIVI", "Kivi"])
def test_names_are_case_insensitive(name: str) -> None:
    assert get_backend(name) is kvp.KIVICache


def test_a_decorated_class_is_a_backend() -> None:
    assert register_backend("mine")(Mine) is Mine
    assert Mine.backend == "mine"
    assert "mine" in list_backends() and get_backend("MINE") is Mine
    assert type(kvp.build_cache(_config(), {"backend": "mine"})) is Mine


def test_a_name_belongs_to_one_class() -> None:
    register_backend("mine")(Mine)
    with pytest.raises(ValueError, match=r"'mine' is already registered by .*test_registry\.Mine"):
        register_backend("mine")(Other)
    assert get_backend("mine") is Mine
    register_backend("mine")(Mine)  # its module was reloaded


def test_a_name_of_ours_cannot_be_taken_before_its_module_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Otherwise it would depend on the order of imports whose backend a name is.
    for name in ("kivi", "int8"):
        monkeypatch.delitem(registry._registered, name, raising=False)
        with pytest.raises(
            ValueError, match=rf"'{name}' is already registered by kvcache_plugins\.backends\.{name}"
        ):
            register_backend(name)(Other)


@pytest.mark.parametrize("name", ["quanto", "hqq", "fp8", "dense"])
def test_reserved_names(name: str) -> None:
    with pytest.raises(ValueError, match=rf"'{name}' is reserved.*'fp8', 'hqq', 'quanto', 'dense'"):
        register_backend(name)


@pytest.mark.parametrize("name", ["Mine", "my-backend", "my backend", "", "2bit", "a.b", None, 3, Mine])
def test_malformed_names(name: Any) -> None:
    with pytest.raises(ValueError, match="must be a lower-case identifier, got"):
        register_backend(name)


# -- unknown names


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("kiwi", "kivi"),
        ("KVI", "kivi"),
        ("int", "int8"),
        ("int44", "int4"),
        ("flaot8", "float8"),
        ("quant", "quanto"),
    ],
)
def test_did_you_mean(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"Unknown cache backend '{name}'") as failure:
        get_backend(name)
    said = str(failure.value)
    assert f"Did you mean '{meant}'?" in said or (name == "int" and "Did you mean 'int" in said)
    for known in (*list_backends(), "quanto", "hqq", "fp8"):
        assert repr(known) in said


def test_nothing_is_suggested_for_something_else() -> None:
    with pytest.raises(ValueError, match=r"Unknown cache backend 'zzzzzz'\. Available"):
        get_backend("zzzzzz")
    assert suggest("zzzzzz", ["kivi"]) == ""
    assert suggest("NBIT", ["nbits", "kernel"]) == " Did you mean 'nbits'?"


@pytest.mark.parametrize("name", [None, 3, ["kivi"]])
def test_a_name_is_a_string(name: Any) -> None:
    with pytest.raises(ValueError, match=r"`backend` must be a string, one of .*'kivi'"):
        get_backend(name)


# -- packages that announce backends


def test_entry_points_are_listed_without_being_loaded(entry_points: Any) -> None:
    entry_points(theirs="module_that_does_not_exist:Cache", Loud="other_missing_module")
    assert {"theirs", "loud"} <= set(list_backends())
    with pytest.raises(ValueError, match=r"Did you mean 'theirs'"):
        get_backend("their")
    with pytest.raises(ModuleNotFoundError, match="module_that_does_not_exist"):
        get_backend("theirs")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("class Cache(", "SyntaxError: '(' was never closed"),
        ("raise KeyError", "KeyError"),
    ],
)
def test_a_broken_module_is_named_with_its_backend(
    content: str,
    said: str,
    entry_points: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By `generate()`, and in one line by commands, which have a traceback for errors of ours alone."""
    (tmp_path / "broken_backend.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    entry_points(theirs="broken_backend:Cache")
    wanted = f"The backend 'theirs' cannot be loaded: its module 'broken_backend' raises {said}"
    with pytest.raises(ImportError) as failure:
        tiny_model("llama").generate(
            torch.ones(1, 3, dtype=torch.long),
            cache_implementation="quantized",
            cache_config={"backend": "theirs"},
        )
    assert str(failure.value).startswith(wanted) and failure.value.__cause__ is not None
    with pytest.raises(ImportError, match="'theirs' cannot be loaded"):  # it is not one that is not installed
        split_available(_config(), [{"backend": "theirs"}])
    command = ["eval", "perplexity", "--model", "m", "--dataset", "pydoc", "--output", str(tmp_path)]
    assert main([*command, "--cache_config", '{"backend": "theirs"}']) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {wanted}") and error.count("\n") == 1


def test_an_entry_point_is_loaded_at_first_use(entry_points: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("announced_backend")
    loads = []

    class Announced(kvp.Int8Cache):
        """Registered when its module is executed, as a real one would be."""

    def __getattr__(name: str) -> Any:
        loads.append(name)
        return register_backend("theirs")(Announced)

    module.__getattr__ = __getattr__  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "announced_backend", module)
    entry_points(Theirs="announced_backend:Cache")
    assert "theirs" in list_backends() and loads == []
    assert get_backend("theirs") is Announced and get_backend("THEIRS") is Announced
    assert loads == ["Cache"]


def test_an_entry_point_that_registers_something_else(entry_points: Any) -> None:
    entry_points(theirs="json:dumps")
    with pytest.raises(ValueError, match="announced for the backend 'theirs' does not register that name"):
        get_backend("theirs")


def test_names_of_ours_win_over_entry_points(entry_points: Any) -> None:
    entry_points(kivi="json:dumps")
    assert get_backend("kivi") is kvp.KIVICache
    assert list_backends().count("kivi") == 1


# -- laziness


def test_listing_imports_no_backend() -> None:
    code = (
        "import sys, kvcache_plugins as kvp\n"
        "names = kvp.list_backends()\n"
        "try: kvp.registry.get_backend('kiwi')\n"
        "except ValueError: pass\n"
        "heavy = ('kvcache_plugins.backends', 'torch', 'transformers')\n"
        "loaded = [m for m in sys.modules if m.startswith(heavy)]\n"
        "print(len(names) >= 4, loaded)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == ["True []"]


def test_asking_for_one_imports_no_other() -> None:
    code = """
        import sys
        for name in [name for name in sys.modules if name.startswith("kvcache_plugins")]:
            del sys.modules[name]
        from kvcache_plugins.registry import get_backend
        get_backend("int8")
        print(sorted(name for name in sys.modules if name.startswith("kvcache_plugins.backends.")))
    """
    assert fresh_process.run(code).stdout.strip() == "['kvcache_plugins.backends.int8']"


def _config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)


# -- what a backend must be


class TestClasses:
    """A class of which no cache can be built is refused where it is registered."""

    @staticmethod
    def made(base: type = kvp.KVCache, **attributes: Any) -> type:
        return type("Made", (base,), {"__doc__": "Made.", **attributes})

    @pytest.mark.parametrize(
        ("attributes", "said"),
        [
            ({}, r"Made\.config_class.*must be a subclass of BackendConfig, got None"),
            ({"config_class": dict}, r"BackendConfig, got <class 'dict'>"),
            ({"config_class": kvp.BackendConfig}, r"Made\.layer_class.*subclass of PackedLayer, got None"),
        ],
    )
    def test_without_its_parts(self, attributes: dict[str, Any], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            register_backend("mine")(self.made(**attributes))
        assert "mine" not in list_backends()

    def test_no_cache(self) -> None:
        with pytest.raises(ValueError, match=r"must be a subclass of KVCache, got <class 'dict'>"):
            register_backend("mine")(dict)  # type: ignore[type-var]

    @pytest.mark.parametrize("option", registry.RESERVED_OPTIONS)
    def test_options_with_a_meaning_of_their_own(self, option: str) -> None:
        config = dataclasses.make_dataclass(
            "Config", [(option, int, 3)], bases=(kvp.BackendConfig,), frozen=True, kw_only=True
        )
        with pytest.raises(ValueError, match=rf"\['{option}'\] of the backend 'mine' need other names"):
            register_backend("mine")(self.made(kvp.Int8Cache, config_class=config))

    def test_what_evicts(self) -> None:
        evicting = get_backend("knorm")
        with pytest.raises(ValueError, match=r"subclass of EvictingConfig, got .*Int8Config"):
            register_backend("mine")(self.made(evicting, config_class=get_backend("int8").config_class))
        with pytest.raises(ValueError, match=r"subclass of EvictingLayer, got .*Int8Layer"):
            register_backend("mine")(self.made(evicting, layer_class=get_backend("int8").layer_class))
        parts = {"config_class": evicting.config_class, "layer_class": evicting.layer_class}
        with pytest.raises(ValueError, match="must be a subclass of EvictingCache"):
            register_backend("mine")(self.made(**parts))
        late = type("Late", (evicting.layer_class,), {"scored_after": "atention"})
        with pytest.raises(ValueError, match=r"one of \('update', 'attention', 'forward'\), got 'atention'"):
            register_backend("mine")(self.made(evicting, layer_class=late))
        register_backend("mine")(self.made(evicting))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fp8", "'fp8' is reserved"),
        ("int8", "'int8' is a backend of this package"),
        ("my-dash", "lower-case identifier, got 'my-dash'"),
    ],
)
def test_names_that_are_announced_in_vain(name: str, said: str, entry_points: Any) -> None:
    """Transformers' own backends and ours stay what they are, whatever a distribution announces."""
    entry_points(**{name: "somewhere:Cache", "theirs": "somewhere:Other"})
    with pytest.warns(UserWarning, match=rf"'{name}' \('somewhere:Cache'\) is ignored: .*{said}"):
        names = list_backends()
    assert names == list_backends() and "theirs" in names
    assert name == "int8" or name not in names
    assert get_backend("int8").__module__ == "kvcache_plugins.backends.int8"


def test_a_name_that_is_announced_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("theirs", f"{where}:Cache", registry.ENTRY_POINT_GROUP) for where in ("one", "other")
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: points)
    registry._entry_points.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"'other:Cache'\) is ignored: .*twice, first as 'one:Cache'"):
            assert registry._entry_points()["theirs"].value == "one:Cache"
    finally:
        registry._entry_points.cache_clear()
