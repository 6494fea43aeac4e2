"""Retaining heads: their formula, their loss against the published constants, saving, sharing, checking."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvcache_plugins.errors import ArtifactError
from kvcache_plugins.retaining.configuration import (
    DEFAULT_BUDGET,
    RetainingHeadsConfig,
    default_hidden_dim,
    model_shape,
)
from kvcache_plugins.retaining.heads import RetainingHeads
from kvcache_plugins.retaining.importing import import_heads
from kvcache_plugins.retaining.loading import load_heads
from kvcache_plugins.retaining.losses import top_recall
from kvcache_plugins.testing import tiny_model


def small_heads(**options: Any) -> RetainingHeads:
    fields = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    return RetainingHeads(RetainingHeadsConfig(**(fields | {"hidden_dim": 16} | options)))


# -- formula


def test_a_score_is_two_matrices_with_an_activation_between() -> None:
    heads = small_heads()
    features = torch.randn(2, 5, 64)
    layer = heads.layers[1]
    hidden = features @ layer.fc1.weight.T
    wanted = (hidden * torch.sigmoid(hidden)) @ layer.fc2.weight.T
    assert [name for name, _ in layer.named_parameters()] == ["fc1.weight", "fc2.weight"]
    torch.testing.assert_close(heads.score(1, features), wanted.transpose(1, 2))


def test_scores_are_fp32_without_gradient_whatever_goes_in() -> None:
    heads = small_heads().to(torch.bfloat16)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        scores = heads.score(0, torch.randn(1, 300, 64, dtype=dtype, requires_grad=True))
        assert scores.dtype == torch.float32 and not scores.requires_grad and scores.shape == (1, 2, 300)
    assert scores.unique().numel() > 500  # bf16 itself would tie many of them


def test_scores_do_not_depend_on_other_tokens() -> None:
    heads = small_heads()
    features = torch.randn(1, 9, 64)
    parts = torch.cat([heads.score(2, part) for part in features.split(4, dim=1)], dim=-1)
    torch.testing.assert_close(parts, heads.score(2, features))


def test_autocast_leaves_scores_alone() -> None:
    heads, features = small_heads(), torch.randn(1, 9, 64)
    with torch.autocast("cpu", torch.bfloat16):
        inside = heads.score(0, features)
    assert torch.equal(inside, heads.score(0, features))


@pytest.mark.cuda
def test_a_layer_is_copied_to_where_the_features_are() -> None:
    heads, features = small_heads(), torch.randn(1, 9, 64)
    scores = heads.score(0, features.cuda())
    assert scores.is_cuda and heads.layers[0].fc1.weight.device.type == "cpu"
    torch.testing.assert_close(scores.cpu(), heads.score(0, features), rtol=1e-3, atol=1e-3)


def test_a_copy_elsewhere_is_made_once_and_anew_when_weights_change() -> None:
    heads, elsewhere = small_heads(), torch.device("meta")
    copied = heads._layer_on(1, elsewhere)
    assert heads._layer_on(1, elsewhere) is copied is not heads._layer_on(0, elsewhere)
    with torch.no_grad():
        heads.layers[1].fc2.weight.mul_(2)
    assert heads._layer_on(1, elsewhere) is not copied


def test_a_wrong_layer_or_width() -> None:
    heads = small_heads()
    with pytest.raises(ValueError, match=r"layer_idx must be in \[0, 3\), got 3"):
        heads.score(3, torch.randn(1, 2, 64))
    with pytest.raises(ValueError, match=r"\(B, n, 64\).* got \(1, 2, 48\)"):
        heads.score(0, torch.randn(1, 2, 48))


# -- loss


def published_loss(scores: list[torch.Tensor], labels: list[torch.Tensor]) -> float:
    """The authors' formula, one row, one number after the other."""
    regression, smoothness, count = 0.0, 0.0, 0
    for score, label in zip(scores, labels, strict=True):
        steps = []
        for s, wanted in zip(score.tolist(), label.tolist(), strict=True):
            for a, b in zip(s, wanted, strict=True):
                distance = abs(a - b)
                regression += 0.5 * distance**2 if distance < 1 else distance - 0.5
                count += 1
            steps += [(s[i + 1] - s[i]) ** 2 for i in range(len(s) - 1)]
        smoothness += sum(steps) / len(steps)
    return regression / count + 0.0025 * smoothness


def test_the_loss_is_the_published_one() -> None:
    heads = small_heads()
    features = [torch.randn(1, 11, 64) for _ in range(3)]
    labels = [3 * torch.randn(1, 2, 11) for _ in range(3)]
    output = heads(features, labels)
    scores = [heads.score(i, x)[0] for i, x in enumerate(features)]
    assert output.loss.item() == pytest.approx(published_loss(scores, [x[0] for x in labels]), rel=1e-5)
    assert output.loss.item() == pytest.approx(output.regression.item() + output.smoothness.item())


