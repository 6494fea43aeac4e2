"""How keys are rotated: what is found in models and configurations is what the models do.

The end-to-end check needs no code of a family: given one token over and over, every position of a rotary
model computes the same, so its keys differ by the rotation alone, and undoing that must make them constant.
"""

from __future__ import annotations

import importlib
import inspect
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedConfig

from kvcache_plugins import build_cache
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.layer_plan import key_value_heads, plan_layers
from kvcache_plugins.models.rotary import (
    Rotary,
    _layout_by_ramp,
    _layout_of,
    _turn_by_complex,
    _turn_by_tables,
    find_rotary,
    modeling_module,
)
from kvcache_plugins.testing.models import tiny_model
from tests.models.families import NAMES, small_model
from tests.models.moving import check_moved_keys, described

FAMILIES: dict[str, tuple[int, bool]] = {
    # rotating channels of 16 (qwen3: 32), interleaved
    "cohere": (16, True),
    "exaone4": (16, False),
    "falcon": (16, False),
    "gemma": (16, False),
    "gemma2": (16, False),
    "gemma3_text": (16, False),
    "glm4": (8, True),
    "gpt_neox": (4, False),
    "gpt_oss": (16, False),
    "granite": (16, False),
    "llama": (16, False),
    "mistral": (16, False),
    "mixtral": (16, False),
    "olmo2": (16, False),
    "phi": (8, False),
    "phi3": (16, False),
    "falcon_h1": (16, False),
    "gemma4_text": (16, False),
    "qwen2": (16, False),
    "qwen3": (32, False),
    "qwen3_moe": (16, False),
    "qwen3_next": (4, False),
    "smollm3": (16, False),
    "stablelm": (4, False),
    "starcoder2": (16, False),
}


def found(name: str, layer: int = 0, **overrides: Any) -> Rotary:
    rotary = described(tiny_model(name, **overrides))[layer].rotary
    assert rotary is not None
    return rotary


# -- what is found


@pytest.mark.parametrize("name", FAMILIES)
def test_dimensions_and_layout(name: str) -> None:
    plans = plan_layers(tiny_model(name).config)
    rotary = found(name, next(layer for layer, plan in enumerate(plans) if plan.has_keys))
    assert (rotary.rotary_dim, rotary.interleaved) == FAMILIES[name]
    assert rotary.inv_freq[0] == pytest.approx(1.0, rel=0.05)
    assert list(rotary.inv_freq) == sorted(rotary.inv_freq, reverse=True)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_neox", "gpt_oss", "llama", "phi3"])
def test_a_model_without_data_says_the_same(name: str) -> None:
    model = tiny_model(name)
    expected = [facts.rotary for facts in described(model)]
    assert any(expected)
    _layout_by_ramp.cache_clear()
    _turn_by_complex.cache_clear()
    _turn_by_tables.cache_clear()
    with torch.device("meta"):  # as models that are too large to be made are
        empty = AutoModelForCausalLM.from_config(model.config)
        assert [facts.rotary for facts in described(empty)] == expected
    assert [facts.rotary for facts in described(empty)] == expected


def test_frequencies_that_are_no_buffers_are_the_models_own() -> None:
    model = tiny_model("llama")
    rotary = model.model.rotary_emb
    frequencies = rotary.inv_freq / 2  # as code of a model's own may have them, and no configuration says
    del rotary.inv_freq, rotary.original_inv_freq
    rotary.inv_freq = frequencies
    assert not list(rotary.buffers())
    found = described(model)[0].rotary
    assert found is not None and found.inv_freq == tuple(frequencies.double().tolist())


@pytest.mark.parametrize("name", FAMILIES)
def test_model_and_configuration_say_the_same(name: str) -> None:
    model = tiny_model(name, num_hidden_layers=4)
    by_model, by_config = described(model), described(model, from_config=True)
    assert len(by_model) == 4
    for one, other in zip(by_model, by_config, strict=True):
        assert one.rotary == other.rotary
        assert one.has_key_bias == other.has_key_bias


@pytest.mark.parametrize("name", ["bloom", "deepseek_v3", "gpt2", "mpt", "opt"])
def test_keys_that_are_not_rotated(name: str) -> None:
    # DeepSeek-V3 caches a latent as its key; the others have no rotary embedding.
    model = tiny_model(name)
    for from_config in (False, True):
        assert [facts.rotary for facts in described(model, from_config=from_config)] == [None, None]


