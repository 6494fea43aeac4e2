#!/usr/bin/env python3
"""Render the generated parts of README.md: the backend table and the measured tables.

    python scripts/render_readme.py                         write README.md
    python scripts/render_readme.py --check                 fail if README.md is not what would be written
    python scripts/render_readme.py --record results.json   first keep a run as the measured one

The backend table comes from the registry, the measured ones from `examples/results/quickstart.json`, and from
`perplexity.json`, `passkey.json`, `facts.json` (a passkey run of several facts), and those of whole models
and of a GPU beside it, so none can say anything that the code or a recorded run does not.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RECORDED = ROOT / "examples" / "results" / "quickstart.json"

RECORDABLE = {
    "quickstart": "examples/quickstart.py",
    "perplexity": "scripts/eval_perplexity.py",
    "passkey": "scripts/eval_passkey.py",
}
"""Task of a run that can be recorded, and what writes it."""

EVALUATIONS = {
    "perplexity": (
        ("perplexity", "perplexity", ".3f"),
        ("kl_to_dense", "KL to dense", ".5f"),
        ("top1_agreement", "same top-1", ".3f"),
        ("packed_read_fraction", "read packed", ".3f"),
        ("kv_bytes", "bytes", ","),
        ("bits_per_value", "bits per value", ".2f"),
    ),
    "passkey": (
        ("accuracy", "accuracy", ".3f"),
        ("kv_bytes", "bytes", ","),
        ("bits_per_value", "bits per value", ".2f"),
    ),
    "facts": (
        ("accuracy", "accuracy", ".3f"),
        ("kv_bytes", "bytes", ","),
        ("memory_fraction", "of dense", ".3f"),
    ),
}
"""Columns of each evaluation: key, heading and format; one that no result has is left out."""

GPU_RUNS = {"8 sequences": "bench_attention_h200_batch_8", "one": "bench_attention_h200_batch_1"}
"""Recorded runs of attention on a GPU, by what their columns are headed with."""

MODEL_RUNS = (
    "bench_windows",
    "bench_latents",
    "bench_gemma3",
    "bench_gemma3_avx512",
    "bench_gpt_oss",
    "bench_gpt_oss_avx512",
    "bench_encoder",
)
"""Recorded runs of whole models with random weights on a CPU."""

MODEL_COLUMNS = (
    ("prefill_ms", 1e-3, "prompt, s"),
    ("ms_per_token", 1.0, "token, ms"),
    ("peak_memory_bytes", 1e-9, "process, GB"),
)
"""What is shown of them: key, factor and heading."""

MEASURED_COLUMNS = (
    "cache",
    "bytes",
    "of dense",
    "bits per value",
    "perplexity",
    "KL to dense",
    "same top-1",
    "ms per token",
    "same tokens",
)


def main(argv: list[str] | None = None) -> int:
    """Write, or check, the README; return 1 if the check found a difference."""
    parser = argparse.ArgumentParser(description="Render the generated parts of README.md.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if README.md is out of date"
    )
    parser.add_argument("--record", type=Path, metavar="RESULTS_JSON", help="run to keep and to show")
    parser.add_argument(
        "--allow_dirty", action="store_true", help="record a run of uncommitted code (it will say so)"
    )
    args = parser.parse_args(argv)
    if args.record is not None:
        try:
            record(args.record, allow_dirty=args.allow_dirty)
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    current = README.read_text(encoding="utf-8")
    rendered = render(current)
    if args.check:
        sys.stdout.writelines(
            difflib.unified_diff(
                current.splitlines(keepends=True), rendered.splitlines(keepends=True), "README.md", "rendered"
            )
        )
        return int(current != rendered)
    README.write_text(rendered, encoding="utf-8")
    return 0


def record(path: Path, *, allow_dirty: bool) -> None:
    """Copy the results of a run to the place the README is rendered from."""
    document = json.loads(path.read_text(encoding="utf-8"))
    task = document.get("task")
    if task not in RECORDABLE or document.get("schema_version") != 1:
        raise ValueError(f"{path} is not a results.json of one of {', '.join(RECORDABLE.values())}")
    if document["environment"]["dirty"] is not False and not allow_dirty:
        raise ValueError(f"{path} was measured on code that is not committed; commit, run again, then record")
    RECORDED.parent.mkdir(parents=True, exist_ok=True)
    has_facts = any(row.get("facts", 1) > 1 for row in document["results"])
    name = "facts" if has_facts else task
    RECORDED.with_name(f"{name}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def render(readme: str) -> str:
    """Return the README with the generated parts replaced."""
    from kvcache_plugins.cli.backend_table import backend_rows, markdown_table

    # a third party's backend may be installed beside ours, and is not ours to present
    rows = [row for row in backend_rows() if row.module.startswith("kvcache_plugins.backends.")]
    readme = replace_part(readme, "packing", markdown_table([row for row in rows if not row.evicts]))
    readme = replace_part(readme, "evicting", markdown_table([row for row in rows if row.evicts]))
    readme = replace_part(readme, "measured", measured_part())
    readme = replace_part(readme, "evaluations", evaluations_part("perplexity", "passkey"))
    readme = replace_part(readme, "models", models_part())
    readme = replace_part(readme, "gpu", gpu_part())
    return replace_part(readme, "facts", evaluations_part("facts"))


def replace_part(readme: str, name: str, content: str) -> str:
    """Replace what stands between `<!-- name:begin -->` and `<!-- name:end -->`."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if readme.count(begin) != 1 or readme.count(end) != 1:
        raise ValueError(f"README.md must contain {begin} and {end} once each")
    before, _, rest = readme.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{content}\n{end}{after}"


