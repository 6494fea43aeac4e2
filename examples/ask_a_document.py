"""Read a document once, keep its packed cache on disk, and ask it questions later, in another process.

    python examples/ask_a_document.py read
    python examples/ask_a_document.py ask

    python examples/ask_a_document.py read --model meta-llama/Llama-3.2-1B --document report.txt \
        --cache_config '{"backend": "kvzip", "budget": 0.25, "storage": {"backend": "int8"}}' \
        --folder outputs/report
    python examples/ask_a_document.py ask " In one sentence, the report says" --folder outputs/report

Without options it needs no network: the model is bundled, and the document is a piece of Python's language
reference with three codes hidden in it. What is kept of that was chosen before any question was known: a
quarter of its tokens, by retaining heads, in 4 to 8 bits. `kvzip` needs no heads and reads everything twice.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvcache_plugins as kvp
from kvcache_plugins.models.cache_argument import as_argument, cache_of
from kvcache_plugins.registry import TRANSFORMERS_BACKENDS
from kvcache_plugins.runs.cache_words import parse_cache_configs
from kvcache_plugins.runs.hidden_codes import CODES, QUESTION, hide_codes
from kvcache_plugins.runs.language_reference import read_language_reference
from kvcache_plugins.runs.text_files import check_characters, read_text_file

MODELS = Path(__file__).resolve().parent / "models"
CACHE_CONFIG = {
    "backend": "locret",
    "heads": os.path.relpath(MODELS / "tiny-llama-books-locret"),
    "budget": 384,
    "chunk_size": 256,
    "storage": {"backend": "int4", "key_bits": 8, "value_bits": 4},
}

DOCUMENT, UNFINISHED = "document.json", "document.json.unfinished"


def main() -> int:
    """Read or ask; return 0, 2 for an error of the user, or 130 for an interruption."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    reading = commands.add_parser("read", help="read a document and save its cache")
    reading.add_argument("--model", default=str(MODELS / "tiny-llama-books"), help="path or hub id")
    reading.add_argument("--document", type=Path, help="text file; the language reference if not given")
    reading.add_argument("--cache_config", default=json.dumps(CACHE_CONFIG), metavar="JSON")
    reading.set_defaults(command=read)
    asking = commands.add_parser("ask", help="continue questions about it")
    asking.add_argument("questions", nargs="*", help="texts to be continued; about the codes if not given")
    asking.set_defaults(command=ask)
    for command in (reading, asking):
        command.add_argument("--folder", type=Path, default=Path("outputs/document"), help="of the cache")
    options = parser.parse_args()
    try:
        options.command(options)
    except (ValueError, OSError, kvp.KernelUnavailableError, kvp.UnsupportedOperationError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: nothing is kept of what was not finished.", file=sys.stderr)
        return 130
    return 0


def read(options: argparse.Namespace) -> None:
    """Read the document through a cache, in chunks if it evicts, and save that beside the token ids."""
    (cache_config,) = parse_cache_configs([[options.cache_config]])
    if cache_config["backend"] in ("dense", *TRANSFORMERS_BACKENDS):
        raise ValueError(
            "--cache_config must name a backend of `kvcache-plugins list`, as transformers' own caches "
            f"cannot be saved; got {cache_config}."
        )
    given = options.document
    text = hide_codes(read_language_reference()) if given is None else read_text_file(given, "--document")
    tokenizer, model = load(options.model)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    started = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=1,  # which the cache does not see
        cache_implementation="quantized",
        cache_config=cache_config,
        return_dict_in_generate=True,
    )
    seconds = time.perf_counter() - started
    # both or neither: of a disk that is full, the earlier document stays; of a process that is killed, a
    # document stays unfinished, which is told when a question is asked
    document, unfinished = options.folder / DOCUMENT, options.folder / UNFINISHED
    options.folder.mkdir(parents=True, exist_ok=True)
    name = str(Path(options.model).resolve()) if Path(options.model).is_dir() else options.model
    unfinished.write_text(json.dumps({"model": name, "ids": ids.tolist()}), encoding="utf-8")
    try:
        cache_of(output).save_pretrained(options.folder)
        unfinished.replace(document)
    finally:
        unfinished.unlink(missing_ok=True)
    print(cache_of(output).report())
    print(f"read {ids.shape[1]} tokens in {seconds:.2f} s, saved to {options.folder}")


def ask(options: argparse.Namespace) -> None:
    """Load the cache and continue each question on a copy of it, so that the next finds it as it was."""
    if (options.folder / UNFINISHED).exists():
        raise ValueError(
            f"A `read` into {options.folder} did not come to its end: `read` the document again."
        )
    if not (options.folder / DOCUMENT).exists():
        raise ValueError(f"{options.folder} holds no document: `read` one into it first.")
    questions = options.questions or [QUESTION.format(name=name) for name in CODES]
    for question in questions:
        check_characters(question, "A question")
    document = json.loads((options.folder / DOCUMENT).read_text(encoding="utf-8"))
    tokenizer, model = load(document["model"])
    started = time.perf_counter()
    cache = kvp.KVCache.from_pretrained(options.folder, model)
    print(f"loaded {cache.get_seq_length()} tokens in {time.perf_counter() - started:.2f} s")
    for question in questions:
        turn = tokenizer(question, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*document["ids"][0], *turn]])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **as_argument(copy.deepcopy(cache)),
            max_new_tokens=6 if not options.questions else 64,
            do_sample=False,
        )
        print(f"{question.strip()}{tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)}")


def load(model: str) -> tuple[Any, Any]:
    return AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)


if __name__ == "__main__":
    sys.exit(main())