def test_a_layout_nobody_knows_is_none_rather_than_a_guess() -> None:
    """RoFormer turns keys, and values if told so, in a method of its attention."""
    model = small_model("roformer")
    assert all(facts.rotary is None and facts.is_rotation_unknown for facts in described(model))
    cache = build_cache(model, {"backend": "kvquant", "calibration": "normal_float"})
    with pytest.warns(UserWarning, match="that of RoFormerForCausalLM is written in a way of its own"):
        cache.bind(model)


@pytest.mark.parametrize("name", ["beam", "jamba", "nemotron_h"])
def test_layers_that_do_not_rotate_hide_nothing(name: str) -> None:
    """Of Beam only the windows rotate; the files of the others have functions that nothing calls."""
    if name not in NAMES:
        pytest.skip("this release of transformers does not have it")
    facts = described(small_model(name))
    assert not any(fact.is_rotation_unknown for fact in facts)
    assert [fact.rotary is not None for fact in facts] == [name == "beam", *[False] * (len(facts) - 1)]


@pytest.mark.parametrize("from_config", [False, True])
def test_alibi_takes_the_place_of_the_rotation(from_config: bool) -> None:
    # The rotary module is built all the same.
    model = tiny_model("falcon", alibi=True)
    assert [facts.rotary for facts in described(model, from_config=from_config)] == [None, None]


def test_frequencies_depend_on_the_kind_of_layer() -> None:
    # Gemma 3 rotates sliding layers with theta 1e4 and full ones with 1e6.
    for from_config in (False, True):
        sliding, full = (f.rotary for f in described(tiny_model("gemma3_text"), from_config=from_config))
        assert sliding is not None and full is not None
        assert sliding.inv_freq[1] == pytest.approx(1e4 ** (-1 / 8))
        assert full.inv_freq[1] == pytest.approx(1e6 ** (-1 / 8))


@pytest.mark.parametrize(
    ("name", "rotating"),
    [("smollm3", [True, True, True, False]), ("exaone4", [True, False, True, False])],
)
def test_layers_without_a_rotation(name: str, rotating: list[bool]) -> None:
    model = tiny_model(name, num_hidden_layers=4)
    for from_config in (False, True):
        assert [f.rotary is not None for f in described(model, from_config=from_config)] == rotating


LAYERS = ["full_attention"] * 4
PREFIX = {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("afmoe", {}),
    "codegen": ("codegen", {}),
    "cohere2": ("cohere2", {}),
    "cohere2 without windows": ("cohere2", {"layer_types": LAYERS}),
    "cohere2_moe": ("cohere2_moe", {}),
    "cohere2_moe with": ("cohere2_moe", {"prefix_dense_sliding_window_pattern": 1, **PREFIX}),
    "exaone4 without windows": ("exaone4", {"sliding_window": None, "layer_types": LAYERS[:2]}),
    "exaone_moe": ("exaone_moe", {}),
    "flint": ("flint", {}),
    "granite_swa": ("granite_swa", {"layer_rope_theta": [1e4, 0]}),
    "granite_swa of two bases": ("granite_swa", {"layer_rope_theta": [1e6, 1e3]}),
    "granitemoe_swa": ("granitemoe_swa", {"layer_rope_theta": [0, 1e3]}),
    "granitemoehybrid": ("granitemoehybrid", {}),
    "granitemoehybrid without": ("granitemoehybrid", {"position_embedding_type": "nope"}),
    "granitemoehybrid with": ("granitemoehybrid", {"position_embedding_type": "rope"}),
    "gptj": ("gptj", {}),
    "internlm3": ("internlm3", {}),
    "iquestcoder": ("iquestcoder", {}),
    "kolibri1": ("kolibri1", {}),
    "llama4": ("llama4_text", {"no_rope_layers": [1, 0, 1, 0]}),
    "modernbert-decoder": ("modernbert-decoder", {}),
    "nanochat": ("nanochat", {}),
    "zamba2": ("zamba2", {}),
    "zamba2 with": ("zamba2", {"use_mem_rope": True}),
}


