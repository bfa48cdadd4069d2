from __future__ import annotations

import pytest

from penstock.sources import cutting, huggingface, memory, numpy_files
from penstock.sources.base import Split


@pytest.fixture
def many_splits(monkeypatch):
    """Small data makes one split; streams need several."""

    def splits(length: int, at_least: int = 1) -> list[Split]:
        return [Split(start=start, stop=min(start + 4, length)) for start in range(0, length, 4)]

    for module in (memory, huggingface, numpy_files):
        monkeypatch.setattr(module, "index_splits", splits)
    monkeypatch.setattr(cutting, "MOST_FILES", 1)
