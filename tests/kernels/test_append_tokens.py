"""One call writes new tokens to the tails and packs what is due, with the bytes of separate ones."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache_plugins.kernels import loader
from kvcache_plugins.kernels.defaults import DEFAULTS
from kvcache_plugins.kernels.writing_ops import append_tokens, encode_tokens
from kvcache_plugins.layers import base, native_encoding, stepping
from kvcache_plugins.models.rotary import Rotary
from kvcache_plugins.testing.conformance import fed, state_bytes
from tests.kernels.append_cases import CODES, Case, check, due_cases
from tests.kernels.test_encode_tokens import CASES, new_layer, states


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    if not loader.try_load():
        pytest.skip("no native library can be built here")


@pytest.mark.parametrize("new", range(1, 9))
@pytest.mark.parametrize("name", CODES)
def test_the_bytes_are_the_same(name: str, new: int) -> None:
    dtype = [torch.float32, torch.bfloat16, torch.float16][new % 3]
    for place in due_cases(CODES[name], new):
        for head_dim in (24, 64):
            assert check(
                Case(CODES[name], new, *place, head_dim=head_dim, dtype=dtype), append_tokens, encode_tokens
            )


@pytest.mark.parametrize("name", ["2bit-channel-g16", "3bit-channel-g128", "4bit-groups", "int8-groups"])
def test_the_bytes_of_wide_heads_are_the_same(name: str) -> None:
    for head_dim, place in zip((328, 512), due_cases(CODES[name], 3)[3:5], strict=True):
        assert check(Case(CODES[name], 3, *place, head_dim=head_dim), append_tokens, encode_tokens)


@pytest.mark.parametrize("metadata_bytes", [2, 4])
@pytest.mark.parametrize("name", ["4bit-channel-g32", "int8", "3bit-token"])
def test_every_width_of_metadata(name: str, metadata_bytes: int) -> None:
    for place in due_cases(CODES[name], 2):
        assert check(
            Case(CODES[name], 2, *place, metadata_bytes=metadata_bytes), append_tokens, encode_tokens
        )


def rotated(case: Case, interleaved: bool, period: int = 32) -> Case:
    """The case with a rotation of keys that is to be undone."""
    cos, sin = Rotary(tuple(0.8**i for i in range(12)), interleaved).tables(torch.arange(period))
    case.preparation = [cos, sin, None]
    case.layouts[0][6] = int(interleaved)
    return case


def scaled(case: Case) -> Case:
    """The case with a factor for every channel of the keys."""
    case.preparation = [None, None, torch.rand(2, 3, 1, case.layouts[0][2]) + 0.5]
    return case


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("name", ["2bit-channel-g32", "3bit-channel-g64", "8bit-token"])
def test_keys_are_turned_back(name: str, interleaved: bool) -> None:
    for place in due_cases(CODES[name], 3):
        assert check(rotated(Case(CODES[name], 3, *place), interleaved), append_tokens, encode_tokens)


@pytest.mark.parametrize("name", ["4bit-token", "2bit-groups"])
def test_keys_are_divided(name: str) -> None:
    for place in due_cases(CODES[name], 3):
        assert check(scaled(Case(CODES[name], 3, *place)), append_tokens, encode_tokens)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e6])
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_rare_is_left_to_torch(side: int, is_new: bool, number: float) -> None:
    """Whichever side it is in, nothing is packed; the tails have the tokens."""
    for codes in (CODES["int8"], CODES["4bit-channel-g16"]):
        case = Case(codes, 2, 16, 14, 0, 48, dtype=torch.float32)
        (case.states if is_new else case.tails)[side][1, 2, 1, 5] = number
        done, records, tails = case.run(append_tokens)
        assert not done and not records.any()
        assert torch.equal(tails[0][:, :, 14:16].view(torch.uint8), case.states[0].view(torch.uint8))


def test_rare_numbers_that_are_not_due_do_not_matter() -> None:
    case = Case(CODES["int8"], 2, 4, 14, 3, 60, dtype=torch.float32)
    case.states[0][0, 0, 0, 0] = math.nan
    case.tails[1][1, 1, 2] = 1e9
    assert check(case, append_tokens, encode_tokens)


def test_states_that_are_not_contiguous() -> None:
    for reorder in (
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
        lambda t: t.repeat(1, 1, 1, 2)[..., : t.shape[3]],
    ):
        case = Case(CODES["4bit-token"], 3, 4, 8, 7, 62)
        expected = case.run(append_tokens)
        case.states = [reorder(tensor) for tensor in case.states]
        got = case.run(append_tokens)
        assert got[0] and torch.equal(got[1], expected[1]) and torch.equal(got[2][0], expected[2][0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_tails_of_other_dtypes_are_filled(dtype: torch.dtype) -> None:
    case = Case(CODES["int8"], 3, 3, 8, 8, 0, dtype=dtype)
    done, records, tails = case.run(append_tokens)
    assert torch.equal(tails[0][:, :, 8:11], case.states[0])
    assert done == (dtype == torch.float32) == bool(records.any())


def test_the_default_fills_the_tails() -> None:
    for due in (0, 3):
        case = Case(CODES["int8"], 3, due, 8, 8, 0)
        done, records, tails = case.run(DEFAULTS["append_tokens"][0])
        assert done == (due == 0) and not records.any()
        assert torch.equal(tails[1], case.expected(lambda *_: False)[2][1])
        meta = [tensor.to("meta") for tensor in (case.records, *case.states, *case.tails)]
        assert append_tokens(*meta, *case.plans()) == (due == 0)


def test_gradients_stop_at_the_tails() -> None:
    case = Case(CODES["int8"], 1, 0, 8, 8, 0, dtype=torch.float32)
    for append in (append_tokens, DEFAULTS["append_tokens"][0]):
        tails = [tail.clone() for tail in case.tails]
        given = [tensor.clone().requires_grad_() for tensor in case.states]
        assert append(case.records, *given, *tails, *case.plans())
        assert not any(tail.requires_grad for tail in tails)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"write": 299}, "do not fit a tail of 300"),
        ({"write": -1}, "do not fit a tail"),
        ({"first": 11}, "do not fit a tail"),
        ({"slot": 320}, "room for 323 tokens"),
        ({"slot": -3}, "Invalid records"),
        ({"plans": lambda plans: [plans[0][:13], plans[1]]}, "Invalid key_plan: expected 14 integers"),
        ({"plans": lambda plans: [plans[0], plans[1][:4]]}, "Invalid value_plan: expected 14 integers"),
        ({"layout": (2, 16)}, "3 tokens of 16 channels|3 of 32"),
        ({"layout": (3, 2)}, "whole groups of 2 tokens"),
        ({"layout": (3, 0)}, "whole groups"),
        ({"layout": (5, 3)}, "Invalid layout"),
        ({"layout": (7, 1 << 20)}, "outside of the"),
        ({"tail_dtype": torch.float16}, "Invalid key_tail"),
        ({"preparation": [torch.ones(4, 4), None, None]}, "Invalid rotation"),
        ({"preparation": [None, None, torch.ones(2, 3, 32)]}, "Invalid factors"),
        ({"preparation": [torch.ones(4, 4), torch.ones(4, 4), torch.ones(2, 3, 1, 32)]}, "Invalid factors"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    """And then nothing has been written."""
    refuse(change, message, append_tokens)


def refuse(change: dict[str, Any], message: str, append: Any) -> None:
    case = Case(CODES["int8"], 3, 3, 8, 8, 61)
    for name in ("write", "first", "slot", "preparation"):
        setattr(case, name, change.get(name, getattr(case, name)))
    if "layout" in change:
        index, number = change["layout"]
        case.layouts[0][index] = number
    if "tail_dtype" in change:
        case.tails[0] = case.tails[0].to(change["tail_dtype"])
    plans = change.get("plans", lambda plans: plans)(case.plans())
    records, tails = case.records.clone(), [tail.clone() for tail in case.tails]
    with pytest.raises(ValueError, match=message):
        append(records, *case.states, *tails, *plans, *case.preparation)
    assert not records.any() and all(map(torch.equal, tails, case.tails))


# ---- layers


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a call of `update` was one step, call by call."""
    taken: list[bool] = []
    original = stepping.take_step

    def record(*args: Any) -> Any:
        views = original(*args)
        taken.append(views is not None)
        return views

    monkeypatch.setattr(base, "take_step", record)
    return taken


