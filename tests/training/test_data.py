"""Examples from files and from prose: where prompts end, what answers hold, what is refused."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvcache_plugins.training.conversations import Conversations, messages_of, read_rows
from kvcache_plugins.training.data import build_datasets
from kvcache_plugins.training.examples import Collator, Example, cut_middle
from kvcache_plugins.training.options import LocretOptions
from kvcache_plugins.training.synthetic import TASKS, SyntheticTasks, longest_example

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "models" / "tiny-llama-books"
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def prose() -> str:
    return "\n\n".join(topics[name] for name in sorted(topics)[:30])


# -- batches


def test_a_batch_is_padded_on_the_right() -> None:
    batch = Collator(9)([Example([1, 2, 3], [4]), Example([5], [6, 7])])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["prompt_length"].tolist() == [3, 1] and batch["length"].tolist() == [4, 3]


def test_the_middle_is_cut() -> None:
    assert cut_middle(range(10), 10) == list(range(10))
    assert cut_middle(range(10), 5) == [0, 1, 2, 8, 9] and cut_middle(range(10), 1) == [0]


# -- conversations


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Who?", "answer": "I."},
        {"instruction": "Who?", "output": "I.", "input": ""},
        {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]},
        {
            "conversations": [
                {"from": "human", "value": "Who?"},
                {"from": "gpt", "value": "I."},
                {"from": "human", "value": "?"},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "Who?"},
                {"role": "assistant", "content": "I."},
                {"role": "system", "content": "The end."},
            ]
        },
        {
            "prompt": [{"role": "user", "content": "Who?"}],
            "completion": [{"role": "assistant", "content": "I."}],
        },
    ],
    ids=["prompt", "instruction", "messages", "sharegpt", "closed", "trl"],
)
def test_rows_of_every_form(row: dict[str, Any]) -> None:
    assert messages_of(row) == [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"instruction": "Add.", "input": "1, 2", "output": "3"}, "Add.\n\n1, 2"),
        ({"context": "A book.", "question": "Who?", "answer": "I."}, "A book.\n\nWho?"),
        ({"context": None, "question": "Who?", "answer": "I."}, "Who?"),
        ({"prompt": "Who?", "answer": "I.", "input": "x"}, "Who?"),
    ],
)
def test_a_prompt_has_the_text_it_is_about(row: dict[str, Any], prompt: str) -> None:
    assert messages_of(row)[0]["content"] == prompt


def test_parts_of_text_and_tools() -> None:
    call = [{"type": "function", "function": {"name": "look", "arguments": "{}"}}]
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Who"}, {"type": "text", "text": "?"}]},
            {"role": "assistant", "content": None, "tool_calls": call},
            {"role": "tool", "content": "I"},
            {"role": "assistant", "content": ["I", "."]},
        ]
    }
    asked, called, told, answer = messages_of(row)
    assert (asked, answer) == ({"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."})
    assert called["role"] == "assistant" and json.loads(called["content"]) == call
    assert told == {"role": "user", "content": "I"}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": "a.png"}]}
    with pytest.raises(ValueError, match="content that is text, parts of text, or `tool_calls`"):
        messages_of({"messages": [image, {"role": "assistant", "content": "I."}]})


def test_a_prompt_ends_where_the_answer_begins(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": "Who is there?", "answer": "It is I."}]
    plain = Conversations(rows, tokenizer, max_length=100)[0]
    assert tokenizer.decode(plain.prompt_ids) == "Who is there?\n\n"
    assert tokenizer.decode(plain.answer_ids) == "It is I.<|endoftext|>"
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    chat = Conversations(rows, tokenizer, max_length=100)[0]
    assert tokenizer.decode(chat.prompt_ids) == "<user>Who is there?<end><assistant>"
    assert tokenizer.decode(chat.answer_ids) == "It is I.<end>"  # the end of the turn asks for things, too
    thinking = CHAT.replace("%}<assistant>{%", "%}<assistant><think>{%")
    monkeypatch.setattr(tokenizer, "chat_template", thinking)
    opened = Conversations(rows, tokenizer, max_length=100)[0]
    assert tokenizer.decode(opened.prompt_ids).endswith("<end><assistant><think>")
    assert tokenizer.decode(opened.answer_ids) == "It is I.", "of a turn that its template opens otherwise"
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert (
        tokenizer.decode(Conversations([row], tokenizer, max_length=100)[0].prompt_ids) == "a\n\nb\n\nc\n\n"
    )
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    several = Conversations([row], tokenizer, max_length=100)[0]
    assert tokenizer.decode(several.prompt_ids) == "<user>a<end><assistant>b<end><user>c<end><assistant>"


def test_long_prompts_lose_their_middle_and_long_answers_their_end(tokenizer: Any) -> None:
    rows = [
        {"prompt": "first " + "word " * 300 + "last", "answer": "yes"},
        {"prompt": "a", "answer": "b " * 300},
    ]
    data = Conversations(rows, tokenizer, max_length=40)
    text = tokenizer.decode(data[0].prompt_ids)
    assert text.startswith("first") and text.endswith("last\n\n")
    assert len(data[0].prompt_ids) + len(data[0].answer_ids) == 40
    assert len(data[1].answer_ids) == 20


def test_files_are_read_shuffled_and_checked(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": str(i), "answer": "x"}) for i in range(20)) + "\n\n")
    options = LocretOptions(model="m", dataset=str(path), num_examples=5, eval_examples=2)
    chosen = [
        [
            [example.prompt_ids for example in data]
            for data in build_datasets(options, tokenizer, positions=99, seed=seed)
        ]
        for seed in (0, 0, 1)
    ]
    assert [len(prompts) for prompts in chosen[0]] == [5, 2] and chosen[0] == chosen[1] != chosen[2]
    assert len({tuple(prompt) for prompts in chosen[0] for prompt in prompts}) == 7
    path.write_text('{"prompt": "a", "answer": "b"}\n[1]\n')
    with pytest.raises(ValueError, match=r"line 2 must be a json object, got '\[1\]'"):
        read_rows(str(path))
    path.write_text("{\n")
    with pytest.raises(ValueError, match="line 1 is not json"):
        read_rows(str(path))
    path.write_bytes("{}".encode("utf-16"))
    with pytest.raises(ValueError, match=r"--dataset '.*\.jsonl' is not UTF-8 text"):
        read_rows(str(path))
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n')
    assert read_rows(str(path)) == [{"prompt": "a"}]
    for row, message in (
        ({"text": "a"}, r"Row 3 of --dataset: must be one of .*found are \['text'\]"),
        ({"prompt": "a", "answer": ""}, "with an answer"),
        ({"messages": [{"role": "user", "content": "a"}]}, "that end with one"),
        ({"messages": [{"role": "user"}]}, "a message must have a role, and content that is text"),
        (
            {"prompt": "a", "answer": "b\ud83d"},
            r"Row 3 of --dataset: what 'assistant' says must be text, got '.ud",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Conversations([{"prompt": "a", "answer": "b"}, {}, row], tokenizer, max_length=10, order=[0, 2])


def test_turns_that_a_chat_template_refuses(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said at once, not when the row's turn comes in the middle of a training."""
    refusing = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{% endif %}" + CHAT
    )
    monkeypatch.setattr(tokenizer, "chat_template", refusing)
    turns = [{"role": role, "content": "a"} for role in ("system", "user", "assistant")]
    assert len(Conversations([{"messages": turns[1:]}], tokenizer, max_length=10)) == 1
    with pytest.raises(ValueError, match=r"Row 2 of .* refuses turns of \['system', .*: No system role"):
        Conversations([{"messages": turns[1:]}, {"messages": turns}], tokenizer, max_length=10)


