"""`python -m kvcache_plugins`: the command line, where `kvcache-plugins` is not on the path."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