LAYERS = CASES | {
    "kivi-block": {"backend": "kivi", "nbits": 2, "rope_mode": "block", "residual_length": 32},
    "kvquant": {"backend": "kvquant", "nbits": 3, "calibration": "normal_float"},
    "int8-tensor": {"backend": "int8", "granularity": "tensor"},
    "int8-window": {"backend": "int8", "residual_length": 40},
    "sinks": {"backend": "int4", "sink_length": 4},
}


@pytest.mark.parametrize("split", [[100, *[1] * 233], [70, *[1, 2, 3, 4, 5] * 17, 8], [1] * 333], ids=len)
@pytest.mark.parametrize("name", LAYERS)
def test_steps_end_in_the_bytes_of_the_general_path(
    name: str, split: list[int], steps: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = states(64, torch.bfloat16)
    split = [*split, 333 - sum(split)] if sum(split) < 333 else split
    stepped = state_bytes(fed(new_layer(LAYERS[name], None, None), *given, split))
    # some windows have no room for several tokens, and some codecs first learn from some
    assert all(steps[-60:]) if set(split[-60:]) == {1} else any(steps)
    monkeypatch.setattr(base, "take_step", lambda *args: None)
    general = state_bytes(fed(new_layer(LAYERS[name], None, None), *given, split))
    torch_only = state_bytes(fed(new_layer({**LAYERS[name], "kernel": "torch"}, None, None), *given, split))
    for other in (general, torch_only):
        assert other.keys() == stepped.keys()
        for part, tensor in other.items():
            assert torch.equal(tensor, stepped[part]), part


@pytest.mark.parametrize("name", ["kivi-2bit-g16", "int8", "int4", "int4-smooth", "kivi-block"])
def test_pads_and_sinks(name: str, steps: list[bool]) -> None:
    mask = (torch.arange(333) >= torch.tensor([[3], [70]])).long()
    options = {**LAYERS[name], "sink_length": 2}
    given = states(64, torch.float32)
    found, expected = (
        state_bytes(fed(new_layer(more, mask, None), *given, [40, *[1] * 293]))
        for more in (options, {**options, "kernel": "torch"})
    )
    assert any(steps) and found.keys() == expected.keys()
    for part, tensor in expected.items():
        assert torch.equal(tensor, found[part]), part


@pytest.mark.parametrize("name", ["int8", "int4-smooth", "kivi-block", "kivi-4bit-g32", "kvquant"])
def test_every_verb_between_steps(name: str, steps: list[bool]) -> None:
    """What a layer has looked up for its kernels is never that of a state before the verb."""

    def run(options: dict[str, Any]) -> list[dict[str, Tensor]]:
        keys, values = states(64, torch.bfloat16)
        layer = fed(new_layer(options, None, None), keys, values, [90, *[1] * 60])
        found = []

        def feed(layer: Any, count: int) -> None:
            rows = layer.records.data.shape[0]
            for i in range(count):
                layer.update(keys[:rows, :, i : i + 1], values[:rows, :, i : i + 1])
            found.append(state_bytes(layer))

        layer.crop(-7)
        feed(layer, 40)
        layer.reorder_cache(torch.tensor([1, 0]))
        feed(layer, 40)
        twin = copy.deepcopy(layer)
        feed(twin, 40)
        feed(layer, 3)
        layer.records.widen_metadata()
        feed(layer, 40)
        layer.offload()
        layer.prefetch()
        feed(layer, 20)
        other = new_layer(options, None, None)
        other.load_state(*layer.state())
        feed(other, 20)
        layer.batch_select_indices(torch.tensor([1]))
        feed(layer, 40)
        layer.crop(-100)
        feed(layer, 130)
        layer.reset()
        layer.update(keys[:1, :, :90], values[:1, :, :90])
        feed(layer, 70)
        return found

    found, expected = run(LAYERS[name]), run({**LAYERS[name], "kernel": "torch"})
    assert sum(steps) > 300
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[part], other[part]) for part in one)


