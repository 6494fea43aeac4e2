#!/usr/bin/env python3
"""Measure one decode step of attention over packed keys and values on a GPU, against dense attention.

python scripts/benchmark_cuda.py --preset llama3-8b --batch_sizes 1 8 --lengths 32768 --output results.json

Several sets of random keys and values take turns, so that none lies in the GPU's cache. A call is timed by
events around replays of a CUDA graph of several calls, one set each; medians over repeats. Beside the times:
the bytes of the records, the bandwidth they mean, as a fraction of that of a copy measured in the same run,
and the error against fp32 attention over the same decoded tokens. `append_ms` is one token's encoding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout this script belongs to

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvcache_plugins.attention.native import attend_handles
from kvcache_plugins.attention.reference import AttentionOptions
from kvcache_plugins.evaluation.caches import new_cache
from kvcache_plugins.evaluation.dense_attention import BASELINES, exact_attention, max_rel_error
from kvcache_plugins.evaluation.labels import cache_label
from kvcache_plugins.kernels import cuda_loader
from kvcache_plugins.models.layer_plan import key_value_heads
from kvcache_plugins.models.presets import preset_config

CONFIGS = [
    {"backend": "int8"},
    {"backend": "float8"},
    {"backend": "int4"},
    {"backend": "kivi", "nbits": 4},
    {"backend": "kivi", "nbits": 4, "q_group_size": 64},
    {"backend": "kivi", "nbits": 2},
    {"backend": "kivi", "nbits": 4, "rope_mode": "block"},
    {"backend": "kivi", "nbits": 2, "rope_mode": "block"},
]
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 2 GiB, in GB/s."""
    source = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / 1e6 / milliseconds([lambda: target.copy_(source)], 5)


def milliseconds(calls: list[Callable[[], object]], repeats: int) -> float:
    """Median time of a call; `calls` are the same work on different data."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        replay = graph.replay
    except RuntimeError as error:  # a baseline that cannot be captured is timed as it is
        print(f"  not captured: {str(error).splitlines()[0]}", file=sys.stderr)
        torch.cuda.synchronize()

        def replay() -> None:
            for call in calls:
                call()

    replay()
    times = []
    for _ in range(repeats):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(started.elapsed_time(ended) / len(calls))
    return statistics.median(times)


def dense(states: list[tuple[Tensor, Tensor, Tensor]], repeats: int) -> dict[str, float]:
    """Times of the ways to attend densely, those that run here."""
    times = {}
    attempts: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = dict(BASELINES)
    for name, backend in BACKENDS.items():
        for form in ("sdpa_enable_gqa", "sdpa_packed_query"):

            def attempt(*inputs: Tensor, backend: Any = backend, form: str = form) -> Tensor:
                with sdpa_kernel(backend):
                    return BASELINES[form](*inputs)

            attempts[f"{form}_{name}"] = attempt
    for name, attend in attempts.items():
        try:
            calls = [lambda attend=attend, s=s: attend(*s) for s in states]
            times[name] = milliseconds(calls, repeats)
        except RuntimeError as error:
            print(f"  {name}: {str(error).splitlines()[0]}", file=sys.stderr)
            torch.cuda.synchronize()
    return times


def packed_layer(config: Any, cache_config: dict[str, Any], keys: Tensor, values: Tensor) -> Any:
    layer = new_cache(config, cache_config).packed_layers[0]
    layer.update(keys, values)
    return layer


def measure(config: Any, cache_config: dict[str, Any], states: Any, repeats: int) -> dict[str, Any]:
    """One cache at one length and batch size."""
    steps = []
    for query, keys, values in states:
        layer = packed_layer(config, cache_config, keys[:, :, :-1], values[:, :, :-1])
        steps.append((query, *layer.update(keys[:, :, -1:], values[:, :, -1:]), layer))
    query, key, value, layer = steps[0]
    output = attend_handles(query, key, value, AttentionOptions())
    decoded = [handle.tokens.dense(torch.float32) for handle in (key, value)]
    error = max_rel_error(output, exact_attention(query, *decoded))
    del decoded
    calls = [lambda s=s: attend_handles(*s[:3], AttentionOptions()) for s in steps]
    record_bytes = 0
    for handle in (key, value):
        stream, tokens = handle.tokens.stream, handle.tokens
        fields = [
            size for name, (_, size) in layer.records.layout.fields.items() if name.startswith(stream.side)
        ]
        heads = layer.records.data.shape[0] * layer.records.data.shape[1]
        record_bytes += heads * tokens.packed_length * sum(fields) // 64
        record_bytes += sum(segment.numel() * segment.element_size() for segment in tokens.segments)
    median = milliseconds(calls, repeats)
    new = [states[0][i][:, :, -1:].clone() for i in (1, 2)]
    for _ in range(3):
        layer.update(*new)
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    for _ in range(64):
        layer.update(*new)
    ended.record()
    torch.cuda.synchronize()
    return {
        "label": cache_label(cache_config),
        "cache_config": cache_config,
        "kernel": layer.kernel,
        "median_ms": median,
        "append_ms": started.elapsed_time(ended) / 64,
        "bytes": record_bytes,
        "gb_per_s": record_bytes / median / 1e6,
        "max_rel_error": error,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="llama3-8b")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768])
    parser.add_argument("--sets", type=int, default=3, help="sets of keys and values that take turns")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--cache_config", type=json.loads, nargs="+", default=CONFIGS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this needs a GPU; `kvcache-plugins bench attention` measures on the CPU")
    config = preset_config(options.preset)
    kv_heads, key_dim, value_dim = key_value_heads(config, 0)
    bandwidth = copy_bandwidth()
    rows: list[dict[str, Any]] = []
    document = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "preset": options.preset,
        "dtype": "bfloat16",
        "copy_gb_per_s": bandwidth,
        "kernels": str(cuda_loader.status()),
        "results": rows,
    }
    print(f"{document['device']}, copy {bandwidth:.0f} GB/s")
    for length in options.lengths:
        for batch in options.batch_sizes:
            states = []
            for _ in range(options.sets):
                query = 2 * torch.randn(batch, config.num_attention_heads, 1, key_dim, device="cuda")
                keys = torch.randn(batch, kv_heads, length, key_dim, device="cuda")
                values = torch.randn(batch, kv_heads, length, value_dim, device="cuda")
                states.append((query.bfloat16(), keys.bfloat16(), values.bfloat16()))
            baselines = dense(states, options.repeats)
            best = min(baselines, key=lambda name: baselines[name])
            dense_bytes = 2 * batch * kv_heads * length * (key_dim + value_dim)
            fraction = dense_bytes / baselines[best] / 1e6 / bandwidth
            print(
                f"{length} x {batch}: dense {best} {baselines[best]:.4f} ms, {fraction:.0%} of copy bandwidth"
            )
            for cache_config in options.cache_config:
                row = measure(config, cache_config, states, options.repeats)
                row |= {
                    "length": length,
                    "batch_size": batch,
                    "baseline_ms": baselines,
                    "speed_up": baselines[best] / row["median_ms"],
                    "fraction_of_copy": row["gb_per_s"] / bandwidth,
                }
                rows.append(row)
                print(
                    f"  {row['label']:<28} {row['kernel']:<6} {row['median_ms']:.4f} ms  "
                    f"x{row['speed_up']:.2f}  {row['fraction_of_copy']:.0%} of copy  "
                    f"error {row['max_rel_error']:.1e}  append {row['append_ms']:.3f} ms",
                    flush=True,
                )
                if options.output is not None:
                    options.output.write_text(json.dumps(document, indent=1))
            del states
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
