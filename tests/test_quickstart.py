"""examples/quickstart.py: what it writes, and what it refuses before any work."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config, cache_utils

from kvcache_plugins import registry
from kvcache_plugins.evaluation.caches import new_cache
from kvcache_plugins.eviction.cache import EvictingCache
from kvcache_plugins.eviction.layer import EvictingLayer
from kvcache_plugins.eviction.options import EvictingConfig
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.runs.language_reference import read_language_reference
from tests.evaluation.drawn_figures import draw

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "examples" / "quickstart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_run_writes_results_and_picture(
    quickstart: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["examples/quickstart.py"])
    sizes = ["--prompt_tokens", "300", "--new_tokens", "8", "--score_tokens", "48", "--block_length", "16"]
    wanted = [
        "--cache_config",
        '{"backend": "int8"}',
        '{"backend": "KIVI", "nbits": 2, "residual_length": 32}',
    ]
    assert quickstart.main([*sizes, *wanted, "--output", str(tmp_path)]) == 0

    document = json.loads((tmp_path / "results.json").read_text())
    assert document["schema_version"] == 1
    assert document["task"] == "quickstart"
    dense, int8, kivi = document["results"]
    assert dense["cache_config"] == {"backend": "dense"}
    assert (dense["memory_fraction"], dense["agreement"], dense["kl_to_dense"]) == (1.0, 1.0, 0.0)
    assert dense["bits_per_value"] == 16
    assert dense["kv_bytes"] == 6 * 2 * 2 * (300 + 8 - 1) * 64 * 2
    assert int8["perplexity"] == pytest.approx(dense["perplexity"], rel=0.01)
    # read through the cache, so never exactly the dense run's; the coarser cache is further away
    assert 0 < int8["kl_to_dense"] < kivi["kl_to_dense"]
    assert kivi["memory_fraction"] < int8["memory_fraction"] < 1
    for row in (int8, kivi):
        assert row["tokens"] == 48
        assert row["ms_per_token"] > 0
        assert row["seconds"] > 0
        assert row["kernel"] in (["cpu"], ["torch"])
    assert {"versions", "device", "commit", "dirty", "command"} <= set(document["environment"])
    assert document["settings"]["model"] == "examples/models/tiny-llama-books"

    _check_scores(quickstart, dense, {"backend": "dense"})
    _check_scores(quickstart, kivi, kivi["cache_config"])

    picture = (tmp_path / "quickstart.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
    printed = capsys.readouterr().out
    for word in ("dense", "int8", "kivi 2-bit", "perplexity", "quickstart.png"):
        assert word in printed


@torch.inference_mode()
def _check_scores(quickstart: ModuleType, row: dict[str, Any], cache_config: dict[str, Any]) -> None:
    """Against a plain loop over the text, whose first 300 tokens are the prompt and the next 48 the truth."""
    model = AutoModelForCausalLM.from_pretrained(quickstart.BUNDLED_MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(quickstart.BUNDLED_MODEL)
    ids = tokenizer(read_language_reference()[:9000], return_tensors="pt").input_ids[:, :348]
    dense = model(ids).logits[0, 299:-1].double().log_softmax(-1)
    cache = new_cache(model, cache_config)
    model(ids[:, :299], **as_argument(cache))
    blocks = [model(block, **as_argument(cache)).logits[0] for block in ids[:, 299:-1].split(16, dim=1)]
    found = torch.cat(blocks).double().log_softmax(-1)
    nll = -found.gather(1, ids[0, 300:, None]).mean()
    assert row["nll"] == pytest.approx(nll.item(), rel=1e-5)
    assert row["perplexity"] == pytest.approx(nll.exp().item(), rel=1e-4)
    divergence = (dense.exp() * (dense - found)).sum(-1).mean()
    assert row["kl_to_dense"] == pytest.approx(divergence.item(), rel=1e-3, abs=1e-7)
    assert row["top1_agreement"] == pytest.approx((found.argmax(-1) == dense.argmax(-1)).double().mean())


def test_a_divergence_of_zero_is_drawn_at_zero(
    quickstart: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = json.loads((ROOT / "examples" / "results" / "quickstart.json").read_text())
    document["results"][1]["kl_to_dense"] = 0.0
    quality = draw(quickstart.save_picture, document, monkeypatch).axes[0]
    heights = [height for points in quality.collections for _, height in points.get_offsets()]
    assert sorted(heights) == sorted(row["kl_to_dense"] for row in document["results"][1:])
    assert 0.0 in quality.get_yticks()


def test_dtypes_have_the_names_that_commands_take(quickstart: ModuleType) -> None:
    args = quickstart.parse_args(["--dtype", "bf16", "--score_dtype", "fp32"])
    assert (args.dtype, args.score_dtype) == ("bfloat16", "float32")
    assert quickstart.parse_args(["--dtype", "float16"]).dtype == "float16"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cache_config", "{'backend': 'kivi'}"], "JSON"),
        (["--cache_config", '{"backend": "kivvi"}'], "kivi"),
        (["--cache_config", '{"backend": "kivi", "nbits": 5}'], "nbits"),
        (["--cache_config", '{"backend": "int8", "budget": 3}'], "budget"),
        (["--cache_config", '{"backend": "fp8", "nbits": 3}'], "nbits"),
        (["--prompt_tokens", "0"], "--prompt_tokens"),
        (["--new_tokens", "5"], "--new_tokens"),
        (["--threads", "0"], "--threads"),
        (["--device", "abacus"], "abacus"),
        (["--device", "hpu"], "--device must be a device of torch such as 'cpu', got 'hpu'."),
        (["--device", ""], "--device must be a device of torch such as 'cpu', got ''."),
        (["--text", ""], "--text must be a file, got ''."),
        (["--model", ""], "--model must be a directory or a hub id, got ''."),
        (["--cache_config", '{"backend": "int8", "kernel": "fast"}'], "native"),
        (["--text", "no_such_file.txt"], "no_such_file.txt"),
        (["--model", "no/such/model/here"], "no/such/model/here"),
    ],
)
def test_errors_stop_before_any_work(
    quickstart: ModuleType,
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def forbidden(*args: object, **options: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", forbidden)
    if "fp8" in " ".join(arguments) and not hasattr(cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this transformers has no fp8 backend")
    assert quickstart.main([*arguments, "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert said in error
    assert list(tmp_path.iterdir()) == []


def test_an_encoder_decoder_is_refused(
    quickstart: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    T5Config().save_pretrained(tmp_path / "model")
    assert quickstart.main(["--model", str(tmp_path / "model"), "--output", str(tmp_path)]) == 2
    assert "error: The quickstart serves decoder-only models; T5Config" in capsys.readouterr().err


def test_an_interruption_is_told_in_one_line(
    quickstart: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quickstart, "run", run)
    assert quickstart.main(["--output", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "\ninterrupted: nothing is kept.\n"
    assert quickstart.main(["--output", ""]) == 2
    assert capsys.readouterr().err == "error: --output must be a directory, got ''.\n"


def test_a_short_text_shortens_the_run(
    quickstart: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "short.txt"
    text.write_text("It was a dark and stormy night. " * 20)
    sizes = ["--prompt_tokens", "1000", "--new_tokens", "20", "--score_tokens", "100"]
    wanted = ["--cache_config", '{"backend": "int8"}']
    assert quickstart.main([*sizes, *wanted, "--text", str(text), "--output", str(tmp_path)]) == 0
    settings = json.loads((tmp_path / "results.json").read_text())["settings"]
    assert 100 < settings["prompt_tokens"] < 300
    assert "too short" in capsys.readouterr().out


def test_a_failure_of_transformers_own_cache_is_a_row(
    quickstart: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("hqq")

    def broken(self: object, tensor: torch.Tensor, axis: int) -> None:
        raise RuntimeError("the extension\ncannot be built: no compiler")

    monkeypatch.setattr(cache_utils.HQQQuantizedLayer, "_quantize", broken)
    sizes = ["--prompt_tokens", "100", "--new_tokens", "8", "--score_tokens", "16"]
    wanted = ["--cache_config", '{"backend": "hqq"}']
    assert quickstart.main([*sizes, *wanted, "--output", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "results.json").read_text())
    assert [row["label"] for row in document["results"]] == ["dense"]
    reason = "failed: the extension cannot be built: no compiler"
    assert document["skipped"] == [{"cache_config": {"backend": "hqq"}, "reason": reason, "is_failure": True}]
    assert f"hqq: {reason}" in capsys.readouterr().out
    assert (tmp_path / "quickstart.png").exists()


def test_a_mistake_of_a_third_party_is_a_row(
    quickstart: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class TheirLayer(EvictingLayer):
        def score(self, keys: Tensor, values: Tensor) -> Tensor:
            raise ArithmeticError("a budget of nothing")

    monkeypatch.setattr(registry, "_registered", registry._registered.copy())

    @registry.register_backend("theirs")
    class TheirCache(EvictingCache):
        config_class, layer_class = EvictingConfig, TheirLayer

    theirs = {"backend": "theirs", "budget": 48, "chunk_size": 16, "stabilizer_length": 4, "local_length": 8}
    sizes = ["--prompt_tokens", "100", "--new_tokens", "8", "--score_tokens", "16"]
    wanted = ["--cache_config", json.dumps(theirs), '{"backend": "int8"}']
    assert quickstart.main([*sizes, *wanted, "--output", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "results.json").read_text())
    assert [row["label"] for row in document["results"]] == ["dense", "int8"]
    [entry] = document["skipped"]
    assert entry["cache_config"] == theirs and entry["is_failure"] is True
    assert entry["reason"] == "failed: ArithmeticError: a budget of nothing"
    shown = capsys.readouterr()
    assert "in score" in shown.err, "its author wants to know where"
    assert entry["reason"] in shown.out


@pytest.mark.parametrize(("spoilt", "status"), [(("int8",), 0), (("dense", "int8"), 2)])
def test_predictions_that_are_no_numbers(
    spoilt: tuple[str, ...],
    status: int,
    quickstart: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    read, made, now = quickstart.predictions, quickstart.new_cache, [""]

    def new_cache(model: Any, cache_config: dict[str, Any]) -> Any:
        now[0] = cache_config["backend"]
        return made(model, cache_config)

    def predictions(*arguments: Any) -> Any:
        for prediction in read(*arguments):
            if now[0] in spoilt:
                prediction.logits[0] = torch.nan
            yield prediction

    monkeypatch.setattr(quickstart, "predictions", predictions)
    monkeypatch.setattr(quickstart, "new_cache", new_cache)
    sizes = ["--prompt_tokens", "100", "--new_tokens", "8", "--score_tokens", "16"]
    wanted = ["--cache_config", '{"backend": "int8"}', "--output", str(tmp_path)]
    assert quickstart.main([*sizes, *wanted]) == status
    captured = capsys.readouterr()
    if status:
        assert "error: The model itself, in float32 and with its ordinary cache" in captured.err
        assert not (tmp_path / "results.json").exists()
        return
    document = json.loads((tmp_path / "results.json").read_text())
    assert [row["label"] for row in document["results"]] == ["dense"]
    reason = "failed: 1 of 16 predictions are not numbers (NaN or infinite logits)"
    assert document["skipped"][0]["reason"] == reason and f"int8: {reason}" in captured.out


def test_a_text_that_is_no_text_is_refused(
    quickstart: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "word.txt"
    text.write_text("word")
    assert quickstart.main(["--text", str(text), "--output", str(tmp_path)]) == 2
    assert "needs 32" in capsys.readouterr().err
