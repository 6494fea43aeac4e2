"""Which kernels serve: what `kernel="native"` asks for, and what is left to the reference."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from kvcache_plugins.attention.native import attend_handles
from kvcache_plugins.attention.reference import AttentionOptions, attend
from kvcache_plugins.building import build_cache
from kvcache_plugins.errors import KernelUnavailableError
from kvcache_plugins.kernels import cuda_loader, loader
from kvcache_plugins.kernels.selection import select_kernel
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import get_backend, list_backends
from kvcache_plugins.testing.models import tiny_model
from tests.kernels.decode_cases import CASES, build_layer, library, step

__all__ = ["library"]  # a fixture


def devices(*names: str) -> set[torch.device]:
    return {torch.device(name) for name in names}


def refused(what: str, reason: str) -> AbstractContextManager[object]:
    """What names the option, what was given, what is allowed, and why it cannot be met."""
    said = f"kernel='native' was given, .* {what} here; kernel='auto' and kernel='torch' work .*{reason}"
    return pytest.raises(KernelUnavailableError, match=said)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are asked for, of the CPU or of a GPU; there is none unless a test says so."""
    found: list[str] = []
    monkeypatch.setattr(loader, "build", lambda: found.append("cpu"))
    monkeypatch.setattr(cuda_loader, "check", lambda device: found.append(str(device)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return found


@pytest.mark.parametrize("requested", ["auto", "torch"])
def test_nothing_is_asked_for(requested: str, asked: list[str]) -> None:
    assert select_kernel(requested, "kivi", devices("cpu")) == "torch"
    assert select_kernel(requested, "kivi", devices("cuda:0")) == "torch"
    assert asked == []


@pytest.mark.parametrize(
    ("names", "kernels", "reported"),
    [
        (["cpu"], ["cpu"], "cpu"),
        (["cpu", "meta"], ["cpu"], "cpu"),
        (["cuda:0"], ["cuda:0"], "cuda"),
        (["cuda:1", "cuda:0"], ["cuda:0", "cuda:1"], "cuda"),
        (["cuda:0", "cpu", "meta"], ["cuda:0"], "cuda"),
        (["meta"], [], "torch"),
    ],
    ids=lambda value: " ".join(value) or "none" if isinstance(value, list) else value,
)
def test_the_kernels_of_the_device_are(
    names: list[str], kernels: list[str], reported: str, asked: list[str]
) -> None:
    """Weights beside those on a GPU wait for their turn there."""
    assert select_kernel("native", "kivi", devices(*names)) == reported
    assert asked == kernels


@pytest.mark.parametrize(("has_gpu", "kernels"), [(False, ["cpu"]), (True, [])])
def test_where_a_model_will_be_is_not_known(
    has_gpu: bool, kernels: list[str], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert select_kernel("native", "kivi") == (kernels or ["torch"])[0]
    assert asked == kernels


@pytest.mark.parametrize(
    ("name", "module", "function"),
    [("cpu", loader, "build"), ("cuda:0", cuda_loader, "check")],
    ids=["cpu", "cuda"],
)
def test_there_are_none(name: str, module: Any, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise KernelUnavailableError("the disk is made of cheese")

    monkeypatch.setattr(module, function, fail)
    with refused("the backend 'kivi'", "the disk is made of"):
        select_kernel("native", "kivi", devices(name))


def test_other_devices_have_none(asked: list[str]) -> None:
    with refused("the backend 'kivi'", "there are none for mps"):
        select_kernel("native", "kivi", devices("mps", "cpu"))
    assert asked == []


# ---- what a cache and attention make of it


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_library", None)
    monkeypatch.setattr(loader, "_failure", "no C++ compiler was found.")


@pytest.mark.usefixtures("no_library")
def test_a_cache_for_a_model_on_the_cpu() -> None:
    with refused("the backend 'int8'", "no C"):
        build_cache(tiny_model("llama"), {"backend": "int8", "kernel": "native"})


@pytest.mark.usefixtures("no_library")
def test_a_cache_that_is_shown_a_model_later(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cache = build_cache(model.config, {"backend": "int8", "kernel": "native"})
    assert set(cache.report().kernel) == {"torch"}
    with refused("the backend 'int8'", "no C"):
        cache.bind(model)


@pytest.mark.usefixtures("no_library")
def test_attention_raises_where_there_is_none() -> None:
    layer = build_layer(CASES["kivi-default"] | {"kernel": "native"}, 200)
    with refused("layer 0", "there are no CPU kernels: no C"):
        attend_handles(*step(layer, 1, 4), AttentionOptions())


@pytest.mark.usefixtures("library")
def test_attention_raises_where_none_serves() -> None:
    layer = build_layer(CASES["kivi-default"] | {"kernel": "native"}, 200)
    query, key, value = step(layer, 1, 4)
    with refused("layer 0", "there is no native kernel for torch.float64"):
        attend_handles(query.double(), key, value, AttentionOptions())
    wide = build_layer(CASES["int8-default"] | {"kernel": "native"}, 200, head_dim=528)
    with refused("layer 0", "no native kernel reads these codecs"):
        attend_handles(*step(wide, 1, 4), AttentionOptions())


# ---- the reference


@pytest.mark.usefixtures("library")
def test_cases_left_to_the_reference() -> None:
    layer = build_layer(CASES["kivi-default"], 200)
    query, key, value = step(layer, 1, 4)
    attend_handles(query, key, value, AttentionOptions())
    assert layer.kernel == "cpu"
    attend_handles(query.double(), key, value, AttentionOptions())
    assert layer.kernel == "torch"
    layer = build_layer(CASES["int8-default"], 200, head_dim=528)
    attend_handles(*step(layer, 1, 4), AttentionOptions())
    assert layer.kernel == "torch"


def test_kernel_torch_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "try_load", lambda: pytest.fail("kernel='torch' loads nothing"))
    layer = build_layer(CASES["kivi-default"] | {"kernel": "torch"}, 200)
    query, key, value = step(layer, 1, 4)
    got = attend_handles(query, key, value, AttentionOptions())
    assert torch.equal(got, attend(query, key.tokens, value.tokens, AttentionOptions()))
    assert layer.kernel == "torch"


@pytest.mark.usefixtures("library")
def test_backends_tell_which_kernels_read_their_codes() -> None:
    model = tiny_model("llama")
    for name in list_backends():
        backend = get_backend(name)
        if backend.evicts:
            assert backend.native_kernels == (), "its storage's"
            continue
        cache = build_cache(model, {"backend": name, **backend.config_class.tiny().to_dict()})
        with torch.no_grad():
            for length in (300, 1):
                model(torch.randint(3, 100, (1, length)), **as_argument(cache))
        assert set(cache.report().kernel) == {"cpu" if "cpu" in backend.native_kernels else "torch"}, name