def test_metadata_beyond_fp16_widen_the_records(steps: list[bool]) -> None:
    keys, values = states(64, torch.float32)
    keys[1, 0, 150] *= 1e6
    layers = [
        fed(new_layer({"backend": "int8", "kernel": kernel}, None, None), keys, values, [100, *[1] * 233])
        for kernel in ("auto", "torch")
    ]
    assert sum(steps) >= 230 and layers[0].records.layout.metadata_bytes == 4
    found, expected = (state_bytes(layer) for layer in layers)
    assert all(torch.equal(found[part], expected[part]) for part in expected)


@pytest.mark.parametrize("name", ["int8", "kivi-block"])
def test_steps_in_every_mode(name: str, steps: list[bool]) -> None:
    """A cache filled in inference mode goes on outside of it, where gradients are wanted, and back."""
    keys, values = states(64, torch.bfloat16)
    layer = new_layer(LAYERS[name], None, None)
    with torch.inference_mode():
        layer.update(keys[:, :, :100], values[:, :, :100])
    for i in range(100, 333):
        with torch.inference_mode(i % 3 == 0), torch.set_grad_enabled(i % 3 == 1):
            given = [t[:, :, i : i + 1].clone().requires_grad_(i % 3 == 1) for t in (keys, values)]
            layer.update(*given)
    assert sum(steps) == 233
    assert not any(t.requires_grad or t.is_inference() for t in layer.tensors().values())
    reference = new_layer({**LAYERS[name], "kernel": "torch"}, None, None)
    expected = state_bytes(fed(reference, keys, values, [100, *[1] * 233]))
    found = state_bytes(layer)
    assert all(torch.equal(found[part], tensor) for part, tensor in expected.items())