def test_a_prompt_begins_as_texts_do_and_does_not_end() -> None:
    """Some tokenizers close every text: what follows a prompt is its answer."""

    class Closing:
        is_fast, chat_template, eos_token_id = False, None, 2

        def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> dict[str, Any]:
            ids = [ord(character) for character in text]
            return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}

    example = Conversations([{"prompt": "ab", "answer": "c"}], Closing(), max_length=10)[0]
    assert example == Example([1, *map(ord, "ab\n\n")], [ord("c"), 2])
    made = SyntheticTasks("abc. " * 30, Closing(), sequence_length=64, size=5)
    assert all(one.prompt_ids[0] == 1 and 2 not in one.prompt_ids for one in made)


def test_the_hub_is_asked_for_what_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    asked: list[Any] = []
    rows = [{"instruction": str(index), "output": "x"} for index in range(4)]
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or rows)
    assert read_rows("Yukang/LongAlpaca-12k") == read_rows("org/name:part") == rows
    split = {"split": "train"}
    assert asked == [(("Yukang/LongAlpaca-12k", None), split), (("org/name", "part"), split)]


# -- synthetic tasks


def test_examples_depend_on_seed_and_index_alone(prose: str, tokenizer: Any) -> None:
    data, same, other = (
        SyntheticTasks(prose, tokenizer, sequence_length=256, size=50, seed=seed) for seed in (0, 0, 1)
    )
    list(same)
    assert data[7] == same[7] != other[7]
    assert len({tuple(example.prompt_ids) for example in data}) == 50
    with pytest.raises(IndexError):
        data[50]


