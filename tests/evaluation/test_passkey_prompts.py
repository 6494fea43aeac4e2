"""Prompts have exactly the tokens asked for, the key where it was asked for, and depend on nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from kvcache_plugins.evaluation.passkey.filler import Filler, read_filler
from kvcache_plugins.evaluation.passkey.options import PasskeyOptions
from kvcache_plugins.evaluation.passkey.prompts import Trial, build_trials, first_integer

BUNDLED_MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books"
SENTENCES = " ".join(f"This is sentence {word} of a dull text." for word in ("one", "two", "three") * 200)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL)


def _options(**options: Any) -> PasskeyOptions:
    return PasskeyOptions(model="m", **options)


def _build(tokenizer: Any, text: str = SENTENCES, **options: Any) -> list[Trial]:
    return build_trials(_options(**options), text, tokenizer)


def _plain(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@pytest.mark.parametrize("depths", [1, 3, 20, 64])
def test_a_prompt_is_filler_with_the_key_at_its_depth(tokenizer: Any, depths: int) -> None:
    text = read_filler(_options())
    trials = _build(tokenizer, text, lengths=[100, 333], depths=depths, trials=2)
    assert [(t.length, t.depth, t.index) for t in trials] == [
        (length, i / depths, k) for length in (100, 333) for i in range(depths) for k in (0, 1)
    ]
    text_ids = _plain(tokenizer, text)
    question = _plain(tokenizer, " What is the pass key? The pass key is")
    for trial in trials:
        ids = list(trial.ids)
        assert len(ids) == trial.length
        assert len(trial.key) == 5 and trial.key.isdecimal() and trial.key[0] != "0"
        needle = _plain(tokenizer, f" The pass key is {trial.key}. Remember it. {trial.key} is the pass key.")
        starts = [i for i in range(len(ids)) if ids[i : i + len(needle)] == needle]
        assert len(starts) == 1 and ids[-len(question) :] == question
        filler = [*ids[: starts[0]], *ids[starts[0] + len(needle) : -len(question)]]
        first = [i for i in range(len(text_ids)) if text_ids[i : i + len(filler)] == filler]
        assert first, "what is left is a piece of the text"
        assert abs(starts[0] - trial.depth * len(filler)) <= len(filler) / (2 * depths) + 1
        assert starts[0] == 0 or trial.depth > 0


def test_the_key_follows_a_sentence_where_one_ends_nearby(tokenizer: Any) -> None:
    trials = _build(tokenizer, lengths=[512], depths=8, trials=2)
    prompts = [tokenizer.decode(trial.ids) for trial in trials]
    before = [prompt.partition(" The pass key is")[0] for prompt in prompts]
    assert all(text.endswith("of a dull text.") for text in before if text)
    assert sum(not text for text in before) == 2, "only at depth 0 there is nothing before it"
    assert all(prompt.rpartition(" What is")[0].endswith(("text.", "key.")) for prompt in prompts)


def test_without_sentences_the_key_follows_a_word(tokenizer: Any) -> None:
    words = "unbelievable circumstances notwithstanding " * 300
    for trial in _build(tokenizer, words, lengths=[600], depths=6, trials=2)[2:]:
        before, _, after = tokenizer.decode(trial.ids).partition(" The pass key is")
        assert before.endswith(("unbelievable", "circumstances", "notwithstanding"))
        assert after.partition("the pass key.")[2].startswith(" ")


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ('He said "Go!" They went (all.) Then e.g. this', ['"Go!"', "(all.)", "e.g."]),
        ("One.\n\nTwo? three.four", ["One.", "Two?"]),
        ("no end at all", []),
    ],
)
def test_ends_of_sentences(tokenizer: Any, text: str, ends: list[str]) -> None:
    filler = Filler.of_text(text, tokenizer)
    assert filler.ids == _plain(tokenizer, text)
    found = [tokenizer.decode(filler.ids[:end]) for end in filler.sentences]
    assert len(found) == len(ends) and all(map(str.endswith, found, ends))


def test_a_prompt_does_not_depend_on_the_others(tokenizer: Any) -> None:
    many = _build(tokenizer, lengths=[128, 200], depths=4, trials=3)
    few = _build(tokenizer, lengths=[200], depths=2, trials=1)
    known = {(t.length, t.depth, t.index): t.key for t in many}
    assert all(known[t.length, t.depth, t.index] == t.key for t in few)
    assert many == _build(tokenizer, lengths=[128, 200], depths=4, trials=3)
    other = _build(tokenizer, lengths=[128, 200], depths=4, trials=3, seed=1)
    assert len({t.key for t in many}) == len(many) and not {t.key for t in many} & {t.key for t in other}


def test_templates_and_repeated_filler(tokenizer: Any) -> None:
    grass = "The grass is green."
    options = _options(
        lengths=[150],
        depths=1,
        trials=1,
        filler_text=f" {grass}\n",
        introduction="Find the code.",
        needle=" Code: {key}!",
        question="\nCode:",
    )
    (trial,) = build_trials(options, read_filler(options), tokenizer)
    prompt = tokenizer.decode(trial.ids)
    assert len(trial.ids) == 150
    assert prompt.startswith(f"Find the code. Code: {trial.key}!")
    assert prompt.endswith(f"{grass}\nCode:") and prompt.count(grass) > 10


def test_filler_is_repeated_for_the_longest_prompt(tokenizer: Any) -> None:
    options = _options(lengths=[90, 900], depths=1, trials=1, filler_text="The grass is green.")
    assert [len(trial.ids) for trial in build_trials(options, read_filler(options), tokenizer)] == [90, 900]


def test_every_trial_has_a_piece_of_the_text_of_its_own(tokenizer: Any) -> None:
    text = " ".join(f"Sentence number {number} of a dull text." for number in range(600))
    trials = _build(tokenizer, text, lengths=[128], depths=1, trials=8)
    pieces = {tokenizer.decode(trial.ids).partition(f"{trial.key} is the pass key.")[2] for trial in trials}
    assert len(pieces) > 5


def test_a_question_stands_in_the_prompt_as_it_is_given() -> None:
    """Though the tokenizer puts a blank before the first word of a text."""
    blank = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    blank.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
    assert blank.decode(_plain(blank, "Code:")) == " Code:"
    (trial,) = _build(blank, lengths=[128], depths=1, trials=1, needle="\nKey={key};", question="\nCode:")
    prompt = blank.decode(trial.ids)
    assert prompt.startswith(f"\nKey={trial.key};") and prompt.endswith("text.\nCode:")


@pytest.mark.parametrize(
    ("position", "distance", "end"),
    [(12, 5, 10), (18, 5, 20), (15, 5, 10), (14, 3, 13), (17, 2, 17), (2, 5, 3), (27, 4, 25), (30, 4, 30)],
)
def test_the_closest_end_is_taken(position: int, distance: int, end: int) -> None:
    filler = Filler(list(range(40)), words=[3, 10, 13, 20, 25], sentences=[10, 20])
    assert filler.end_near(position, distance) == end


@pytest.mark.parametrize("template", ["<|endoftext|> $A", "<|endoftext|> $A <end>"])
def test_special_tokens_come_first_and_count(template: str) -> None:
    """Those that end a text have no place before a prompt."""
    special = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    special.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<|endoftext|>", 0), ("<end>", 1)]
    )
    start = [0, *_plain(special, "Find the code.")]
    for trial in _build(special, lengths=[128], depths=2, trials=1, introduction="Find the code."):
        assert len(trial.ids) == 128
        assert list(trial.ids[: len(start)]) == start
        assert [i for i, token in enumerate(trial.ids) if token in (0, 1)] == [0]


def test_first_integer() -> None:
    assert first_integer(" 83012. The") == "83012"
    assert first_integer("key: 830121") == "830121"
    assert first_integer(" I saw 7 of 83012") == "7"
    assert first_integer(" none") is None


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"needle": " The pass key is lost."}, r"--needle must hold \{key\}"),
        ({"question": " Is it {key}?"}, r"--question must not hold \{key\}"),
        ({"introduction": "{key}"}, r"--introduction must not hold \{key\}"),
        ({"question": " "}, "--question must ask"),
        ({"lengths": []}, "--lengths must be one or more integers"),
        ({"lengths": [512, 512]}, "--lengths must differ"),
        ({"depths": 0}, "--depths must be an integer >= 1, got 0"),
        ({"trials": 1.5}, "--trials must be an integer"),
        ({"seed": -1}, "--seed must be an integer >= 0"),
        ({"filler_text": "a", "filler_files": ["b"]}, "exclude each other"),
        ({"filler_text": " "}, "--filler_text must hold words"),
        ({"filler_text": "abc \udcff def."}, r"--filler_text must be text, got '\\udcff' after 4 characters"),
        ({"needle": "\udcff {key}"}, r"--needle must be text, got '\\udcff' after 0 characters"),
        ({"filler_files": "book.txt"}, "--filler_files must be one or more files"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _options(**options)


def test_lengths_that_do_not_fit(tokenizer: Any) -> None:
    others = len(_plain(tokenizer, " The pass key is 12345. Remember it. 12345 is the pass key."))
    others += len(_plain(tokenizer, " What is the pass key? The pass key is"))
    assert len(_build(tokenizer, lengths=[others + 1], depths=1, trials=1)[0].ids) == others + 1
    with pytest.raises(ValueError, match=f"--lengths must be above {others}, .* got {others}"):
        _build(tokenizer, lengths=[others], depths=1)
    with pytest.raises(ValueError, match="The filler has 5 tokens and a prompt of 100 needs"):
        _build(tokenizer, "far too short.", lengths=[100])


def test_files(tmp_path: Path) -> None:
    good, empty, binary = (tmp_path / name for name in ("good.txt", "empty.txt", "binary.txt"))
    good.write_text("Gr\u00fcn ist das Gras.\n", encoding="utf-8")
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00")
    assert read_filler(_options(filler_files=[str(good)] * 2)) == "\n\n".join(["Gr\u00fcn ist das Gras."] * 2)
    with pytest.raises(ValueError, match=r"--filler_files must hold text, '.*empty\.txt' is empty"):
        read_filler(_options(filler_files=[str(good), str(empty)]))
    with pytest.raises(ValueError, match=r"--filler_files must be UTF-8 text, '.*binary\.txt' is not"):
        read_filler(_options(filler_files=[str(binary)]))
    with pytest.raises(ValueError, match=r"--filler_files must be a file, '.*missing\.txt' cannot be read"):
        read_filler(_options(filler_files=[str(tmp_path / "missing.txt")]))
