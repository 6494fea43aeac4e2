"""The text in which a pass key is hidden."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...runs.language_reference import read_language_reference
from ...runs.text_files import check_tokenizable, read_text_file
from .options import PasskeyOptions

__all__ = ["Filler", "read_filler"]

_SENTENCE_END = ".!?"
_CLOSING = "\"')]\u2019\u201d"


@dataclass(frozen=True)
class Filler:
    """Token ids of a text, and where words and sentences end.

    Args:
        ids (`list[int]`): The text.
        words (`list[int]`): Ascending; a word ends before `ids[end]`. Empty for a tokenizer that cannot tell
            which characters a token stands for.
        sentences (`list[int]`): Those of them that end a sentence.
    """

    ids: list[int]
    words: list[int]
    sentences: list[int]

    @classmethod
    def of_text(cls, text: str, tokenizer: Any) -> Filler:
        """Tokenize a text, without special tokens and without a limit of length.

        Raises:
            ValueError: If the text is too long for the memory of the machine.
        """
        check_tokenizable(text)
        encoded = tokenizer(
            text, add_special_tokens=False, verbose=False, return_offsets_mapping=tokenizer.is_fast
        )
        stops = [stop for _, stop in encoded.get("offset_mapping", ())]
        words = [
            index + 1
            for index, (stop, next_stop) in enumerate(pairwise(stops))
            if next_stop > stop and text[stop].isspace() and not text[stop - 1].isspace()
        ]
        sentences = [
            end for end in words if _ends_sentence(text[max(stops[end - 1] - 3, 0) : stops[end - 1]])
        ]
        return cls(list(encoded["input_ids"]), words, sentences)

    def end_near(self, position: int, distance: int) -> int:
        """Return the end of a sentence within a distance of a position, else of a word, else the position."""
        for ends in (self.sentences, self.words):
            index = bisect_left(ends, position)
            closest = min(
                ends[max(index - 1, 0) : index + 1], key=lambda end: abs(end - position), default=None
            )
            if closest is not None and abs(closest - position) <= distance:
                return closest
        return position

    def sentences_from(self, position: int) -> list[int]:
        """Return the ends of sentences at or after a position."""
        return self.sentences[bisect_left(self.sentences, position) :]


def read_filler(options: PasskeyOptions) -> str:
    """Return the text that the options name; `filler_text` once, however often it will be repeated.

    Raises:
        ValueError: If a file cannot be read, is empty or no UTF-8 text, or there is no language reference.
    """
    if options.filler_text is not None:
        return options.filler_text.strip()
    if options.filler_files is None:
        return read_language_reference()
    texts = [read_text_file(name, "--filler_files").strip() for name in options.filler_files]
    return "\n\n".join(texts)


def _ends_sentence(text: str) -> bool:
    """Whether a text ends with a sentence: punctuation, perhaps closed by a quote or bracket."""
    return text.rstrip(_CLOSING).endswith(tuple(_SENTENCE_END))
