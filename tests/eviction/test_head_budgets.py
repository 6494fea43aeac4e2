"""Heads that share a budget, against brute force: a model that forgets nothing, with masks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Module
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvcache_plugins
from kvcache_plugins.attention.dispatch import forward_over_handles
from kvcache_plugins.attention.reference import AttentionOptions
from kvcache_plugins.errors import ArtifactError
from kvcache_plugins.layers.view import StreamView
from kvcache_plugins.models.cache_argument import as_argument, cache_of
from tests.eviction.feeding import bound_cache, feed, ids, mask_of, model_of, real_positions
from tests.reference.eviction import Call, Policy, run_with_evictions

ROOT = Path(__file__).parents[2]
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8}
METHODS: dict[str, tuple[dict[str, Any], Policy]] = {
    "snapkv": ({"backend": "snapkv"}, Policy("snapkv", 24, stabilizers=3, local=3)),
    "snapkv-sinks": (
        {"backend": "snapkv", "window_length": 9, "sink_length": 2},
        Policy("snapkv", 24, sinks=2, stabilizers=3, local=3, window=9),
    ),
    "h2o": (
        {"backend": "h2o", "stabilizer_length": 2, "local_length": 4},
        Policy("h2o", 24, stabilizers=2, local=4),
    ),
    "expected": (
        {"backend": "expected_attention", "future_length": 9},
        Policy("expected_attention", 24, sinks=4, stabilizers=3, local=3, future=9),
    ),
}
PROMPT: list[Call] = [(17, "chunk"), (20, "chunk"), (30, "chunk"), (10, "prompt")]
DECODE: list[Call] = [(1, "decode")] * 5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("floor", [0.2, 0.7])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvcache_plugins"])
def test_prompt_in_chunks(method: str, floor: float, attention: str) -> None:
    _compare(method, floor, PROMPT + DECODE, attention=attention)


@pytest.mark.parametrize("method", METHODS)
def test_eviction_while_generating(method: str) -> None:
    _compare(method, 0.2, PROMPT + DECODE * 27, evicts_at_decode=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pads", [8, 30, 60])
def test_padding(method: str, pads: int) -> None:
    _compare(method, 0.2, PROMPT + DECODE, pads=pads)


def _compare(
    method: str,
    floor: float,
    calls: list[Call],
    *,
    pads: int = 0,
    attention: str = "sdpa",
    evicts_at_decode: bool = False,
) -> None:
    options, policy = METHODS[method]
    model = model_of("llama", attention, **SIZES)
    counts = [count for count, _ in calls]
    tokens = ids(sum(counts), pads=[pads])
    mask = mask_of(sum(counts), [pads])
    config = {**options, "budget": 24, "head_floor": floor, "evict_at_decode": evicts_at_decode}
    cache = bound_cache(model, config, sum(n for n, phase in calls if phase != "decode"), mask)
    got = feed(model, cache, tokens, counts, mask)
    policy = replace(policy, head_floor=floor, evicts_at_decode=evicts_at_decode)
    logits, survivors = run_with_evictions(model, tokens, calls, policy, [pads])
    held = [real_positions(layer) for layer in cache.evicting_layers]
    assert held == survivors
    assert pads or len({len(head) for layer in held for head in layer[0]}) > 2
    torch.testing.assert_close(got[mask.bool()], logits[mask.bool()], atol=1e-4, rtol=0.0)


def test_a_second_turn() -> None:
    model = model_of("llama", **SIZES)
    calls: list[Call] = [(30, "chunk"), (11, "prompt"), *DECODE, (20, "chunk"), (9, "prompt"), *DECODE]
    counts = [count for count, _ in calls]
    tokens = ids(sum(counts))
    for options, policy in METHODS.values():
        config = {**options, "budget": 24, "head_floor": 0.2, "local_length": policy.local}
        cache = bound_cache(model, config, 41)
        first = feed(model, cache, tokens[:, :46], counts[:7])
        cache.bind(model, prompt_length=75)
        second = feed(model, cache, tokens[:, 46:], counts[7:])
        logits, survivors = run_with_evictions(model, tokens, calls, replace(policy, head_floor=0.2))
        assert [real_positions(layer) for layer in cache.evicting_layers] == survivors
        torch.testing.assert_close(torch.cat([first, second], 1), logits, atol=1e-4, rtol=0.0)


def test_a_budget_that_grows_keeps_what_there_is() -> None:
    model, tokens = model_of("llama", **SIZES), ids(200)
    cache = bound_cache(model, {"backend": "snapkv", "budget": 0.5, "head_floor": 0.2}, 60)
    feed(model, cache, tokens[:, :60], [60])
    cache.bind(model, prompt_length=120)
    before = [real_positions(layer) for layer in cache.evicting_layers]
    feed(model, cache, tokens[:, 60:90], [30])  # 30 and 30 a head, of 60
    for layer, held in zip(cache.evicting_layers, before, strict=True):
        expected = [[*head, *range(60, 90)] for head in held[0]]
        assert real_positions(layer)[0] == expected
    feed(model, cache, tokens[:, 90:120], [30])
    for layer in cache.evicting_layers:
        assert 58 <= sum(map(len, real_positions(layer)[0])) / 8 <= 60


@pytest.mark.parametrize("method", METHODS)
def test_a_floor_of_the_budget_is_the_same_for_all_heads(method: str) -> None:
    model, tokens, config = model_of("llama", **SIZES), ids(90, 2), {**METHODS[method][0], "budget": 24}
    found = []
    for floor in (None, 1.0):
        cache = bound_cache(model, {**config, "head_floor": floor}, 80)
        logits = feed(model, cache, tokens, [30, 30, 20, *[1] * 10])
        found.append((logits, [real_positions(layer) for layer in cache.evicting_layers]))
    assert found[0][1] == found[1][1]
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("storage", [None, {"backend": "int8"}], ids=["exact", "int8"])
def test_what_a_head_does_not_keep_takes_no_memory(storage: dict[str, Any] | None) -> None:
    model, tokens = model_of("llama", **SIZES), ids(400)
    bytes_of = {}
    for floor in (None, 0.2):
        config = {"backend": "snapkv", "budget": 128, "head_floor": floor, "storage": storage}
        cache = bound_cache(model, config, 400)
        feed(model, cache, tokens, [200, 200])
        bytes_of[floor] = cache.kv_bytes()
        estimated = kvcache_plugins.estimate(model, config, 400)
        room = 8 * 2 * 64 * 40 if storage else 0  # a block of every head, of which some are not full
        assert abs(estimated - cache.kv_bytes()) <= cache.kv_bytes() / 16 + room
        report = cache.report()
        held = sum(len(head) for layer in cache.evicting_layers for head in real_positions(layer)[0])
        assert report.values == held * 2 * 16
        assert report.dense_bytes == 2 * 8 * 400 * 2 * 16 * 4
    widest = max(len(head) for layer in cache.evicting_layers for head in real_positions(layer)[0])
    assert widest > 128 + 4  # as many in all heads would take more
    assert bytes_of[0.2] <= 17 / 16 * bytes_of[None] + room


def test_room_is_reserved_for_what_each_head_will_hold() -> None:
    model, tokens = model_of("llama", **SIZES), ids(440)
    config = {
        "backend": "expected_attention",
        "budget": 256,
        "head_floor": 0.2,
        "storage": {"backend": "int8"},
    }
    cache = bound_cache(model, config, 400).bind(model, max_cache_length=440, prompt_length=400)
    feed(model, cache, tokens, [400, *[1] * 40])
    for layer in cache.evicting_layers:
        for part in layer.uniform_layers:
            assert part.records.num_blocks == -(-part.stored_length // 64)


@pytest.mark.parametrize(
    ("sinks", "storage"),  # sinks are exact, and beside the codes
    [
        (0, {"backend": "int8"}),
        (2, {"backend": "int8"}),
        (2, {"backend": "int4", "residual_length": 0, "smooth": 0.5}),
    ],
)
def test_packed_tokens_move_as_they_are(sinks: int, storage: dict[str, Any]) -> None:
    # With what was learnt of the first tokens of every head: int4's smoothing factors, which decode its keys.
    config = {
        "backend": "h2o", "budget": 40, "head_floor": 0.1, "storage": storage,
        "local_length": 4, "stabilizer_length": 4, "evict_at_decode": True, "sink_length": sinks,
    }  # fmt: skip
    cache = bound_cache(model_of("llama", **SIZES), config, 100)
    layer = cache.evicting_layers[0]
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(2, 8, 250, 16, generator=generator) for _ in range(2))
    for start, stop in [(0, 70), (70, 100), *[(n, n + 1) for n in range(100, 250)]]:
        query = 3 * torch.randn(2, 16, stop - start, 16, generator=generator)
        handles = layer.update(keys[:, :, start:stop], values[:, :, start:stop])
        forward_over_handles(Module(), query, *handles, None)
    stored = {**storage, "sink_length": sinks}
    plain = kvcache_plugins.build_cache(cache.model_config, stored).layers[0]
    plain.update(keys, values)
    assert len(layer.parts) > 1
    for part in layer.parts:
        for stream, whole in zip(part.layer.streams, plain.streams, strict=True):
            length = stream.packed_length
            index = part.layer.ledger.positions[:, :, :length].long()[..., None].expand(-1, -1, -1, 16)
            heads = whole.decode(0, 250)[:, list(part.group.heads)]
            assert torch.equal(stream.decode(0, length), heads.gather(2, index))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 3])
def test_attention_with_sink_logits_and_a_softcap(length: int, dtype: torch.dtype) -> None:
    cache = bound_cache(model_of("llama", **SIZES), {"backend": "h2o", "budget": 24, "head_floor": 0.1}, 60)
    layer = cache.evicting_layers[0]
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(2, 8, 60 + length, 16, generator=generator).to(dtype) for _ in range(2))
    query = 2 * torch.randn(2, 16, 60 + length, 16, generator=generator).to(dtype)
    handles = layer.update(keys[:, :, :60], values[:, :, :60])
    forward_over_handles(Module(), query[:, :, :60], *handles, None)
    held = [[[*head, *range(60, 60 + length)] for head in row] for row in real_positions(layer)]
    sinks = torch.randn(16, generator=generator)
    handles = layer.update(keys[:, :, 60:], values[:, :, 60:])
    got, _ = forward_over_handles(Module(), query[:, :, 60:], *handles, None, 0.3, softcap=5.0, s_aux=sinks)
    for row in range(2):
        for head in range(16):
            slots = torch.tensor(held[row][head // 2])
            one = query[row, head, 60:].float() @ keys[row, head // 2, slots].float().T * 0.3
            one = 5.0 * torch.tanh(one / 5.0)
            one = one.masked_fill(slots[None] > torch.arange(60, 60 + length)[:, None], -torch.inf)
            with_sink = torch.cat([one, sinks[head].expand(length, 1)], dim=1).softmax(-1)[:, :-1]
            expected = with_sink @ values[row, head // 2, slots].float()
            torch.testing.assert_close(
                got[row, :, head].float(), expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0.0
            )


def test_rows_of_a_padded_batch_go_together() -> None:
    model, pads = model_of("llama", **SIZES), [0, 30]
    mask, tokens, rows = mask_of(76, pads), ids(76, 2, pads=pads), torch.tensor([1, 1, 0])
    cache = bound_cache(model, {"backend": "h2o", "budget": 24, "head_floor": 0.2}, 72, mask[:, :72])
    feed(model, cache, tokens[:, :72], [40, 32], mask[:, :72])
    assert len(cache.evicting_layers[0].uniform_layers) > 1
    chosen = copy.deepcopy(cache)
    chosen.batch_select_indices(rows)
    expected = feed(model, cache, tokens[:, 72:], [1] * 4, mask)
    got = feed(model, chosen, tokens[rows, 72:], [1] * 4, mask[rows])
    torch.testing.assert_close(got, expected[rows], atol=1e-5, rtol=0.0)


def test_rejected_drafts_have_asked_nothing() -> None:
    model, config = model_of("llama", **SIZES), {**METHODS["expected"][0], "budget": 24, "head_floor": 0.2}
    cache = bound_cache(model, config, 72)
    feed(model, cache, ids(72), [72])
    before = {name: tensor.clone() for name, tensor in cache.evicting_layers[0].tensors().items()}
    cache.activate_past_recording()
    feed(model, cache, ids(3, seed=4), [3])
    cache.crop(-3)
    names = [name for name in before if name.endswith(("count", "mean", "scatter"))]
    after = cache.evicting_layers[0].tensors()
    assert names and all(torch.equal(after[name], before[name]) for name in names)


def test_a_turn_that_is_read_with_drafts_is_evicted_from_once_they_are_judged() -> None:
    model = model_of("llama", **SIZES)
    cache = bound_cache(model, {"backend": "h2o", "budget": 24, "head_floor": 0.2}, 41)
    feed(model, cache, ids(41), [41])
    cache.bind(model, prompt_length=75)
    cache.activate_past_recording()
    held = []
    for drafts, rejected in ((37, 3), (3, 1)):  # the first come with the turn, of which 34 tokens are new
        feed(model, cache, ids(drafts), [drafts])
        held += [layer.mean_held for layer in cache.evicting_layers]
        cache.crop(-rejected)
        held += [layer.mean_held for layer in cache.evicting_layers]
    assert held == [24 + 37] * 2 + [24] * 2 + [24 + 3] * 2 + [24 + 2] * 2, "what is generated is not evicted"


@pytest.mark.parametrize("how", ["reset", "crop"])
@pytest.mark.parametrize("method", ["snapkv", "expected"])
def test_emptied_they_are_together_again(method: str, how: str) -> None:
    model, tokens = model_of("llama", **SIZES), ids(76, 2, seed=3)
    config = {**METHODS[method][0], "budget": 24, "head_floor": 0.2}
    used, fresh = (bound_cache(model, config, 72) for _ in range(2))
    feed(model, used, ids(72, 2), [40, 32])
    layer = used.evicting_layers[0]
    assert len(layer.uniform_layers) > 1
    assert not layer.companions, "what was remembered of all heads is kept beside what their groups remember"
    if how == "reset":
        used.reset()
    else:
        used.crop(-72)
    used.bind(model, prompt_length=72)
    assert used.kv_bytes() == used.num_held() == 0 and layer.uniform_layers == (layer,)
    calls = [40, 32, *[1] * 4]
    assert torch.equal(feed(model, used, tokens, calls), feed(model, fresh, tokens, calls))


@pytest.mark.allow_deprecation(
    "Passing .generation_config. together", reason="transformers drafts in this way"
)
@pytest.mark.parametrize("mode", ["beams", "sampling", "assistant", "lookup", "long"])
@pytest.mark.parametrize("method", ["snapkv", "expected"])
def test_modes_of_generation(mode: str, method: str) -> None:
    # What the torch reference makes of the same calls.
    model, tokens = model_of("llama", **SIZES), ids(60, 2, pads=[0, 13])
    arguments: dict[str, Any] = {
        "beams": {"num_beams": 3},
        "sampling": {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
        "assistant": {"assistant_model": model_of("llama", **SIZES, seed=5)},
        "lookup": {"prompt_lookup_num_tokens": 3},
        "long": {"max_new_tokens": 80},
    }[mode]
    inputs = ids(60).repeat(1, 2) if mode in ("assistant", "lookup") else tokens
    config = {
        **METHODS[method][0], "budget": 24, "head_floor": 0.2, "chunk_size": 32,
        "evict_at_decode": mode == "long",
    }  # fmt: skip

    def run(**changed: str) -> list[list[int]]:
        torch.manual_seed(0)
        given = {"max_new_tokens": 12, "do_sample": False, **arguments}
        output: Any = model.generate(  # type: ignore[operator]
            inputs, attention_mask=(inputs != 0).long(), cache_implementation="quantized",
            cache_config={**config, **changed}, return_dict_in_generate=True, **given,
        )  # fmt: skip
        assert all(len(layer.parts) > 1 for layer in cache_of(output).evicting_layers)
        return output.sequences.tolist()  # type: ignore[no-any-return]

    assert run() == run(kernel="torch")


@torch.no_grad()
def test_sharing_pays() -> None:
    # The mean divergence from the whole cache, with as many tokens held, on a text that is not prose.
    folder = ROOT / "examples" / "models" / "tiny-llama-books"
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    text = (ROOT / "LICENSE").read_text()
    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, 1000:2200]
    dense = model(tokens).logits[:, 1000:].log_softmax(-1)
    loss = {}
    for floor in (None, 0.2):
        config = {"backend": "expected_attention", "budget": 96, "head_floor": floor}
        cache = bound_cache(model, config, 1000)
        feed(model, cache, tokens[:, :1000], [1000])
        got = feed(model, cache, tokens[:, 1000:], [200]).log_softmax(-1)
        loss[floor] = float((dense.exp() * (dense - got)).sum(-1).mean())
    assert loss[0.2] < 0.8 * loss[None], loss


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda facts: facts["parts"].pop(), "of 8"),
        (lambda facts: facts["parts"][0].update(heads=facts["parts"][1]["heads"]), "of 8"),
        (lambda facts: facts["parts"][0]["facts"].update(cumulative_length=3), "keys and values of 3 tokens"),
        (lambda facts: facts.pop("kept"), "kept"),
    ],
)
def test_damaged_facts(damage: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path) -> None:
    model = model_of("llama", **SIZES)
    cache = bound_cache(model, {"backend": "snapkv", "budget": 24, "head_floor": 0.2}, 60)
    feed(model, cache, ids(60), [60])
    cache.save_pretrained(tmp_path)
    kvcache_plugins.KVCache.from_pretrained(tmp_path, model)
    (path,) = tmp_path.glob("*.json")
    facts = json.loads(path.read_text())
    damage(facts["layers"][1])
    path.write_text(json.dumps(facts))
    with pytest.raises(ArtifactError, match=f"layer 1.*{message}"):
        kvcache_plugins.KVCache.from_pretrained(tmp_path, model)


def test_attention_weights_are_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = model_of("llama", "eager", **SIZES), ids(60)
    options = {"backend": "h2o", "budget": 24, "head_floor": 0.2}
    cache = kvcache_plugins.build_cache(model, options)
    with pytest.raises(ValueError, match=r"output_attentions=True needs heads that hold the same tokens"):
        model.generate(tokens, **as_argument(cache), max_new_tokens=3, output_attentions=True)  # type: ignore[operator]
    assert cache.get_seq_length() == 0
    monkeypatch.setattr(model.config, "output_attentions", True)
    with pytest.raises(ValueError, match=r"those of the backend 'h2o' do not with `head_floor`"):
        cache.bind(model)


def test_attention_that_needs_tensors_is_refused() -> None:
    """Where nobody could know before that a model will be asked for its weights."""
    model, tokens = model_of("llama", "eager", **SIZES), ids(60)
    cache = bound_cache(model, {"backend": "h2o", "budget": 24, "head_floor": 0.2}, 60)
    feed(model, cache, tokens, [60])
    with pytest.raises(
        NotImplementedError, match=r"heads of layer 0 hold from \d+ to \d+ tokens \(head_floor"
    ):
        model(tokens[:, :1], **as_argument(cache), output_attentions=True)


def test_one_part_without_a_kernel_is_told_of() -> None:
    model = model_of("llama", **SIZES)
    cache = bound_cache(model, {"backend": "h2o", "budget": 24, "head_floor": 0.2}, 60)
    feed(model, cache, ids(60), [60])
    layer = cache.evicting_layers[0]
    part = layer.parts[-1].layer
    part.kernel, part.kernel_reason = "torch", "its own"
    layer.attended(torch.zeros(0), StreamView.of(part.stored_keys), AttentionOptions())
    assert cache.report().kernel[0] == "torch"
    assert cache.report().kernel_reasons[0] == "its own"


def test_states_of_other_heads_are_refused() -> None:
    cache = bound_cache(model_of("llama", **SIZES), {"backend": "h2o", "budget": 24, "head_floor": 0.2}, 60)
    feed(model_of("llama", **SIZES), cache, ids(60), [60])
    with pytest.raises(
        ValueError, match=r"Layer 0 holds \(batch, heads\) = \(1, 8\), got states of \(1, 4\)"
    ):
        cache.layers[0].update(torch.zeros(1, 4, 1, 16), torch.zeros(1, 4, 1, 16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_floor": 1.5}, r"head_floor must be a number in \[0.0, 1.0\], got 1.5"),
        ({"head_floor": "0.2"}, "head_floor must be a number"),
        ({"head_floor": 0.2, "positions": "compact"}, "head_floor makes heads hold different numbers"),
        ({"head_floor": 0.2, "pool": "merge"}, "head_floor cannot be combined with pool='merge'"),
        (
            {
                "head_floor": 0.2,
                "storage": {"backend": "float8", "scale": "head", "calibration": "somewhere"},
            },
            "allowed with it are 'int8', 'int4' and 'float8' without `calibration`, or None",
        ),
        ({"head_floor": 0.2, "backend": "knorm"}, "head_floor"),
    ],
)
def test_what_does_not_go_with_it(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvcache_plugins.build_cache(model_of().config, {"backend": "snapkv", "budget": 24, **options})
