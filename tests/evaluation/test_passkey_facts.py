"""Several facts in a prompt: how they are hidden, that no question is known, and what each copy is asked."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcache_plugins import build_cache
from kvcache_plugins.cli import main
from kvcache_plugins.evaluation.pages.documents import find_results
from kvcache_plugins.evaluation.pages.page import render_page
from kvcache_plugins.evaluation.passkey import answers
from kvcache_plugins.evaluation.passkey import display as passkey_display
from kvcache_plugins.evaluation.passkey import run as passkey
from kvcache_plugins.evaluation.passkey.answers import ask_afterwards, ask_with_prompt
from kvcache_plugins.evaluation.passkey.filler import read_filler
from kvcache_plugins.evaluation.passkey.options import NAMES, PasskeyOptions
from kvcache_plugins.evaluation.passkey.prompts import Trial, build_trials
from kvcache_plugins.models.cache_argument import as_argument, given_cache
from kvcache_plugins.runs.loading import Subject
from kvcache_plugins.runs.results import read_results
from kvcache_plugins.runs.sharding import Shard

BUNDLED_MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books"
DENSE = {"backend": "dense"}
KNORM = {"backend": "knorm", "budget": 64, "chunk_size": 64}
PACKED = KNORM | {"storage": {"backend": "int4", "key_bits": 8, "value_bits": 4, "residual_length": 16}}
NEEDLE = " The code of {name} is {key}. Remember it. {key} is the code of {name}."
QUESTION = " What is the code of {name}? The code of {name} is"
SMALL = [
    "--lengths",
    "300",
    "--facts",
    "3",
    "--trials",
    "2",
    "--threads",
    "1",
    "--dtype",
    "fp32",
    "--no_plots",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL)


@pytest.fixture(scope="module")
def subject(tokenizer: Any) -> Subject:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()
    return Subject(model, tokenizer, Shard())


def _build(tokenizer: Any, **options: Any) -> list[Trial]:
    asked = PasskeyOptions(model="m", **options)
    return build_trials(asked, read_filler(asked), tokenizer)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _command(output: Path, *caches: dict[str, Any]) -> list[str]:
    given = ["--model", str(BUNDLED_MODEL), *SMALL, "--cache_config", *map(json.dumps, caches)]
    return ["eval", "passkey", *given, "--output", str(output)]


def _run(output: Path, *caches: dict[str, Any]) -> dict[str, Any]:
    assert main(_command(output, *caches)) == 0
    return read_results(output)


# ---- prompts ----


@pytest.mark.parametrize("facts", [2, 8, len(NAMES)])
def test_facts_stand_evenly_in_a_piece_of_the_text(tokenizer: Any, facts: int) -> None:
    trials = _build(tokenizer, lengths=[1200, 1500], facts=facts, trials=2)
    assert [(t.length, t.index) for t in trials] == [
        (length, index) for length in (1200, 1500) for index in (0, 1) for _ in range(facts)
    ]
    text = _ids(tokenizer, read_filler(PasskeyOptions(model="m")))
    for start in range(0, len(trials), facts):
        prompt = trials[start : start + facts]
        assert len({trial.ids for trial in prompt}) == 1 and len(prompt[0].ids) == prompt[0].length
        assert len({trial.key for trial in prompt}) == facts == len({trial.question for trial in prompt})
        assert [trial.depth for trial in prompt] == [(i + 0.5) / facts for i in range(facts)]
        left, places = list(prompt[0].ids), []
        for trial in prompt:
            assert trial.key.isdecimal() and len(trial.key) == 5 and trial.key[0] != "0"
            name = tokenizer.decode(trial.question).removeprefix(" What is the code of ").partition("?")[0]
            assert list(trial.question) == _ids(tokenizer, QUESTION.replace("{name}", name)) and name in NAMES
            needle = _ids(tokenizer, NEEDLE.replace("{name}", name).replace("{key}", trial.key))
            found = [i for i in range(len(left)) if left[i : i + len(needle)] == needle]
            assert len(found) == 1
            del left[found[0] : found[0] + len(needle)]
            places.append(found[0])  # among what is left: the earlier ones are gone
        for place, trial in zip(places, prompt, strict=True):
            assert abs(place - trial.depth * len(left)) <= len(left) / (2 * facts) + 1
        assert places == sorted(places)
        assert any(text[i : i + len(left)] == left for i in range(len(text))), "one piece of the text"
        assert "What is the code" not in tokenizer.decode(prompt[0].ids)


def test_a_prompt_does_not_depend_on_the_others(tokenizer: Any) -> None:
    many = _build(tokenizer, lengths=[400, 500], facts=3, trials=3)
    assert _build(tokenizer, lengths=[500], facts=3, trials=1) == many[9:12]
    other = _build(tokenizer, lengths=[500], facts=3, trials=1, seed=1)
    assert not {trial.key for trial in other} & {trial.key for trial in many}


def test_a_length_needs_room_for_all_facts(tokenizer: Any) -> None:
    short = {"facts": 4, "trials": 1, "needle": " {name}: {key}.", "question": " {name}:"}
    # of a name one or two tokens, then a colon, a blank, five digits and a full stop, and one of filler
    for length in (30, 35):
        with pytest.raises(ValueError, match=f"the tokens of introduction, 4 needles alone, got {length}"):
            _build(tokenizer, lengths=[length], **short)
    assert len(_build(tokenizer, lengths=[55], **short)[0].ids) == 55


# ---- answers ----


def test_dense_equals_a_plain_greedy_loop(subject: Subject, tokenizer: Any) -> None:
    trials = _build(tokenizer, lengths=[400], facts=4, trials=1)
    records = ask_afterwards(subject, DENSE, trials, 8)
    assert any(record["is_right"] for record in records)
    for trial, record in zip(trials, records, strict=True):
        ids = [*trial.ids, *trial.question]
        with torch.inference_mode():
            for _ in range(8):
                ids.append(int(subject.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert record["answer"] == tokenizer.decode(ids[-8:])
        digits = "".join(c if c.isdecimal() else " " for c in record["answer"]).split()
        assert record["is_right"] == (digits[:1] == [trial.key])
        # six layers, keys and values, two heads of 64 channels, four bytes: of the prompt alone
        assert record["kv_bytes"] == 6 * 2 * 2 * 64 * 4 * 400 and record["cached_tokens"] == 400


@pytest.mark.parametrize(
    "cache_config",
    [
        KNORM,
        PACKED,
        KNORM | {"positions": "compact"},
        KNORM | {"backend": "h2o"},
        KNORM | {"backend": "sirllm"},
        {"backend": "kivi", "nbits": 2, "residual_length": 32},
    ],
    ids=lambda config: "-".join([config["backend"], *(k for k in ("storage", "positions") if k in config)]),
)
def test_a_cache_reads_the_prompt_in_chunks_and_then_a_turn(
    subject: Subject, tokenizer: Any, cache_config: dict[str, Any]
) -> None:
    trials, model = _build(tokenizer, lengths=[300], facts=3, trials=1), subject.model
    prompt = torch.tensor([trials[0].ids])
    records = ask_afterwards(subject, cache_config, trials, 6)
    with torch.no_grad():
        cache = build_cache(model, cache_config)
        cache.bind(model, torch.ones_like(prompt), prompt_length=300)
        for chunk in prompt.split(cache_config.get("chunk_size", 300), dim=1):
            model(chunk, **as_argument(cache))
        if cache_config["backend"] != "kivi":  # which allocates ahead unless it knows the end
            assert {layer.held_length for layer in cache.packed_layers} == {64}
        for trial, record in zip(trials, records, strict=True):
            own = copy.deepcopy(cache)
            turn = torch.tensor([trial.question])
            own.bind(model, prompt_length=300 + turn.shape[1])
            ids = []
            for _ in range(6):
                turn = model(turn, **as_argument(own)).logits[:, -1:].argmax(-1)
                ids.append(int(turn))
            assert record["answer"] == tokenizer.decode(ids)
            assert record["cached_tokens"] == 300
            assert 0 < record["kv_bytes"] < 6 * 2 * 2 * 64 * 4 * 300 / 2


def test_transformers_own_caches_are_copied(subject: Subject, tokenizer: Any) -> None:
    pytest.importorskip("hqq")  # quanto's own tensors refuse to be copied
    trials = _build(tokenizer, lengths=[300], facts=3, trials=1)
    options = {"nbits": 4, "axis_key": 1, "axis_value": 1}
    records = ask_afterwards(subject, {"backend": "hqq", **options}, trials, 6)
    assert len({record["answer"] for record in records}) == 3
    assert all(record["kv_bytes"] < 6 * 2 * 2 * 64 * 4 * 300 / 2 for record in records)


@pytest.mark.parametrize("ask", [ask_with_prompt, ask_afterwards])
def test_trials_share_the_time_of_what_they_are_asked_in(
    ask: Any, tokenizer: Any, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = _build(tokenizer, lengths=[200], facts=3, trials=1)
    ticks = iter([10.0, 16.0])
    monkeypatch.setattr(answers, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    assert [record["seconds"] for record in ask(subject, DENSE, trials, 1)] == [2.0] * 3


def test_one_prefill_for_each_prompt_and_cache(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[list[int], int | None]] = []
    load = passkey.load_subject

    def loaded(*arguments: Any) -> Any:
        found = load(*arguments)
        generate = found.model.generate

        def recorded(**arguments: Any) -> Any:
            cache = given_cache(arguments)
            seen = None if cache is None else cache.get_seq_length()
            given.append((arguments["input_ids"][0].tolist(), seen))
            assert arguments["attention_mask"].shape == arguments["input_ids"].shape
            return generate(**arguments)

        found.model.generate = recorded
        return found

    monkeypatch.setattr(passkey, "load_subject", loaded)
    document = _run(tmp_path, KNORM, PACKED)
    trials = _build(tokenizer, lengths=[300], facts=3, trials=2)
    expected: list[tuple[list[int], int | None]] = []
    for start in (0, 3):
        expected.append((list(trials[start].ids), None))
        expected += [([*t.ids, *t.question], 300) for t in trials[start : start + 3]]
    assert given == expected * 3

    dense, knorm, packed = document["results"]
    assert dense["cache_config"] == DENSE and document["settings"]["facts"] == 3
    for row in (dense, knorm, packed):
        assert (row["facts"], row["query_aware"], row["trials"]) == (3, False, 6)
        assert set(row["by_length"]) == {"300"} and len(row["by_depth"]) == len(row["grid"]) == 3
        assert row["by_length"]["300"] == row["accuracy"]
    assert knorm["label"] == "knorm budget=64 chunk_size=64"
    assert (
        packed["label"]
        == "knorm budget=64 chunk_size=64 over int4 key_bits=8 value_bits=4 residual_length=16"
    )
    assert dense["kv_bytes"] == 6 * 2 * 2 * 64 * 4 * 300
    assert knorm["memory_fraction"] == pytest.approx(knorm["kv_bytes"] / dense["kv_bytes"])
    assert 64 / 300 < knorm["memory_fraction"] < 0.4 and packed["memory_fraction"] < knorm["memory_fraction"]
    assert packed["bits_per_value"] == pytest.approx(32 * packed["memory_fraction"])


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _run(tmp_path / "whole", KNORM)
    asked: list[int] = []

    def interrupted(*arguments: Any) -> Any:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(len(arguments[2]))
        return ask_afterwards(*arguments)

    monkeypatch.setattr(passkey, "ask_afterwards", interrupted)
    assert main(_command(tmp_path / "half", KNORM)) == 130
    assert (tmp_path / "half" / "progress").exists()
    monkeypatch.setattr(
        passkey, "ask_afterwards", lambda *a: (asked.append(len(a[2])), ask_afterwards(*a))[1]
    )
    found = _run(tmp_path / "half", KNORM)
    assert asked == [3] * 4, "two prompts for two caches, none of them twice"
    for row, same in zip(found["results"], whole["results"], strict=True):
        assert {**row, "seconds": 0} == {**same, "seconds": 0}


def test_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    document = _run(tmp_path, PACKED)
    shown = " ".join(capsys.readouterr().out.split())
    assert "6 trials, 3 facts in each of 2 prompts at 1 lengths" in shown
    assert "knorm budget=64" in shown and "over int4" in shown
    passkey_display.plot_passkey(document, tmp_path / "passkey.png")
    assert (tmp_path / "passkey.png").stat().st_size > 1000
    page = render_page(*find_results(tmp_path), "results")
    assert "facts a prompt" in page and "question known" in page


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"facts": 0}, "--facts must be an integer >= 1, got 0"),
        ({"facts": 1.5}, "--facts must be an integer"),
        ({"facts": len(NAMES) + 1}, f"--facts must be at most {len(NAMES)}"),
        ({"facts": 3, "depths": 5}, "--depths must be left out with --facts 3"),
        ({"facts": 3, "batch_size": 2}, "--batch_size must be 1 with --facts 3"),
        ({"facts": 3, "needle": " It is {key}."}, r"--needle must hold \{name\}"),
        ({"facts": 3, "needle": " {name} is."}, r"--needle must hold \{key\}"),
        ({"facts": 3, "question": " What is it?"}, r"--question must hold \{name\}"),
        ({"facts": 3, "question": " {name} {key}?"}, r"--question must not hold \{key\}"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PasskeyOptions(model="m", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "80"], "3 needles alone, got 80"),
        (["--lengths", "4080"], "the model has 4096 positions and the question takes"),
        (["--facts", "0"], "--facts must be an integer >= 1"),
    ],
)
def test_errors_come_before_the_model(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(passkey, "load_subject", lambda *_: pytest.fail("the model was loaded"))
    given = ["--model", str(BUNDLED_MODEL), *SMALL, "--output", str(tmp_path), *options]
    assert main(["eval", "passkey", *given]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("facts", [1, 3])
def test_the_bar_has_as_many_steps_as_there_are_questions(tmp_path: Path, facts: int) -> None:
    totals: list[int] = []
    steps: list[int] = []

    @contextmanager
    def progress_bar(total: int) -> Iterator[Any]:
        totals.append(total)
        yield lambda description, advance=0: steps.append(advance)

    options = PasskeyOptions(
        model=str(BUNDLED_MODEL), lengths=[300], trials=2, facts=facts, cache_config=[KNORM]
    )
    assert passkey.measure_passkey(options, tmp_path, progress_bar) is not None
    questions = 2 * options.depths  # two trials
    assert totals == [2 * questions] and sum(steps) == totals[0]  # dense, and the cache