def test_padding_does_not_count_and_rows_count_alike() -> None:
    heads = small_heads()
    lengths = (11, 4)
    features = [torch.randn(2, 11, 64) for _ in range(3)]
    labels = [3 * torch.randn(2, 2, 11) for _ in range(3)]
    mask = torch.arange(11) < torch.tensor(lengths)[:, None]
    rows = [
        heads([x[i : i + 1, :n] for x in features], [x[i : i + 1, :, :n] for x in labels]).loss
        for i, n in enumerate(lengths)
    ]
    for x in features:
        x[1, 4:] = 1e4
    for x in labels:
        x[1, :, 4:] = -math.inf
    loss = heads(features, labels, mask).loss
    torch.testing.assert_close(loss, torch.stack(rows).mean())
    loss.backward()
    assert all(torch.isfinite(weight.grad).all() for weight in heads.parameters())


def test_layers_must_be_complete() -> None:
    with pytest.raises(ValueError, match="of 3 layers, got 1 and 1"):
        small_heads()([torch.randn(1, 2, 64)], [torch.randn(1, 2, 2)])


def test_recall_of_the_top_tenth() -> None:
    labels = torch.arange(40.0).expand(1, 2, 40)
    scores = labels.clone()
    scores[0, 1] = -scores[0, 1]  # one head right, the other all wrong
    assert top_recall(scores, labels).tolist() == [0.5]
    scores[0, 0, 39] = -1.0
    assert top_recall(scores, labels).tolist() == [0.375]
    for length in (20, 5):  # of a row of five, one
        assert top_recall(scores, labels, (torch.arange(40) < length)[None]).tolist() == [0.5]


def test_a_row_without_tokens_has_no_recall() -> None:
    mask = torch.tensor([[True] * 10, [False] * 10])
    first, second = top_recall(torch.randn(2, 2, 10), torch.randn(2, 2, 10), mask).tolist()
    assert 0 <= first <= 1 and math.isnan(second)


# -- configuration


def test_configuration_of_a_model() -> None:
    config = RetainingHeadsConfig.from_model(tiny_model("qwen3"), hidden_dim=24, max_train_length=99)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)
    assert (config.input_dim, config.hidden_dim, config.max_train_length) == (256, 24, 99)
    assert (config.hidden_act, config.label, config.label_scale) == ("silu", "max_qk", "rsqrt_d")
    assert [default_hidden_dim(size) for size in (256, 1024, 4096, 8192)] == [128, 256, 1024, 1024]


@pytest.mark.parametrize(
    ("family", "activation"), [("gemma", "gelu_pytorch_tanh"), ("gpt2", "gelu_new"), ("gpt_neox", "gelu")]
)
def test_heads_have_the_activation_of_their_model(family: str, activation: str) -> None:
    config = RetainingHeadsConfig.from_model(tiny_model(family))
    assert config.hidden_act == activation and config.defaults == DEFAULT_BUDGET


def test_keys_and_values_of_two_widths() -> None:
    with pytest.raises(ValueError, match="keys and values of one width, got 32 and 16 channels"):
        RetainingHeadsConfig.from_model(tiny_model("deepseek_v3"))


def test_models_that_loop_are_refused() -> None:
    """As their configurations are described, whether or not this release of transformers has them."""
    shape = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    loops = {"n_input_layers": 1, "n_recurrent_layers": 2, "n_recurrent_loops": 3}
    config: Any = SimpleNamespace(model_type="dory", **shape, head_dim=16, **loops)
    with pytest.raises(ValueError, match="pass through every layer once, and SimpleNamespace passes"):
        model_shape(config)
    config.n_recurrent_loops = 1
    assert model_shape(config) == {n: s for n, s in shape.items() if n != "hidden_size"} | {"head_dim": 16}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_dim", 0, ">= 1, got 0"),
        ("inputs", "hidden", "'qkv_proj', got 'hidden'"),
        ("label", "x", "max_qk"),
        ("hidden_act", "swish7", "got 'swish7'"),
    ],
)
def test_a_wrong_configuration(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"RetainingHeadsConfig\.{field} must be .*{message}"):
        RetainingHeadsConfig(**{field: value})


