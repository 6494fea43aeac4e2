"""Options of the passkey evaluation. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...runs.model_options import ModelOptions
from ...runs.options import check_count, check_counts
from ...runs.text_files import check_characters

__all__ = ["FACT_NEEDLE", "FACT_QUESTION", "NAMES", "NEEDLE", "QUESTION", "PasskeyOptions"]

NEEDLE = " The pass key is {key}. Remember it. {key} is the pass key."
"""The sentence to be found, as the bundled model has learnt it."""

QUESTION = " What is the pass key? The pass key is"
"""What a prompt ends with; the answer continues it."""

FACT_NEEDLE = " The code of {name} is {key}. Remember it. {key} is the code of {name}."
"""The sentence to be found where there are several, as the bundled model has learnt it."""

FACT_QUESTION = " What is the code of {name}? The code of {name} is"
"""What is asked after the prompt has been read; the answer continues it."""

_MOST_PROMPTS, _MOST_TOKENS = 100_000, 10**9
"""Far beyond what a table needs: its standard errors are below half a percent with a tenth of these prompts.
All of them are made before the first is asked."""

_NAMES = """
Alice Arthur Bob David Edward Frank Grace Helen Irene Kate Laura Lucy Margaret Martha Nora Oliver Philip
Quentin Samuel Sarah Susan Ursula Victor Walter
"""
NAMES = tuple(_NAMES.split())
"""Whom the facts of one prompt are about; names the bundled model tells apart."""


@dataclass(frozen=True, kw_only=True)
class PasskeyOptions(ModelOptions):
    """What the passkey evaluation is told.

    Args:
        lengths (`Sequence[int]`): Tokens of a prompt: filler, needle, question and the special ones that the
            tokenizer adds.
        facts (`int`): Keys in a prompt. With one, the prompt ends with the question. With several, each of
            somebody's, the prompt is read without any, and every key is asked for on a copy of the cache.
        depths (`int`, *optional*): The needle stands at depths `0, 1/depths, ..., (depths-1)/depths` of the
            filler; 5 if not given. Several facts stand in the middle of as many equal parts of one prompt.
        trials (`int`): Prompts for each length and depth, or for each length with several facts, each with
            keys and a piece of filler of its own.
        filler_files (`Sequence[str]`, *optional*): UTF-8 texts, put together to one; the language reference
            that comes with Python by default.
        filler_text (`str`, *optional*): A text to be repeated as often as needed, instead.
        introduction (`str`): What a prompt begins with; part of its tokens.
        needle (`str`, *optional*): Template of the sentence to be found: `{key}` stands for the key and, with
            several facts, `{name}` for whose it is.
        question (`str`, *optional*): What a prompt ends with; with several facts, what is asked about
            `{name}`.
        max_new_tokens (`int`): Tokens of an answer at most. Six hold a space and five digits, the next ones
            show whether the number goes on.
        batch_size (`int`): Prompts of one length given to `generate()` together. Rounding depends on it: for
            the same numbers as one by one, leave it at 1. With several facts it must be.
        seed (`int`): Of keys and pieces of filler.

    Raises:
        ValueError: If an option is out of range or no text, or a template lacks `{key}` or `{name}` or has it
            where it must not.
    """

    MAY_BE_EMPTY: ClassVar[tuple[str, ...]] = ("introduction",)

    lengths: Sequence[int] = (512, 1024, 2048)
    facts: int = 1
    depths: int = None  # type: ignore[assignment]  # what is not given depends on `facts`
    trials: int = 4
    filler_files: Sequence[str] | None = None
    filler_text: str | None = None
    introduction: str = ""
    needle: str = None  # type: ignore[assignment]
    question: str = None  # type: ignore[assignment]
    max_new_tokens: int = 8
    batch_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("facts", self.facts)
        is_single = self.facts == 1
        self._default("depths", 5 if is_single else self.facts)
        self._default("needle", NEEDLE if is_single else FACT_NEEDLE)
        self._default("question", QUESTION if is_single else FACT_QUESTION)
        check_counts("lengths", self.lengths)
        for name in ("depths", "trials", "max_new_tokens", "batch_size"):
            check_count(name, getattr(self, name))
        self._check_size()
        check_count("seed", self.seed, least=0)
        if self.filler_files is not None:
            if isinstance(self.filler_files, str) or not self.filler_files:
                raise ValueError(f"--filler_files must be one or more files, got {self.filler_files!r}.")
            if self.filler_text is not None:
                raise ValueError("--filler_files and --filler_text exclude each other, got both.")
        if self.filler_text is not None and not self.filler_text.strip():
            raise ValueError(f"--filler_text must hold words to be repeated, got {self.filler_text!r}.")
        for name in ("filler_text", "introduction", "needle", "question"):
            check_characters(getattr(self, name) or "", f"--{name}")
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
        if not is_single:
            self._check_facts()
            return
        for name in ("needle", "question"):
            if "{name}" in getattr(self, name):
                raise ValueError(
                    f"--{name} must hold {{name}} with several --facts only, whose keys have names, got "
                    f"{getattr(self, name)!r}."
                )

    def _default(self, name: str, value: Any) -> None:
        """Set an option that was not given."""
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _check_size(self) -> None:
        """Check that all prompts can be made in seconds, and kept."""
        places = self.trials * (self.depths if self.facts == 1 else 1)
        prompts, tokens = places * len(self.lengths), places * sum(self.lengths)
        if prompts > _MOST_PROMPTS or tokens > _MOST_TOKENS:
            depths = f", --depths {self.depths}" if self.facts == 1 else ""
            raise ValueError(
                f"--trials {self.trials}{depths} and {len(self.lengths)} --lengths make {prompts:,} prompts "
                f"of {tokens:,} tokens in all; at most {_MOST_PROMPTS:,} of {_MOST_TOKENS:,} are possible."
            )

    def _check_facts(self) -> None:
        """Check what several facts ask for."""
        if self.facts > len(NAMES):
            raise ValueError(
                f"--facts must be at most {len(NAMES)}, as many as there are names, got {self.facts}."
            )
        if self.depths != self.facts:
            raise ValueError(
                f"--depths must be left out with --facts {self.facts}, which stand at {self.facts} depths of "
                f"every prompt, got {self.depths}."
            )
        if self.batch_size != 1:
            raise ValueError(
                f"--batch_size must be 1 with --facts {self.facts}, whose questions differ in length, got "
                f"{self.batch_size}."
            )
        for name in ("needle", "question"):
            if "{name}" not in getattr(self, name):
                raise ValueError(
                    f"--{name} must hold {{name}}, which tells the {self.facts} facts of a prompt apart, got "
                    f"{getattr(self, name)!r}."
                )

    @property
    def depth_fractions(self) -> list[float]:
        """Where needles stand, as parts of the filler."""
        first = 0.0 if self.facts == 1 else 0.5
        return [(index + first) / self.depths for index in range(self.depths)]
