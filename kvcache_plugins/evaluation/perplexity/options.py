"""Options of the perplexity evaluation. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...runs.model_options import ModelOptions
from ...runs.options import check_choice, check_count, check_unused

__all__ = ["DATASETS", "PG19", "PerplexityOptions"]

DATASETS = ("pg19", "pydoc", "text")
"""Where texts come from: the PG-19 test books, the Python language reference, or UTF-8 files."""

PG19 = "emozilla/pg19-test"
"""The hub data set of the 100 test books of PG-19 (arXiv 1911.05507)."""


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions(ModelOptions):
    """What the perplexity evaluation is told, beside the options of every evaluation of a model.

    Args:
        dataset (`str`): One of `DATASETS`.
        dataset_path (`str`, *optional*): Directory or hub id that stands in for `emozilla/pg19-test`, with a
            column `text` of one document per row.
        text_files (`Sequence[str]`): UTF-8 files, for the data set `text`.
        context_length (`int`): Tokens of a window.
        prefill_length (`int`, *optional*): Tokens of a window read at once before the first prediction; half
            of the window by default.
        block_length (`int`): Most tokens read at once after that. A block is cut where reading it at once
            would not give what one token at a time gives.
        approximate_blocks (`bool`): Never cut a block; the results then say `"blocks": "approximate"` where
            that changes what is read.
        stride (`int`, *optional*): Tokens from the start of a window to that of the next one in the same
            text; by default windows follow each other without overlap. At least the number of predicted
            tokens of a window, so that none is predicted twice.
        max_windows (`int`, *optional*): Stop after so many windows.
        max_windows_per_text (`int`, *optional*): Take no more windows than that from one text.
        no_kl (`bool`): Leave out what is compared with the dense predictions: divergence and agreement.
        max_reference_gb (`float`): Gigabytes (10^9 bytes) that the dense logits of one window may take.
    """

    dataset: str = "pg19"
    dataset_path: str | None = None
    text_files: Sequence[str] = ()
    context_length: int = 2048
    prefill_length: int | None = None
    block_length: int = 1
    approximate_blocks: bool = False
    stride: int | None = None
    max_windows: int | None = None
    max_windows_per_text: int | None = None
    no_kl: bool = False
    max_reference_gb: float = 8.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("dataset", self.dataset, DATASETS)
        if isinstance(self.text_files, str) or not all(isinstance(name, str) for name in self.text_files):
            raise ValueError(f"--text_files must be one or more paths, got {self.text_files!r}.")
        if self.dataset == "text" and not self.text_files:
            raise ValueError("--dataset text needs --text_files.")
        if self.dataset != "text" and self.text_files:
            raise ValueError(
                f"--text_files goes with --dataset text, got {list(self.text_files)!r} with {self.dataset!r}."
            )
        if self.dataset != "pg19" and self.dataset_path is not None:
            raise ValueError(
                f"--dataset_path goes with --dataset pg19, got {self.dataset_path!r} with {self.dataset!r}."
            )
        check_count("context_length", self.context_length, 2)
        check_count("block_length", self.block_length)
        for name in ("prefill_length", "stride", "max_windows", "max_windows_per_text"):
            if (value := getattr(self, name)) is not None:
                check_count(name, value)
        if self.prefill_tokens >= self.context_length:
            raise ValueError(
                f"--prefill_length must be below --context_length ({self.context_length}), so that tokens "
                f"are left to predict, got {self.prefill_length}."
            )
        if self.stride is not None and self.stride < self.predicted_tokens:
            raise ValueError(
                f"--stride must be at least the {self.predicted_tokens} predicted tokens of a window "
                f"(--context_length minus --prefill_length), or tokens would be predicted twice; got "
                f"{self.stride}."
            )
        if self.no_kl:
            check_unused(self, ("max_reference_gb",), "is for the comparison that --no_kl leaves out")
        if self.block_length == 1:
            check_unused(self, ("approximate_blocks",), "needs a --block_length above 1")
        if isinstance(self.max_reference_gb, bool) or not self.max_reference_gb > 0:
            raise ValueError(f"--max_reference_gb must be positive, got {self.max_reference_gb!r}.")

    @property
    def prefill_tokens(self) -> int:
        """Tokens of a window read before the first prediction."""
        return self.context_length // 2 if self.prefill_length is None else self.prefill_length

    @property
    def predicted_tokens(self) -> int:
        """Tokens of a window that are predicted."""
        return self.context_length - self.prefill_tokens

    def settings(self) -> dict[str, Any]:
        """Return the merged options for the result file."""
        return super().settings() | {
            "prefill_length": self.prefill_tokens,
            "text_files": list(self.text_files),
        }
