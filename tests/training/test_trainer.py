"""The loop: what it learns, what it saves, and that no way of running it changes the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import EvalPrediction

from kvcache_plugins.retaining.configuration import RetainingHeadsConfig
from kvcache_plugins.retaining.heads import RetainingHeads
from kvcache_plugins.retaining.losses import layer_loss
from kvcache_plugins.testing import tiny_model
from kvcache_plugins.training.arguments import LocretTrainingArguments
from kvcache_plugins.training.card import heads_card
from kvcache_plugins.training.examples import Collator, Example
from kvcache_plugins.training.tables import recall_table
from kvcache_plugins.training.trainer import LocretTrainer, recall_metrics


class Texts(Dataset[Example]):
    """Random tokens, some of which return in the answer."""

    def __init__(self, size: int = 64, seed: int = 0, length: int = 40) -> None:
        self.size, self.seed, self.length = size, seed, length

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:
        draw = torch.Generator().manual_seed(1000 * self.seed + index)
        prompt = torch.randint(3, 100, (self.length + index % 5,), generator=draw).tolist()
        return Example(prompt, prompt[5:13])


def build(tmp_path: Path, model: Any = None, **options: Any) -> LocretTrainer:
    model = tiny_model("llama") if model is None else model
    torch.manual_seed(0)
    heads = RetainingHeads(RetainingHeadsConfig.from_model(model, hidden_dim=32))
    defaults = {
        "max_steps": 6,
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
    }
    args = LocretTrainingArguments(output_dir=str(tmp_path), **(defaults | options))
    data = {"train_dataset": Texts(), "eval_dataset": Texts(8, seed=1), "data_collator": Collator()}
    return LocretTrainer(heads, model, args, **data)


def weights(trainer: LocretTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def gradients(trainer: LocretTrainer, *texts: Example) -> dict[str, torch.Tensor]:
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    trainer.training_step(trainer.model, Collator()(texts))
    return {name: weight.grad.clone() for name, weight in trainer.model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_gradients_layer_by_layer_are_those_of_the_joint_loss(family: str, tmp_path: Path) -> None:
    model, texts = tiny_model(family), [Texts()[i] for i in range(2)]
    joint, by_layer = (build(tmp_path, model, layerwise_backward=flag) for flag in (False, True))
    found = gradients(by_layer, *texts)
    for name, gradient in gradients(joint, *texts).items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("layerwise_backward", [False, True])
def test_accumulated_steps_are_a_larger_batch(layerwise_backward: bool, tmp_path: Path) -> None:
    options = {"layerwise_backward": layerwise_backward, "max_steps": 3}
    large = build(tmp_path, per_device_train_batch_size=4, **options)
    small = build(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, **options)
    for trainer in (large, small):
        trainer.train()
    torch.testing.assert_close(weights(small), weights(large), rtol=1e-4, atol=1e-6)
    losses = [trainer.state.log_history[0]["loss"] for trainer in (large, small)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_recall_of_batches_that_are_not_put_together() -> None:
    """As `--eval_do_concat_batches false` leaves them, the last one smaller."""
    found, norms = torch.rand(3, 3).numpy(), torch.rand(3, 2).numpy()
    heads, losses = found[:, :2], found[:, 2]
    whole = recall_metrics(EvalPrediction(found, norms))
    parts = EvalPrediction([found[:2], found[2:]], [norms[:2], norms[2:]])  # type: ignore[arg-type]
    assert recall_metrics(parts) == whole and whole["loss"] == pytest.approx(losses.mean())
    assert whole["recall_layer_1"] == pytest.approx(heads[:, 1].mean())
    assert whole["knorm_recall"] == pytest.approx(norms.mean())
    assert whole["knorm_recall_layer_0"] == pytest.approx(norms[:, 0].mean())


def test_recall_rises_and_the_base_stays(tmp_path: Path) -> None:
    model = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = build(tmp_path, model, max_steps=150, learning_rate=1e-2, warmup_steps=5)
    untrained = trainer.evaluate()
    trainer.train()
    trained = trainer.evaluate()
    assert trained["eval_loss"] < 0.5 * untrained["eval_loss"]
    assert trained["eval_recall"] > max(untrained["eval_recall"], untrained["eval_knorm_recall"]) + 0.1
    layers = [trained[f"eval_recall_layer_{layer}"] for layer in range(2)]
    assert sum(layers) / 2 == pytest.approx(trained["eval_recall"])
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_base_is_read_without_dropout(tmp_path: Path) -> None:
    model = tiny_model("llama").train()
    trainer = build(tmp_path, model)
    trainer.train()
    assert not any(module.training for module in model.modules())


def test_saved_reloaded_and_resumed(tmp_path: Path) -> None:
    whole = build(tmp_path / "whole", max_steps=6)
    whole.train()
    part = build(tmp_path / "part", max_steps=6, save_strategy="steps", save_steps=3, save_total_limit=None)
    part.train()
    checkpoint = tmp_path / "part" / "checkpoint-3"
    names = load_file(checkpoint / "model.safetensors").keys()
    assert names == whole.model.state_dict().keys(), "heads alone are saved"
    assert json.loads((checkpoint / "config.json").read_text())["model_type"] == "locret_heads"
    resumed = build(tmp_path / "resumed", max_steps=6)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
    resumed.save_model(str(tmp_path / "saved"))
    again = RetainingHeads.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(dict(again.state_dict()), weights(whole), rtol=0, atol=0)


def test_components_of_the_gradient_are_clipped(tmp_path: Path) -> None:
    steps = {}
    for limit in (0.0, 1e-3):
        plain = {"optim": "sgd", "learning_rate": 1.0, "warmup_steps": 0, "weight_decay": 0.0}
        trainer = build(tmp_path, clip_value=limit, max_steps=1, **plain)
        before = weights(trainer)
        trainer.train()
        after = weights(trainer)
        steps[limit] = max((after[name] - before[name]).abs().max().item() for name in before)
    assert steps[0.0] > 2e-3 and steps[1e-3] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("layerwise_backward", [False, True])
def test_bf16_autocast_keeps_heads_in_fp32(layerwise_backward: bool, tmp_path: Path) -> None:
    found = {}
    for bf16 in (False, True):
        trainer = build(tmp_path, bf16=bf16, layerwise_backward=layerwise_backward, max_steps=3)
        trainer.train()
        found[bf16] = weights(trainer)["layers.0.fc1.weight"]
    assert found[True].dtype == torch.float32 and not torch.equal(found[True], found[False])
    torch.testing.assert_close(found[True], found[False], rtol=0, atol=2e-3)


def test_heads_of_another_model(tmp_path: Path) -> None:
    heads = RetainingHeads(RetainingHeadsConfig.from_model(tiny_model("llama", num_hidden_layers=3)))
    args = LocretTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match=r"num_hidden_layers=3.*num_hidden_layers=2"):
        LocretTrainer(heads, tiny_model("llama"), args)


@pytest.mark.parametrize("option", ["fsdp", "deepspeed"])
def test_gradients_layer_by_layer_are_not_for_weights_in_parts(option: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    heads = RetainingHeads(RetainingHeadsConfig.from_model(model, hidden_dim=8))
    args = LocretTrainingArguments(output_dir=str(tmp_path), use_cpu=True, layerwise_backward=True)
    setattr(args, option, "given")
    with pytest.raises(ValueError, match="--layerwise_backward is for one process or DDP"):
        LocretTrainer(heads, model, args)


@pytest.mark.parametrize("load_best_model_at_end", [False, True])
def test_what_is_restored_is_the_checkpoint_or_the_best(load_best_model_at_end: bool, tmp_path: Path) -> None:
    """The best by the highest loss, which is that of the first."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "save_total_limit": None}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 1e-2, "warmup_steps": 0}
    options |= {"metric_for_best_model": "loss", "greater_is_better": True}
    build(tmp_path, **options).train()
    restored = build(tmp_path, **options, load_best_model_at_end=load_best_model_at_end)
    restored.restore(str(tmp_path / "checkpoint-4"))
    assert restored.state.global_step == 4 and restored.state.best_global_step == 2
    expected = load_file(tmp_path / f"checkpoint-{2 if load_best_model_at_end else 4}" / "model.safetensors")
    torch.testing.assert_close(weights(restored), expected, rtol=0, atol=0)


