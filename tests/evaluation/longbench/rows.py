"""Rows of two tasks with short answers, as published, and templates for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEMPLATES = {
    "passage_count": "Count these.\n\n{context}\n\nHow many? {input}The final answer is: ",
    "hotpotqa": "Read this.\n{context}\n\nQuestion: {input}\nAnswer:",
    "samsum": "Go on.\n\n{context}\n\n{input}",
}
_WORDS = "the ship sailed north and the captain counted seven barrels of rum before the storm".split()  # noqa: SIM905


def row(number: int, task: str = "hotpotqa") -> dict[str, Any]:
    """Return a row as published, of some sixty words."""
    words = [_WORDS[(number * 5 + i * i) % len(_WORDS)] for i in range(60)]
    return {
        "input": "" if task == "passage_count" else f"What of number {number}?",
        "context": " ".join(words) + ".",
        "answers": ["7"] if task == "passage_count" else ["the storm", "rum"],
        "length": 3000 * number,
        "dataset": task,
        "language": "en",
        "all_classes": None,
        "_id": f"{task}-{number}",
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a file of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in rows), encoding="utf-8")


def write_data(folder: Path) -> Path:
    """Write three rows each of two tasks, their LongBench-E files, and the templates."""
    for task in ("hotpotqa", "passage_count"):
        for name in (task, f"{task}_e"):
            write_rows(folder / f"{name}.jsonl", [row(number, task) for number in range(3)])
    (folder / "prompts.json").write_text(json.dumps(TEMPLATES))
    return folder
