"""What small random models of text and images, or sounds, are made of, and prompts that show them some.

The towers are as small as the text models of `kvcache_plugins.testing.models`; features are noise. Tokens
that stand for an image have an id of their own, and the second row is padded on the left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PreTrainedModel

from kvcache_plugins.testing.models import _COMMON, _initialize

LENGTH, PADS = 60, 7
START, STOP, IMAGE = 3, 4, 5
TEXT: dict[str, Any] = {**_COMMON, "max_position_embeddings": 4096}
TOWER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Subject:
    """A model and what it is asked.

    Args:
        model (`PreTrainedModel`): In evaluation mode.
        prompt (`dict`): Arguments of `generate()`.
        features (`str`): Which of them is the image, or the sound.
    """

    model: PreTrainedModel
    prompt: dict[str, Tensor]
    features: str = "pixel_values"

    def with_other_features(self) -> dict[str, Tensor]:
        """The prompt with another image."""
        return {**self.prompt, self.features: -self.prompt[self.features]}

    def text_alone(self) -> dict[str, Tensor]:
        """The prompt with words in the place of its image."""
        tokens = self.prompt["input_ids"]
        words = torch.where((tokens > 0) & (tokens < 20), 21, tokens)
        return {"input_ids": words, "attention_mask": self.prompt["attention_mask"]}


def make(config: Any) -> PreTrainedModel:
    """The model of a configuration, with weights of our own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    _initialize(model, 1)
    assert model.generation_config is not None
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


def noise(*shape: int) -> Tensor:
    """The same numbers every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def prompt_of(
    count: int, start: int | None = None, stop: int | None = None, **features: Tensor
) -> dict[str, Tensor]:
    """Two rows, each with `count` tokens of an image after 8 of text, or `start`, and before `stop`."""
    tokens = torch.randint(20, 100, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens[1, :PADS] = 0
    for row, pads in enumerate((0, PADS)):
        tokens[row, pads + 8 : pads + 8 + count] = IMAGE
        if start is not None:
            tokens[row, pads + 7] = start
        if stop is not None:
            tokens[row, pads + 8 + count] = stop
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), **features}


def join(name: str, text: str, tower: str, key: str = "image_token_id", **config: Any) -> PreTrainedModel:
    """A model put together of a text model and a tower that have families of their own."""
    return make(
        CONFIG_MAPPING[name](
            text_config={**TEXT, "model_type": text, **config.pop("text_config", {})},
            vision_config={**TOWER, "model_type": tower, **config.pop("vision_config", {})},
            **{key: IMAGE},
            **config,
        )
    )