def test_components_alone_are_clipped_by_default(tmp_path: Path) -> None:
    args = LocretTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert (args.clip_value, args.max_grad_norm) == (0.5, 0.0)


def test_a_negative_clip_value(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--clip_value must be at least 0"):
        LocretTrainingArguments(output_dir=str(tmp_path), clip_value=-1.0)


def test_a_process_trains_on_one_gpu(tmp_path: Path) -> None:
    """Where there are several, `Trainer` would spread copies of the heads over them."""
    args = build(tmp_path).args
    args._n_gpu = 4
    assert (args.n_gpu, args.train_batch_size) == (1, 2)
    args._n_gpu = 0
    assert args.n_gpu == 0


def test_the_mean_recall_is_of_the_layers_that_evict(tmp_path: Path) -> None:
    """No cache asks the heads of a sliding layer for a score, however good they are."""
    trainer = build(tmp_path, tiny_model("gemma2", num_hidden_layers=4))
    assert trainer.evicting_layers == [1, 3]
    metrics = trainer.evaluate()
    by_layer = [metrics[f"eval_recall_layer_{layer}"] for layer in range(4)]
    recall = metrics["eval_recall"]
    assert recall == pytest.approx((by_layer[1] + by_layer[3]) / 2) != pytest.approx(sum(by_layer) / 4)
    row = {"recall": recall, "recall_layers": trainer.evicting_layers, "recall_by_layer": by_layer}
    recalls = dict.fromkeys(("trained", "untrained", "knorm"), row)
    config = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    facts = config | {"input_dim": 128, "hidden_dim": 32, "hidden_act": "silu", "parameters": 1, "data": "d"}
    facts |= {"steps": 1, "batch": 1, "learning_rate": 1.0, "seconds": 1, "eval_examples": 8}
    defaults = {"budget": 64, "chunk_size": 48, "stabilizer_length": 8, "local_length": 7}
    card = heads_card(facts | {"defaults": defaults}, recalls)
    assert f"\n| all that evict | {recall:.3f} |" in card
    table = recall_table({"results": [{"label": "locret"} | row]})
    assert table.columns[1].header == "all that evict"


def test_the_loss_of_an_evaluation_is_of_the_layers_that_evict(tmp_path: Path) -> None:
    """By it checkpoints are compared: heads that no cache asks must not decide which one is best."""
    trainer = build(tmp_path, tiny_model("gemma2", num_hidden_layers=4), per_device_eval_batch_size=8)
    before = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        trainer.model.layers[0].fc2.weight.mul_(10)
    assert trainer.evaluate()["eval_loss"] == before
    batch = trainer._prepare_inputs(next(iter(trainer.get_eval_dataloader())))
    with torch.no_grad():
        _, (output, layers) = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    terms = [layer_loss(output.scores[i], layers[i].labels, layers[i].mask, 2) for i in (1, 3)]
    assert before == pytest.approx(float(sum(regression + step for regression, step in terms)), rel=1e-5)
    with torch.no_grad():
        trainer.model.layers[1].fc2.weight.mul_(10)
    assert trainer.evaluate()["eval_loss"] > 1.2 * before
