"""Models that cache latents: attention to the packed latents is what they would do with keys and values."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

import kvcache_plugins as kvp
from kvcache_plugins.attention import latent_models
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing.generation import SCENARIOS, padded_prompt, run_scenario
from tests.models.families import NAMES, NotSmall, greedy, small_model

LENGTH, NEW = 150, 5
# Before this kind of layer had its name, such models cached keys and values of all heads, which stay dense.
INDEXED = (
    ("axk2", "deepseek_v32", "dots3_note_text", "glm5_next", "glm_moe_dsa", "hy_v4", "mistral_large4")
    if "indexed_attention" in DYNAMIC_LAYER_TYPE_MAPPING
    else ()
)
FAMILIES = tuple(
    name
    for name in (
        *INDEXED, "axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear",
        "longcat_flash", "minicpm3", "mistral4", "youtu",
    )
    if name in NAMES
)  # fmt: skip
CACHES: dict[str, dict[str, Any]] = {
    "int8": {"backend": "int8"},
    "kivi": {"backend": "kivi", "residual_length": 32},
    "kvquant": {"backend": "kvquant", "calibration": "normal_float", "residual_length": 32},
    "knorm": {"backend": "knorm", "budget": 96, "chunk_size": 48, "storage": {"backend": "int8"}},
    "lagkv": {"backend": "lagkv", "budget": 96, "chunk_size": 48, "storage": {"backend": "int8"}},
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return small_model("deepseek_v3")


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models make keys and values of all latents at every step, as they would of a dense cache."""
    latent_models.restore_expansions()
    monkeypatch.setattr("kvcache_plugins.cache.let_latents_pass", lambda model: None)


@pytest.fixture
def prompts_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models read prompts by their own attention: what is packed of them is the same to the last bit."""
    monkeypatch.setattr("kvcache_plugins.cache.prompt_dtype", lambda model, kernel: None)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many tokens a model made keys and values of, each time it did."""
    latent_models.restore_expansions()
    counts: list[int] = []
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    original = modeling.DeepseekV3Attention.expand_kv

    def counted(self: Any, latents: Tensor, rotated: Tensor) -> Any:
        counts.append(latents.shape[2])
        return original(self, latents, rotated)

    monkeypatch.setattr(modeling.DeepseekV3Attention, "expand_kv", counted)
    yield counts
    latent_models.restore_expansions()


