#!/usr/bin/env python3
"""Hide keys in long texts and ask for them through every cache, as `kvcache-plugins eval passkey` does.

python scripts/eval_passkey.py --model examples/models/tiny-llama-books --lengths 512 1024 --output outputs
python scripts/eval_passkey.py --model meta-llama/Llama-3.1-8B --lengths 8192 32768 --filler_files book.txt
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout this script belongs to

from kvcache_plugins.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", "passkey", *sys.argv[1:]]))
