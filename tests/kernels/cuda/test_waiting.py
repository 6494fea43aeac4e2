"""No step waits for a GPU, and appends are part of CUDA graphs, whatever the cache.

Waiting is what torch calls so in its debug mode. A test asks many caches, and does not take them for
parameters, because simulated devices run few parameter sets of each.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from kvcache_plugins import build_cache, list_backends
from kvcache_plugins.backends.kvquant import NORMAL_FLOAT
from kvcache_plugins.eviction.layer import EvictingLayer
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import get_backend
from kvcache_plugins.retaining.configuration import RetainingHeadsConfig
from kvcache_plugins.retaining.heads import RetainingHeads
from kvcache_plugins.testing.conformance import state_bytes
from kvcache_plugins.testing.models import tiny_model
from tests.kernels.decode_cases import CASES

pytestmark = pytest.mark.cuda

MODELS = Path(__file__).resolve().parents[3] / "examples" / "models"
ARTIFACT = str(MODELS / "tiny-llama-books-kvquant3")
LEVELS: dict[str, Any] = {"backend": "kvquant", "calibration": NORMAL_FLOAT, "residual_length": 0}
APPENDED = CASES | {
    "kvquant-3bit-k2": LEVELS | {"nbits": 3, "key_bits": 2},
    "kvquant-no-sinks": LEVELS | {"sink_length": 0},
    "kvquant-many-sinks": LEVELS | {"sink_length": 70, "outlier_fraction": 0.02},
    "kvquant-artifact": {"backend": "kvquant", "calibration": ARTIFACT},
    "int8-static": {"backend": "int8", "calibration": ARTIFACT},
    "int8-static-tensor": {"backend": "int8", "calibration": ARTIFACT, "granularity": "tensor"},
    "float8-static": {"backend": "float8", "calibration": ARTIFACT, "scale": "head"},
}
NO_KERNEL = {"int8-token", "int8-tensor"}
"""No kernel encodes scales over heads. The codecs ask whether any number is beyond what they store."""
SINKS = {"int4-sinks", "kivi-sinks"}
"""Groups in which there are sinks are the codecs' too, and come after the prompt if that is short."""
LENGTH = 300


@pytest.fixture(scope="module", autouse=True)
def kernels(cuda_kernels: None) -> None:
    pass


@contextmanager
def nobody_waits() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def waiting(steps: Iterable[Callable[[], object]]) -> str | None:
    """Where the first step waits that does; `None` if none does."""
    with nobody_waits():
        try:
            for step in steps:
                step()
        except RuntimeError as error:
            if "called a synchronizing CUDA operation" not in str(error):
                raise
            frames = traceback.extract_tb(error.__traceback__)
            return " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames[-4:]))
    return None


def new_layer(options: dict[str, Any], final_length: int | None = None, pads: Any = None) -> PackedLayer:
    """A layer of the bundled model: two heads of 64 channels."""
    layer: PackedLayer = build_cache(_config(), dict(options)).packed_layers[0]
    layer.bind(layer.facts, None if pads is None else torch.tensor(pads, device="cuda"), final_length)
    return layer


def _config() -> Any:
    return AutoConfig.from_pretrained(MODELS / "tiny-llama-books")


def states(count: int, batch_size: int = 1) -> list[Tensor]:
    return [torch.randn(batch_size, 2, count, 64, dtype=torch.bfloat16).to("cuda") for _ in range(2)]


def test_what_waits_is_told() -> None:
    """By the debug mode, on which the other tests rely."""
    numbers = torch.arange(6, device="cuda")
    mask, elsewhere = numbers % 2 == 0, torch.tensor([1, 2], device="cpu")
    waits: dict[str, Callable[[], object]] = {
        "a number": numbers.sum().item,
        "a condition": lambda: bool(mask.any()),
        "a copy to the host": numbers.cpu,
        "a copy from the host": lambda: torch.tensor([1.0, 2.0], device="cuda"),
        "places": mask.nonzero,
        "a mask": lambda: numbers[mask],
        "numbers for a mask": lambda: numbers.index_put_((mask,), numbers[:3].clone()),
        "indices of the host": lambda: numbers[elsewhere],
        "counts": lambda: torch.bincount(numbers),
        "repeats": lambda: numbers.repeat_interleave(numbers),
        "different numbers": numbers.unique,
        "a comparison": lambda: torch.equal(numbers, numbers.clone()),
    }
    assert [name for name, act in waits.items() if waiting([act]) is None] == []
    goes_on: list[Callable[[], object]] = [
        lambda: torch.full((2,), 0.5, device="cuda"),
        lambda: torch.where(mask, numbers, 0),
        lambda: numbers[numbers],
        lambda: numbers.masked_fill(mask, 1).topk(2),
        lambda: numbers.repeat_interleave(numbers, output_size=15),
        lambda: torch.empty(0, device="cuda").cpu(),
    ]
    assert waiting(goes_on) is None