def logits_of(model: PreTrainedModel, cache_config: dict[str, Any]) -> tuple[Tensor, Any]:
    """Logits `(B, NEW, vocabulary)` of a padded batch, and its cache."""
    _, logits, cache = greedy(model, (LENGTH, 131), NEW, cache_config)
    return logits, cache


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("prompts_of_tensors")
@pytest.mark.parametrize(
    ("name", "dtype"),
    # in fp64 those without experts, whose products torch has no fp64 for
    [(name, torch.float32) for name in FAMILIES] + [(name, torch.float64) for name in ("minicpm3", "youtu")],
)
def test_every_family(name: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    try:
        model = small_model(name).to(dtype)
    except NotSmall as error:
        pytest.skip(str(error))
    if model.config._attn_implementation == "eager":
        model.set_attn_implementation("kvcache_plugins")
    # in fp32, a number between two codes may round the other way: what is compared is what was packed before
    steps, error = (2, 1e-4) if dtype == torch.float32 else (NEW, 1e-6)
    absorbed = {cache: logits_of(model, config) for cache, config in CACHES.items()}
    request.getfixturevalue("expanded")
    for cache, config in CACHES.items():
        expected, past = logits_of(model, config)
        if name in INDEXED and "budget" in config:
            reasons = set(past.report().dense_layers.values())
            assert reasons == {"indexed_attention: chooses among all tokens, so none may be evicted"}
            continue
        assert past.report().fallback_reads > 0, "every step made keys and values of all latents"
        got, past = absorbed[cache]
        assert past.packed_layers and past.report().fallback_reads == 0
        if "budget" not in config or dtype == torch.float64:  # whose prompt reads what its first chunks left
            torch.testing.assert_close(got[:, :steps], expected[:, :steps], atol=error, rtol=error)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", [name for name in ("deepseek_v3", "deepseek_v32") if name in FAMILIES])
def test_every_mode(name: str, scenario: str, request: pytest.FixtureRequest) -> None:
    model = small_model(name)
    absorbed = run_scenario(model, scenario, cache_config=CACHES["int8"])
    request.getfixturevalue("expanded")
    assert absorbed.tolist() == run_scenario(model, scenario, cache_config=CACHES["int8"]).tolist()


def test_keys_and_values_are_made_of_new_tokens_only(made: list[int], model: PreTrainedModel) -> None:
    logits_of(model, CACHES["int8"])
    # of a prompt ours makes them, a tile at a time; three tokens show that a module does what is expected
    assert set(made) <= {3}


@pytest.mark.usefixtures("prompts_of_tensors")
def test_a_model_that_reads_its_prompt_itself_makes_its_keys_once(
    made: list[int], model: PreTrainedModel
) -> None:
    logits_of(model, CACHES["int8"])
    assert made.count(LENGTH) == model.config.num_hidden_layers
    assert set(made) <= {LENGTH, 3}


def test_many_tokens_at_once_are_expanded_by_tiles(made: list[int], model: PreTrainedModel) -> None:
    cache = kvp.build_cache(model, CACHES["int8"])
    ids = padded_prompt((600,))["input_ids"]
    with torch.no_grad():
        model(ids[:, :200], **as_argument(cache))
        got = model(ids[:, 200:], **as_argument(cache)).logits
        whole = model(ids).logits[:, 200:]
    assert cache.report().fallback_reads == 0
    assert max(made) == 600 and 400 not in made, "only what has no cache makes them of all"
    assert (got - whole).norm() < 0.02 * whole.norm()


@pytest.mark.parametrize("backend", ["expected_attention", "h2o", "snapkv", "tova"])
@pytest.mark.parametrize("storage", [None, {"backend": "int8"}])
def test_evicting_by_attention(backend: str, storage: Any, model: PreTrainedModel) -> None:
    options = {"backend": backend, "budget": 64, "chunk_size": 48, "storage": storage}
    logits, cache = logits_of(model, options)
    assert torch.isfinite(logits).all()
    assert {layer.held_length for layer in cache.packed_layers} == {64 + NEW - 1}


def test_what_attention_shows_an_evicting_layer(model: PreTrainedModel) -> None:
    """The scores of H2O are the column sums of the attention weights that the eager model returns."""
    ids = padded_prompt((90,))["input_ids"]
    cache = kvp.build_cache(model, {"backend": "h2o", "budget": 200})
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        model(ids[:, :60], **as_argument(cache))
        model(ids[:, 60:], **as_argument(cache))
        weights = eager(ids, output_attentions=True).attentions
    for layer, expected in zip(cache.packed_layers, weights, strict=True):
        torch.testing.assert_close(layer.ledger.scores, expected.sum((1, 2))[:, None], atol=1e-3, rtol=1e-4)


@pytest.mark.usefixtures("prompts_of_tensors")
def test_a_model_without_a_plain_weight_goes_on_as_before(model: PreTrainedModel) -> None:
    changed = copy.deepcopy(model)
    for layer in changed.model.layers:
        layer.self_attn.kv_b_proj.register_forward_hook(lambda module, args, output: output)
    got, cache = logits_of(changed, CACHES["int8"])
    expected, _ = logits_of(model, CACHES["int8"])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    report = cache.report()
    assert report.fallback_reads > 0
    assert all("more than a weight" in reason for reason in report.kernel_reasons.values())
    assert set(report.kernel_reasons) == {0, 1}


@pytest.mark.parametrize("backend", ["kvzip", "snapkv"])
def test_queries_are_not_seen_of_latents_that_a_model_expands(backend: str, model: PreTrainedModel) -> None:
    changed = copy.deepcopy(model)
    attention: Any = changed.model.layers[1].self_attn
    attention.kv_b_proj = nn.Sequential(attention.kv_b_proj)  # what PEFT makes of it has parts, too
    with pytest.raises(ValueError, match=rf"'{backend}' must see .*kv_b_proj \(Sequential\) .* merged"):
        kvp.build_cache(changed, {"backend": backend, "budget": 24}).bind(changed)
    kvp.build_cache(changed, {"backend": "knorm", "budget": 24}).bind(changed)


def test_uninstalling_puts_the_models_back(model: PreTrainedModel) -> None:
    cls = type(model.model.layers[0].self_attn)
    latent_models.restore_expansions()
    original = cls.expand_kv
    kvp.build_cache(model, CACHES["int8"])
    assert cls.expand_kv is not original
    kvp.uninstall()
    try:
        assert cls.expand_kv is original
    finally:
        kvp.install()


@pytest.mark.parametrize("options", [{"pool": "merge"}, {"layer_overrides": {"-1": {"pool": "merge"}}}])
def test_pooling_values_of_latents_is_refused(model: PreTrainedModel, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="pool='merge' adds up values, and models of type 'deepseek_v3'"):
        kvp.build_cache(model, {"backend": "knorm", "budget": 64, **options})


def test_a_cache_made_for_a_configuration_learns_of_the_model(model: PreTrainedModel) -> None:
    latent_models.restore_expansions()
    cache = kvp.build_cache(model.config, CACHES["int8"])
    ids = padded_prompt((90,))["input_ids"]
    model.generate(ids, **as_argument(cache), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert cache.report().fallback_reads == 0
