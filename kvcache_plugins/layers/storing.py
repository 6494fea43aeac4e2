"""How tensors that a cache keeps are made and written, whatever mode the model runs in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["storing"]


@contextmanager
def storing() -> Iterator[None]:
    """Record no gradients, and make ordinary tensors even in inference mode.

    A cache filled inside `torch.inference_mode()` may be continued outside of it, where tensors made inside
    cannot be written to.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield
