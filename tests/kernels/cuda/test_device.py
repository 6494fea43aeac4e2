"""The CUDA kernels on a GPU: what the emulated ones are tested for, and what only a device can show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvcache_plugins.attention import cuda, tiles
from kvcache_plugins.attention.native import attend_handles
from kvcache_plugins.attention.reference import AttentionOptions, attend
from kvcache_plugins.backends.kvquant import NORMAL_FLOAT
from kvcache_plugins.kernels import cuda_check, cuda_loader, cuda_trial, loader
from kvcache_plugins.kernels.writing_ops import append_tokens
from kvcache_plugins.layers.base import PackedLayer
from kvcache_plugins.layers.handle import KVHandle
from kvcache_plugins.layers.windowed import with_window
from kvcache_plugins.models.facts import LayerFacts
from kvcache_plugins.models.rotary import Rotary
from kvcache_plugins.registry import get_backend
from kvcache_plugins.testing.comparison import relative_rms
from kvcache_plugins.testing.conformance import state_bytes
from tests.kernels.append_cases import CODES, Case, due_cases
from tests.kernels.decode_cases import CASES, states

pytestmark = pytest.mark.cuda
BOUNDS = {torch.float32: 1e-5, torch.float16: 8e-4, torch.bfloat16: 3e-3}
LEVELS: dict[str, dict[str, Any]] = {
    f"{nbits} bit, {fraction}": {
        "backend": "kvquant", "nbits": nbits, "outlier_fraction": fraction, "calibration": NORMAL_FLOAT,
    }
    for nbits, fraction in ((2, 0.01), (3, 0.02), (4, 0.0))
}  # fmt: skip
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    with pytest.MonkeyPatch.context() as patch:  # before the fixture that does so for every test
        patch.setenv("KVCACHE_CUDA_KERNELS", "1")
        loader.build()  # some results are compared with those of the CPU kernels
        cuda_loader.build()
        assert cuda_loader.try_load(torch.device("cuda", 0)), cuda_loader.status().reason


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def new_layer(options: dict[str, Any], head_dim: int = 64) -> PackedLayer:
    options = dict(options)
    cache_class = get_backend(options.pop("backend"))
    inv_freq = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    facts = LayerFacts(Rotary(tuple(inv_freq.tolist())))
    layer: PackedLayer = cache_class.layer_class(cache_class.config_class.from_dict(options), 0, facts)
    return layer


def device_layer(
    options: dict[str, Any],
    length: int,
    device: str = "cuda",
    *,
    batch_size: int = 2,
    kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> PackedLayer:
    """A layer like those of the emulated tests, its tokens encoded on the GPU."""
    layer = new_layer(options, head_dim)
    given = states(batch_size, kv_heads, length, head_dim, None, dtype)
    layer.update(*(tensor.to(device) for tensor in given))
    return layer


def step(layer: PackedLayer, query_length: int, group: int) -> tuple[Tensor, KVHandle, KVHandle]:
    batch_size, heads = layer.records.data.shape[:2]
    dims = [stream.head_dim for stream in layer.streams]
    device = layer.records.data.device
    new = (tensor.to(device) for tensor in states(batch_size, heads, query_length, *dims, layer.dtype))
    key, value = layer.update(*new)
    query = torch.randn(batch_size, heads * group, query_length, dims[0]).to(device, layer.dtype)
    assert isinstance(key, KVHandle) and isinstance(value, KVHandle)
    return query, key, value


def check(
    query: Tensor, key: KVHandle, value: KVHandle, options: AttentionOptions, bound: float | None = None
) -> Tensor:
    expected = attend(query.double(), key.tokens, value.tokens, options)
    got = attend_handles(query, key, value, options)
    assert key.layer.kernel == "cuda"
    assert torch.isfinite(got).all() and got.device == query.device
    assert relative_rms(expected, got) <= (bound or BOUNDS[query.dtype])
    return got


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_backend(name: str, dtype: torch.dtype) -> None:
    layer = device_layer(CASES[name], 1000, dtype=dtype, head_dim=128)
    check(*step(layer, 1, 4), AttentionOptions())
    check(*step(layer, 3, 4), AttentionOptions(is_causal=True))


@pytest.mark.parametrize("group", [1, 2])
def test_more_groups_than_a_thread_block_has_room_for(group: int) -> None:
    """They are encoded and read by torch, also those of a step."""
    options = {"backend": "int8", "granularity": "group", "q_group_size": group, "residual_length": 0}
    layer = device_layer(options, 130, head_dim=512)
    query, key, value = step(layer, 1, 4)
    got = attend_handles(query, key, value, AttentionOptions())
    assert relative_rms(attend(query.double(), key.tokens, value.tokens, AttentionOptions()), got) <= 1e-5
    assert (layer.kernel, layer.fallback_reads) == ("torch", 0)
    assert "no native kernel reads these codecs" in str(layer.kernel_reason)
    assert not any(stream.encoder.layout for stream in layer.streams)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    "name", ["kivi-default", "kivi-2bit-g32", "kivi-3bit-block", "int8-default", "int4-default"]
)
def test_head_sizes(name: str, head_dim: int) -> None:
    layer = device_layer(CASES[name], 700, head_dim=head_dim, dtype=torch.bfloat16)
    check(*step(layer, 1, 4), AttentionOptions())


@pytest.mark.cuda(simulated=False)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("name", ["kivi-default", "kivi-2bit-block", "int8-default"])
def test_long_contexts(name: str, batch_size: int) -> None:
    layer = device_layer(
        CASES[name], 32768, batch_size=batch_size, kv_heads=8, head_dim=128, dtype=torch.bfloat16
    )
    check(*step(layer, 1, 4), AttentionOptions())


@pytest.mark.cuda(simulated=False, free_gib=40)
def test_more_than_four_gigabytes_of_records() -> None:
    """Offsets beyond 32 bits: the last of 16 different rows gives what it gives alone."""
    factors = 1 + torch.arange(16, device="cuda", dtype=torch.bfloat16)[:, None, None, None] / 16
    query = torch.randn(16, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    past, new = (
        [torch.randn(1, 8, length, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        for length in (131072, 1)
    )
    results = []
    for rows in (slice(None), slice(15, 16)):
        layer = new_layer(CASES["int8-default"], 128)
        layer.update(*(tensor * factors[rows] for tensor in past))
        handles = layer.update(*(tensor * factors[rows] for tensor in new))
        results.append(attend_handles(query[rows], *handles, AttentionOptions())[-1])
        assert layer.kernel == "cuda" and (layer.records.data.nbytes > 2**32) == (len(results) == 1)
    assert relative_rms(results[1].double(), results[0]) <= 3e-3


@pytest.mark.parametrize("group", [1, 3, 7, 8, 16])
@pytest.mark.parametrize("query_length", [1, 3, 8, 40, 100])
def test_group_ratios(group: int, query_length: int) -> None:
    layer = device_layer(CASES["kivi-default"], 500, dtype=torch.float16)
    check(*step(layer, query_length, group), AttentionOptions(is_causal=query_length > 1))


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 150},
        {"softcap": 5.0},
        {"sink_logits": (8,), "alibi_slopes": True, "softcap": 20.0, "sliding_window": 100},
        {"sink_logits": (2, 8, 3)},
        {"mask": True},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    layer = device_layer(CASES["kivi-default"], 333, dtype=torch.float16)
    query, key, value = step(layer, 3, 4)
    options = dict(options)
    if "sink_logits" in options:
        options["sink_logits"] = torch.randn(options["sink_logits"], device="cuda") + 2
    if "alibi_slopes" in options:
        options["alibi_slopes"] = 2.0 ** -torch.arange(1.0, 9.0, device="cuda")
    if "mask" in options:
        options["mask"] = torch.rand(2, 1, 3, 336, device="cuda") > 0.3
    check(query, key, value, AttentionOptions(is_causal=True, **options), 1e-3)


@pytest.mark.parametrize("query_length", [1, 4, 70])
@pytest.mark.parametrize("name", ["kivi-2bit-block", "int8-default", "int4-smooth", "kvquant-default"])
def test_windows(name: str, query_length: int) -> None:
    """The oldest tokens that are stored have left the window; others left the records some steps before."""
    plain = new_layer(CASES[name])
    layer = with_window(type(plain))(plain.config, 0, plain.facts)
    layer.window = 400
    for count in (555, *[1] * 20):
        layer.update(*(tensor.to("cuda") for tensor in states(2, 2, count, 64, None, torch.float16)))
    query, key, value = step(layer, query_length, 4)
    assert layer.padding.dropped > 0 and key.tokens.first > 0 and key.shape[2] == 399 + query_length
    slots = torch.arange(key.shape[2], device="cuda")
    own = slots[-query_length:, None]
    mask = ((slots <= own) & (slots > own - 400) & (slots % 5 != 1))[None, None]
    check(query, key, value, AttentionOptions(mask=mask), 1e-3)
    check(query, key, value, AttentionOptions(is_causal=True, sliding_window=400), 1e-3)
    check(query, key, value, AttentionOptions(), 1e-3)


MANY = 700
"""Query tokens of a next turn."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 300}, {"mask": True}, {"sink_logits": True}], ids=str
)
@pytest.mark.parametrize("name", ["kivi-default", "kvquant-default", "int8-default"])
def test_the_next_turn(
    name: str, options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By flash attention over decoded tiles, with the error of flash attention over what they hold."""
    monkeypatch.setitem(tiles._TILE_VALUES, "cuda", 2 * 2 * 64 * 512)
    query, key, value = step(device_layer(CASES[name], 1500, dtype=dtype), MANY, 4)
    given, length = dict(options), 1500 + MANY
    if "mask" in given:  # pads of the first row
        given["mask"] = torch.arange(length, device="cuda") >= torch.tensor([40, 0], device="cuda")[:, None]
        given["mask"] = given["mask"][:, None, None]
    if "sink_logits" in given:
        given["sink_logits"] = torch.randn(8, device="cuda")
    given = AttentionOptions(is_causal=True, **given)
    expected = attend(query.double(), key.tokens, value.tokens, given)
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "attend", None)  # the reference, which would be better and slower
        got = attend_handles(query, key, value, given)
    dense = [handle.tokens.dense(dtype).repeat_interleave(4, 1) for handle in (key, value)]
    causal = torch.ones(MANY, length, dtype=torch.bool, device="cuda").tril(length - MANY)
    theirs = F.scaled_dot_product_attention(query, *dense, attn_mask=causal)
    plain = attend(query.double(), key.tokens, value.tokens, AttentionOptions(is_causal=True))
    assert key.layer.kernel == "cuda" and torch.isfinite(got).all() and got.dtype == dtype
    assert relative_rms(expected, got) <= 1.25 * relative_rms(plain, theirs) + 1e-4


@pytest.mark.parametrize("name", ["kivi-4bit-block-g128", "int8-default", "int4-default", "float8-default"])
def test_records_are_those_of_the_cpu(name: str) -> None:
    """But for a scale in a thousand: torch divides by a constant on a GPU as if by its reciprocal."""
    given = states(2, 2, 700, 64, None, torch.bfloat16)
    layers = [new_layer(CASES[name] | {"kernel": kernel}) for kernel in ("auto", "torch")]
    layers[0].update(*(tensor.cuda() for tensor in given))
    layers[1].update(*given)
    found, expected = (layer.records.data[:, :, :10].cpu() for layer in layers)
    assert (found != expected).float().mean() < 1e-3


@pytest.mark.parametrize("is_rotated", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("pads", [(0, 0), (0, 70)], ids=str)
@pytest.mark.parametrize("name", LEVELS)
def test_levels_and_lists_are_those_of_the_codecs(name: str, pads: tuple[int, int], is_rotated: bool) -> None:
    """On the same GPU; a rotation may be rounded otherwise, which may change which numbers are outliers."""
    given = [tensor.cuda() for tensor in states(2, 2, 700, 64, None, torch.bfloat16)]
    layers = [new_layer(LEVELS[name] | {"kernel": kernel}) for kernel in ("auto", "torch")]
    for layer in layers:
        layer.bind(layer.facts if is_rotated else LayerFacts(None), torch.tensor(pads), None)
        layer.update(*given)
    found, expected = map(state_bytes, layers)
    assert float((found["records"] != expected["records"]).float().mean()) <= (1e-3 if is_rotated else 0.0)
    for part, tensor in expected.items():
        if not is_rotated or ("key" not in part and part != "records"):
            assert torch.equal(found[part], tensor), part


@pytest.mark.parametrize("new", [1, 3, 8])
@pytest.mark.parametrize("name", CODES)
def test_a_step_writes_the_bytes_of_the_cpu(name: str, new: int) -> None:
    for place in due_cases(CODES[name], new):
        case = Case(CODES[name], new, *place)
        done, records, tails = case.to("cuda").run(append_tokens)
        _, expected, expected_tails = case.expected(torch.ops.kvcache_plugins.encode_tokens)
        assert done and torch.equal(records.cpu(), expected)
        assert all(torch.equal(*pair) for pair in zip((t.cpu() for t in tails), expected_tails, strict=True))


def test_faults_are_reported_by_the_next_call() -> None:
    case = Case(CODES["int8"], 1, 1, 8, 8, 3, dtype=torch.float32)
    loud = case.to("cuda")
    loud.states[0] *= 1e8
    assert loud.run(append_tokens)[0]
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="beyond fp16"):
        case.to("cuda").run(append_tokens)
    assert case.to("cuda").run(append_tokens)[0]


@pytest.mark.parametrize(("place", "name"), [(0, "key_tail"), (1, "value_tail")])
def test_tensors_elsewhere_are_refused(place: int, name: str) -> None:
    """On the CPU here; another GPU would be refused as well."""
    case = Case(CODES["int8"], 1, 1, 8, 8, 3).to("cuda")
    case.tails[place] = case.tails[place].cpu()
    with pytest.raises(ValueError, match=f"device of {name}: expected cuda:0, got cpu"):
        case.run(append_tokens)


def test_a_step_in_a_graph() -> None:
    layer = device_layer(CASES["kivi-default"], 2000, head_dim=128, dtype=torch.bfloat16)
    query, key, value = step(layer, 1, 4)
    expected = attend_handles(query, key, value, AttentionOptions())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend_handles(query, key, value, AttentionOptions())
    got.zero_()
    graph.replay()
    assert torch.equal(got, expected)
    query.mul_(-1)
    graph.replay()
    assert torch.equal(got, attend_handles(query, key, value, AttentionOptions()))


@pytest.mark.cuda(simulated=False)
@pytest.mark.parametrize("waits", [False, True], ids=["copies", "another-stream"])
def test_a_step_in_a_graph_behind_what_is_no_kernel(waits: bool) -> None:
    """Which it may not overtake, though it begins early behind kernels."""
    codes = CODES["4bit-token"]
    case = Case(codes, 3, *due_cases(codes, 3)[3]).to("cuda")
    _, expected, expected_tails = case.run(append_tokens)
    assert not torch.equal(expected, case.records)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        here = torch.cuda.current_stream()
        records, tails = torch.empty_like(case.records), [torch.empty_like(tail) for tail in case.tails]
        side.wait_stream(here)
        with torch.cuda.stream(side if waits else here):
            for to, of in zip((records, *tails), (case.records, *case.tails), strict=True):
                to.copy_(of)
        here.wait_stream(side)
        append_tokens(records, *case.states, *tails, *case.plans(), *case.preparation)
    for _ in range(3):
        for tensor in (records, *tails):
            tensor.zero_()
        graph.replay()
        for pair in zip((records, *tails), (expected, *expected_tails), strict=True):
            assert torch.equal(*pair)


@pytest.mark.parametrize("name", ["kivi-default", "kivi-2bit-block", "int8-default", "kvquant-default"])
def test_layers_that_follow_each_other_at_once(name: str) -> None:
    """No kernel of torch's comes between what appends, attends and merges: early launches meet our own."""
    is_simulated = torch.version.cuda == "simulated"
    layers, steps, length = (2, 2, 300) if is_simulated else (4, 16, 20000)
    outputs: list[list[Tensor]] = []
    for waits in (True, False):
        torch.manual_seed(3)
        cache = [
            device_layer(CASES[name], length + 640 * i, head_dim=128, dtype=torch.bfloat16)
            for i in range(layers)
        ]
        new = [[x.cuda() for x in states(2, 2, 1, 128, None, torch.bfloat16)] for _ in range(steps * layers)]
        queries = torch.randn(steps * layers, 2, 8, 1, 128).to("cuda", torch.bfloat16)
        room = torch.full((1 << 20 if is_simulated else 1 << 28,), torch.nan, device="cuda")
        del room  # what is allocated from here on holds none but such numbers
        made = []
        for call in range(steps * layers):
            key, value = cache[call % layers].update(*new[call])
            made.append(attend_handles(queries[call], key, value, AttentionOptions()))
            if waits:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        assert all(torch.isfinite(output).all() for output in made)
        outputs.append(made)
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))


