"""lm-evaluation-harness with our caches: log-likelihoods are read through the cache, generation uses it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvcache_plugins as kvp
from kvcache_plugins.evaluation import lm_eval_model
from kvcache_plugins.evaluation.lm_eval_model import continuation_logits, register
from kvcache_plugins.models.cache_argument import as_argument

BUNDLED_MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-llama-books"
KIVI = {"backend": "kivi", "nbits": 2, "residual_length": 32}
TEXT = topics["specialnames"]


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL)


def _token_by_token(model: Any, cache_config: dict[str, Any], ids: list[int], count: int) -> torch.Tensor:
    """The definition: all before the last `count` tokens at once, then these one at a time."""
    cache = kvp.build_cache(model, cache_config).bind(model)
    rows = []
    with torch.inference_mode():
        if len(ids) > count:
            model(input_ids=torch.tensor([ids[:-count]]), **as_argument(cache), use_cache=True)
        for token in ids[-count:]:
            output = model(input_ids=torch.tensor([[token]]), **as_argument(cache), use_cache=True)
            rows.append(output.logits[0, -1])
    return torch.stack(rows)


# ---- without the harness ----


@pytest.mark.parametrize("cache_config", [KIVI, {"backend": "int8"}], ids=["kivi", "int8"])
@pytest.mark.parametrize(("length", "count"), [(150, 1), (150, 90), (70, 70)])
def test_predictions_are_those_of_one_token_at_a_time(
    model: Any, tokenizer: Any, cache_config: dict[str, Any], length: int, count: int
) -> None:
    ids = tokenizer(TEXT[:4000])["input_ids"][:length]
    logits = continuation_logits(model, cache_config, ids, count)
    assert logits.shape == (count, model.config.vocab_size)
    # A block and single tokens round differently, which codes of two bits amplify where one tips over.
    torch.testing.assert_close(logits, _token_by_token(model, cache_config, ids, count), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("count", [1, 40])
def test_predictions_are_read_from_the_cache(model: Any, tokenizer: Any, count: int) -> None:
    """Even the first token of a continuation: only a pass without a cache would give the dense logits."""
    ids = tokenizer(TEXT[:4000])["input_ids"][:200]
    with torch.inference_mode():
        plain = model(torch.tensor([ids])).logits[0, -count:]
    dense = continuation_logits(model, {"backend": "dense"}, ids, count)
    torch.testing.assert_close(dense, plain, atol=1e-4, rtol=1e-4)
    packed = continuation_logits(model, KIVI, ids, count)
    distance = (packed.log_softmax(-1) - plain.log_softmax(-1)).abs().amax(-1)
    assert (distance > 1e-3).all(), "codes of two bits cannot give the dense logits"


def test_requests_that_read_the_same_share_a_run() -> None:
    requests = [(None, [1, 2, 3], [4]), (None, [1, 2, 3], [5]), (None, [1, 2], [3, 4]), (None, [7], [8, 9])]
    groups = lm_eval_model._grouped(requests, 8)
    assert groups == {((1, 2, 3), 1): [0, 1], ((1, 2, 3), 2): [2], ((7, 8), 2): [3]}
    assert list(lm_eval_model._grouped([(None, [1, 2, 3], [4, 5])], 3)) == [((2, 3, 4), 2)]


def test_without_the_harness_an_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_NoHarness(), *sys.meta_path])
    register.cache_clear()
    with pytest.raises(ImportError, match=r"needs lm_eval \(pip install 'kvcache-plugins\[lm_eval\]'\)"):
        register()
    with pytest.raises(SystemExit, match=r"^error: The model 'hf-kvcache' needs lm_eval"):
        lm_eval_model.main()


class _NoHarness:
    """An importer for which the harness is not installed."""

    def find_spec(self, name: str, *args: Any) -> None:
        if name.partition(".")[0] == "lm_eval":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(
    "wrong", ["", "kivi", "[1]", {"nbits": 2}, {"backend": 3}, {"backend": "dense", "nbits": 2}]
)
def test_a_cache_must_be_named(wrong: Any) -> None:
    with pytest.raises(
        ValueError, match=r"needs a cache_config that names a backend|dense.* takes no options"
    ):
        lm_eval_model._checked(wrong)
    assert lm_eval_model._checked('{"backend": "KIVI", "nbits": 2}') == {"backend": "kivi", "nbits": 2}


# ---- with it ----


@pytest.fixture
def harness() -> Any:
    """The model class of the harness, and ours."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    from lm_eval.models.huggingface import HFLM

    return HFLM, register()