@pytest.mark.parametrize("from_config", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_moving_a_text_turns_the_keys_that_are_said_to_rotate(name: str, from_config: bool) -> None:
    family, own = OTHERS[name]
    if family not in NAMES:
        pytest.skip("this release of transformers does not have it")
    model = small_model(family, **own)
    said = model.config.to_dict()
    check_moved_keys(model, from_config=from_config)
    # which is the user's, also where layers have frequencies of their own
    assert model.config.to_dict() == said


def test_keys_that_are_weighed_after_their_rotation_cannot_be_moved() -> None:
    if "hunyuan_v1_dense" not in NAMES:
        pytest.skip("this release of transformers does not have it")
    model = small_model("hunyuan_v1_dense")
    options = {"backend": "knorm", "budget": 64}
    assert build_cache(model, options)
    with pytest.raises(ValueError, match=r"nothing done to keys after them, which .*'hunyuan_v1_dense'"):
        build_cache(model, {**options, "positions": "compact"})


def test_key_biases() -> None:
    facts = described(tiny_model("qwen2"))
    model = tiny_model("qwen2")
    for layer, fact in zip(model.model.layers, facts, strict=True):
        assert fact.has_key_bias
        assert fact.key_bias_max == pytest.approx(float(layer.self_attn.k_proj.bias.detach().abs().max()))
    assert all(f.has_key_bias and f.key_bias_max is None for f in described(model, from_config=True))
    assert not any(f.has_key_bias or f.key_bias_max for f in described(tiny_model("llama")))
    assert all(f.has_key_bias for f in described(tiny_model("llama", attention_bias=True), from_config=True))
    assert described(tiny_model("gpt2"))[0].has_key_bias  # a fused projection
    assert described(tiny_model("gpt2"))[0].key_bias_max is None


def test_a_bias_that_a_method_makes() -> None:
    """Linear layers that torch has quantized keep theirs packed."""

    class Packed(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.linear = linear

        def bias(self) -> Tensor | None:
            return self.linear.bias

    for family in ("qwen2", "llama", "gpt2"):
        model = tiny_model(family)
        expected = described(model)
        for module in list(model.modules()):
            for name in ("k_proj", "c_attn"):
                if hasattr(module, name):
                    setattr(module, name, Packed(getattr(module, name)))
        assert described(model) == expected


def test_a_model_on_the_meta_device_has_no_bias_to_measure() -> None:
    model = tiny_model("qwen2").to("meta")
    facts = described(model)
    assert all(f.has_key_bias and f.key_bias_max is None for f in facts)


def test_a_class_defined_outside_transformers_has_the_modelling_file_of_what_it_derives_from() -> None:
    class Derived(LlamaConfig):
        pass

    class Mine(PreTrainedConfig):
        pass

    assert modeling_module(Derived()) is modeling_module(LlamaConfig())
    found = find_rotary(None, Derived(head_dim=16), "full_attention", 16)
    assert found is not None and found == find_rotary(None, LlamaConfig(head_dim=16), "full_attention", 16)
    assert modeling_module(Mine()) is None
    assert find_rotary(None, Mine(), "full_attention", 16) is None


# -- it is what the models do


def _own_rotation(model: Any, states: Tensor, positions: Tensor, layer_type: str) -> Tensor:
    """Rotated by the family's own functions, its constant factor (yarn) taken out."""
    module = importlib.import_module(type(model).__module__)
    rotary = next(m for m in model.modules() if "RotaryEmbedding" in type(m).__name__)
    arguments = (layer_type,) if hasattr(rotary, f"{layer_type}_inv_freq") else ()
    cos, sin = rotary(states, positions[None], *arguments)
    rotate = module.apply_rotary_pos_emb
    if "q" in inspect.signature(rotate).parameters:
        rotated, _ = rotate(states, states, cos, sin)
    else:
        rotated = rotate(states, cos, sin)  # one of them at a time
    return rotated / float(getattr(rotary, "attention_scaling", 1.0))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", FAMILIES)
def test_rotating_is_the_models_own_function(name: str, layer: int) -> None:
    model = tiny_model(name)
    kind = plan_layers(model.config)[layer].layer_type
    rotary = find_rotary(model, model.config, kind, key_value_heads(model.config, layer)[1])
    assert rotary is not None
    # Some families cut off the channels that do not rotate before they call the function.
    states, positions = torch.randn(2, 3, 40, rotary.rotary_dim), torch.arange(3, 43)
    expected = _own_rotation(model, states, positions, kind)
    assert (rotary.rotate(states, positions) - expected).abs().max() <= 1e-5
    assert (states - expected).abs().max() > 1


# The state of their recurrent layers depends on the number of tokens.
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"falcon_h1", "qwen3_next"}))
def test_keys_of_a_repeated_token_become_constant(name: str) -> None:
    model = tiny_model(name)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.full((1, 16), 7), **as_argument(cache))
    for layer, facts in zip(cache.layers, described(model), strict=True):
        keys = layer.keys
        scale = keys.abs().max()
        if facts.rotary is None:
            assert (keys - keys[:, :, :1]).abs().max() <= 2e-5 * scale
            continue
        assert (keys - keys[:, :, :1]).abs().max() > 0.1 * scale
        unrotated = facts.rotary.rotate(keys, -torch.arange(keys.shape[2]))
        assert (unrotated - unrotated[:, :, :1]).abs().max() <= 2e-5 * scale
        if name == "gpt_oss":
            break  # what its sink logits take depends on the position, so the next layer is not constant


