"""What holds for all tests, those in docstrings included."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _caches_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what tests keep out of the user's own folder; child processes too."""
    os.environ["PENSTOCK_CACHE"] = str(tmp_path_factory.mktemp("cache"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m alone`, leave out files that have no such test: importing all of them takes long."""
    if config.option.markexpr != "alone" or collection_path.suffix != ".py":
        return None
    return True if "pytest.mark.alone" not in collection_path.read_text() else None
