#!/usr/bin/env python3
"""Measure the speed of caches against dense ones, as `kvcache-plugins bench` does.

python scripts/benchmark.py attention --preset llama3-8b --lengths 4096 32768
python scripts/benchmark.py generate --lengths 16384 --max_new_tokens 64
python scripts/benchmark.py generate --device cuda --preset llama3-8b --lengths 16384 --batch_sizes 8
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout this script belongs to

from kvcache_plugins.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
