"""The model and tokenizer of an evaluation, wherever the model is to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..models import pretrained
from .model_options import ModelOptions
from .sharding import Shard
from .text_files import check_tokenizable

__all__ = ["Subject", "encode", "load_config", "load_subject", "load_tokenizer", "prefix_ids"]


@dataclass(frozen=True)
class Subject:
    """What is evaluated.

    Args:
        model (`PreTrainedModel`): In evaluation mode, on its device or devices.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        shard (`Shard`): The part of this process.
    """

    model: Any
    tokenizer: Any
    shard: Shard

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @property
    def dtype(self) -> str:
        """The dtype that its weights are in, by name: never `"auto"`."""
        return str(self.model.dtype).removeprefix("torch.")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens and without a limit of length."""
        return encode(self.tokenizer, text)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text, without special tokens and without a limit of length.

    Raises:
        ValueError: If the text is too long for the memory of the machine, or has what is no character.
    """
    check_tokenizable(text)
    ids: Sequence[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return list(ids)


def prefix_ids(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer puts in front of every text: many models go astray without theirs.

    One has none, most have one (the beginning of the text), some have two (GLM).
    """
    plain, whole = encode(tokenizer, "a"), list(tokenizer("a", verbose=False)["input_ids"])
    starts = [start for start in range(len(whole)) if whole[start : start + len(plain)] == plain]
    return whole[: starts[0]] if starts else []


def load_config(options: ModelOptions) -> Any:
    """Load the configuration of the model alone, for what can be checked without the model.

    Raises:
        OSError: If the model cannot be found.
        ValueError: If it cannot be read, or there is no such `attn_implementation`.
    """
    pretrained.check_attention(options.attn_implementation)
    return pretrained.load_config(options.model, **_source(options))


def load_tokenizer(options: ModelOptions) -> Any:
    """Load the tokenizer alone, for what can be checked without the model.

    Raises:
        OSError: If the model cannot be found.
        ValueError: If it cannot be read.
    """
    return pretrained.load_tokenizer(options.model, **_source(options))


def load_subject(options: ModelOptions, tokenizer: Any = None) -> Subject:
    """Load the model and its tokenizer.

    Args:
        options (`ModelOptions`): Which model, and where it runs: `device_map` spreads it over the devices of
            one process, `tp_plan` over the processes; otherwise every process holds a whole one.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): If it is loaded already.

    Raises:
        OSError: If the model cannot be found.
        ValueError: If it cannot be loaded as asked.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    placement: dict[str, Any] = {}
    if options.tp_plan is not None:
        placement["tp_plan"] = options.tp_plan
    elif options.device_map is not None:
        placement["device_map"] = options.device_map
    if options.attn_implementation is not None:
        placement["attn_implementation"] = options.attn_implementation
    if tokenizer is None:
        tokenizer = load_tokenizer(options)
    model: Any = pretrained.load_model(
        options.model, load_config(options), dtype=options.torch_dtype, **_source(options), **placement
    )
    # A tensor parallel model has made the process group by now, which the state then finds.
    shard = Shard.of_this_process(is_tensor_parallel=options.tp_plan is not None)
    if options.tp_plan is None and options.device_map is None:
        model = model.to(shard.device)
    return Subject(model.eval(), tokenizer, shard)


def _source(options: ModelOptions) -> dict[str, Any]:
    return {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
