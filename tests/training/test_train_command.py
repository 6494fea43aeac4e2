"""The command from end to end, in one process and in two, and everything it refuses before it works."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, MistralConfig, TrainerCallback

from kvcache_plugins.backends.locret import LocretConfig
from kvcache_plugins.cli import main
from kvcache_plugins.retaining.configuration import RetainingHeadsConfig
from kvcache_plugins.retaining.loading import load_heads
from kvcache_plugins.testing import tiny_model
from kvcache_plugins.training import job
from kvcache_plugins.training.checkpoints import check_checkpoint
from kvcache_plugins.training.options import LocretOptions
from kvcache_plugins.training.parsing import parse_arguments
from tests.launching import run_script

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "models" / "tiny-llama-books"
FILES = ["README.md", "config.json", "model.safetensors", "results.json", "training.png"]


def arguments(text: Path, output: Path, *more: str) -> list[str]:
    return [
        "--model", str(MODEL), "--dtype", "fp32", "--dataset", "synthetic", "--text_files", str(text),
        "--sequence_length", "128", "--eval_examples", "3", "--hidden_dim", "16", "--heads_dtype", "fp32",
        "--warmup_steps", "0", "--save_strategy", "no", "--disable_tqdm", "true", "--use_cpu", "true",
        "--output", str(output), *more,
    ]  # fmt: skip


def launch(text: Path, output: Path, *more: str, processes: int) -> dict[str, torch.Tensor]:
    """Run the script in so many processes and return the heads it wrote."""
    given = (*arguments(text, output, *more), "--no_plots")
    done = run_script("train_locret.py", *given, processes=processes)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("written to") == 1, "one process, and only one, shows the results"
    return load_file(output / "model.safetensors")


def test_the_command(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    pushed: list[Any] = []
    monkeypatch.setattr(job, "push", lambda *args, **kwargs: pushed.append((args, kwargs)))
    monkeypatch.setattr(job, "check_push", lambda *args: pushed.append(args))
    output = tmp_path / "heads"
    more = ("--max_steps", "6", "--logging_steps", "2", "--budget", "96", "--push_to_hub", "true")
    more += ("--hub_token", "secret")
    assert main(["train-locret", *arguments(text, output, *more)]) == 0
    assert f"written to {output}" in capsys.readouterr().out
    assert sorted(path.name for path in output.iterdir()) == FILES
    assert pushed[0] == ("heads", "hub_model_id", "secret"), (
        "whether it can be uploaded is asked before the training"
    )
    assert pushed[1][0][0] == output and pushed[1][0][2] == "heads"
    assert pushed[1][1] == {"private": None, "token": "secret", "revision": None}
    heads = load_heads(str(output))
    heads.check_model(AutoConfig.from_pretrained(MODEL))
    assert heads.config.base_model_name_or_path == "tiny-llama-books"
    wanted = {"budget": 96, "chunk_size": 1024, "stabilizer_length": 12, "local_length": 12}
    assert heads.config.defaults == wanted
    assert LocretConfig.from_dict({"heads": str(output)}) == LocretConfig(heads=str(output), **wanted)
    document = json.loads((output / "results.json").read_text())
    rows = {row["label"]: row for row in document["results"]}
    assert list(rows) == ["dense", "locret", "locret, untrained", "knorm"]
    assert rows["locret"]["loss"] < rows["locret, untrained"]["loss"]
    measured = [rows[label].pop("seconds") for label in ("locret, untrained", "knorm")]
    assert measured[0] == measured[1] > 0 and rows["locret"]["seconds"] > 0
    assert document["settings"]["dtype"] == "float32"
    assert len(rows["knorm"]["recall_by_layer"]) == 6 and document["settings"]["steps"] == 6
    assert [entry["step"] for entry in document["history"] if "loss" in entry] == [2, 4, 6]
    assert str(text.parent) not in json.dumps(document["settings"])
    card = (output / "README.md").read_text()
    assert "reference.txt" in card and f"| all | {rows['locret']['recall']:.3f} |" in card
    assert (output / "training.png").read_bytes().startswith(b"\x89PNG")


def test_options_reach_the_model_and_its_heads(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, load = [], job.load_model

    def noted(*args: Any, **options: Any) -> Any:
        loaded.append(options)
        return load(*args, **options)

    monkeypatch.setattr(job, "load_model", noted)
    more = ("--max_steps", "1", "--gradient_accumulation_steps", "3", "--attn_implementation", "eager")
    more += ("--heads_dtype", "bf16", "--max_train_length", "50", "--budget", "96", "--local_length", "5")
    assert main(["train-locret", *arguments(text, tmp_path, *more, "--no_plots")]) == 0
    heads = load_heads(str(tmp_path))
    assert heads.dtype == torch.bfloat16 and heads.config.max_train_length == 50
    wanted = {"budget": 96, "chunk_size": 1024, "stabilizer_length": 12, "local_length": 5}
    assert heads.config.defaults == wanted and heads.config.hidden_dim == 16
    (options,) = loaded
    assert options["attn_implementation"] == "eager" and options["dtype"] == "float32"
    assert json.loads((tmp_path / "results.json").read_text())["settings"]["batch"] == 3


def test_a_step_has_no_more_prompts_than_an_epoch(text: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    words = text.read_text(encoding="utf-8").split()
    pairs = [{"prompt": " ".join(words[9 * i : 9 * i + 60]), "answer": words[i]} for i in range(13)]
    rows.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    more = ("--dataset", str(rows), "--max_steps", "2", "--gradient_accumulation_steps", "100", "--no_plots")
    for batch_size, drop, batch in (("3", "false", 10), ("4", "true", 8)):
        sizes = ("--per_device_train_batch_size", batch_size, "--dataloader_drop_last", drop)
        given = arguments(text, tmp_path / batch_size, *more, *sizes)
        for name in ("--text_files", "--sequence_length"):  # of synthetic tasks
            place = given.index(name)
            del given[place : place + 2]
        assert main(["train-locret", *given]) == 0
        document = json.loads((tmp_path / batch_size / "results.json").read_text())
        assert document["settings"]["batch"] == batch
        assert f"2 steps of {batch} prompts" in (tmp_path / batch_size / "README.md").read_text()


@pytest.mark.parametrize("layerwise", [pytest.param("false", marks=pytest.mark.in_depth), "true"])
def test_two_processes_are_a_batch_of_two(text: Path, tmp_path: Path, layerwise: str) -> None:
    steps = ("--max_steps", "2", "--learning_rate", "1e-3", "--layerwise_backward", layerwise)
    own = {"backend": "locret", "budget": 48, "chunk_size": 32, "local_length": 4, "stabilizer_length": 4}
    caches = ("--cache_config", '{"backend": "int8"}', json.dumps(own))  # of which every process builds each
    steps += ("--save_strategy", "steps", "--save_steps", "1", *caches)
    steps += ("--per_device_eval_batch_size", "2")  # of three examples: one is read twice
    batch = "--per_device_train_batch_size"
    assert main(["train-locret", *arguments(text, tmp_path / "alone", *steps, batch, "2"), "--no_plots"]) == 0
    alone = load_file(tmp_path / "alone" / "model.safetensors")
    both = launch(text, tmp_path / "both", *steps, batch, "1", processes=2)
    torch.testing.assert_close(both, alone, rtol=1e-4, atol=2e-6)
    results = [
        json.loads((tmp_path / name / "results.json").read_text())["results"] for name in ("alone", "both")
    ]
    recalls, losses, likely = (
        [[row[key] for row in rows if key in row] for rows in results] for key in ("recall", "loss", "nll")
    )
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert recalls[0] == pytest.approx(recalls[1], abs=0.02)
    assert likely[0][:2] == pytest.approx(likely[1][:2], abs=1e-6), "dense and int8"
    assert [len(each) for each in likely] == [3, 3], "and locret, whose keys may be others where scores tie"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="of a machine without a GPU")
def test_processes_share_the_work_without_being_told_that_there_is_no_gpu(text: Path, tmp_path: Path) -> None:
    """As above; each alone, they would train on half as many examples, into one directory."""
    given = [*arguments(text, tmp_path, "--max_steps", "2"), "--no_plots"]
    told = given.index("--use_cpu")
    done = run_script("train_locret.py", *given[:told], *given[told + 2 :], processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("written to") == 1
    settings = json.loads((tmp_path / "results.json").read_text())["settings"]
    assert settings["batch"] == 4, "of two processes, each with two examples a step"


def test_heads_that_could_not_be_used_are_not_written(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = tmp_path / "heads"
    more = ("--max_steps", "2", "--lr_scheduler_type", "constant", "--learning_rate", "1e30", "--no_plots")
    assert main(["train-locret", *arguments(text, heads, *more)]) == 2
    assert "The training diverged" in capsys.readouterr().err and not heads.exists()
    nothing = shutil.copytree(MODEL, tmp_path / "nothing")
    weights = load_file(nothing / "model.safetensors")
    name = next(name for name in weights if "layers.1" in name)
    weights[name] = torch.full_like(weights[name], torch.nan)
    save_file(weights, nothing / "model.safetensors", {"format": "pt"})
    model = ("--max_steps", "1", "--no_plots", "--model", str(nothing))
    assert main(["train-locret", *arguments(text, heads, *model)]) == 2
    said = "The model itself gives no numbers in float32: before any step, the loss of the heads is nan."
    assert said in capsys.readouterr().err and not heads.exists()
    protected = ("--max_steps", "1", "--budget", "100", "--local_length", "100", "--no_plots")
    assert main(["train-locret", *arguments(text, heads, *protected)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --budget must exceed what is protected") and not heads.exists()


def test_an_interrupted_training_goes_on(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--no_plots", "--max_steps", "4", "--per_device_train_batch_size", "1")
    saving = ("--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "5")
    assert main(["train-locret", *arguments(text, tmp_path / "whole", *more, *saving)]) == 0
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    (tmp_path / "part").mkdir()
    (tmp_path / "whole" / "checkpoint-2").rename(tmp_path / "part" / "checkpoint-2")
    (tmp_path / "part" / "checkpoint-3").mkdir()  # whose saving was interrupted
    told = tmp_path / "part" / "checkpoint-2" / "training.json"
    facts = json.loads(told.read_text())
    assert 0 < facts["seconds"] < 100
    told.write_text(json.dumps(facts | {"seconds": 1000.0}))
    resume = ("--resume_from_checkpoint", "true")
    others = (*resume, "--hidden_dim", "8")
    assert main(["train-locret", *arguments(text, tmp_path / "part", *more, *saving, *others)]) == 2
    assert "are others than those of this training: hidden_dim 16, now 8." in capsys.readouterr().err
    assert main(["train-locret", *arguments(text, tmp_path / "part", *more, *saving, *resume)]) == 0
    torch.testing.assert_close(load_file(tmp_path / "part" / "model.safetensors"), whole, rtol=0, atol=0)
    (trained,) = (
        row["seconds"]
        for row in json.loads((tmp_path / "part" / "results.json").read_text())["results"]
        if row["label"] == "locret"
    )
    assert 1000 < trained < 1100, "with what it took before it was interrupted"


def test_another_training_is_not_gone_on_with(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer would keep its learning rate, and the results would be said to be of the new options."""
    own = Path(shutil.copyfile(text, tmp_path / "text.txt"))
    output, model = tmp_path / "out", shutil.copytree(MODEL, tmp_path / "model")
    common = ("--no_plots", "--save_strategy", "steps", "--save_steps", "2", "--model", str(model))
    assert main(["train-locret", *arguments(own, output, *common, "--max_steps", "2")]) == 0
    facts = json.loads((output / "checkpoint-2" / "training.json").read_text())
    assert facts["seed"] == 0 and facts["batch"] == 2 and facts["lr_scheduler_type"] == "linear"
    assert sorted(path.name for path in output.iterdir()) == ["README.md", "checkpoint-2", *FILES[1:-1]]

    again = ("--resume_from_checkpoint", "true", "--max_steps", "4")
    capsys.readouterr()

    def refused(*more: str) -> str:
        with monkeypatch.context() as loading:
            loading.setattr(job, "load_model", lambda *args, **options: pytest.fail("the model was loaded"))
            assert main(["train-locret", *arguments(own, output, *common, *again, *more)]) == 2
        return capsys.readouterr().err

    for option, given, said in (
        ("seed", "1", "seed was 0, is 1"),
        ("optim", "sgd", "optim was 'adamw"),
        ("learning_rate", "1e-4", "learning_rate was 0.002, is 0.0001"),
        ("gradient_accumulation_steps", "1", "batch was 2, is 1"),
        ("eval_examples", "4", "eval_examples was 3, is 4"),
        ("bf16", "true", "bf16 was False, is True"),
        ("dataloader_drop_last", "true", "dataloader_drop_last was False, is True"),
        ("train_sampling_strategy", "sequential", "train_sampling_strategy was 'random'"),
        ("accelerator_config", '{"use_seedable_sampler": false}', "accelerator_config was {"),
    ):
        assert said in refused(f"--{option}", given), option
    for path, content in ((own, b"more"), (model / "tokenizer.json", b" ")):
        before = path.read_bytes()
        path.write_bytes(before + content)
        assert f"is of another training ({'data' if path == own else 'model'}_digest was" in refused()
        path.write_bytes(before)
    elsewhere = ("--model", str(MODEL))  # the same files
    assert main(["train-locret", *arguments(own, output, *common, *again, *elsewhere)]) == 0
    assert json.loads((output / "results.json").read_text())["settings"]["steps"] == 4
    heads = (output / "model.safetensors").read_bytes()
    (output / "model.safetensors").unlink()  # as if it had been interrupted before it wrote them
    assert main(["train-locret", *arguments(own, output, *common, *again)]) == 0
    assert (output / "model.safetensors").read_bytes() == heads, "no step is added to what has them all"
    assert json.loads((output / "results.json").read_text())["settings"]["steps"] == 4
    assert "has all of its steps; --max_steps 4 asks for no more" in capsys.readouterr().out


