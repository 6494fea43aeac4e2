"""One measurement of `generate()`, in a process of its own, so that its peak memory is its own.

python -m kvcache_plugins.evaluation.speed.generation.worker JOB.json ANSWER.json PROCESS

PROCESS is the id of the one that waits for the answer, without which this one has nothing to do.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from transformers import AutoConfig, CompileConfig, PreTrainedConfig

from ....artifacts.files import read_json, write_json
from ....models.auto_class import auto_class
from ....models.cache_argument import cache_of
from ....models.positions import check_positions
from ....models.presets import preset_config
from ....models.pretrained import load_config, load_model
from ....registry import TRANSFORMERS_BACKENDS
from ....runs.memory import peak_resident_bytes, resident_bytes
from ...caches import cache_bytes, generate
from ..timing import StepTimer
from .process import OUT_OF_MEMORY

__all__ = ["DeviceMemory", "compiled", "end_with", "main", "measure", "model_config", "work"]

WARM_UP_STEPS = 4
"""Decode steps left out of the time per token: first-use allocations, and a first look at a fresh cache."""

_WARM_UP_PROMPT = 256

# About 50 million parameters; grouped queries as in current models, 64 channels a head.
_RANDOM_MODEL: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def model_config(
    model: str | None, preset: str | None = None, num_layers: int | None = None
) -> PreTrainedConfig:
    """Return the configuration of a model, of a preset, or of the random model that stands in for both.

    Args:
        model (`str`, *optional*): Path or hub id.
        preset (`str`, *optional*): A name of `models.presets.PRESETS`.
        num_layers (`int`, *optional*): Layers of the preset.
    """
    config: PreTrainedConfig
    if model is not None:
        config = load_config(model)
    elif preset is not None:
        config = preset_config(preset, num_layers)
    else:
        config = AutoConfig.for_model("llama", **_RANDOM_MODEL)
    return config


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Generate from a random prompt with one cache.

    The prompt is read by the model like any other, in one call unless the cache wants chunks; by its encoder
    if there is one. A step is timed from one token's arrival on the CPU to the next one's, so it ends when
    the device has finished it.

    Args:
        job (`dict`): `model` (path, hub id or None), `preset` and `num_layers` (or None; for random weights,
            made on the device), `compile` (a mode of `torch.compile`, or None), `dtype` (torch's name),
            `device`, `cache_config`, `length`, `batch_size`, `max_new_tokens` and `threads`.

    Returns:
        `dict`: `ttft_ms` (from the call to the first token) and `prefill_ms` (from the prompt's entry into
        the loop of `generate()`, what is prepared before it left out), `step_ms` (list), `kv_bytes`,
        `model_bytes` (parameters and buffers), `memory_before_bytes` (resident before the prompt),
        `load_peak_bytes` and `peak_memory_bytes` (resident at most, until then and in all),
        `device_before_bytes` and `device_peak_bytes` (allocated on a GPU before and during generation; None
        on a CPU), `kernel`, `fallback_reads`, `threads`, `parameters`, `new_tokens`.
    """
    if job["threads"] is not None:
        torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    dtype = getattr(torch, job["dtype"])
    device = torch.device(job["device"])
    memory = DeviceMemory(device) if device.type == "cuda" else None
    if job["model"] is not None:
        model = load_model(job["model"], load_config(job["model"]), dtype=dtype)
    else:
        config = model_config(None, job["preset"], job["num_layers"])
        with device:
            model = auto_class(config).from_config(config, dtype=dtype)
    if not model.config.is_encoder_decoder:
        read = job["length"] + job["max_new_tokens"] - 1  # the last is not read any more
        check_positions(model, read, "--lengths plus --max_new_tokens less one")
    model = model.eval().to(device)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    prompt = torch.randint(10, vocabulary, (job["batch_size"], job["length"])).to(device)
    compiling: dict[str, Any] = {}
    if job["compile"] is not None:
        compiling = compiled(model, job["compile"], job["cache_config"])
        for _ in range(2):  # a first graph is of one length, the next of all
            generate(model, prompt, job["cache_config"], 2 * WARM_UP_STEPS, **compiling)
    # kernels and quanto's extension are built at their first use
    generate(model, prompt[:, :_WARM_UP_PROMPT], job["cache_config"], WARM_UP_STEPS, **compiling)
    before, load_peak = resident_bytes(), peak_resident_bytes()
    device_before = None if memory is None else memory.begin()
    timer = StepTimer()
    started = time.perf_counter()
    output = generate(model, prompt, job["cache_config"], job["max_new_tokens"], timer, **compiling)
    device_peak = None if memory is None else memory.peak()
    cache = cache_of(output)
    report = cache.report() if hasattr(cache, "report") else None
    reports = [] if report is None else [report, report.cross_attention or report]
    before_first = 1 if model.config.is_encoder_decoder else job["length"]  # what the decoder begins with
    return {
        "ttft_ms": 1000 * (timer.times[1] - started),
        "prefill_ms": timer.prefill_ms(),
        "step_ms": timer.decode_ms()[WARM_UP_STEPS:],
        "kv_bytes": cache_bytes(cache),
        "model_bytes": model_bytes(model),
        "memory_before_bytes": before,
        "load_peak_bytes": load_peak,
        "peak_memory_bytes": peak_resident_bytes(),
        "device_before_bytes": device_before,
        "device_peak_bytes": device_peak,
        "kernel": sorted({name for part in reports for name in part.kernel}) if report else None,
        "fallback_reads": report.fallback_reads if report else None,
        "threads": torch.get_num_threads(),
        "parameters": model.num_parameters(),
        "new_tokens": output.sequences.shape[1] - before_first,
    }