def test_kernels_that_are_not_trusted_take_no_steps(
    steps: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose kernels have failed their check: what is loaded is not called for copies either."""
    keys, values = states(64, torch.bfloat16)
    layer = fed(new_layer({"backend": "int8"}, None, None), keys, values, [100])
    monkeypatch.setattr(layer.stored_keys.encoder, "_device_type", "cuda")
    monkeypatch.setattr(native_encoding.cuda_loader, "try_load", lambda device: False)
    layer.update(keys[:, :, 100:101], values[:, :, 100:101])
    assert not steps[-1] and layer.stored_keys.packed_length == 101


def test_drafts_are_no_steps(steps: list[bool]) -> None:
    keys, values = states(64, torch.bfloat16)
    layer = fed(new_layer({"backend": "int8"}, None, None), keys, values, [100])
    layer.activate_past_recording()
    del steps[:]
    layer.update(keys[:, :, 100:105], values[:, :, 100:105])
    assert not steps and layer.stored_keys.packed_length == 100


def test_opcheck() -> None:
    case = Case(CODES["int8"], 2, 2, 8, 8, 0)
    torch.library.opcheck(
        torch.ops.kvcache_plugins.append_tokens.default,
        (case.records, *case.states, *case.tails, *case.plans()),
        test_utils=("test_schema", "test_autograd_registration"),
    )