def test_two_streams() -> None:
    cases = [
        step(device_layer(CASES["int8-default"], 3000 + 64 * i, dtype=torch.float16), 1, 4) for i in range(2)
    ]
    expected = [attend_handles(*case, AttentionOptions()) for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    rounds = 2 if torch.version.cuda == "simulated" else 20  # simulated streams never run at the same time
    for _ in range(rounds):
        got = []
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(attend_handles(*case, AttentionOptions()))
        torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


@pytest.mark.cuda(devices=2)
def test_the_last_device() -> None:
    """Another one than the current device."""
    last = f"cuda:{torch.cuda.device_count() - 1}"
    layer = device_layer(CASES["kivi-default"], 500, last, dtype=torch.float16)
    check(*step(layer, 1, 4), AttentionOptions())


def test_no_step_waits_for_the_device() -> None:
    layer = device_layer(CASES["int8-default"], 500, head_dim=128, dtype=torch.bfloat16)
    for _ in range(3):
        attend_handles(*step(layer, 1, 4), AttentionOptions())
    given = [tensor.cuda() for tensor in states(2, 2, 1, 128, None, torch.bfloat16)]
    query = torch.randn(2, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            key, value = layer.update(*given)
            attend_handles(query, key, value, AttentionOptions())
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.cuda(simulated=False)
def test_the_trial_passes() -> None:
    device = torch.device("cuda", 0)
    assert cuda_trial.find_fault(cuda_loader.build(), device) is None
    assert cuda_trial.passed(cuda_loader.build(), device)


def test_the_check_passes() -> None:
    assert cuda_check.find_deviation(torch.device("cuda", 0)) is None