def test_heads_of_another_model() -> None:
    model = tiny_model("llama")
    heads = RetainingHeads(RetainingHeadsConfig.from_model(model, hidden_dim=8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heads.check_model(model)
        heads.check_model(model.config)
    other = tiny_model("llama", num_key_value_heads=4)
    with pytest.raises(ValueError, match=r"num_key_value_heads=2.*; LlamaConfig has .*num_key_value_heads=4"):
        heads.check_model(other)
    heads.config.base_model_name_or_path = "org/Some-Model"
    for name, is_same in (("elsewhere/some-model", True), ("org/Other", False)):
        model.config._name_or_path = name
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            heads.check_model(model)
        assert is_same == (not caught)
    assert "trained for 'org/Some-Model' and are used with 'org/Other'" in str(caught[0].message)


# -- loading


def test_saved_heads_are_the_same_and_loaded_once(tmp_path: Path) -> None:
    heads, features = small_heads(), torch.randn(1, 9, 64)
    heads.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    found = load_heads(str(tmp_path))
    assert load_heads(str(tmp_path / ".." / tmp_path.name)) is found
    assert torch.equal(found.score(1, features), heads.score(1, features))
    assert torch.equal(RetainingHeads.from_pretrained(tmp_path).score(1, features), heads.score(1, features))
    assert not found.training and not any(weight.requires_grad for weight in found.parameters())


def test_heads_are_read_where_they_can_be_and_draw_nothing(tmp_path: Path) -> None:
    small_heads().save_pretrained(tmp_path)
    before = torch.get_rng_state()  # that a user has seeded, and samples with
    with torch.device("meta"):
        heads = load_heads(str(tmp_path))
    assert {parameter.device.type for parameter in heads.parameters()} == {"cpu"}
    assert torch.equal(torch.get_rng_state(), before)


def test_heads_that_were_written_anew_are_read_again(tmp_path: Path) -> None:
    small_heads().save_pretrained(tmp_path)
    found = load_heads(str(tmp_path))
    small_heads(hidden_dim=4).to(torch.bfloat16).save_pretrained(tmp_path)
    again = load_heads(str(tmp_path))
    assert again is not found and again.config.hidden_dim == 4 and again.dtype == torch.bfloat16


def test_what_is_no_heads(tmp_path: Path) -> None:
    cases = {
        "missing": (None, "neither a directory nor a hub repository"),
        "empty": ({}, "there is no config.json"),
        "model": ({"config.json": '{"model_type": "llama"}'}, "got model_type 'llama'"),
        "weights": ({"config.json": '{"model_type": "locret_heads"}'}, "model.safetensors cannot be read"),
        "damaged": ({"config.json": "{"}, "cannot be read"),
    }
    for name, (files, message) in cases.items():
        if files is not None:
            (tmp_path / name).mkdir()
            for file, text in files.items():
                (tmp_path / name / file).write_text(text)
        with pytest.raises(ArtifactError, match=message):
            load_heads(str(tmp_path / name))
    small_heads().save_pretrained(tmp_path / "lacking")
    tensors = {"layers.0.fc1.weight": torch.zeros(16, 64)}
    save_file(tensors, tmp_path / "lacking" / "model.safetensors")
    with pytest.raises(ArtifactError, match="Missing key"):
        load_heads(str(tmp_path / "lacking"))
    with pytest.raises(ArtifactError, match="heads must be the directory"):
        load_heads(None)  # type: ignore[arg-type]


# -- the authors' checkpoints


def official(heads: RetainingHeads) -> dict[str, torch.Tensor]:
    tensors = {
        f"model.layers.{i}.self_attn.{name}.weight": getattr(layer, name).weight.detach().clone()
        for i, layer in enumerate(heads.layers)
        for name in ("fc1", "fc2")
    }
    return tensors | {
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4),
        "lm_head.weight": torch.ones(2),
    }


@pytest.mark.parametrize("suffix", ["safetensors", "bin", "directory", "trainer"])
def test_heads_of_the_authors(tmp_path: Path, suffix: str) -> None:
    model = tiny_model("llama")
    heads = RetainingHeads(RetainingHeadsConfig.from_model(model, hidden_dim=24)).to(torch.bfloat16)
    source = tmp_path / f"heads.{suffix}"
    if suffix == "safetensors":
        save_file(official(heads), source)
    elif suffix == "bin":
        torch.save(official(heads), source)
    else:
        source.mkdir()
        if suffix == "directory":
            save_file(official(heads), source / "part.safetensors")
        else:
            torch.save(official(heads), source / "pytorch_model.bin")
        for state in ("training_args.bin", "rng_state_0.pth"):  # of the Trainer, and no weights
            torch.save(tmp_path, source / state)
    import_heads(str(source), model.config, tmp_path / "out")
    found = load_heads(str(tmp_path / "out"))
    found.check_model(model)
    features = torch.randn(1, 5, found.config.input_dim)
    assert found.config.hidden_dim == 24 and torch.equal(found.score(1, features), heads.score(1, features))


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    model = tiny_model("llama")
    heads = RetainingHeads(RetainingHeadsConfig.from_model(model, hidden_dim=24))
    tensors = official(heads)
    cases = {
        "none": ({"lm_head.weight": torch.ones(2)}, "holds no key such as"),
        "infinite": ({k: v / 0 for k, v in tensors.items()}, "not finite"),
        "part": (
            {k: v for k, v in tensors.items() if ".1." not in k},
            r"layers\.1\.fc1\.weight must be of shape",
        ),
        "wide": (
            {k: v[:, :20].clone() if v.dim() == 2 else v for k, v in tensors.items()},
            r"got \(24, 20\)",
        ),
    }
    for name, (given, message) in cases.items():
        save_file(given, tmp_path / f"{name}.safetensors")
        with pytest.raises(ArtifactError, match=message):
            import_heads(str(tmp_path / f"{name}.safetensors"), model.config, tmp_path / "out")
    assert not (tmp_path / "out").exists()
