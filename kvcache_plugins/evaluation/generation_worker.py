"""One measurement of `generate()`, in a process of its own, so that its peak memory is its own.

python -m kvcache_plugins.evaluation.generation_worker JOB.json ANSWER.json
"""

from __future__ import annotations

import platform
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from ..artifacts.files import read_json, write_json
from ..cache import KVCache
from .caches import cache_bytes, generate
from .timing import StepTimer

__all__ = ["main", "measure", "model_config"]

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


def model_config(model: str | None) -> PreTrainedConfig:
    """Return the configuration of a model, or of the random one that stands in for it."""
    config: PreTrainedConfig
    if model is not None:
        config = AutoConfig.from_pretrained(model)
    else:
        config = AutoConfig.for_model("llama", **_RANDOM_MODEL)
    return config


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Generate from a random prompt with one cache.

    Args:
        job (`dict`): `model` (path, hub id or None), `dtype` (torch's name), `cache_config`, `length`,
            `batch_size`, `max_new_tokens` and `threads`.

    Returns:
        `dict`: `prefill_ms`, `step_ms` (list), `kv_bytes`, `memory_before_bytes`, `peak_memory_bytes`,
        `kernel`, `fallback_reads`, `threads`, `parameters`, `new_tokens`.
    """
    if job["threads"] is not None:
        torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    dtype = getattr(torch, job["dtype"])
    if job["model"] is not None:
        model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_config(model_config(None), dtype=dtype)
    model.eval()
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    prompt = torch.randint(10, vocabulary, (job["batch_size"], job["length"]))
    # kernels and quanto's extension are built at their first use
    generate(model, prompt[:, :_WARM_UP_PROMPT], job["cache_config"], WARM_UP_STEPS)
    before = resident_bytes("VmRSS")
    timer = StepTimer()
    output = generate(model, prompt, job["cache_config"], job["max_new_tokens"], timer)
    cache = output.past_key_values
    report = cache.report() if isinstance(cache, KVCache) else None
    return {
        "prefill_ms": timer.prefill_ms(),
        "step_ms": timer.decode_ms()[WARM_UP_STEPS:],
        "kv_bytes": cache_bytes(cache),
        "memory_before_bytes": before,
        "peak_memory_bytes": resident_bytes("VmHWM"),
        "kernel": sorted(set(report.kernel)) if report else None,
        "fallback_reads": report.fallback_reads if report else None,
        "threads": torch.get_num_threads(),
        "parameters": model.num_parameters(),
        "new_tokens": output.sequences.shape[1] - job["length"],
    }


def resident_bytes(field: str) -> int:
    """Return `VmRSS` (now) or `VmHWM` (the peak) of this process; the peak for both where neither is told."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main(argv: list[str]) -> int:
    """Read the job, measure, write the answer."""
    job, answer = map(Path, argv)
    transformers.logging.set_verbosity_error()
    write_json(answer, measure(read_json(job)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