def _requests(tokenizer: Any) -> list[tuple[Any, list[int], list[int]]]:
    """Continuations of one token and of several, of one context and of different ones."""
    ids = tokenizer(TEXT[:6000])["input_ids"]
    return [
        (None, ids[:150], ids[150:151]),
        (None, ids[:150], ids[160:161]),
        (None, ids[:150], ids[150:190]),
        (None, ids[200:290], ids[290:300]),
        (None, ids[:1], ids[1:60]),
        (None, ids[300:310], ids[310:420]),
    ]


def test_dense_log_likelihoods_are_the_harness_s_own(model: Any, tokenizer: Any, harness: Any) -> None:
    theirs, ours = harness
    requests = _requests(tokenizer)
    options = {"tokenizer": tokenizer, "batch_size": 1, "max_length": 256}
    expected = theirs(model, **options)._loglikelihood_tokens(requests, disable_tqdm=True)
    found = ours(model, cache_config={"backend": "dense"}, **options)._loglikelihood_tokens(
        requests, disable_tqdm=True
    )
    assert len(found) == len(requests)
    for (log_likelihood, is_greedy), other in zip(found, expected, strict=True):
        assert log_likelihood == pytest.approx(other[0], rel=1e-5, abs=1e-5)
        assert is_greedy == other[1]
    assert {is_greedy for _, is_greedy in expected} == {True, False}, "both answers must occur"


def test_packed_log_likelihoods_differ_but_are_close(model: Any, tokenizer: Any, harness: Any) -> None:
    _, ours = harness
    requests = _requests(tokenizer)
    options = {"tokenizer": tokenizer, "batch_size": 1}
    dense = ours(model, cache_config={"backend": "dense"}, **options)._loglikelihood_tokens(requests)
    kivi = {"backend": "kivi", "nbits": 4, "residual_length": 32}
    packed = ours(model, cache_config=kivi, **options)._loglikelihood_tokens(requests)
    for (_, _, continuation), (exact, _), (found, _) in zip(requests, dense, packed, strict=True):
        assert 1e-5 < abs(found - exact) < 0.2 * len(continuation)


def test_the_harness_finds_the_model_and_hands_the_cache_to_generate(
    tmp_path: Path, model: Any, tokenizer: Any, harness: Any
) -> None:
    """A whole run of both kinds of task, from a task and data of our own."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    _write_tasks(tmp_path)
    seen: list[Any] = []
    generate = model.generate

    def recorded(*args: Any, **options: Any) -> Any:
        seen.append(options.get("cache_config"))
        return generate(*args, **options)

    ours = harness[1](model, cache_config=json.dumps(KIVI), tokenizer=tokenizer, batch_size=1)
    model.generate = recorded
    try:
        found = lm_eval.simple_evaluate(
            model=ours,
            tasks=["own_choice", "own_answer"],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            bootstrap_iters=0,
        )
    finally:
        del model.generate
    assert found["results"]["own_choice"]["acc,none"] == 1.0
    assert found["results"]["own_answer"]["exact_match,none"] == 1.0
    assert seen == [KIVI, KIVI]


def _write_tasks(folder: Path) -> None:
    """Write two tasks of the harness that ask for the pass key of two short texts."""
    rows = [
        {
            "text": f"{TEXT[:400]}. The pass key is {key}. Remember it. {key} is the pass key. "
            f"{TEXT[400:900]}",
            "question": "What is the pass key? The pass key is",
            "choices": [key, wrong],
            "label": 0,
        }
        for key, wrong in (("71832", "40915"), ("58206", "93371"))
    ]
    (folder / "rows.json").write_text(json.dumps(rows))
    common = (
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / 'rows.json'}}}}}\n"
        "test_split: test\n"
        'doc_to_text: "{{text}} {{question}}"\n'
    )
    (folder / "own_choice.yaml").write_text(
        "task: own_choice\noutput_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: label\n"
        "metric_list: [{metric: acc}]\n" + common
    )
    (folder / "own_answer.yaml").write_text(
        'task: own_answer\noutput_type: generate_until\ndoc_to_target: " {{choices[0]}}"\n'
        "generation_kwargs: {until: ['.'], max_gen_toks: 8}\n"
        "metric_list: [{metric: exact_match, ignore_punctuation: true}]\n" + common
    )


def test_a_wrong_cache_is_refused_at_once(model: Any, tokenizer: Any, harness: Any) -> None:
    with pytest.raises(ValueError, match="nbit"):
        harness[1](model, cache_config={"backend": "kivi", "nbit": 2}, tokenizer=tokenizer)
