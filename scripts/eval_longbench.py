#!/usr/bin/env python3
r"""Answer LongBench through every cache, or score predictions, as `kvcache-plugins eval longbench` does.

python scripts/eval_longbench.py --model meta-llama/Llama-3.1-8B-Instruct --dataset THUDM/LongBench \
    --prompts dataset2prompt.json --max_length 31500 --cache_config '{"backend": "kivi", "nbits": 2}'
python scripts/eval_longbench.py --score_only pred/llama3.1-8b
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout this script belongs to

from kvcache_plugins.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", "longbench", *sys.argv[1:]]))
