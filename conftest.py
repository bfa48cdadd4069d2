"""What holds for all tests, those in docstrings included."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m alone`, leave out files that have no such test: importing all of them takes long."""
    if config.option.markexpr != "alone" or collection_path.suffix != ".py":
        return None
    return True if "pytest.mark.alone" not in collection_path.read_text() else None