def test_what_a_checkpoint_does_not_say_is_not_asked_for(tmp_path: Path) -> None:
    config = RetainingHeadsConfig.from_model(AutoConfig.from_pretrained(MODEL))
    facts = {"seed": 0, "batch": 2, "bf16": True}
    (tmp_path / "training.json").write_text('{"seed": 0, "batch": 2}')
    check_checkpoint(str(tmp_path), config, facts)
    with pytest.raises(ValueError, match=r"is of another training \(batch was 2, is 4\)"):
        check_checkpoint(str(tmp_path), config, facts | {"batch": 4})


ONE_STEP = ("--no_plots", "--save_strategy", "steps", "--save_steps", "1")


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a training of one step, and its checkpoint."""
    output = tmp_path_factory.mktemp("trained")
    assert main(["train-locret", *arguments(text, output, *ONE_STEP, "--max_steps", "1")]) == 0
    return output


@pytest.mark.parametrize(
    ("given", "removed", "missing"),
    [
        (["--save_only_model", "true"], None, "optimizer.pt, scheduler.pt, rng_state*.pth"),
        ([], "optimizer.pt", "optimizer.pt"),
        ([], "scheduler.pt", "scheduler.pt"),
        ([], "rng_state.pth", "rng_state*.pth"),
    ],
)
def test_a_checkpoint_without_the_optimizer_is_not_gone_on_with(
    given: list[str],
    removed: str | None,
    missing: str,
    text: Path,
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The Trainer would begin its warm-up anew in the middle of the training, and say nothing."""
    more = (*ONE_STEP, *given)
    if given:
        assert main(["train-locret", *arguments(text, tmp_path, *more, "--max_steps", "1")]) == 0
    else:
        shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    heads = (tmp_path / "model.safetensors").read_bytes()
    checkpoint = tmp_path / "checkpoint-1"
    if removed is not None:
        (checkpoint / removed).unlink()
    capsys.readouterr()
    for named in ("true", str(checkpoint)):
        resume = (*more, "--resume_from_checkpoint", named)
        with monkeypatch.context() as loading:
            loading.setattr(job, "load_config", lambda *args, **options: pytest.fail("loaded"))
            assert main(["train-locret", *arguments(text, tmp_path, *resume, "--max_steps", "2")]) == 2
        said = f"got {str(checkpoint)!r} without {missing}: --save_only_model true leaves them out."
        error = capsys.readouterr().err
        assert error.startswith("error: --resume_from_checkpoint must be") and said in error
    assert main(["train-locret", *arguments(text, tmp_path, *resume, "--max_steps", "1")]) == 0
    assert (tmp_path / "model.safetensors").read_bytes() == heads, "that is all there once it has all steps"