def test_no_append_waits() -> None:
    """Over whole periods of encoding; only where the text says so may the first blocks make an exception."""

    def of(options: dict[str, Any], length: int, steps: int, pads: Any = None) -> str | None:
        layer = new_layer(options, pads=pads)
        layer.update(*states(length, 1 if pads is None else len(pads)))
        new = states(1, 1 if pads is None else len(pads))
        layer.update(*new)
        found = waiting([lambda: layer.update(*new)] * steps)
        assert found is not None or layer.stored_keys.packed_length >= 64
        return found

    found = {name: of(options, LENGTH, 130) for name, options in APPENDED.items()}
    assert {name for name, where in found.items() if where} == NO_KERNEL, found
    # The first block comes later, and with it what a codec learns.
    found = {name: of(options, 2, 200) for name, options in APPENDED.items() if "artifact" not in name}
    assert {name for name, where in found.items() if where} == NO_KERNEL | SINKS, found
    found = {
        name: of(options, 100, 200, pads=(20, 0))
        for name, options in APPENDED.items()
        if options["backend"] == "kvquant"
    }
    assert not any(found.values()), found


def test_appends_in_a_graph() -> None:
    """Over a whole period: what a replay leaves is what appending leaves."""
    steps = 130
    for name, options in APPENDED.items():
        if name in NO_KERNEL:
            continue
        prompt, tokens = states(LENGTH), [states(1) for _ in range(steps)]
        layers = [new_layer(options, final_length=LENGTH + steps) for _ in range(2)]
        for layer in layers:
            layer.update(*prompt)
        for token in tokens:
            layers[0].update(*token)
        recorded, graph = layers[1], torch.cuda.CUDAGraph()
        before = {part: tensor.clone() for part, tensor in recorded.tensors().items()}
        places = {part: tensor.data_ptr() for part, tensor in recorded.tensors().items()}
        packed_length = recorded.stored_keys.packed_length
        with torch.cuda.graph(graph):
            for token in tokens:
                recorded.update(*token)
        assert recorded.stored_keys.packed_length > packed_length, name
        assert {part: tensor.data_ptr() for part, tensor in recorded.tensors().items()} == places, name
        for part, tensor in recorded.tensors().items():  # a simulated device has done what it recorded
            tensor.copy_(before[part])
        graph.replay()
        found, expected = state_bytes(recorded), state_bytes(layers[0])
        for part, tensor in expected.items():
            assert torch.equal(found[part], tensor), f"{name}: {part}"


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Untrained retaining heads for a model of one layer."""
    folder, model = tmp_path_factory.mktemp("heads"), tiny_model("llama", num_hidden_layers=1)
    RetainingHeads(RetainingHeadsConfig.from_model(model)).save_pretrained(folder)
    return str(folder)


def test_no_step_of_a_model_waits(heads: str) -> None:
    """Attention included, and evictions but for those of backends that look at what is held."""
    ids = torch.randint(5, 100, (2, 131), device="cpu").to("cuda")
    one, several = (tiny_model("llama", num_hidden_layers=n).to("cuda", torch.bfloat16) for n in (1, 3))

    @torch.no_grad()
    def of(options: dict[str, Any]) -> str | None:
        model = several if options.get("offload") else one  # of one layer, nothing would leave
        cache = build_cache(model, options)

        def step(start: int, stop: int) -> None:
            model(ids[:, start:stop], **as_argument(cache), logits_to_keep=1)

        step(0, 130)
        for _ in range(3):  # in which small tables are moved to the device
            step(130, 131)
        found = waiting([lambda: step(130, 131)] * 66)  # and something has to go
        assert found is not None or cache.report().fallback_reads == 0
        return found

    caches: dict[str, dict[str, Any]] = {
        "kvquant-offload": LEVELS | {"offload": True},
        "int8-offload": {"backend": "int8", "offload": True},
    }
    for name in list_backends():
        backend = get_backend(name)
        options = {"backend": name, **backend.config_class.tiny().to_dict()}
        options |= {"heads": heads} if name == "locret" else {}
        if not issubclass(backend.layer_class, EvictingLayer):
            caches[name] = options
            continue
        for storage in (None, {"backend": "int4"}):
            caches[f"{name} in {storage}"] = options | {"budget": 96, "storage": storage}
        caches[f"{name} evicting"] = options | {"budget": 96, "storage": None, "evict_at_decode": True}
    found = {name: of(options) for name, options in caches.items()}
    assert {name for name, where in found.items() if where} == {"kvzip evicting", "lagkv evicting"}, found
