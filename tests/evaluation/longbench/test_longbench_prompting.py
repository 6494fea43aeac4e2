"""Prompts as the benchmark builds them: cut in the middle, then put into the chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcache_plugins.evaluation.longbench.answering import answer
from kvcache_plugins.evaluation.longbench.prompting import Prompt, build_prompt, truncate
from kvcache_plugins.evaluation.longbench.questions import Question
from kvcache_plugins.evaluation.longbench.tasks import TASKS
from kvcache_plugins.runs.labels import DENSE
from kvcache_plugins.runs.loading import Subject
from kvcache_plugins.runs.sharding import Shard

CHAT = "{{ bos_token }}[U]{{ messages[0]['content'] }}[/U]{% if add_generation_prompt %}[A]{% endif %}"
QUESTION = Question(0, "Read: " + "one two three four. " * 30, "\n\nWho?\nAnswer:", {})


@pytest.fixture
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def subject(model: Path) -> Subject:
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    return Subject(loaded, AutoTokenizer.from_pretrained(model), Shard())


def _text(tokenizer: Any, prompt: Prompt) -> str:
    text: str = tokenizer.decode(prompt.ids)
    return text


@pytest.mark.parametrize("max_length", [2, 3, 20, 21])
def test_a_long_prompt_loses_its_middle(tokenizer: Any, max_length: int) -> None:
    ids = tokenizer(QUESTION.prompt)["input_ids"]
    half = int(max_length / 2)
    expected = tokenizer.decode(ids[:half]), tokenizer.decode(ids[-half:])
    assert truncate(tokenizer, QUESTION.prompt, max_length) == expected
    for query_agnostic in (False, True):
        prompt = build_prompt(tokenizer, TASKS["lcc"], QUESTION, max_length, query_agnostic=query_agnostic)
        assert prompt.is_truncated
        assert _text(tokenizer, prompt) == "".join(expected)


def test_a_prompt_of_just_the_limit_keeps_its_middle(tokenizer: Any) -> None:
    length = len(tokenizer(QUESTION.prompt)["input_ids"])
    assert truncate(tokenizer, QUESTION.prompt, length) == (QUESTION.prompt, None)
    assert truncate(tokenizer, QUESTION.prompt, length - 1)[1] is not None


def _with_a_first_token(tokenizer: Any) -> Any:
    """A tokenizer that begins every text with its first token, as many do."""
    first = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, tokenizer.bos_token_id)]
    )
    return tokenizer


def test_the_first_token_counts_and_is_no_text(tokenizer: Any) -> None:
    plain = tokenizer(QUESTION.prompt)["input_ids"]
    _with_a_first_token(tokenizer)
    assert truncate(tokenizer, QUESTION.prompt, len(plain) + 1)[1] is None
    assert truncate(tokenizer, QUESTION.prompt, len(plain))[1] is not None
    expected = tokenizer.decode(plain[:9]), tokenizer.decode(plain[-10:])
    assert truncate(tokenizer, QUESTION.prompt, 20) == expected


@pytest.mark.parametrize("query_agnostic", [False, True])
@pytest.mark.parametrize("template", [None, CHAT, CHAT.removeprefix("{{ bos_token }}")])
@pytest.mark.parametrize("max_length", [60, 1000])
def test_the_first_token_comes_first_and_nowhere_else(
    tokenizer: Any, max_length: int, template: str | None, query_agnostic: bool
) -> None:
    _with_a_first_token(tokenizer).chat_template = template
    prompt = build_prompt(tokenizer, TASKS["qasper"], QUESTION, max_length, query_agnostic=query_agnostic)
    assert prompt.is_truncated == (max_length == 60) and bool(prompt.context_ids) == query_agnostic
    assert [i for i, token in enumerate(prompt.ids) if token == tokenizer.bos_token_id] == [0]


@pytest.mark.parametrize("query_agnostic", [False, True])
def test_the_chat_template_and_its_exceptions(tokenizer: Any, query_agnostic: bool) -> None:
    def text(task: str, **options: Any) -> str:
        options["query_agnostic"] = query_agnostic
        return _text(tokenizer, build_prompt(tokenizer, TASKS[task], QUESTION, 1000, **options))

    assert text("qasper") == QUESTION.prompt  # this tokenizer has none
    tokenizer.chat_template = CHAT
    bos = tokenizer.bos_token
    assert text("qasper") == f"{bos}[U]{QUESTION.prompt}[/U][A]"  # and not the first token twice
    assert text("qasper", chat_template=False) == QUESTION.prompt
    for name in ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"):
        assert text(name) == QUESTION.prompt


def test_the_question_can_be_parted_from_the_context(tokenizer: Any) -> None:
    tokenizer.chat_template = CHAT
    prompt = build_prompt(tokenizer, TASKS["qasper"], QUESTION, 1000, query_agnostic=True)
    assert tokenizer.decode(prompt.context_ids) == f"{tokenizer.bos_token}[U]{QUESTION.context_part}"
    assert tokenizer.decode(prompt.question_ids) == f"{QUESTION.question_part}[/U][A]"
    short = build_prompt(tokenizer, TASKS["lcc"], QUESTION, 60, query_agnostic=True)
    assert short.is_truncated
    assert tokenizer.decode(short.question_ids) == QUESTION.question_part
    # of a question longer than half of the prompt, the end is asked
    question = Question(0, QUESTION.context_part, "Who of all of them was it, and where?", {})
    cut = build_prompt(tokenizer, TASKS["lcc"], question, 6, query_agnostic=True)
    assert len(cut.context_ids) == len(cut.question_ids) == 3
    assert question.question_part.endswith(tokenizer.decode(cut.question_ids))


def test_what_cannot_be_parted_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = type(tokenizer).decode
    with monkeypatch.context() as patch:
        patch.setattr(type(tokenizer), "decode", lambda *args, **options: decode(*args, **options).lower())
        with pytest.raises(ValueError, match="needs a larger --max_length"):
            build_prompt(tokenizer, TASKS["lcc"], QUESTION, 60, query_agnostic=True)
    tokenizer.chat_template = "{{ messages[0]['content'] | replace('<', '(') }}"
    with pytest.raises(ValueError, match="--no_chat_template"):
        build_prompt(tokenizer, TASKS["qasper"], QUESTION, 1000, query_agnostic=True)


# ---- answers ----


def test_the_context_is_read_before_the_question(subject: Subject) -> None:
    whole = build_prompt(subject.tokenizer, TASKS["hotpotqa"], QUESTION, 1000)
    parted = build_prompt(subject.tokenizer, TASKS["hotpotqa"], QUESTION, 1000, query_agnostic=True)
    assert parted.ids == whole.ids  # of this text the seam is a boundary of tokens anyway
    lengths: list[int] = []
    hook = subject.model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: lengths.append(args[0].shape[1])
    )
    try:
        answers = {
            name: [answer(subject, cache, TASKS["hotpotqa"], prompt) for prompt in (whole, parted)]
            for name, cache in {"dense": DENSE, "int8": {"backend": "int8"}}.items()
        }
    finally:
        hook.remove()
    steps = [1] * (TASKS["hotpotqa"].max_new_tokens - 1)
    by_parts = [len(parted.context_ids), len(parted.question_ids)]
    assert lengths == 2 * [len(whole.ids), *steps, *by_parts, *steps]
    usual, agnostic = answers["dense"]
    assert agnostic["pred"] == usual["pred"] != ""
    for record in (*answers["dense"], *answers["int8"]):
        assert record["prompt_tokens"] == len(whole.ids)
        assert record["cached_tokens"] == len(whole.ids) + len(steps)
    assert answers["int8"][1]["kv_bytes"] < 0.8 * agnostic["kv_bytes"]


def test_samsum_ends_at_a_line_break_and_is_never_empty(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = build_prompt(subject.tokenizer, TASKS["samsum"], QUESTION, 1000)
    line_break = subject.encode("\n")[-1]
    word = subject.encode("sea")[0]
    end = subject.tokenizer.eos_token_id
    monkeypatch.setattr(subject.model, "forward", _scripted(subject.model, [end, word, line_break, word]))
    # the first choice is the end, which is forbidden there: the second best is taken
    record = answer(subject, DENSE, TASKS["samsum"], prompt)
    assert record["new_tokens"] == 3
    monkeypatch.setattr(subject.model, "forward", _scripted(subject.model, [word, line_break, word, end]))
    record = answer(subject, DENSE, TASKS["triviaqa"], prompt)
    assert record["new_tokens"] == 4


def _scripted(model: Any, tokens: list[int]) -> Any:
    """A forward pass that prefers these tokens, one a call."""
    forward, script = type(model).forward, iter(tokens)

    def scripted(*args: Any, **options: Any) -> Any:
        output = forward(model, *args, **options)
        output.logits = torch.zeros_like(output.logits)
        output.logits[..., next(script)] = 1.0
        return output

    return scripted
