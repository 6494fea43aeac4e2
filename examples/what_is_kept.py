"""Look at what an evicting cache keeps of a text: a page with the text, shaded, and a picture of all layers.

    python examples/what_is_kept.py

    python examples/what_is_kept.py --model meta-llama/Llama-3.2-1B --text report.txt --tokens 4000 \
        --cache_config '{"backend": "kvzip", "budget": 0.25}' --output outputs/kept

Without options it needs no network: the bundled model reads a piece of Python's language reference with three
codes hidden in it, and retaining heads that were trained for it choose an eighth of its tokens. The darker a
token, the more heads hold it; the cursor on it says how many do.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcache_plugins import EvictingCache, KernelUnavailableError, build_cache
from kvcache_plugins.models.cache_argument import cache_of
from kvcache_plugins.registry import TRANSFORMERS_BACKENDS
from kvcache_plugins.runs.cache_words import parse_cache_configs
from kvcache_plugins.runs.hidden_codes import hide_codes
from kvcache_plugins.runs.labels import cache_label
from kvcache_plugins.runs.language_reference import read_language_reference
from kvcache_plugins.runs.plot_labels import folded
from kvcache_plugins.runs.plotting import pyplot
from kvcache_plugins.runs.text_files import read_text_file

MODELS = Path(__file__).resolve().parent / "models"
CACHE_CONFIG = {
    "backend": "locret",
    "heads": os.path.relpath(MODELS / "tiny-llama-books-locret"),
    "budget": 192,
    "chunk_size": 192,
}
BINS = 256  # columns of the picture
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>What is kept</title>
<style>
  body {{ font: 15px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
  pre {{ white-space: pre-wrap; font: inherit; }}
  span {{ background: rgba(27, 108, 168, var(--share)); }}
</style>
<h1>What is kept</h1>
<p>{described}</p>
<pre>{text}</pre>
</html>
"""


def main() -> int:
    """Read, and show; return 0, 2 for an error of the user, or 130 for an interruption."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(MODELS / "tiny-llama-books"), help="path or hub id")
    parser.add_argument("--text", type=Path, help="text file; the language reference if not given")
    parser.add_argument(
        "--tokens", type=int, default=1536, metavar="N", help="of it, at most (default: 1536)"
    )
    parser.add_argument("--cache_config", default=json.dumps(CACHE_CONFIG), metavar="JSON")
    parser.add_argument("--output", type=Path, default=Path("outputs/kept"), metavar="DIR")
    options = parser.parse_args()
    try:
        show(options)
    except (ValueError, OSError, KernelUnavailableError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: nothing is kept of what was not finished.", file=sys.stderr)
        return 130
    return 0


def show(options: argparse.Namespace) -> None:
    """Let the model read the text, and write the page and the picture."""
    if options.tokens < 1:
        raise ValueError(f"--tokens must be at least 1, got {options.tokens}.")
    (cache_config,) = parse_cache_configs([[options.cache_config]])
    if cache_config["backend"] in ("dense", *TRANSFORMERS_BACKENDS):
        raise ValueError(f"--cache_config must name a backend that evicts here, got {cache_config}.")
    plt = pyplot()
    text = (
        hide_codes(read_language_reference())
        if options.text is None
        else read_text_file(options.text, "--text")
    )
    ids, words = tokenized(options.model, text, options.tokens)
    cache = read(AutoModelForCausalLM.from_pretrained(options.model), ids, cache_config)
    kept = {index: held[0] for index, held in cache.kept_positions().items()}  # of the only row
    shares = held_by(kept, ids.shape[1])
    options.output.mkdir(parents=True, exist_ok=True)
    page, picture = options.output / "what_is_kept.html", options.output / "what_is_kept.png"
    described = f"{ids.shape[1]} tokens, {cache.num_held()} held by a head: {cache_label(cache_config)}"
    write_page(page, words, shares, described)
    draw(plt, picture, kept, ids.shape[1], described)
    print(cache.report())
    print(f"written to {page} and {picture}")


def tokenized(model: str, text: str, most: int) -> tuple[Tensor, list[str]]:
    """Return the first tokens of a text, `(1, n)`, and what each of them stands for there."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if not tokenizer.is_fast:
        raise ValueError(f"--model must have a tokenizer that tells where its tokens stand, got {model!r}.")
    found = tokenizer(text, return_offsets_mapping=True)
    starts = [start for start, _ in found["offset_mapping"]] + [len(text)]
    words = [text[start:end] for start, end in pairwise(starts)]
    return torch.tensor([found["input_ids"][:most]]), words[:most]


def read(model: Any, ids: Tensor, cache_config: dict[str, Any]) -> EvictingCache:
    """Return the cache of a prompt that has been read, as `generate()` reads it."""
    empty = build_cache(model, cache_config)  # what is wrong with it is told before anything is read
    if not isinstance(empty, EvictingCache) or not any(layer.evicts for layer in empty.evicting_layers):
        raise ValueError(f"--cache_config must name a backend that evicts here, got {cache_config}.")
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=1,  # which the cache does not see
        cache_implementation="quantized",
        cache_config=cache_config,
        return_dict_in_generate=True,
    )
    cache: EvictingCache = cache_of(output)
    return cache


def held_by(kept: dict[int, Tensor], length: int) -> Tensor:
    """The share of all heads of all layers that hold a token: `(length,)`."""
    counts = torch.zeros(length)
    for held in kept.values():
        counts += torch.bincount(held[held >= 0], minlength=length)
    return counts / sum(held.shape[0] for held in kept.values())


def write_page(path: Path, words: list[str], shares: Tensor, described: str) -> None:
    """Write the text, every token as dark as many heads hold it."""
    spans = [
        f'<span style="--share: {share:.2f}" title="token {place}: {share:.0%} of the heads">'
        f"{html.escape(word)}</span>"
        for place, (word, share) in enumerate(zip(words, shares.tolist(), strict=True))
    ]
    path.write_text(PAGE.format(described=html.escape(described), text="".join(spans)), encoding="utf-8")


def draw(plt: Any, path: Path, kept: dict[int, Tensor], length: int, described: str) -> None:
    """Draw a line for every head, and as a column the share of some neighbours that it holds."""
    bins = min(BINS, length)
    edges = torch.linspace(0, length, bins + 1)
    rows = [
        torch.histogram(held[head][held[head] >= 0].float(), edges).hist / edges.diff()
        for held in kept.values()
        for head in range(held.shape[0])
    ]
    figure, axes = plt.subplots(figsize=(10, 1.5 + 0.16 * len(rows)), layout="constrained")
    image = axes.imshow(
        torch.stack(rows).numpy(),
        aspect="auto",
        cmap="Blues",
        vmin=0,
        vmax=1,
        extent=(0, length, len(rows), 0),
    )
    places, place = [], 0
    for held in kept.values():
        places.append(place)
        place += held.shape[0]
    axes.set_yticks(places, [str(index) for index in kept])
    axes.set(xlabel="token", ylabel="layer, its heads below each other")
    axes.set_title(folded(described, 110), fontsize=9, loc="left")
    figure.colorbar(image, label="share held")
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