def _interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    def stop(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == step:
            raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(TrainerCallback, "on_save", stop)
        assert main(command) == 130


@pytest.mark.parametrize("logging_steps", ["1", pytest.param("100", marks=pytest.mark.in_depth)])
def test_the_steps_of_an_interrupted_training_are_not_lost(
    logging_steps: str,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The Trainer deletes checkpoints of any training when it saves those of a new one."""
    output = tmp_path / "out"
    more = ("--no_plots", "--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "2")
    more += ("--logging_steps", logging_steps, "--gradient_accumulation_steps", "1")
    command = ["train-locret", *arguments(text, output, *more, "--max_steps", "3")]
    _interrupt_at(1, monkeypatch, command)
    kept = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    other = tmp_path / "other" / "checkpoint-1"
    shutil.copytree(output / "checkpoint-1", other)
    capsys.readouterr()
    for resume in ([], ["--resume_from_checkpoint", str(other)]):
        with monkeypatch.context() as loading:
            loading.setattr(job, "load_config", lambda *args, **options: pytest.fail("loaded"))
            assert main([*command, *resume]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: --output_dir must not hold") and "--resume_from_checkpoint" in error
        assert f"got {str(output)!r} with checkpoint-1." in error
        assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == kept
    assert main([*command, "--resume_from_checkpoint", "true"]) == 0
    assert {path.name for path in output.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3"}
    heads = (output / "model.safetensors").read_bytes()

    assert main(command) == 0, "one that was finished may be repeated, where it is"
    assert (output / "model.safetensors").read_bytes() == heads
    other_seed = [*command, "--seed", "1"]
    assert main(other_seed) == 0, "and so may another, whose results set those of the first one aside"
    assert len(list(output.glob("results*.json"))) == 2
    assert main(command) == 0
    (output / "checkpoint-3" / "trainer_state.json").write_text("{}")  # nobody could go on from that
    assert main(command) == 0


def test_the_steps_of_a_training_are_not_those_of_the_finished_one_beside_it(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("--no_plots", "--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "5")
    command = ["train-locret", *arguments(text, tmp_path, *more)]
    assert main([*command, "--max_steps", "4"]) == 0
    other = [*command, "--learning_rate", "1e-4", "--max_steps", "3"]  # nothing is logged by then
    _interrupt_at(2, monkeypatch, other)
    assert main(command) == 2
    assert f"got {str(tmp_path)!r} with checkpoint-2." in capsys.readouterr().err
    assert main([*other, "--resume_from_checkpoint", "true"]) == 0
    document = json.loads((tmp_path / "results.json").read_text())
    assert (document["settings"]["steps"], document["settings"]["learning_rate"]) == (3, 1e-4)
    assert "kept: " in capsys.readouterr().out, "and the results of the finished one"


def test_the_best_heads_are_those_of_their_step(text: Path, tmp_path: Path) -> None:
    """Of the first evaluation, where the highest loss is asked for."""
    best = ("--load_best_model_at_end", "true", "--eval_strategy", "steps", "--eval_steps", "2")
    best += ("--save_strategy", "steps", "--save_steps", "2", "--metric_for_best_model", "loss")
    more = ("--no_plots", "--max_steps", "4", "--greater_is_better", "true")
    assert main(["train-locret", *arguments(text, tmp_path, *best, *more)]) == 0
    document = json.loads((tmp_path / "results.json").read_text())
    losses = [entry["eval_loss"] for entry in document["history"] if "eval_loss" in entry]
    assert losses[0] > losses[1]
    assert document["settings"]["steps"] == 2
    assert document["results"][1]["loss"] == pytest.approx(losses[0], rel=1e-3)


def test_a_picture_that_cannot_be_costs_no_heads(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    assert main(["train-locret", *arguments(text, tmp_path, "--max_steps", "1")]) == 0
    said = capsys.readouterr().out
    assert (
        f"no picture: The picture {tmp_path / 'training.png'} cannot be written: [Errno 28] No space" in said
    )
    assert "locret, untrained" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES[:-1]


DAMAGE = {
    "trainer_state.json": (
        ("{}", "its global_step must be an integer, got None."),
        ('{"global_step": 2}', "its train_batch_size must be an integer, got None."),
        ('{"global_step": 2, "train_batch_size": 1, "x": 1}', "unexpected keyword argument 'x'"),
    ),
    "optimizer.pt": (("", "it is no file of torch."),),
    "model.safetensors": (("", "cannot be read"),),
}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [(name, content, said) for name, cases in DAMAGE.items() for content, said in cases],
)
@pytest.mark.parametrize("given", ["true", "by name"])
def test_a_damaged_checkpoint_is_told_before_the_model_is_loaded(
    name: str, content: str, said: str, given: str, text: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(job, "load_config", lambda *args, **options: pytest.fail("loaded"))
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / "trainer_state.json").write_text('{"global_step": 2, "train_batch_size": 1}')
    (folder / name).write_text(content)
    resume = ("--resume_from_checkpoint", "true" if given == "true" else str(folder))
    assert main(["train-locret", *arguments(text, tmp_path, "--no_plots", *resume)]) == 2
    error = capsys.readouterr().err
    assert f"{folder / name}" in error and said in error and error.count("\n") == 1


def test_the_folder_of_a_model_is_left_alone(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Heads, calibrations and models have files of the same names."""
    victim = tmp_path / "model"
    victim.mkdir()
    kept = {"config.json": '{"model_type": "llama"}', "README.md": "mine", "model.safetensors": "weights"}
    for name, content in kept.items():
        (victim / name).write_text(content)
    common = ["--model", str(MODEL), "--output", str(victim)]
    small = ["--text_files", str(text), "--num_samples", "1", "--sequence_length", "16"]
    for command in (
        ["train-locret", *arguments(text, victim, "--max_steps", "1", "--no_plots")],
        ["import-locret", str(tmp_path), *common],
        ["calibrate", *common, *small],
    ):
        assert main(command) == 2
        assert "must not be the folder of a model" in capsys.readouterr().err
        assert {path.name: path.read_text() for path in victim.iterdir()} == kept
    bits = ["--backend", "kivi", "--target_bits", "3", "--sequence_length", "2"]
    assert main(["calibrate", *common, *small, *bits, "--sink_length", "0"]) == 2
    assert "is too short to judge a precision" in capsys.readouterr().err, "a precision alone has no card"


def test_options_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("model: m\nlearning_rate: 5e-4\nmax_steps: 7\noutput: there\nsave_strategy: no\n")
    options, training = parse_arguments(["--config", str(path), "--max_steps", "9"])
    assert training.save_strategy == "no", "which YAML takes for false"
    assert (options.model, training.learning_rate, training.max_steps) == ("m", 5e-4, 9)
    assert training.output_dir == "there"
    epochs = ["--model", "m", "--output", "x", "--num-train-epochs=2"]
    assert [parse_arguments(epochs + more)[1].max_steps for more in ([], ["--max_steps", "9"])] == [-1, 9]
    path.write_text("model: m\noutput: there\nnum_train_epochs: 2\nmax_steps: 7\n")
    assert parse_arguments(["--config", str(path)])[1].max_steps == 7
    path.write_text("model: m\nlearning_rat: 1\n")
    assert main(["train-locret", f"--config={path}"]) == 2
    assert "Unknown option 'learning_rat'" in capsys.readouterr().err


def test_a_data_set_that_is_typed_takes_the_place_of_the_one_in_the_file(tmp_path: Path) -> None:
    path, rows, text = tmp_path / "options.yaml", tmp_path / "rows.jsonl", tmp_path / "book.txt"
    rows.write_text("{}\n")
    text.write_text("Once.\n")
    path.write_text("model: m\noutput: x\ndataset: Yukang/LongAlpaca-12k\nmax_length: 300\nnum_examples: 5\n")
    for typed in (["--dataset", "synthetic"], ["--dataset=synthetic"]):
        options = parse_arguments(["--config", str(path), *typed])[0]
        assert (options.dataset, options.max_length, options.num_examples) == ("synthetic", None, None)
    assert parse_arguments(["--config", str(path), "--dataset", str(rows)])[0].max_length == 300
    with pytest.raises(ValueError, match="max_length is not for --dataset synthetic"):
        parse_arguments(["--config", str(path), "--dataset", "synthetic", "--max_length", "9"])
    path.write_text(f"model: m\noutput: x\nsequence_length: 300\ntext_files: ['{text}']\n")
    options = parse_arguments(["--config", str(path), "--dataset", str(rows)])[0]
    assert (options.dataset, options.text_files) == (str(rows), None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--model must name the model"),
        (["--model", "m"], "--output_dir (or --output) is needed"),
        (["--model", "m", "--output", "x", "--learning_rat", "3"], "Did you mean '--learning_rate'?"),
        (["--model", "m", "--output", "x", "--learning_rate", "abc"], "--learning_rate"),
        (["--model", "m", "--output", "x", "--use_cpu", "true", "--fp16", "true"], "allowed is --bf16 true"),
        (
            ["--model", "m", "--output", "x", "--hidden_dim", "0"],
            "--hidden_dim must be an integer >= 1, got 0",
        ),
        (
            ["--model", "m", "--output", "x", "--hidden_dim", "1000000000"],
            "--hidden_dim must be an integer >= 1 and at most 65536, got 1000000000",
        ),
        (
            ["--model", "m", "--output", "x", "--max_length", "1"],
            "--max_length must be an integer >= 2, got 1",
        ),
        (
            ["--model", "m", "--output", "x", "--sequence_length", "63"],
            "--sequence_length must be an integer >= 64, got 63",
        ),
        (["--model", "m", "--output", "x", "--dataset", "foo"], "got 'foo'"),
        (["--model", "m", "--output", "x", "--dataset", "no.jsonl"], "not there: 'no.jsonl'"),
        (["--model", "m", "--output", "x", "--text_files", "no.txt"], "not there: 'no.txt'"),
        (["--model", "m", "--output", "x", "--heads_dtype", "int8"], "--heads_dtype must be one of"),
        (["--model", "m", "--output", "x", "--dtype", "int8"], "--dtype must be one of"),
        (
            ["--model", "m", "--output", "x", "--resume_from_checkpoint", "true"],
            "there is no checkpoint in 'x'",
        ),
        (["--model", "m", "--output", "x", "--num_train_epochs", "1"], "which have no end, got -1"),
        (["--config"], "--config must name a YAML file"),
        (["--model", "m", "--output", ""], "--output_dir (or --output) is needed"),
        (["--model", "m", "--output", "x", "--clip_value", "nan"], "--clip_value must be at least 0"),
        (["--model", "m", "--output", "x", "--num_examples", "4"], "--num_examples is not for --dataset syn"),
        (
            ["--model", "m", "--output", "x", "--dataset", "a/b", "--sequence_length", "128"],
            "--sequence_length is for --dataset synthetic, not 'a/b', got 128.",
        ),
        (
            ["--model", "m", "--output", "x", "--hub_model_id", "a/b"],
            "--hub_model_id needs --push_to_hub true",
        ),
        (["--model", "m", "--output", "x", "--fsdp_config", "f.json"], "--fsdp_config needs --fsdp, got"),
        (
            ["--model", "m", "--output", "x", "--prediction_loss_only", "true"],
            "--prediction_loss_only must be left out, a training ends with the recall of its heads, got",
        ),
        (
            ["--model", "m", "--output", "x", "--neftune_noise_alpha", "5"],
            "--neftune_noise_alpha must be left",
        ),
        (["--model", "m", "--output", "x", "--include_for_metrics", "loss"], "must be left out, the recall"),
        (
            ["--model", "m", "--output", "x", "--gradient_accumulation_steps", "0"],
            "--gradient_accumulation_steps must be an integer >= 1, got 0.",
        ),
        (
            ["--model", "m", "--output", "x", "--eval_accumulation_steps", "0"],
            "--eval_accumulation_steps must be an integer >= 1, got 0.",
        ),
        (["--model", "m", "--output", "x", "--torch_compile_mode", "no"], "--torch_compile_mode must be one"),
        (["--model", "m", "--output", "x", "--accelerator_config", "no.json"], "The Trainer cannot have"),
        (
            ["--model", "m", "--output", "x", "--accelerator_config", "{"],
            "--accelerator_config must be a JSON",
        ),
        (["--model", "m", "--output", "x", "--lr_scheduler_kwargs", "a"], "must be a JSON object, got 'a' ("),
        (
            ["--model", "m", "--output", "x", "--optim_args", "a=1,b"],
            "--optim_args must be NAME=VALUE,NAME=V",
        ),
        (
            ["--model", "m", "--output", "x", "--lr_scheduler_type", "no"],
            "--lr_scheduler_type must be one of",
        ),
        (["--model", "m", "--output", "x", "--save_strategy", "never"], "--save_strategy must be one of"),
        (["--model", "m", "--output", "x", "--seed", "-1"], "--seed must be an integer >= 0, got -1."),
    ],
)
def test_wrong_arguments(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train-locret", *given]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", ["0", "-3", "nan", "inf", "1e308"])
def test_a_training_has_steps(given: str) -> None:
    """One of none would replace trained heads by others that are not."""
    common = ["--model", "m", "--output", "x", "--dataset", "a/b"]
    got = re.escape(f", got {float(given)!r}.")
    for more in ([], ["--max_steps", "7"]):
        with pytest.raises(ValueError, match=f"^--num_train_epochs must be a number above 0 .*{got}$"):
            parse_arguments([*common, f"--num_train_epochs={given}", *more])
    if given in ("0", "-3"):
        with pytest.raises(ValueError, match=rf"^--max_steps must be an integer >= 1, or -1 .*, got {given}"):
            parse_arguments([*common, f"--max_steps={given}"])
    assert parse_arguments([*common, "--max_steps", "-1"])[1].max_steps == -1
    assert parse_arguments([*common, "--num_train_epochs", "0.01"])[1].num_train_epochs == 0.01


@pytest.mark.parametrize(
    "name", ["logging_steps", "save_steps", "eval_steps", "warmup_steps", "weight_decay"]
)
@pytest.mark.parametrize("given", ["nan", "inf", "-5"])
def test_numbers_are_finite_and_not_negative(name: str, given: str) -> None:
    every = ("--eval_strategy", "steps", "--save_strategy", "steps", "--logging_strategy", "steps")
    said = f"--{name} must be a finite number of at least 0, got {float(given)!r}."
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        parse_arguments(["--model", "m", "--output", "x", *every, f"--{name}={given}"])
    parse_arguments(["--model", "m", "--output", "x", *every, f"--{name}=0.5"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--lr_scheduler_kwargs", '{"cycles": 1}'], "unexpected keyword argument 'cycles'"),
        (["--learning_rate", "-1"], "Invalid learning rate: -1.0"),
        (["--metric_for_best_model", "accuracy"], "--metric_for_best_model must be one of"),
    ],
)
def test_what_only_the_trainer_refuses_is_told_before_the_model_is_loaded(
    given: list[str],
    message: str,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(job, "_load_base", lambda *args: pytest.fail("loaded"))
    assert main(["train-locret", *arguments(text, tmp_path, "--no_plots", *given)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("qwen3_next", r"has layers without keys and values, \[0.* such as 'knorm' and 'kvzip'"),
        ("bloom", "add a bias to every logit"),
    ],
)
def test_models_whose_heads_nobody_could_use_are_refused(
    family: str,
    said: str,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job, "load_tokenizer", lambda *args, **options: pytest.fail("loaded"))
    tiny_model(family).config.save_pretrained(tmp_path / "model")
    command = ["train-locret", *arguments(text, tmp_path / "out", "--no_plots")]
    assert main([*command, "--model", str(tmp_path / "model")]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_model_of_which_nothing_is_evicted_is_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "load_tokenizer", lambda *args, **options: pytest.fail("loaded"))
    MistralConfig(sliding_window=16, max_position_embeddings=64).save_pretrained(tmp_path / "model")
    command = ["train-locret", *arguments(text, tmp_path / "out", "--no_plots")]
    assert main([*command, "--model", str(tmp_path / "model")]) == 2
    said = (
        f"error: --model {str(tmp_path / 'model')!r} has no layer that could evict tokens "
        "(sliding_attention: holds at most 16 tokens already)"
    )
    assert said in capsys.readouterr().err


def test_unknown_attention_is_told_before_the_model_is_looked_for(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "load_config", lambda *args, **options: pytest.fail("loaded"))
    given = arguments(text, tmp_path, "--no_plots", "--attn_implementation", "foo")
    assert main(["train-locret", *given]) == 2
    assert "--attn_implementation must be one of eager, " in capsys.readouterr().err


@pytest.mark.parametrize(("given", "seed"), [([], 5), (["--data_seed", "0"], 0)])
def test_the_seed_of_the_data(
    given: list[str], seed: int, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*args: Any, seed: int, **options: Any) -> Any:
        raise ValueError(seed)

    monkeypatch.setattr(job, "build_datasets", build)
    options, training = parse_arguments([*arguments(text, tmp_path, "--seed", "5"), *given])
    with pytest.raises(ValueError, match=f"^{seed}$"):
        job.train_locret(options, training)


def test_a_file_must_be_of_json_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("synthetic").write_text("a file of that name changes nothing")
    assert LocretOptions(model="m").dataset == "synthetic"
    for name in ("rows.json", "deep/rows.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text('[{"prompt": "a", "answer": "b"}]')
        with pytest.raises(ValueError, match=rf"a \.jsonl file or a hub id.*got '{name}'"):
            LocretOptions(model="m", dataset=name)


def test_help_lists_options_of_both_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train-locret", "--help"])
    shown = capsys.readouterr().out
    assert stopped.value.code == 0 and "--text_files" in shown and "--gradient_accumulation_steps" in shown
    assert "(default: 600)" in shown, "also options that have other defaults than transformers'"
    assert "--neftune_noise_alpha" not in shown, "what is refused is not offered"


def test_heads_of_the_authors_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {}
    for layer in range(6):
        tensors[f"model.layers.{layer}.self_attn.fc1.weight"] = torch.randn(8, 768)
        tensors[f"model.layers.{layer}.self_attn.fc2.weight"] = torch.randn(2, 8)
    save_file(tensors, tmp_path / "official.safetensors")
    command = ["import-locret", str(tmp_path / "official.safetensors"), "--model", str(MODEL), "--output"]
    assert main([*command, str(tmp_path / "out")]) == 0
    assert "6 heads of width 8" in capsys.readouterr().out
    assert load_heads(str(tmp_path / "out")).config.hidden_dim == 8
    assert main([*command, str(tmp_path / "out"), "--revision", "main"]) == 2
    assert "--revision is for sources on the hub" in capsys.readouterr().err
    assert main(["import-locret", "x", "--model", "./nowhere", "--output", str(tmp_path / "out")]) == 2
    assert "--model must be a directory or a hub id" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "official.safetensors")]) == 2
    assert "--output must be a directory" in capsys.readouterr().err
