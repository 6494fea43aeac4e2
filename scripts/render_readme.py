#!/usr/bin/env python3
"""Render the generated parts of README.md: the backend table and the measured table.

    python scripts/render_readme.py                         write README.md
    python scripts/render_readme.py --check                 fail if README.md is not what would be written
    python scripts/render_readme.py --record results.json   first keep a quickstart run as the measured one

The backend table comes from the registry, the measured one from `examples/results/quickstart.json`, so
neither can say anything that the code or a recorded run does not.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RECORDED = ROOT / "examples" / "results" / "quickstart.json"

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
    parser.add_argument(
        "--record", type=Path, metavar="RESULTS_JSON", help="quickstart run to keep and to show"
    )
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
    """Copy the results of a quickstart run to the place the README is rendered from."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("task") != "quickstart" or document.get("schema_version") != 1:
        raise ValueError(f"{path} is not a results.json of examples/quickstart.py")
    if document["environment"]["dirty"] is not False and not allow_dirty:
        raise ValueError(f"{path} was measured on code that is not committed; commit, run again, then record")
    RECORDED.parent.mkdir(parents=True, exist_ok=True)
    RECORDED.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def render(readme: str) -> str:
    """Return the README with both generated parts replaced."""
    from kvcache_plugins.cli.backend_table import backend_rows, markdown_table

    # a third party's backend may be installed beside ours, and is not ours to present
    rows = [row for row in backend_rows() if row.module.startswith("kvcache_plugins.backends.")]
    readme = replace_part(readme, "backends", markdown_table(rows))
    return replace_part(readme, "measured", measured_part())


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
    settings, place = document["settings"], document["environment"]
    lines = [
        f"| {' | '.join(MEASURED_COLUMNS)} |",
        f"|---|{'--:|' * (len(MEASURED_COLUMNS) - 1)}",
    ]
    lines += [f"| {' | '.join(measured_cells(row))} |" for row in document["results"]]
    code = f"commit {place['commit'][:10]}" if place["commit"] else "code without a commit"
    sentences = (
        f"`{place['command']}`",
        f"{settings['prompt_tokens']} prompt tokens, {settings['new_tokens']} generated, "
        f"{settings['score_tokens']} scored",
        f"bytes and times in {settings['dtype']}, the rest in {settings['score_dtype']}",
        f"{place['device']} with {place['threads']} thread{'' if place['threads'] == 1 else 's'}",
        f"torch {place['versions']['torch']}, transformers {place['versions']['transformers']}",
        code + (" with uncommitted changes" if place["dirty"] else ""),
    )
    lines += ["", "; ".join(sentences) + "."]
    return "\n".join(lines)


def measured_cells(row: dict[str, Any]) -> list[str]:
    """Return one row of the measured table."""
    from kvcache_plugins.registry import TRANSFORMERS_BACKENDS

    is_foreign = row["cache_config"]["backend"] in TRANSFORMERS_BACKENDS
    return [
        row["label"] + (" (transformers)" if is_foreign else ""),
        f"{row['kv_bytes']:,}",
        f"{row['memory_fraction']:.3f}",
        f"{row['bits_per_value']:.2f}",
        f"{row['perplexity']:.3f}",
        f"{row['kl_to_dense']:.5f}",
        f"{row['top1_agreement']:.3f}",
        f"{row['ms_per_token']:.1f}",
        f"{row['agreement']:.2f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
