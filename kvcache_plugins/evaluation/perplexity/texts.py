"""The texts of the perplexity evaluation, and their windows.

Texts are read apart from each other: no window reaches from one into the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...runs.hub_datasets import import_datasets
from ...runs.language_reference import read_language_reference
from ...runs.text_files import read_text_file
from .options import PG19, PerplexityOptions

__all__ = ["Text", "Window", "cut_windows", "read_texts"]

_CHARACTERS = 32
"""Of a token: more than any real text has."""
_MARGIN = 64
"""Tokens at the end of a piece of text which the rest of it might have changed, and far more."""


@dataclass(frozen=True)
class Text:
    """One text.

    Args:
        name (`str`): How messages name it.
        content (`str`): All of it.
    """

    name: str
    content: str


@dataclass(frozen=True)
class Window:
    """Tokens that are read with a fresh cache.

    Args:
        text (`str`): Name of the text they come from.
        start (`int`): Index of the first of them in that text, in tokens.
        token_ids (`tuple[int, ...]`): All of them, with what the tokenizer puts in front of a text.
    """

    text: str
    start: int
    token_ids: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Identify the tokens, whatever the place they were found at."""
        ids = ",".join(map(str, self.token_ids))
        return hashlib.sha256(ids.encode("ascii")).hexdigest()[:16]


def read_texts(options: PerplexityOptions) -> list[Text]:
    """Return the texts of the data set that is asked for.

    Raises:
        ValueError: If a text is empty or none of its kind; if a data set lacks what is needed.
        OSError: If a file or a data set cannot be found.
    """
    if options.dataset == "text":
        return [_read_file(Path(name)) for name in options.text_files]
    if options.dataset == "pydoc":
        return [Text("pydoc_data.topics", read_language_reference())]
    return _read_pg19(options.dataset_path or PG19)


def cut_windows(
    texts: Sequence[Text],
    encode: Callable[[str], list[int]],
    options: PerplexityOptions,
    prefix: Sequence[int] = (),
) -> list[Window]:
    """Cut texts into windows of `options.context_length` tokens, in order; what is left over is dropped.

    Args:
        texts (`Sequence[Text]`): Tokenized one after the other, until there are enough windows.
        encode (`Callable`): Returns the token ids of a text, without special tokens.
        options (`PerplexityOptions`): The length of the windows, their distance and number.
        prefix (`Sequence[int]`): Tokens every window begins with, such as the beginning-of-text token. They
            count towards its length.

    Raises:
        ValueError: If a file is shorter than one window, or every text of a data set is; the message says
            what the longest has and what is needed.
    """
    length = options.context_length - len(prefix)
    stride = length if options.stride is None else options.stride
    windows: list[Window] = []
    longest, most = "", -1
    for text in texts:
        if options.max_windows is not None and len(windows) >= options.max_windows:
            break
        most_windows = [options.max_windows_per_text]
        if options.max_windows is not None:
            most_windows.append(options.max_windows - len(windows))
        limit = min((most for most in most_windows if most is not None), default=None)
        needed = None if limit is None else (limit - 1) * stride + length
        ids = _encode_enough(encode, text.content, needed)
        if len(ids) > most:
            longest, most = text.name, len(ids)
        if options.dataset == "text" and len(ids) < length:
            # a file that was asked for must not be left out without a word
            raise _too_short(repr(text.name), len(ids), length)
        starts = range(0, len(ids) - length + 1, stride)[: options.max_windows_per_text]
        windows += [Window(text.name, start, (*prefix, *ids[start : start + length])) for start in starts]
    if not windows:
        raise _too_short(f"the longest text, {longest!r},", most, length)
    return windows[: options.max_windows]


def _encode_enough(encode: Callable[[str], list[int]], content: str, needed: int | None) -> list[int]:
    """Return the token ids of a text, or of its beginning where `needed` of them are all that is read."""
    if needed is not None and len(content) > _CHARACTERS * (needed + _MARGIN):
        ids = encode(content[: _CHARACTERS * (needed + _MARGIN)])
        if len(ids) >= needed + _MARGIN:
            return ids
    return encode(content)


def _too_short(which: str, found: int, needed: int) -> ValueError:
    return ValueError(f"A window (--context_length) needs {needed} tokens of text, but {which} has {found}.")


def _read_file(path: Path) -> Text:
    return Text(path.name, read_text_file(path, "--text_files"))


def _read_pg19(path: str) -> list[Text]:
    data = import_datasets("eval", "use --dataset text or pydoc").load_dataset(path)
    split = "test" if "test" in data else next(iter(data)) if len(data) == 1 else None
    if split is None:
        raise ValueError(f"The data set {path!r} must have a split 'test', found are {sorted(data)}.")
    rows = data[split]
    if "text" not in rows.column_names:
        raise ValueError(f"The data set {path!r} must have a column 'text', found are {rows.column_names}.")
    return list(_named_rows(rows, path))


def _named_rows(rows: Any, path: str) -> Iterator[Text]:
    for number, row in enumerate(rows, start=1):
        if not isinstance(row["text"], str):
            raise ValueError(f"Column 'text' of {path!r} must hold text, row {number} holds {row['text']!r}.")
        yield Text(f"{row.get('short_book_title') or path} (row {number})", row["text"])
