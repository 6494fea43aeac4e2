"""The text that every CPython carries, of which the bundled model has not seen a part."""

from __future__ import annotations

import sys
from pydoc_data.topics import topics

import pytest

from kvcache_plugins.runs.language_reference import read_language_reference


def test_it_begins_with_what_recorded_numbers_were_measured_on() -> None:
    text = read_language_reference()
    assert len(text) > 20_000 and "object.__getattribute__" in text
    assert text.startswith(topics["attribute-access"] + "\n\n")


def test_a_python_without_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match=r"without pydoc_data.*text files"):
        read_language_reference()