def compiled(model: Any, mode: str, cache_config: dict[str, Any]) -> dict[str, Any]:
    """Compile a model, or return the arguments by which [`generate`] compiles what decodes.

    So it is done on GPUs for caches of ours: masks are then made before the graph, so that nothing that CUDA
    graphs record, which are of one size, depends on the length of the text.

    Args:
        model (`PreTrainedModel`): The model, on its device.
        mode (`str`): Of `torch.compile`.
        cache_config (`dict`): What the model will generate with.
    """
    is_ours = cache_config["backend"] not in ("dense", *TRANSFORMERS_BACKENDS)
    if is_ours and model.device.type == "cuda" and not model.config.is_encoder_decoder:
        return {"compile_config": CompileConfig(mode=mode)}
    model.compile(mode=mode)
    return {}


class DeviceMemory:
    """What tensors take of a GPU's memory, as torch's allocator counts it in this process.

    Args:
        device (`torch.device`): The GPU; it becomes the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.set_device(device)

    def begin(self) -> int:
        """Return the bytes allocated now, and count the peak from here."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """Return the most bytes allocated at once since [`begin`]."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)


def model_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all parameters and buffers; tied ones count once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation was refused; torch has no type of its own for it on CPUs."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def main(argv: list[str]) -> int:
    """Read the job, measure, write the answer; the status tells a refused allocation from other failures."""
    job, answer = map(Path, argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # what is said last is shown where a measurement fails
    # Where memory runs out, the system should end this process rather than one that does other work.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        measured = measure(read_json(job))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        print(str(error).splitlines()[0] if str(error) else "no memory", file=sys.stderr)
        return OUT_OF_MEMORY
    write_json(answer, measured)
    return 0


def end_with(process: int) -> None:
    """Wait until the process that started this one is gone, by whatever signal, and end this one too."""
    # Windows tells the id of the process that started this one also when that is gone
    while os.getppid() == process and psutil.pid_exists(process):
        time.sleep(1)
    os._exit(1)


def work(argv: list[str]) -> int:
    """Call [`main`] with all but the last argument: the process without which there is nothing to do."""
    *files, process = argv
    threading.Thread(target=end_with, args=(int(process),), daemon=True).start()
    return main(files)


if __name__ == "__main__":
    sys.exit(work(sys.argv[1:]))