@pytest.mark.parametrize("from_config", [False, True])
@pytest.mark.parametrize(
    ("name", "channels", "interleaved", "sense"),
    [
        ("codegen", 8, True, 1),
        ("gptj", 8, True, 1),
        ("llama4_text", 16, True, 1),
        ("nanochat", 16, False, -1),
    ],
)
def test_rotations_written_in_other_ways(
    name: str, channels: int, interleaved: bool, sense: int, from_config: bool
) -> None:
    """By tables of sines, by complex numbers, and the other way round."""
    if name not in NAMES:
        pytest.skip("this release of transformers does not have it")
    model = small_model(name)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.full((1, 16), 7), **as_argument(cache))
    for layer, facts in zip(cache.layers, described(model, from_config=from_config), strict=True):
        keys, rotary = layer.keys, facts.rotary
        if rotary is not None:
            assert (rotary.rotary_dim, rotary.interleaved) == (channels, interleaved)
            assert rotary.inv_freq[0] == sense
            assert (keys - keys[:, :, :1]).abs().max() > 0.1 * keys.abs().max()
            keys = rotary.rotate(keys, -torch.arange(keys.shape[2]))
        assert (keys - keys[:, :, :1]).abs().max() <= 2e-5 * keys.abs().max()
    assert described(model, from_config=from_config)[0].rotary is not None


# -- the function that attention calls


def _halves(states: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _neighbours(states: Tensor) -> Tensor:
    return torch.stack((-states[..., 1::2], states[..., 0::2]), dim=-1).flatten(-2)


def _apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _neighbours(q) * sin, k * cos + _neighbours(k) * sin


def _apply_at(q: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, **other: Any) -> Tensor:
    return _apply(q, q, cos.squeeze(0)[position_ids], sin.squeeze(0)[position_ids])[0]


def _apply_to_pairs(states: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    even, odd = states[..., 0::2], states[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


@pytest.mark.parametrize("apply", [_apply, _apply_at, _apply_to_pairs])
def test_what_attention_calls_says_the_layout_whatever_helpers_are_beside_it(apply: Any) -> None:
    """Such as that of a tower for images, in files of both."""
    assert _layout_of({"apply_rotary_pos_emb": apply, "rotate_half": _halves}) == (True, 1.0)


def test_a_function_that_became_a_module_is_asked_as_it_was_written() -> None:
    """Decorators of the library kernels make one; what it calls later may take the tensors of a GPU alone."""

    class Kernel(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return _apply(*args, **kwargs)

    Kernel.forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *inspect.signature(_apply).parameters.values(),
        ]
    )
    kernel = Kernel()
    kernel.forward = None  # type: ignore[assignment]
    assert _layout_of({"apply_rotary_pos_emb": kernel, "rotate_half": _halves}) == (True, 1.0)


def test_a_function_that_wants_what_nobody_knows_has_no_layout() -> None:
    def apply(q: Tensor, cos: Tensor, sin: Tensor, sections: list[int]) -> Tensor:
        return torch.cat(q.split(sections, dim=-1)[::-1], dim=-1)

    assert _layout_of({"apply_rotary_pos_emb": apply, "rotate_half": _halves}) is None


# -- the rotation itself


ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 1024,
    },
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 1024,
    },
}  # fmt: skip


