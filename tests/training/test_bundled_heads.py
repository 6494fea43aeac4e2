"""The heads that come with the bundled model are what their card says, on text that nobody has trained on."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcache_plugins.retaining.loading import load_heads
from kvcache_plugins.retaining.losses import top_recall
from kvcache_plugins.runs.language_reference import UNSEEN_TOPICS
from kvcache_plugins.runs.results import read_results
from kvcache_plugins.training.examples import Collator
from kvcache_plugins.training.synthetic import SyntheticTasks
from kvcache_plugins.training.targets import Targets, observe_targets

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
HEADS = MODELS / "tiny-llama-books-locret"


def test_the_artifact_is_complete_and_small() -> None:
    names = sorted(path.name for path in HEADS.iterdir())
    assert names == ["README.md", "config.json", "model.safetensors", "results.json", "training.png"]
    assert (HEADS / "model.safetensors").stat().st_size < 1_500_000
    document = read_results(HEADS)
    recalls = {row["label"]: row["recall"] for row in document["results"]}
    assert recalls["locret"] > 2 * recalls["locret, untrained"] > 0
    assert recalls["locret"] > 5 * recalls["knorm"]
    assert f"| all | {recalls['locret']:.3f} |" in (HEADS / "README.md").read_text(encoding="utf-8")
    assert document["settings"]["text_files"] == ["pride_and_prejudice.txt"]


def test_recall_on_text_of_another_kind() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / "tiny-llama-books", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "tiny-llama-books")
    heads = load_heads(str(HEADS))
    heads.check_model(model)
    text = "\n\n".join(topics[name] for name in UNSEEN_TOPICS)
    examples = SyntheticTasks(text, tokenizer, sequence_length=512, size=4, seed=5)
    found: list[float] = []
    norms: list[float] = []

    def show(layer_idx: int, layer: Targets) -> None:
        found.append(
            top_recall(heads.score(layer_idx, layer.features), layer.labels, layer.mask).mean().item()
        )
        norms.append(top_recall(-layer.key_norms, layer.labels, layer.mask).mean().item())

    observe_targets(model.eval(), Collator(1)([examples[index] for index in range(4)]), show)
    mean = sum(found) / len(found)
    assert len(found) == 6 and mean > 0.2
    assert mean > 3 * sum(norms) / len(norms)
