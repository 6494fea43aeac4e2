#!/usr/bin/env python3
"""Train retaining heads for the backend `locret`, as `kvcache-plugins train-locret` does.

python scripts/train_locret.py --model MODEL --dataset synthetic --text_files book.txt --output DIR
python scripts/train_locret.py --config configs/locret/llama31_8b.yaml --output DIR
torchrun --nproc_per_node 8 scripts/train_locret.py --config configs/locret/llama31_8b.yaml --output DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout this script belongs to

from kvcache_plugins.cli import main

if __name__ == "__main__":
    sys.exit(main(["train-locret", *sys.argv[1:]]))
