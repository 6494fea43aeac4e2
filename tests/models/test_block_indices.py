"""Models whose indexer chooses blocks of tokens (MiniMax-M3), in layers whose cache is of their own class."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvcache_plugins as kvp
from kvcache_plugins.evaluation.speed.generation.run import measure_generation
from kvcache_plugins.evaluation.speed.options import GenerationOptions
from kvcache_plugins.layers.counting import bytes_of, owned_tensors
from kvcache_plugins.models.cache_argument import as_argument, cache_of
from kvcache_plugins.testing import assert_close
from tests.kernels import fresh_process
from tests.models.families import NAMES, greedy, small_model
from tests.reference.attention import naive_attention

NAME, OWN = "minimax_m3_vl_text", "kvcache_plugins"
KNOWN = pytest.mark.skipif(NAME not in NAMES, reason="transformers does not know it")
FULL, SPARSE = "full_attention", "minimax_m3_sparse"
EXACT, INT8 = {"backend": "int4", "residual_length": 512}, {"backend": "int8"}


def build(*layer_types: str) -> PreTrainedModel:
    return small_model(
        NAME,
        layer_types=list(layer_types),
        num_hidden_layers=len(layer_types),
        index_block_size=8,
        index_topk_blocks=3,
        index_n_heads=2,
        dense_intermediate_size=64,
        shared_intermediate_size=32,
        rotary_dim=16,
    )


@pytest.fixture
def model() -> PreTrainedModel:
    return build(FULL, SPARSE)


@KNOWN
@pytest.mark.parametrize("lengths", [(60,), (60, 53)], ids=["", "left-padded"])
def test_our_attention_attends_to_chosen_blocks(model: PreTrainedModel, lengths: tuple[int, ...]) -> None:
    # Indexers score what stands for pads, which `eager` and `sdpa` have of their own.
    model.set_attn_implementation("sdpa")
    expected, dense, _ = greedy(model, lengths, 6)
    model.set_attn_implementation(OWN)
    for config in (None, EXACT):
        got, logits, _ = greedy(model, lengths, 6, config)
        assert got.tolist() == expected.tolist()
        assert_close("logits", dense, logits, 1e-5)
    for module in model.modules():
        if hasattr(module, "topk_blocks"):
            module.topk_blocks = 100
    assert greedy(model, lengths, 6)[0].tolist() != expected.tolist(), "the choice matters"


@KNOWN
def test_chosen_blocks_of_a_prompt_in_chunks(model: PreTrainedModel) -> None:
    ids = torch.randint(20, 100, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(ids).logits
        model.set_attn_implementation(OWN)
        assert_close("no cache", expected, model(ids, use_cache=False).logits, 1e-5)
        cache = as_argument(DynamicCache(config=model.config))
        chunks = (ids[:, :20], ids[:, 20:45], ids[:, 45:46], ids[:, 46:])
        got = torch.cat([model(chunk, **cache).logits for chunk in chunks], dim=1)
    assert_close("chunks", expected, got, 1e-5)


EVICTING: dict[str, dict[str, Any]] = {
    "in chunks": {"backend": "knorm", "budget": 24, "chunk_size": 16},
    "packed": {"backend": "streaming_llm", "budget": 24, "storage": {"backend": "int8"}},
    "by queries": {"backend": "h2o", "budget": 24, "chunk_size": None},
}


@KNOWN
@pytest.mark.parametrize("layer_types", [(FULL, SPARSE), (SPARSE, FULL)], ids=["sparse last", "sparse first"])
@pytest.mark.parametrize("name", EVICTING)
def test_what_evicts_is_refused_beside_layers_that_choose(name: str, layer_types: tuple[str, ...]) -> None:
    model, config = build(*layer_types), EVICTING[name]
    for ask in (
        lambda: kvp.build_cache(model, config),
        lambda: kvp.build_cache(model.config, config),
        lambda: kvp.estimate(model.config, config, 64),
        lambda: greedy(model, (60, 53), 2, config),
    ):
        with pytest.raises(ValueError, match=r"evicts .* keep every token \(\['minimax_m3_sparse'\].*'int8'"):
            ask()


@KNOWN
def test_what_evicts_where_no_layer_chooses_or_none_evicts() -> None:
    _, logits, cache = greedy(build(FULL, FULL), (60, 53), 4, EVICTING["in chunks"])
    assert torch.isfinite(logits).all() and cache.report().tokens_held < 60
    model, config = build(FULL, SPARSE), {**EVICTING["by queries"], "skip_layers": [0]}
    _, expected, _ = greedy(model, (60, 53), 4)
    _, logits, _ = greedy(model, (60, 53), 4, config)
    assert_close("logits", expected, logits, 1e-4)


@KNOWN
@pytest.mark.parametrize("new", [1, 5])
def test_keys_of_indexers_are_predicted(model: PreTrainedModel, new: int) -> None:
    _, _, cache = greedy(model, (150,), new, INT8)
    assert cache.kv_bytes() == kvp.estimate(model, INT8, 150, new_tokens=new)
    assert cache.report().dense_layers == {1: "minimax_m3_sparse: cached by a class of the model's own"}
    options: dict[str, Any] = {"return_dict_in_generate": True, "max_new_tokens": new, "min_new_tokens": new}
    past = cache_of(model.generate(torch.randint(20, 100, (1, 150)), do_sample=False, **options))
    dense = kvp.estimate(model, {"backend": "dense"}, 150, new_tokens=new)
    assert dense == bytes_of(tensor for layer in past.layers for tensor in owned_tensors(layer))
    most = kvp.most_tokens(model, INT8, 10**6)
    assert most is not None and kvp.estimate(model, INT8, most + 1, max_cache_length=most + 1) > 10**6


@pytest.mark.skipif("deepseek_v4" not in NAMES, reason="transformers does not know it")
def test_states_of_another_form_are_not_predicted() -> None:
    model = small_model("deepseek_v4")
    _, _, cache = greedy(model, (60,), 2, INT8)
    reasons = set(cache.report().dense_layers.values())
    assert reasons == {"heavily_compressed_attention: cached by a class of the model's own"}
    for config in (INT8, {"backend": "dense"}):
        with pytest.raises(ValueError, match=r"\['heavily_compressed_attention'\] keep .* not predicted"):
            kvp.estimate(model.config, config, 60)
        with pytest.raises(ValueError, match="not predicted"):
            kvp.most_tokens(model.config, config, 10**6)


@pytest.mark.skipif("deepseek_v4" not in NAMES, reason="transformers does not know it")
def test_what_is_not_predicted_is_measured_all_the_same(tmp_path: Path) -> None:
    small_model("deepseek_v4").save_pretrained(tmp_path / "model")
    options = GenerationOptions(
        cache_config=[INT8], lengths=[60], max_new_tokens=8, model=str(tmp_path / "model"), device="cpu",
        dtype="fp32", threads=1,
    )  # fmt: skip
    results = measure_generation(options)["results"]
    assert [row["estimated_kv_bytes"] for row in results] == [None, None]
    assert all(row["fits"] and row["kv_bytes"] > 0 and "not predicted" in row["note"] for row in results)


@pytest.mark.skipif("deepseek_v4" not in NAMES, reason="transformers does not know it")
def test_kinds_of_layers_are_known_from_a_configuration_alone() -> None:
    # A modelling file says of which class they are, and that of no model has been imported here.
    code = """
        from transformers import CONFIG_MAPPING
        from kvcache_plugins import build_cache

        config = CONFIG_MAPPING["deepseek_v4"](num_hidden_layers=2)
        print(len(build_cache(config, {"backend": "int8"}).report().dense_layers))
    """
    done = fresh_process.run(code)
    assert done.stdout.strip() == "2", done.stderr


class Attention(nn.Module):
    """Of 4 query heads for 2 of keys."""

    num_key_value_groups = 2
    is_causal = True
    indexer: Any = None


@pytest.mark.parametrize("count", [1, 7, 40])
@pytest.mark.parametrize("is_masked", [False, True], ids=["", "masked"])
def test_blocks_of_every_group_of_heads(count: int, is_masked: bool) -> None:
    query = torch.randn(2, 4, count, 16)
    key, value = torch.randn(2, 2, 50, 16), torch.randn(2, 2, 50, 16)
    indices = torch.randint(-1, 7, (2, 2, count, 3))
    indices[..., 0] = 0  # every query sees something
    hidden = torch.ones(2, 4, count, 56, dtype=torch.bool)
    for row, head, position in torch.cartesian_prod(*map(torch.arange, (2, 4, count))).tolist():
        for block in indices[row, head // 2, position].tolist():
            if block >= 0:
                hidden[row, head, position, 8 * block : 8 * block + 8] = False
    mask = ~hidden[..., :50]
    given = torch.rand(2, 1, count, 50) > 0.2 if is_masked else None
    if given is not None:
        given[..., 0] = True
        mask = mask & given
    module = Attention()
    module.indexer = SimpleNamespace(block_size=8)
    got, _ = ALL_ATTENTION_FUNCTIONS[OWN](module.eval(), query, key, value, given, block_indices=indices)
    expected = naive_attention(query, key, value, mask=mask, is_causal=not is_masked)
    assert_close("blocks", expected.transpose(1, 2), got, 1e-5)


def test_blocks_of_a_size_that_is_not_known() -> None:
    states = torch.randn(1, 2, 9, 16)
    indices = torch.zeros(1, 2, 9, 1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"Attention hands `block_indices` .* Allowed are modules with `ind"):
        ALL_ATTENTION_FUNCTIONS[OWN](Attention(), states, states, states, None, block_indices=indices)
