"""Which layouts tensor cores read: what Python says of it, and what the emulated kernels do."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcache_plugins.attention import cuda
from kvcache_plugins.attention.description import describe
from kvcache_plugins.attention.reference import AttentionOptions
from kvcache_plugins.kernels.cuda_inputs import is_fast
from tests.kernels.cuda import emulation
from tests.kernels.cuda.test_emulated_attention import check
from tests.kernels.decode_cases import CASES, build_layer, step

pytestmark = pytest.mark.usefixtures("emulated")
SHARED_BYTES = (232448, 101376, 90000)
"""Of a thread block on GPUs for servers, on those for desks, and less than any has."""
CODES = CASES | {
    f"kvquant-{nbits}bit": {**CASES["kvquant-default"], "nbits": nbits, "residual_length": 32}
    for nbits in (2, 3, 4)
}


@pytest.mark.parametrize("head_dim", [40, 64, 128, 256, 272])
@pytest.mark.parametrize("name", CODES)
def test_the_mirror_is_true(name: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = build_layer(CODES[name], 300, batch_size=1, kv_heads=1, head_dim=head_dim, dtype=torch.float16)
    query, key, value = step(layer, 1, 4)
    keys, values = describe(key.tokens), describe(value.tokens)
    assert keys is not None and values is not None
    record_bytes = layer.records.data.shape[3]
    assert not is_fast(torch.float32, record_bytes, keys, values, SHARED_BYTES[0])
    for shared_bytes in SHARED_BYTES:
        monkeypatch.setenv("KVCACHE_EMULATED_SHARED_BYTES", str(shared_bytes))
        before = emulation.products()
        check(query, key, value, AttentionOptions())
        was_fast = emulation.products() > before
        assert is_fast(torch.float16, record_bytes, keys, values, shared_bytes) == was_fast


def test_channels_of_which_halves_lie_together_are_not_for_tensor_cores() -> None:
    """No layer packs keys with metadata of channels so, but for such as must be turned."""
    layer = build_layer({"backend": "kivi"}, 300, head_dim=128, dtype=torch.float16)
    _, key, value = step(layer, 1, 4)
    keys, values = describe(key.tokens), describe(value.tokens)
    assert keys is not None and values is not None
    record_bytes = layer.records.data.shape[3]
    for interleaved in (1, 0):
        side = replace(keys, layout=keys.layout._replace(interleaved=interleaved))
        assert is_fast(torch.float16, record_bytes, side, values, SHARED_BYTES[0]) == bool(interleaved)


@pytest.mark.parametrize(
    ("options", "compiled_for", "resident"),
    [
        ({"backend": "kivi", "nbits": 2}, 90, 5),
        ({"backend": "kivi", "nbits": 2}, 80, 4),
        ({"backend": "kivi", "nbits": 4}, 90, 4),
        ({"backend": "kivi", "nbits": 4}, 80, 4),
        ({"backend": "int8"}, 90, 3),
        ({"backend": "int8"}, 80, 3),
    ],
)
def test_the_plan_counts_on_what_registers_leave_room_for(
    options: dict[str, Any], compiled_for: int, resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the driver has translated a build for older GPUs, in which a kernel may take more."""
    processors, heads = 6, 2
    monkeypatch.setenv("KVCACHE_EMULATED_MULTIPROCESSORS", str(processors))
    monkeypatch.setenv("KVCACHE_EMULATED_CAPABILITY", str(compiled_for))
    layer = build_layer(options, 4500, batch_size=1, kv_heads=heads, head_dim=128, dtype=torch.float16)
    emulation.launched()
    check(*step(layer, 1, 4), AttentionOptions())
    attended = [line for line in emulation.launched() if "attend_known_kernel" in line]
    grids = [re.search(r" of (\d+) x (\d+)$", line) for line in attended]
    assert [found and tuple(map(int, found.groups())) for found in grids] == [
        (heads, processors * resident // heads)
    ]


@pytest.mark.parametrize(("dtype", "is_named"), [(torch.bfloat16, False), (torch.float32, True)])
def test_a_slow_kernel_is_reported(
    dtype: torch.dtype, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = build_layer({"backend": "int4"}, 300, dtype=dtype)
    query, key, value = step(layer, 1, 4)
    monkeypatch.setattr(cuda, "_shared_bytes", lambda device: 232448)
    for _ in range(2):  # found out, then remembered
        reason = cuda.why_not_fast(query, key.tokens, value.tokens)
        assert (reason is not None and "general CUDA kernel" in reason) if is_named else reason is None


def test_every_gpu_has_its_own_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer that has moved, or of two GPUs of which one has less shared memory."""
    layer = build_layer({"backend": "int4"}, 300, dtype=torch.bfloat16)
    query, key, value = step(layer, 1, 4)
    shared_bytes = {torch.device("cuda", 0): 232448, torch.device("cuda", 1): 1024}
    monkeypatch.setattr(cuda, "_shared_bytes", shared_bytes.get)
    asked: list[Any] = [
        SimpleNamespace(shape=query.shape, dtype=query.dtype, device=device) for device in shared_bytes
    ]
    for _ in range(2):
        reasons = [cuda.why_not_fast(one, key.tokens, value.tokens) for one in asked]
        assert reasons[0] is None and "general CUDA kernel" in str(reasons[1])
