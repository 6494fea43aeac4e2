"""`torch.compile`: a compiled model generates the same, with a packed and with an evicting cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from kvcache_plugins.models.cache_argument import cache_of
from kvcache_plugins.testing.models import tiny_model

EVICTING = {"budget": 64, "chunk_size": 48}
KIVI = {"backend": "kivi", "nbits": 2, "residual_length": 64}
KVZIP = {"backend": "kvzip", "head_floor": 0.2, "storage": {"backend": "int8"}, **EVICTING}
SNAPKV = {"backend": "snapkv", "window_length": 32, **EVICTING}
STREAMING = {"backend": "streaming_llm", "positions": "compact", "evict_at_decode": True, **EVICTING}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def generated(model: Any, options: dict[str, Any], new: int = 70) -> Any:
    prompt = torch.randint(3, 100, (2, 150), generator=torch.Generator().manual_seed(0))
    return model.generate(
        prompt, cache_implementation="quantized", cache_config=options, max_new_tokens=new,
        min_new_tokens=new, do_sample=False, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:Dynamo")
@pytest.mark.parametrize(
    ("family", "options", "dynamic"),
    [
        ("llama", KIVI, None),
        ("llama", KVZIP, True),
        pytest.param("llama", SNAPKV, None, marks=pytest.mark.slow),
        pytest.param("llama", STREAMING, True, marks=pytest.mark.slow),
        pytest.param("gemma2", SNAPKV, True, marks=pytest.mark.slow),  # runs eager, and has a window
    ],
)
def test_compiled_models_generate_the_same(
    family: str, options: dict[str, Any], dynamic: bool | None
) -> None:
    places: list[str] = []

    def run_as_traced(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """The same operators: the same numbers."""
        places.extend(str(node.stack_trace) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    plain = generated(tiny_model(family), options)
    model = tiny_model(family)
    model.compile(backend=run_as_traced, dynamic=dynamic)
    compiled = generated(model, options)
    assert torch.equal(compiled.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(compiled.logits), torch.stack(plain.logits), rtol=0, atol=1e-6)
    report = cache_of(compiled).report()
    assert report.fallback_reads == 0 and report.kernel == cache_of(plain).report().kernel
    # what a layer does and counts is in no graph
    assert places and not [place for place in places if ", in update" in place or "/eviction/" in place]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_compiler_makes_code_that_serves_all_lengths() -> None:
    plain = generated(tiny_model("llama"), STREAMING)
    model = tiny_model("llama")
    model.compile(dynamic=True)
    assert torch.equal(generated(model, STREAMING).sequences, plain.sequences)