def measured_part() -> str:
    """Return the table of the recorded run, with the command that made it and where it ran."""
    if not RECORDED.exists():
        return "No run is recorded yet; `./scripts/quickstart.sh` prints this table for your machine."
    document = json.loads(RECORDED.read_text(encoding="utf-8"))
    settings = document["settings"]
    lines = [
        f"| {' | '.join(MEASURED_COLUMNS)} |",
        f"|---|{'--:|' * (len(MEASURED_COLUMNS) - 1)}",
    ]
    lines += [f"| {' | '.join(measured_cells(row))} |" for row in document["results"]]
    sentences = (
        f"{settings['prompt_tokens']} prompt tokens, {settings['new_tokens']} generated, "
        f"{settings['score_tokens']} scored",
        f"bytes and times in {settings['dtype']}, the rest in {settings['score_dtype']}",
    )
    return "\n".join([*lines, "", origin(document["environment"], *sentences)])


def origin(place: dict[str, Any], *sentences: str) -> str:
    """Return the command of a run, what is to be said about it, and where it ran."""
    code = f"commit {place['commit'][:10]}" if place["commit"] else "code without a commit"
    parts = (
        f"`{place['command']}`",
        *sentences,
        f"{place['device']} with {place['threads']} thread{'' if place['threads'] == 1 else 's'}",
        f"torch {place['versions']['torch']}, transformers {place['versions']['transformers']}",
        code + (" with uncommitted changes" if place["dirty"] else ""),
    )
    return "; ".join(parts) + "."


def evaluations_part(*names: str) -> str:
    """Return the tables of recorded evaluations; nothing where none is recorded."""
    paths = {name: RECORDED.with_name(f"{name}.json") for name in names}
    tables = [
        evaluation_table(json.loads(path.read_text(encoding="utf-8")), EVALUATIONS[name])
        for name, path in paths.items()
        if path.exists()
    ]
    return "\n\n".join(tables)


def evaluation_table(document: dict[str, Any], columns: Sequence[tuple[str, str, str]]) -> str:
    """Return one evaluation as a table, the accuracy of each length of a passkey run beside the mean."""
    rows = document["results"]
    shown = [column for column in columns if any(row.get(column[0]) is not None for row in rows)]
    lengths = sorted({length for row in rows for length in row.get("by_length") or {}}, key=int)
    heads = ["cache", *(title for _, title, _ in shown), *(f"{length} tokens" for length in lengths)]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'--:|' * (len(heads) - 1)}"]
    for row in rows:
        cells = [_format(row.get(key), form) for key, _, form in shown]
        cells += [_format((row.get("by_length") or {}).get(length), ".2f") for length in lengths]
        lines.append(f"| {' | '.join([cache_name(row), *cells])} |")
    return "\n".join([*lines, "", origin(document["environment"])])


