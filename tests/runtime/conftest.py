from __future__ import annotations

import pytest

from penstock.sources import huggingface, listing, memory, numpy_files, raw_files
from penstock.sources.base import Split


@pytest.fixture
def many_splits(monkeypatch):
    """Small data makes one split; streams need several."""

    def splits(length: int, at_least: int = 1) -> list[Split]:
        return [Split(start=start, stop=min(start + 4, length)) for start in range(0, length, 4)]

    for module in (memory, huggingface, numpy_files):
        monkeypatch.setattr(module, "index_splits", splits)
    monkeypatch.setattr(raw_files, "SMALL_FILES_PER_SPLIT", 2)
    monkeypatch.setattr(listing, "SMALL_FILES_PER_SPLIT", 1)