def _llama(rope: str) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=512, num_attention_heads=4, num_hidden_layers=1, rope_parameters=ROPE[rope],
        max_position_embeddings=8192,
    )  # fmt: skip


@pytest.mark.parametrize("rope", ROPE)
def test_rotating_back_and_forth_is_the_identity(rope: str) -> None:
    rotary = find_rotary(None, _llama(rope), "full_attention", 128)
    assert rotary is not None and rotary.rotary_dim == 128
    states = torch.randn(2, 3, 64, 128)
    for interleaved in (False, True):
        turned = Rotary(rotary.inv_freq, interleaved)
        for offset in (0, 1000, 10**6):
            positions = torch.arange(64) + offset
            back = turned.rotate(turned.rotate(states, -positions), positions)
            assert (back - states).abs().max() <= 1e-6 * states.abs().max()


def test_scaled_frequencies_differ() -> None:
    rotaries = {rope: find_rotary(None, _llama(rope), "full_attention", 128) for rope in ROPE}
    default = rotaries["default"]
    assert default is not None
    assert default.inv_freq == pytest.approx([1e4 ** (-i / 64) for i in range(64)])
    assert rotaries["linear"] == Rotary(tuple(f / 4 for f in default.inv_freq))
    for rope in ("yarn", "llama3"):
        assert rotaries[rope] is not None and rotaries[rope] != default
    # Dynamic scaling changes frequencies only once a text is longer than the model's context.
    assert rotaries["dynamic"] == default


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_by_hand(interleaved: bool) -> None:
    # A quarter turn a position for the first pair, an eighth for the second; two channels left alone.
    quarter = torch.pi / 2
    rotary = Rotary((quarter, quarter / 2), interleaved)
    first, second = (0, 1) if interleaved else (0, 2)
    states = torch.zeros(1, 1, 3, 6)
    states[..., first], states[..., 4], states[..., 5] = 1.0, 5.0, 6.0
    turned = rotary.rotate(states, torch.tensor([0, 1, -1]))[0, 0]
    assert turned[:, first].tolist() == pytest.approx([1.0, 0.0, 0.0], abs=1e-7)
    assert turned[:, second].tolist() == pytest.approx([0.0, 1.0, -1.0], abs=1e-7)
    assert turned[:, 4:].tolist() == [[5.0, 6.0]] * 3
    assert states[..., first].eq(1).all()  # the input stays


def test_pairs_are_views_of_the_turning_channels() -> None:
    states = torch.arange(10.0).view(1, 1, 1, 10)
    for interleaved, expected in ((False, ([0, 1, 2], [3, 4, 5])), (True, ([0, 2, 4], [1, 3, 5]))):
        first, second = Rotary((1.0, 0.5, 0.1), interleaved).pairs(states)
        assert (first.flatten().tolist(), second.flatten().tolist()) == expected
        assert first.untyped_storage().data_ptr() == states.untyped_storage().data_ptr()


def test_angles_are_exact_far_out() -> None:
    # An fp32 angle of 1e6 radians would be off by 0.03.
    rotary = Rotary((1.0, 0.123456789))
    cos, sin = rotary.tables(torch.tensor([1_000_003]))
    angles = 1_000_003 * torch.tensor(rotary.inv_freq, dtype=torch.float64)
    assert torch.equal(cos[0], angles.cos().float()) and torch.equal(sin[0], angles.sin().float())


# -- keys as the models make them, turned back


POWERS_OF_TWO = {"rope_type": "default", "rope_theta": 2.0**16}
"""Of 16 channels the frequencies are 4^0, 4^-1, ...: the models' fp32 angles are exact at every position."""

MADE: dict[str, tuple[str, dict[str, Any]]] = {
    **{rope: ("llama", {"rope_parameters": parameters}) for rope, parameters in ROPE.items()},
    "partial": ("phi", {}),
    "partial-quarter": ("stablelm", {}),
    "partial-llama3": ("phi", {"rope_parameters": {**ROPE["llama3"], "partial_rotary_factor": 0.5}}),
    "interleaved": ("cohere", {"use_qk_norm": False}),
    "interleaved-yarn": ("cohere", {"use_qk_norm": False, "rope_parameters": ROPE["yarn"]}),
    "interleaved-partial": ("glm4", {}),
    "after-a-norm": ("qwen3", {"head_dim": 16}),
    "yarn-with-sinks": ("gpt_oss", {}),
}