@pytest.mark.parametrize("length", [16, 64, 256])  # 16: less than one statement
def test_examples_are_no_longer_than_asked_for(length: int, prose: str, tokenizer: Any) -> None:
    data = SyntheticTasks(prose, tokenizer, sequence_length=length, size=100)
    for example in data:
        assert length // 4 <= len(example.prompt_ids) <= length and example.answer_ids
        assert len(example.prompt_ids) + len(example.answer_ids) <= longest_example(length)
    for task in ("facts", "records") if length > 16 else ():  # there are fewer, not some that were cut away
        made = [TASKS[task][0](data, random.Random(seed), length // 4) for seed in range(20)]
        assert length // 2 < max(len(example.prompt_ids) for example in made) <= length


@pytest.mark.parametrize("task", TASKS)
def test_what_is_asked_for_stands_in_the_prompt(task: str, prose: str, tokenizer: Any) -> None:
    data = SyntheticTasks(prose, tokenizer, sequence_length=400, size=1)
    for seed in range(20):
        example = TASKS[task][0](data, random.Random(seed), 300)
        prompt, answer = tokenizer.decode(example.prompt_ids), tokenizer.decode(example.answer_ids)
        if task in ("passkey", "facts"):
            assert "?" in answer or " is" in answer
            for fact in answer.rstrip(".").split(".")[:3]:
                assert fact.split()[-1] in prompt
            assert 300 <= len(example.prompt_ids) < 450
        elif task == "records":
            assert all(line in prompt for line in answer.strip().split("\n"))
        elif task == "repetition":
            size, ids = len(example.answer_ids), list(example.prompt_ids)
            assert size >= 16 and any(ids[i : i + size] == example.answer_ids for i in range(len(ids)))
        else:
            assert prompt[-40:] + answer[:40] in tokenizer.decode(data._filler.ids)


def test_facts_lie_all_over_the_prompt_and_are_asked_for_in_another_order(prose: str, tokenizer: Any) -> None:
    data = SyntheticTasks(prose, tokenizer, sequence_length=400, size=1)
    places, orders = [], []
    for seed in range(60):
        example = TASKS["facts"][0](data, random.Random(seed), 400)
        prompt, answer = tokenizer.decode(example.prompt_ids), tokenizer.decode(example.answer_ids)
        found = [prompt.index(value) / len(prompt) for value in re.findall(r" (\d+)\.", answer)]
        places += found
        orders.append(found == sorted(found))
    assert min(places) < 0.1 and max(places) > 0.9 and 0.3 < sum(places) / len(places) < 0.7
    assert sum(orders) < 40


def test_texts_that_are_too_short_or_prompts_that_are_too_long(
    prose: str, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"--sequence_length 800 need more than 900"):
        SyntheticTasks("A short text.", tokenizer, sequence_length=800, size=1)
    options = LocretOptions(model="m", sequence_length=400)
    with pytest.raises(ValueError, match="must be at most 320: the model has 400 positions, got 400"):
        build_datasets(options, tokenizer, positions=400, seed=0)
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n' * 3)
    with pytest.raises(ValueError, match="has 3 rows, of which --eval_examples takes 3"):
        build_datasets(
            LocretOptions(model="m", dataset=str(path), eval_examples=3), tokenizer, positions=99, seed=0
        )
    with pytest.raises(ValueError, match="--max_length must be at most the model's 99 positions, got 100"):
        build_datasets(
            LocretOptions(model="m", dataset=str(path), max_length=100), tokenizer, positions=99, seed=0
        )
    train, held_out = build_datasets(
        LocretOptions(model="m", dataset=str(path), eval_examples=1), tokenizer, positions=99, seed=0
    )
    assert (len(train), len(held_out)) == (2, 1)  # type: ignore[arg-type]  # torch's base class has no length


def test_evaluation_text_is_not_trained_on(prose: str, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(prose)
    options = LocretOptions(model="m", text_files=[str(tmp_path / "a.txt")], sequence_length=128)
    train, held_out = build_datasets(options, tokenizer, positions=None, seed=0)
    texts = [tokenizer.decode(data._filler.ids) for data in (train, held_out)]  # type: ignore[attr-defined]
    assert "".join(texts) == prose.strip() and len(texts[1]) >= 0.09 * len(prose)
    assert len(held_out) == options.eval_examples  # type: ignore[arg-type]
    for index in range(options.eval_examples):
        assert train[index].answer_ids != held_out[index].answer_ids, "nor are the facts that are asked for"


def test_all_texts_are_read(prose: str, tokenizer: Any, tmp_path: Path) -> None:
    texts = [prose[start : start + 9000].strip() for start in (0, 20000)]
    for name, text in zip("ab", texts, strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
    files = [str(tmp_path / f"{name}.txt") for name in "ab"]
    train, held_out = build_datasets(
        LocretOptions(model="m", text_files=files, sequence_length=64), tokenizer, positions=None, seed=0
    )
    read, unseen = (
        tokenizer.decode(data._filler.ids)  # type: ignore[attr-defined]
        for data in (train, held_out)
    )
    cuts = [len(text) - len(text) // 10 for text in texts]
    assert read == "\n\n".join(text[:cut] for text, cut in zip(texts, cuts, strict=True))
    assert unseen == "\n\n".join(text[cut:] for text, cut in zip(texts, cuts, strict=True))


def test_a_short_text_has_room_for_an_evaluation(prose: str, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(prose[:2000])
    options = LocretOptions(model="m", text_files=[str(tmp_path / "a.txt")], sequence_length=64)
    for data in build_datasets(options, tokenizer, positions=None, seed=0):
        assert data[0].prompt_ids
