"""`torch.compile`: a compiled model generates the same, with a packed and with an evicting cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvcache_plugins.models.cache_argument import cache_of
from kvcache_plugins.testing.models import tiny_model


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:Dynamo")
@pytest.mark.parametrize(
    "options",
    [
        {"backend": "kivi", "nbits": 2, "residual_length": 64},
        {"backend": "snapkv", "budget": 96, "window_length": 32},
    ],
    ids=lambda options: str(options["backend"]),
)
def test_compiled_models_generate_the_same(options: dict[str, Any]) -> None:
    prompt = torch.randint(3, 100, (2, 200), generator=torch.Generator().manual_seed(0))
    found = []
    for is_compiled in (False, True):
        model = tiny_model("llama")
        if is_compiled:
            model.compile(backend="eager")  # the same operators: the same numbers
        found.append(
            model.generate(
                prompt, cache_implementation="quantized", cache_config=options, max_new_tokens=80,
                min_new_tokens=80, do_sample=False, output_logits=True, return_dict_in_generate=True,
            )
        )  # fmt: skip
    plain, compiled = found
    assert torch.equal(compiled.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(compiled.logits), torch.stack(plain.logits), rtol=0, atol=1e-6)
    report = cache_of(compiled).report()
    assert report.fallback_reads == 0 and report.kernel == cache_of(plain).report().kernel
