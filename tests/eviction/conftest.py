"""Fixtures of the evicting caches' tests."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.eviction.feeding import model_of


@pytest.fixture
def _no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a token is processed: what is wrong must be told before."""
    original = type(model_of()).forward

    @functools.wraps(original)  # generate() looks at what a model's forward takes
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a token was processed")

    monkeypatch.setattr(type(model_of()), "forward", refuse)
