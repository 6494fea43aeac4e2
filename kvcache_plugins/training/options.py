"""Options of a training beside transformers' own. Nothing heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..runs.cache_words import EXAMPLE, read_cache_configs
from ..runs.options import DTYPES, check_choice, check_count, check_filled, check_model, check_unused

__all__ = ["HEADS_DTYPES", "OF_A_DATA_SET", "OF_SYNTHETIC", "SYNTHETIC", "LocretOptions"]

SYNTHETIC = "synthetic"
OF_SYNTHETIC = ("sequence_length", "text_files")
"""Options of texts that are made up."""
OF_A_DATA_SET = ("max_length", "num_examples")
"""Options of any other `dataset`."""
HEADS_DTYPES = ("bf16", "fp16", "fp32")
_LEAST = {
    "hidden_dim": 1,
    "max_length": 2,  # a token of the prompt and one of the answer
    "max_train_length": 1,
    "num_examples": 1,
    "budget": 1,
    "chunk_size": 1,
    "stabilizer_length": 0,
    "local_length": 0,
}
"""Of the counts that may be left out."""
_WIDEST = 2**16
"""Of a head: 64 times the width of the paper's, whose two matrices no machine should be asked for in vain."""


@dataclass
class LocretOptions:
    """What a training of retaining heads is told.

    Args:
        model (`str`): Path or hub id of the model the heads are for.
        dataset (`str`): `"synthetic"`, a `.jsonl` file, or a hub id, with `:NAME` where it has several
            configurations; its split `train`.
        text_files (`list[str]`, *optional*): UTF-8 texts of the synthetic tasks; the language reference that
            comes with Python by default.
        hidden_dim (`int`, *optional*): Width of a head.
        sequence_length (`int`): Tokens of the longest synthetic prompt.
        max_length (`int`, *optional*): Tokens of prompt and answer of a data set: longer prompts lose their
            middle. The model's positions by default.
        max_train_length (`int`, *optional*): Tokens of a prompt that are trained on, its first.
        num_examples (`int`, *optional*): Examples of a data set that are used, after shuffling.
        eval_examples (`int`): Examples that the recall is measured on and that no step sees.
        heads_dtype (`str`): In which the finished heads are saved: one of `HEADS_DTYPES`.
        dtype (`str`): Of the model: `"auto"` (the checkpoint's) or one of `DTYPES`.
        revision (`str`, *optional*): Of the model on the hub.
        trust_remote_code (`bool`): Run the code that comes with the model.
        attn_implementation (`str`, *optional*): As for `from_pretrained`.
        device_map (`str`, *optional*): `"auto"` spreads the model over the devices of one process.
        budget (`int`, *optional*): Recommended in the heads' configuration, with the next three.
        chunk_size (`int`, *optional*): Recommended.
        stabilizer_length (`int`, *optional*): Recommended.
        local_length (`int`, *optional*): Recommended.
        cache_config (`list[dict]`, *optional*): Caches through which the examples that no step sees are read
            and answered in the end, beside the dense one. A `locret` without `heads` has the trained ones.
        no_plots (`bool`): Draw no picture.

    Raises:
        ValueError: If an option is missing, out of range or names a file that is not there.
    """

    model: str | None = field(
        default=None, metadata={"help": "path or hub id of the model the heads are for"}
    )
    dataset: str = field(
        default=SYNTHETIC,
        metadata={
            "help": "synthetic, a hub id with :NAME for its configuration, or a .jsonl file; rows are "
            '{"prompt", "answer"}, {"instruction", "output"}, {"question", "answer"}, {"prompt", '
            '"completion"}, {"messages"} or {"conversations"}'
        },
    )
    text_files: list[str] | None = field(
        default=None,
        metadata={"help": "UTF-8 texts of the synthetic tasks; Python's language reference by default"},
    )
    hidden_dim: int | None = field(
        default=None, metadata={"help": "width of a head; a quarter of the model's, 128 to 1024, by default"}
    )
    sequence_length: int = field(default=768, metadata={"help": "tokens of the longest synthetic prompt"})
    max_length: int | None = field(
        default=None,
        metadata={
            "help": "tokens of prompt and answer of a data set: longer prompts lose their middle; "
            "the model's positions by default"
        },
    )
    max_train_length: int | None = field(
        default=None, metadata={"help": "tokens of a prompt that are trained on, its first; all by default"}
    )
    num_examples: int | None = field(
        default=None, metadata={"help": "examples of a data set to use, after shuffling; all by default"}
    )
    eval_examples: int = field(default=24, metadata={"help": "examples to measure the recall on"})
    heads_dtype: str = field(
        default="bf16", metadata={"help": f"of the finished heads: {', '.join(HEADS_DTYPES)}"}
    )
    dtype: str = field(default="auto", metadata={"help": f"of the model: auto or one of {', '.join(DTYPES)}"})
    revision: str | None = field(default=None, metadata={"help": "of the model on the hub"})
    trust_remote_code: bool = field(default=False, metadata={"help": "run the model's own code"})
    attn_implementation: str | None = field(default=None, metadata={"help": "as for from_pretrained"})
    device_map: str | None = field(
        default=None, metadata={"help": "auto: spread the model over the devices of one process"}
    )
    budget: int | None = field(default=None, metadata={"help": "recommended in the heads' configuration"})
    chunk_size: int | None = field(default=None, metadata={"help": "recommended in the heads' configuration"})
    stabilizer_length: int | None = field(
        default=None, metadata={"help": "recommended in the heads' configuration"}
    )
    local_length: int | None = field(
        default=None, metadata={"help": "recommended in the heads' configuration"}
    )
    cache_config: list[dict[str, Any]] | None = field(
        default=None,
        metadata={
            "help": f"cache options as JSON, such as '{EXAMPLE}'; may be repeated: caches through which the "
            "evaluation examples are answered in the end, beside the dense one; a locret without heads has "
            "the trained ones; none by default"
        },
    )
    no_plots: bool = field(default=False, metadata={"help": "draw no picture"})

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("--model must name the model the heads are for, a path or a hub id.")
        check_model(self.model, self.revision)
        check_choice("dtype", self.dtype, ["auto", *DTYPES])
        check_choice("heads_dtype", self.heads_dtype, HEADS_DTYPES)
        check_count("sequence_length", self.sequence_length, least=64)
        check_count("eval_examples", self.eval_examples)
        for name, least in _LEAST.items():
            if getattr(self, name) is not None:
                most = _WIDEST if name == "hidden_dim" else None
                check_count(name, getattr(self, name), least=least, most=most)
        if isinstance(self.text_files, str) or (self.text_files is not None and not self.text_files):
            raise ValueError(f"--text_files must be one or more files, got {self.text_files!r}.")
        for name in ("revision", "attn_implementation", "device_map", "text_files"):
            check_filled(name, getattr(self, name))
        if self.cache_config is not None:
            self.cache_config = read_cache_configs(self.cache_config)
        self._check_sources()
        if self.dataset == SYNTHETIC:
            check_unused(self, OF_A_DATA_SET, f"is not for --dataset {SYNTHETIC}")
        else:
            check_unused(self, ("sequence_length",), f"is for --dataset {SYNTHETIC}, not {self.dataset!r}")

    def _check_sources(self) -> None:
        dataset: object = self.dataset
        if not isinstance(dataset, str) or not dataset:
            raise ValueError(f"--dataset must be {SYNTHETIC!r}, a .jsonl file or a hub id, got {dataset!r}.")
        if self.text_files is not None and dataset != SYNTHETIC:
            raise ValueError(
                f"--text_files are for --dataset {SYNTHETIC}, got --dataset {dataset!r} as well."
            )
        is_file = Path(dataset).is_file()
        if dataset.endswith(".jsonl"):
            if not is_file:
                raise ValueError(f"--dataset names a file that is not there: {dataset!r}.")
        elif dataset != SYNTHETIC and (is_file or ("/" not in dataset and not Path(dataset).exists())):
            raise ValueError(
                f"--dataset must be {SYNTHETIC!r}, a .jsonl file or a hub id such as "
                f"'Yukang/LongAlpaca-12k', got {dataset!r}."
            )
        for name in self.text_files or ():
            if not Path(name).is_file():
                raise ValueError(f"--text_files names a file that is not there: {name!r}.")

    def defaults(self) -> dict[str, int]:
        """Options of the cache to recommend, those that were given."""
        names = ("budget", "chunk_size", "stabilizer_length", "local_length")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