def models_part() -> str:
    """Return the table of whole models: of every length and batch size the dense cache, and the range of
    ours."""
    heads = ["model", "layers", "dtype", "kernels", "rows", "tokens"]
    heads += [title for _, _, title in MODEL_COLUMNS]
    lines = [f"| {' | '.join([*heads, 'bytes'])} |", f"|---|--:|---|---|{'--:|' * (len(heads) - 3)}"]
    for name in MODEL_RUNS:
        document = json.loads(RECORDED.with_name(f"{name}.json").read_text(encoding="utf-8"))
        settings = document["settings"]
        run = [
            f"[`{settings['preset']}`](examples/results/{name}.json)",
            str(settings["num_layers"] or "all"),
            settings["dtype"],
            settings.get("cpu_kernels") or "-",
        ]
        cases = {(row["batch_size"], row["length"]): [] for row in document["results"]}
        for row in document["results"]:
            cases[row["batch_size"], row["length"]].append(row)
        for (rows, length), results in cases.items():
            cells = [*run, str(rows), f"{length:,}"]
            for key, factor, _ in MODEL_COLUMNS:
                dense, *packed = (factor * row[key] for row in results)
                cells.append(f"{_short(dense)} → {_range(packed)}")
            cells.append(_range([row["memory_fraction"] for row in results[1:]]))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _range(values: Sequence[float]) -> str:
    least, most = _short(min(values)), _short(max(values))
    return least if least == most else f"{least} to {most}"


def _short(value: float) -> str:
    """Two or three digits."""
    return format(value, ".2f" if value < 1 else ".1f" if value < 20 else ".0f")


def gpu_part() -> str:
    """Return the table of the recorded runs on a GPU, which are of the same caches in the same order."""
    documents = [
        json.loads(RECORDED.with_name(f"{name}.json").read_text(encoding="utf-8"))
        for name in GPU_RUNS.values()
    ]
    heads = ["cache", "of dense"]
    for title in GPU_RUNS:
        heads += [f"{title}: µs", "times dense", "of a copy"]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'--:|' * (len(heads) - 1)}"]
    for rows in zip(*(document["results"] for document in documents), strict=True):
        (name,) = {cache_name(row) for row in rows}
        cells = [name, f"{rows[0]['memory_fraction']:.3f}"]
        for row in rows:
            cells.append(f"{1000 * row['median_ms']:.0f}")
            cells.append(f"{1 / row['ratio_to_best_dense']:.2f}")
            cells.append(f"{row['fraction_of_copy']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    place = documents[0]["environment"]
    where = f"{place['device']}, torch {place['versions']['torch']}, commit {place['commit'][:10]}"
    return "\n".join([*lines, "", where + (" with uncommitted changes." if place["dirty"] else ".")])


def _format(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def cache_name(row: dict[str, Any]) -> str:
    """Return the name of a result's cache, and whether it is transformers' own."""
    from kvcache_plugins.registry import TRANSFORMERS_BACKENDS
    from kvcache_plugins.runs.labels import cache_label

    is_foreign = row["cache_config"]["backend"] in TRANSFORMERS_BACKENDS
    return (row.get("label") or cache_label(row["cache_config"])) + (" (transformers)" if is_foreign else "")


def measured_cells(row: dict[str, Any]) -> list[str]:
    """Return one row of the measured table."""
    return [
        cache_name(row),
        f"{row['kv_bytes']:,}",
        f"{row['memory_fraction']:.3f}",
        f"{row['bits_per_value']:.2f}",
        _format(row["perplexity"], ".3f"),
        f"{row['kl_to_dense']:.5f}",
        f"{row['top1_agreement']:.3f}",
        f"{row['ms_per_token']:.1f}",
        f"{row['agreement']:.2f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
