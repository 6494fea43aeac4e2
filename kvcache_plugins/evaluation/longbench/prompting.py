"""From a question to token ids: truncation in the middle and the chat template, as published.

Source: `pred.py` of https://github.com/THUDM/LongBench.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .questions import Question
from .tasks import Task

__all__ = ["Prompt", "build_prompt", "truncate"]

_SEAM = "<|end of context|>"  # put between the two parts to find them again in a rendered template


@dataclass(frozen=True)
class Prompt:
    """What the model reads.

    Args:
        context_ids (`list[int]`): Read into the cache first; empty if the whole prompt is read at once.
        question_ids (`list[int]`): The rest, or all of it.
        is_truncated (`bool`): Whether the prompt has lost its middle.
    """

    context_ids: list[int]
    question_ids: list[int]
    is_truncated: bool

    @property
    def ids(self) -> list[int]:
        """All of them."""
        return self.context_ids + self.question_ids


def build_prompt(
    tokenizer: Any,
    task: Task,
    question: Question,
    max_length: int,
    *,
    chat_template: bool = True,
    query_agnostic: bool = False,
) -> Prompt:
    """Build the prompt of a question.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Of the model.
        task (`Task`): Whether it takes a chat template.
        question (`Question`): What is asked.
        max_length (`int`): Tokens of the prompt before the chat template is put around it.
        chat_template (`bool`): Use the tokenizer's, if it has one and the task wants one.
        query_agnostic (`bool`): Part context and question. The tokens at the seam may then differ from those
            of the whole text. Of a question longer than half of `max_length` only the end is left, as in any
            truncated prompt, and that is what is asked.

    Raises:
        ValueError: If the two parts cannot be told apart, after truncation or in the chat template.
    """
    kept, rest = truncate(tokenizer, question.prompt, max_length)
    uses_template = chat_template and task.has_chat_template and tokenizer.chat_template is not None
    if not query_agnostic:
        text = kept + (rest or "")
        text = _render(tokenizer, text) if uses_template else text
        return Prompt([], _encode(tokenizer, text, uses_template), rest is not None)
    if rest is None:
        before, after = question.context_part, question.question_part
    else:
        before, after = _part(kept, rest, question, f"row {question.number + 1} of {task.name}")
    if uses_template:
        before, after = _split_template(tokenizer, before, after)
    context_ids = _encode(tokenizer, before, uses_template)
    return Prompt(context_ids, _ids(tokenizer, after, add_special_tokens=False), rest is not None)


def truncate(tokenizer: Any, text: str, max_length: int) -> tuple[str, str | None]:
    """Cut the middle out of a text of more than `max_length` tokens, special ones included.

    Returns:
        `tuple[str, str | None]`: What comes before and after the cut, decoded apart, so that there may be a
        few tokens more or less than `max_length` in both together. The whole text and None if it is not cut.
    """
    ids = _ids(tokenizer, text, add_special_tokens=True)
    if len(ids) <= max_length:
        return text, None
    half = max_length // 2
    first, last = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
    return first, last


def _part(kept: str, rest: str, question: Question, place: str) -> tuple[str, str]:
    """Part context and question in a prompt that has lost its middle."""
    asked = question.question_part
    if len(rest) <= len(asked):  # the cut went into the question, and its end is all there is
        return kept, rest
    if not rest.endswith(asked):
        raise ValueError(
            f"The tokenizer gives the question of {place} back in other letters, so that it cannot be parted "
            "from its context in a truncated prompt: --query_agnostic needs a larger --max_length."
        )
    return kept + rest.removesuffix(asked), asked


def _split_template(tokenizer: Any, before: str, after: str) -> tuple[str, str]:
    """Render the chat template around two parts of a message, and part it there."""
    rendered_before, seam, rendered_after = _render(tokenizer, before + _SEAM + after).partition(_SEAM)
    if not seam or rendered_before + rendered_after != _render(tokenizer, before + after):
        raise ValueError(
            "The chat template of this tokenizer changes the text it is given, so that the question cannot "
            "be parted from the context: use --no_chat_template with --query_agnostic."
        )
    return rendered_before, rendered_after


def _render(tokenizer: Any, text: str) -> str:
    message = [{"role": "user", "content": text}]
    rendered: str = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return rendered


def _encode(tokenizer: Any, text: str, is_rendered: bool) -> list[int]:
    """Return the ids, with the tokenizer's special tokens unless a template has put the first one there."""
    has_bos = is_rendered and tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return _ids(tokenizer, text, add_special_tokens=not has_bos)


def _ids(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    # a text longer than the model is the normal case here, and no reason for a warning
    encoded = tokenizer(text, truncation=False, add_special_tokens=add_special_tokens, verbose=False)
    return list(encoded["input_ids"])
