#!/usr/bin/env python3
"""Measure the perplexity of a text read through caches, as `kvcache-plugins eval perplexity` does.

python scripts/eval_perplexity.py --model examples/models/tiny-llama-books --dataset pydoc --max_windows 4
accelerate launch --num_processes 8 scripts/eval_perplexity.py --model meta-llama/Llama-3.1-8B --dataset pg19
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout this script belongs to

from kvcache_plugins.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", "perplexity", *sys.argv[1:]]))
