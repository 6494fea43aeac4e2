"""Prompts and answers of a data set as token ids, as a model would be asked and would answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from ..runs import json_lines
from ..runs.hub_datasets import import_datasets
from ..runs.loading import prefix_ids
from ..runs.text_files import check_characters
from .examples import Example, cut_middle

__all__ = ["Conversations", "messages_of", "read_rows"]

_PAIRS = (("prompt", "answer"), ("instruction", "output"), ("question", "answer"), ("prompt", "completion"))
_ASKED = {"instruction": ("instruction", "input"), "question": ("context", "question")}
"""Columns that make a prompt, where the text that it is about has one of its own, which may be empty."""
_SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "tool": "user",
    "function": "user",
}
"""Whose turns they are, for chat templates: many know none of tools."""
_Message = dict[str, str]


class Conversations(Dataset[Example]):
    """Rows of a data set, tokenized when they are asked for.

    A prompt is everything up to the last answer. With a chat template it ends where the answer begins, and
    the answer ends with whatever the template closes a turn with; without one it is plain text, and the
    answer ends with the end of text.

    Args:
        rows (`Sequence[Mapping]`): Each `{"prompt", "answer"}`, `{"instruction", "output"}` (with `input`, if
            it has one), `{"question", "answer"}` (with `context`), `{"prompt", "completion"}`, of texts or of
            lists of turns, or `{"messages"}` or `{"conversations"}` that end with an answer. Calls of tools
            are read as JSON, and what tools say as the user's.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        max_length (`int`): Tokens of prompt and answer: longer prompts lose their middle, and an answer is
            cut after half of it.
        order (`Sequence[int]`, *optional*): Indices of the rows that are taken; all of them by default.

    Raises:
        ValueError: If a row has none of these forms, turns that the chat template refuses, or what is no
            character; the message says which, and what it has.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: Any,
        *,
        max_length: int,
        order: Sequence[int] | None = None,
    ) -> None:
        self._rows, self._tokenizer, self._max_length = rows, tokenizer, max_length
        self._order = range(len(rows)) if order is None else order
        self._start = prefix_ids(tokenizer)
        accepted: set[tuple[str, ...]] = set()
        for index in sorted(self._order):  # the first one that is wrong is named, whatever their order is
            try:
                turns = messages_of(rows[index])
                for turn in turns:
                    check_characters(turn["content"], f"what {turn['role']!a} says")
                roles = tuple(turn["role"] for turn in turns)
                if roles not in accepted:
                    self._check_roles(roles)
                    accepted.add(roles)
            except ValueError as error:
                raise ValueError(f"Row {index + 1} of --dataset: {error}") from error

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Example:
        *turns, answer = messages_of(self._rows[self._order[index]])
        prompt_ids, answer_ids = self._encode(turns, answer["content"])
        answer_ids = answer_ids[: max(1, self._max_length // 2)]
        return Example(cut_middle(prompt_ids, self._max_length - len(answer_ids)), answer_ids)

    def _check_roles(self, roles: Sequence[str]) -> None:
        """Some templates refuse a system turn, or two of one speaker in a row."""
        if not getattr(self._tokenizer, "chat_template", None):
            return
        try:
            self._encode([{"role": role, "content": "a"} for role in roles[:-1]], "a")
        except Exception as error:  # a template raises what it likes
            raise ValueError(f"the model's chat template refuses turns of {list(roles)}: {error}") from error

    def _encode(self, turns: list[_Message], answer: str) -> tuple[list[int], list[int]]:
        tokenizer = self._tokenizer
        if not getattr(tokenizer, "chat_template", None):
            prompt = self._plain("\n\n".join(turn["content"] for turn in turns) + "\n\n")
            end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
            return [*self._start, *prompt], [*self._plain(answer), *end]
        prompt_text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(
            [*turns, {"role": "assistant", "content": answer}], tokenize=False, add_generation_prompt=False
        )
        # a template that opens an answer with something it leaves out when it is complete has no such prefix
        rest = whole[len(prompt_text) :] if whole.startswith(prompt_text) else answer
        return self._plain(prompt_text), self._plain(rest)

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def messages_of(row: Mapping[str, Any]) -> list[_Message]:
    """Return the turns of a row, the last one an answer.

    Raises:
        ValueError: If it has none of the known forms.
    """
    for asked, answered in _PAIRS:
        if isinstance(row.get(asked), str) and isinstance(row.get(answered), str) and row[answered]:
            parts = [row.get(name) for name in _ASKED.get(asked, (asked,))]
            prompt = "\n\n".join(part for part in parts if isinstance(part, str) and part)
            return [{"role": "user", "content": prompt}, {"role": "assistant", "content": row[answered]}]
    turns = row.get("messages") or row.get("conversations")
    asked_turns, answer_turns = row.get("prompt"), row.get("completion")
    if isinstance(asked_turns, list) and isinstance(answer_turns, list):  # as TRL has them
        turns = [*asked_turns, *answer_turns]
    if isinstance(turns, Sequence) and not isinstance(turns, str):
        messages = [_message(turn) for turn in turns]
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()
        if len(messages) > 1 and messages[-1]["content"]:
            return messages
    forms = ", ".join(f"{{{asked!r}, {answered!r}}}" for asked, answered in _PAIRS)
    raise ValueError(
        f"must be one of {forms} with an answer, or 'messages' or 'conversations' that end with one; found "
        f"are {sorted(row)}."
    )


def _message(turn: Any) -> _Message:
    if not isinstance(turn, Mapping):
        raise ValueError(f"a message must be an object with role and content, got {turn!r}.")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    content = _text(content)
    if content is None and turn.get("tool_calls"):
        content = json.dumps(turn["tool_calls"], ensure_ascii=False)
    if not isinstance(role, str) or content is None:
        raise ValueError(
            f"a message must have a role, and content that is text, parts of text, or `tool_calls`; got "
            f"{dict(turn)!r}."
        )
    return {"role": _SPEAKERS.get(role, role), "content": content}


def _text(content: Any) -> str | None:
    """What is said, which may come in parts; `None` if it is not text alone."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    parts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    return "".join(parts) if parts and all(isinstance(part, str) for part in parts) else None


def read_rows(dataset: str) -> Sequence[Mapping[str, Any]]:
    """Read a data set.

    Args:
        dataset (`str`): A `.jsonl` file, or a hub id or directory with `:NAME` for its configuration.

    Raises:
        ValueError: If it is empty, a line is no JSON object, or the package datasets is missing.
        OSError: If it cannot be read.
    """
    if dataset.endswith(".jsonl"):
        return json_lines.read_rows(Path(dataset), {}, source=f"--dataset {dataset!r}")
    datasets = import_datasets("train", "use a .jsonl file")
    name, _, configuration = dataset.partition(":")
    rows: Any = datasets.load_dataset(name, configuration or None, split="train")
    return rows  # type: ignore[no-any-return]  # a sequence of mappings by construction
