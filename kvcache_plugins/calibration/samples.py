"""The text of a calibration, cut into samples of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..runs.hub_datasets import import_datasets
from ..runs.language_reference import read_language_reference
from ..runs.loading import Subject, prefix_ids
from ..runs.text_files import read_text_file
from .options import PYDOC, CalibrationOptions

__all__ = ["Samples", "read_samples", "token_digest"]

_SURPLUS = 4
"""How many times the tokens of all samples are read of a data set, for the seed to choose from."""


@dataclass(frozen=True)
class Samples:
    """Samples of text.

    Args:
        token_ids (`torch.Tensor` of shape `(num_samples, sequence_length)`): int64.
        source (`str`): Where the text comes from: a data set, or names of files without their place.
        digest (`str`): sha256 of the token ids.
    """

    token_ids: Tensor
    source: str
    digest: str

    def __len__(self) -> int:
        return len(self.token_ids)


def read_samples(subject: Subject, options: CalibrationOptions) -> Samples:
    """Read the text and draw the samples.

    Samples do not overlap where the text is long enough; otherwise they are spread evenly over it. Each
    begins with what the tokenizer puts in front of a text.

    Raises:
        ValueError: If the text has fewer tokens than one sample; the message says how many.
        OSError: If it cannot be read.
    """
    prefix = prefix_ids(subject.tokenizer)
    length = options.sequence_length - len(prefix)
    if options.text_files is not None:
        source = ", ".join(Path(name).name for name in options.text_files)
        texts = [read_text_file(name, "--text_files") for name in options.text_files]
        token_ids = subject.encode("\n\n".join(texts))
    elif options.dataset == PYDOC:
        source = "pydoc_data.topics"
        token_ids = subject.encode(read_language_reference())
    else:
        source = options.dataset
        token_ids = _encode_enough(subject, options, _SURPLUS * options.num_samples * length)
    if len(token_ids) < length:
        raise ValueError(
            f"The calibration text ({source}) has {len(token_ids)} tokens, a sample (--sequence_length) "
            f"needs {length}."
        )
    starts = _starts(len(token_ids), length, options.num_samples, options.seed)
    rows = torch.tensor([[*prefix, *token_ids[start : start + length]] for start in starts])
    return Samples(rows, source, token_digest(rows))


def token_digest(token_ids: Tensor) -> str:
    """Return the sha256 of token ids, whatever their shape."""
    return hashlib.sha256(token_ids.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def _starts(num_tokens: int, length: int, num_samples: int, seed: int) -> list[int]:
    spare = num_tokens - num_samples * length
    if spare < 0:
        return [int(start) for start in np.linspace(0, num_tokens - length, num_samples).round()]
    gaps = np.sort(np.random.default_rng(seed).integers(0, spare + 1, num_samples))
    return [int(gap) + index * length for index, gap in enumerate(gaps)]


def _encode_enough(subject: Subject, options: CalibrationOptions, num_tokens: int) -> list[int]:
    """Tokens of the first rows of a data set."""
    token_ids: list[int] = []
    for text in _rows(options.dataset):
        token_ids += subject.encode(text + "\n\n")
        if len(token_ids) >= num_tokens:
            break
    return token_ids


def _rows(dataset: str) -> Iterator[str]:
    """Rows of the column `text`, in order, as long as they are asked for."""
    datasets = import_datasets("eval", "use --text_files")
    name, _, configuration = dataset.partition(":")
    rows: Any = datasets.load_dataset(name, configuration or None, split="train", streaming=True)
    for row in rows:
        if not isinstance(row.get("text"), str):
            raise ValueError(f"--dataset {dataset!r} must have a column 'text', found are {sorted(row)}.")
        yield row["text"]
