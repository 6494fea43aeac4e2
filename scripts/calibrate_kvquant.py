#!/usr/bin/env python3
"""Calibrate a model for the backend `kvquant`, as `kvcache-plugins calibrate` does.

python scripts/calibrate_kvquant.py --model MODEL --nbits 3 --output DIR
python scripts/calibrate_kvquant.py --model MODEL --text_files book.txt --target_bits 3.0 --output DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout this script belongs to

from kvcache_plugins.cli import main

if __name__ == "__main__":
    sys.exit(main(["calibrate", *sys.argv[1:]]))
