"""Options of the passkey evaluation. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .model_options import ModelOptions
from .options import check_count, check_counts

__all__ = ["NEEDLE", "QUESTION", "PasskeyOptions"]

NEEDLE = " The pass key is {key}. Remember it. {key} is the pass key."
"""The sentence to be found, as the bundled model has learnt it."""

QUESTION = " What is the pass key? The pass key is"
"""What a prompt ends with; the answer continues it."""


@dataclass(frozen=True, kw_only=True)
class PasskeyOptions(ModelOptions):
    """What the passkey evaluation is told.

    Args:
        lengths (`Sequence[int]`): Tokens of a prompt: filler, needle, question and the special ones that the
            tokenizer adds.
        depths (`int`): The needle stands at depths `0, 1/depths, ..., (depths-1)/depths` of the filler.
        trials (`int`): Prompts for each length and depth, each with a key and a piece of filler of its own.
        filler_files (`Sequence[str]`, *optional*): UTF-8 texts, put together to one; the language reference
            that comes with Python by default.
        filler_text (`str`, *optional*): A text to be repeated as often as needed, instead.
        introduction (`str`): What a prompt begins with; part of its tokens.
        needle (`str`): Template of the sentence to be found; `{key}` stands for the key.
        question (`str`): What a prompt ends with.
        max_new_tokens (`int`): Tokens of an answer at most. Six hold a space and five digits, the next ones
            show whether the number goes on.
        batch_size (`int`): Prompts of one length given to `generate()` together. Rounding depends on it: for
            the same numbers as one by one, leave it at 1.
        seed (`int`): Of keys and pieces of filler.

    Raises:
        ValueError: If an option is out of range, or a template lacks `{key}` or has it where it must not.
    """

    lengths: Sequence[int] = (512, 1024, 2048)
    depths: int = 5
    trials: int = 4
    filler_files: Sequence[str] | None = None
    filler_text: str | None = None
    introduction: str = ""
    needle: str = NEEDLE
    question: str = QUESTION
    max_new_tokens: int = 8
    batch_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts("lengths", self.lengths)
        if len(set(self.lengths)) < len(self.lengths):
            raise ValueError(f"--lengths must differ from each other, got {list(self.lengths)}.")
        for name in ("depths", "trials", "max_new_tokens", "batch_size"):
            check_count(name, getattr(self, name))
        check_count("seed", self.seed, least=0)
        if self.filler_files is not None:
            if isinstance(self.filler_files, str) or not self.filler_files:
                raise ValueError(f"--filler_files must be one or more files, got {self.filler_files!r}.")
            if self.filler_text is not None:
                raise ValueError("--filler_files and --filler_text exclude each other, got both.")
        if self.filler_text is not None and not self.filler_text.strip():
            raise ValueError(f"--filler_text must hold words to be repeated, got {self.filler_text!r}.")
        if "{key}" not in self.needle:
            raise ValueError(f"--needle must hold {{key}} where the key goes, got {self.needle!r}.")
        for name in ("introduction", "question"):
            if "{key}" in getattr(self, name):
                raise ValueError(
                    f"--{name} must not hold {{key}}, which would give the key away, "
                    f"got {getattr(self, name)!r}."
                )
        if not self.question.strip():
            raise ValueError(f"--question must ask for the key, got {self.question!r}.")

    @property
    def depth_fractions(self) -> list[float]:
        """Where the needle stands, as parts of the filler."""
        return [index / self.depths for index in range(self.depths)]
