"""What caches make of the text behind a prompt, measured when a training is over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvcache_plugins as kvp
from kvcache_plugins.cli import main
from kvcache_plugins.evaluation.caches import prefill
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.training import answers, job
from kvcache_plugins.training.answers import score_answers, with_heads
from kvcache_plugins.training.data import build_datasets
from kvcache_plugins.training.examples import Example
from kvcache_plugins.training.options import LocretOptions
from kvcache_plugins.training.parsing import parse_arguments
from tests.training.test_train_command import MODEL, arguments

INT8 = {"backend": "int8"}
LOCRET = {"backend": "locret", "budget": 48, "chunk_size": 32, "local_length": 4, "stabilizer_length": 4}
PACKED = {**LOCRET, "storage": {"backend": "int4", "key_bits": 8, "residual_length": 16}}
BUNDLED = {**LOCRET, "heads": str(MODEL.parent / "tiny-llama-books-locret")}


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def negative_log_likelihood(model: Any, example: Example, cache_config: dict[str, Any]) -> float:
    """Of an answer whose tokens are read one after the other, as `generate()` would if it had chosen them."""
    prompt, answer = torch.tensor([example.prompt_ids]), torch.tensor([example.answer_ids])
    cache = kvp.build_cache(model, cache_config)
    with torch.no_grad():
        logits = [prefill(model, prompt, cache, prompt.shape[1] + answer.shape[1]).logits[:, -1]]
        for token in answer[:, :-1].split(1, dim=1):
            logits.append(model(token, **as_argument(cache)).logits[:, -1])
    likely = torch.stack(logits, dim=1).double().log_softmax(-1)
    return -likely.gather(2, answer[..., None]).sum().item()


def report_page(output: Path, folder: Path) -> str:
    assert main(["report", str(output), "--output", str(folder / "page.html")]) == 0
    return (folder / "page.html").read_text()


def test_the_command(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Any) -> None:
    output = tmp_path / "heads"
    caches = ["--cache_config", json.dumps(PACKED), json.dumps(INT8), f"--cache_config={json.dumps(BUNDLED)}"]
    more = ("--max_steps", "2", *caches, "--no_plots")
    assert main(["train-locret", *arguments(text, output, *more)]) == 0
    shown = capsys.readouterr()
    assert "answers" in shown.err, "a bar"
    assert "that follow 3 prompts of unseen text" in " ".join(shown.out.split())

    document = json.loads((output / "results.json").read_text())
    dense, *rows = document["results"]
    assert dense["cache_config"] == {"backend": "dense"} and dense["recall"] == 1.0
    assert [row["label"] for row in rows[:3]] == ["locret", "locret, untrained", "knorm"]
    own = {**PACKED, "heads": str(output)}
    assert [row["cache_config"] for row in rows[3:]] == [own, INT8, BUNDLED]
    assert str(output) in document["inputs"]["artifacts"] and document["skipped"] == []

    options = LocretOptions(
        model=str(MODEL), text_files=[str(text)], sequence_length=128, eval_examples=3, dtype="fp32"
    )
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    examples: Any = build_datasets(options, tokenizer, positions=2048, seed=0)[1]
    examples = [examples[index] for index in range(3)]
    tokens = sum(len(example.answer_ids) for example in examples)
    truth: dict[str, float] = {}
    for example in examples:
        ids = torch.tensor([[*example.prompt_ids, *example.answer_ids]])
        with torch.no_grad():
            likely = model(ids, use_cache=False).logits.double().log_softmax(-1)[0, :-1]
        chosen = -likely.gather(1, ids[0, 1:, None])[len(example.prompt_ids) - 1 :]
        truth["dense"] = truth.get("dense", 0.0) + chosen.sum().item()
        for name, cache_config in (("own", own), ("int8", INT8), ("bundled", BUNDLED)):
            found = negative_log_likelihood(model, example, cache_config)
            truth[name] = truth.get(name, 0.0) + found
    for row, name in ((dense, "dense"), *zip(rows[3:], ("own", "int8", "bundled"), strict=True)):
        assert row["tokens"] == tokens and row["windows"] == 3
        assert row["nll"] == pytest.approx(truth[name] / tokens, abs=2e-5), name
        assert row["nll_increase"] == pytest.approx(row["nll"] - dense["nll"], abs=1e-9)
        assert "nll_by_position" not in row, "prompts are of many lengths"
    assert abs(rows[4]["nll_increase"]) < 0.01 < rows[3]["nll_increase"], "two steps teach nothing"
    assert all(0.1 < row["memory_fraction"] < 0.9 for row in rows[3:]) and dense["memory_fraction"] == 1.0

    card = (output / "README.md").read_text()
    assert f"| int8 | {rows[4]['nll']:.4f} | {rows[4]['nll_increase']:+.4f}" in card
    assert "| locret budget=48" in card
    page = report_page(output, tmp_path)
    assert "Training of retaining heads" in page and "nats per token more than dense" in page


def test_without_caches_nothing_is_read(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "score_answers", lambda *args: pytest.fail("read"))
    assert main(["train-locret", *arguments(text, tmp_path, "--max_steps", "1", "--no_plots")]) == 0
    document = json.loads((tmp_path / "results.json").read_text())
    assert not any("nll" in row for row in document["results"])
    assert "read through caches" not in (tmp_path / "README.md").read_text()
    page = report_page(tmp_path, tmp_path)
    assert "mean of the layers that evict" in page and "nats per token more than dense" not in page


def test_the_heads_are_there_before_anything_is_read(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens then, a training is not lost."""

    def stop(*args: Any) -> None:
        assert (tmp_path / "model.safetensors").is_file() and (tmp_path / "results.json").is_file()
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "score_answers", stop)
    more = ("--max_steps", "1", "--no_plots", "--cache_config", json.dumps(INT8))
    assert main(["train-locret", *arguments(text, tmp_path, *more)]) == 130
    assert kvp.build_cache(AutoModelForCausalLM.from_pretrained(MODEL), {**LOCRET, "heads": str(tmp_path)})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["{"], "--cache_config must be a JSON object"),
        (['{"backend": "locert"}'], "Did you mean 'locret'?"),
        ([], "--cache_config must be followed by one or more JSON objects."),
        (['{"backend": "locret", "budget": 0}'], "LocretConfig.budget"),
        (['{"backend": "locret", "storage": {"backend": "kivi"}}'], "storage"),
        (['{"backend": "int8", "granularity": "row"}'], "Int8Config.granularity"),
        (['{"backend": "kvquant"}'], "KVQuantConfig.calibration"),
        (['{"backend": "locret", "heads": "nowhere/at/all"}'], "heads='nowhere/at/all'"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said_before_the_model_is_loaded(
    given: list[str],
    said: str,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(job, "load_model", lambda *args, **options: pytest.fail("the model was loaded"))
    more = ("--max_steps", "1", "--no_plots", "--cache_config", *given)
    assert main(["train-locret", *arguments(text, tmp_path, *more)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error, error


@pytest.mark.parametrize("option", ["fsdp", "deepspeed"])
def test_one_process_measures(option: str, text: Path, tmp_path: Path, monkeypatch: Any) -> None:
    options, training = parse_arguments(
        [*arguments(text, tmp_path, "--max_steps", "1"), "--cache_config", json.dumps(INT8)]
    )
    monkeypatch.setattr(training, option, "anything")
    with pytest.raises(ValueError, match=r"--cache_config is measured in one process, got \[\{'backend'"):
        job.train_locret(options, training)


def test_a_file_holds_a_cache_or_several(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    own = ["--config", str(file), "--model", str(MODEL), "--output", str(tmp_path)]
    for caches in ({"backend": "INT8"}, [{"backend": "int8"}, LOCRET]):
        file.write_text(json.dumps({"cache_config": caches}))
        found = parse_arguments(own)[0].cache_config
        assert found == ([INT8] if isinstance(caches, dict) else [INT8, LOCRET])
    assert parse_arguments([*own, "--cache-config", '{"backend": "kivi"}'])[0].cache_config == [
        {"backend": "kivi"}
    ], "what is typed takes precedence"
    file.write_text(json.dumps({"cache_config": ["int8"]}))
    with pytest.raises(ValueError, match="--cache_config must be a JSON object naming a backend"):
        parse_arguments(own)


def test_only_a_locret_that_names_no_heads_gets_the_trained_ones() -> None:
    assert with_heads(LOCRET, "there") == {**LOCRET, "heads": "there"}
    for cache_config in (BUNDLED, INT8, {"backend": "knorm", "budget": 9}):
        assert with_heads(cache_config, "there") == cache_config


def test_a_failure_of_transformers_own_is_noted_and_one_of_ours_is_not(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = answers.score_window
    examples = [Example(range(5, 40), range(40, 44)), Example(range(7, 30), [9])]

    def failing(model: Any, ids: Any, cache_config: dict[str, Any], *args: Any) -> Any:
        if cache_config["backend"] in failed:
            raise RuntimeError("no such shape")
        return score(model, ids, cache_config, *args)

    monkeypatch.setattr(answers, "score_window", failing)
    failed = ["hqq"]
    hqq = {"backend": "hqq", "nbits": 4}
    results, skipped = score_answers(model, examples, [hqq, INT8])
    assert [row["label"] for row in results] == ["dense", "int8"] and results[0]["tokens"] == 5
    assert skipped == [{"cache_config": hqq, "reason": "failed: no such shape", "is_failure": True}]
    failed = ["int8"]
    with pytest.raises(RuntimeError, match="no such shape"):
        score_answers(model, examples, [INT8])