class Made(NamedTuple):
    """Keys of one layer: as its projection made them, and as its cache received them."""

    before: Tensor
    after: Tensor
    positions: Tensor
    rotary: Rotary
    factor: float
    """What the model multiplies cosines and sines by (yarn)."""

    @property
    def expected(self) -> Tensor:
        """Keys before the rotation, with the factor on the channels that rotate."""
        factors = torch.ones(self.before.shape[-1])
        factors[: self.rotary.rotary_dim] = self.factor
        return self.before * factors

    def turned_back(self) -> Tensor:
        return self.rotary.rotate(self.after, -self.positions)


def made_keys(name: str, start: int, **overrides: Any) -> Made:
    family, given = MADE[name]
    model = tiny_model(family, **(given | overrides))
    # the second of two layers: where a family has sliding ones, the first is
    attention = [m for m in model.modules() if hasattr(m, "layer_idx") and "Attention" in type(m).__name__][1]
    last: Any = getattr(attention, "k_norm", None) or attention.k_proj
    outputs: list[Tensor] = []
    handle = last.register_forward_hook(lambda module, args, output: outputs.append(output))
    cache = DynamicCache(config=model.config)
    positions = torch.arange(start, start + 64)
    with torch.no_grad():
        model(torch.randint(3, 120, (2, 64)), **as_argument(cache), position_ids=positions[None])
    handle.remove()
    layer: Any = cache.layers[1]
    after, rotary = layer.keys, described(model)[1].rotary
    assert rotary is not None
    before = outputs[0].view(2, 64, -1, after.shape[-1]).transpose(1, 2)
    module = next(m for m in model.modules() if "RotaryEmbedding" in type(m).__name__)
    return Made(before, after, positions, rotary, float(getattr(module, "attention_scaling", 1.0)))


def relative_error(exact: Tensor, got: Tensor) -> float:
    """Largest distance of two vectors, relative to the vector."""
    return float(((got - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


@pytest.mark.parametrize("name", MADE)
def test_turning_back_finds_the_key_before_the_rotation(name: str) -> None:
    made = made_keys(name, 0)
    assert ("interleaved" in name, "partial" in name) == (
        made.rotary.interleaved,
        made.rotary.rotary_dim < made.after.shape[-1],
    )
    assert relative_error(made.expected, made.after) > 0.5
    assert relative_error(made.expected, made.turned_back()) <= 1e-6


def test_the_factor_of_yarn_stays_on_the_key() -> None:
    # A cache cannot tell it from the key itself; what it reads then has it once, as the model's own key.
    made = made_keys("yarn", 0)
    factor = 0.1 * math.log(ROPE["yarn"]["factor"]) + 1  # arXiv 2309.00071, eq. 22
    assert factor == pytest.approx(made.factor) and factor > 1.2
    assert relative_error(made.before * factor, made.turned_back()) <= 1e-6


@pytest.mark.parametrize("start", [1000, 8000, 10**6])
@pytest.mark.parametrize("name", ["default", "partial", "interleaved", "interleaved-partial"])
def test_turning_back_is_exact_far_out_where_the_models_angles_are(name: str, start: int) -> None:
    partial = {"partial_rotary_factor": 0.5} if "partial" in name else {}
    made = made_keys(name, start, rope_parameters={**POWERS_OF_TWO, **partial})
    assert all(math.log2(frequency).is_integer() for frequency in made.rotary.inv_freq)
    assert relative_error(made.expected, made.after) > 0.5
    assert relative_error(made.expected, made.turned_back()) <= 1e-6


@pytest.mark.parametrize("start", [0, 1000, 10**5])
@pytest.mark.parametrize("name", MADE)
def test_reading_gives_the_models_own_keys(name: str, start: int) -> None:
    """Also where the models' angles are rounded, and beyond the context, where some change."""
    made = made_keys(name, start)
    back = made.turned_back()
    assert relative_error(made.after, made.rotary.rotate(back, made.positions)) <= 1e-6
    assert torch.allclose(back.norm(dim=-1), made.after.norm(dim=-1), rtol=1e-6)
    if name == "dynamic" and start > 8192:
        assert relative_error(made.before, back) > 0.1, "its frequencies follow the length of the text"
