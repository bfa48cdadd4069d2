"""What holds for all tests, those in docstrings included."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parent / "src" / "penstock"
ASKED_FOR = {Path(__file__).parent / "tests" / name for name in ("trainers", "clusters", "spark")}
"""Tests with frameworks and engines that have environments of their own: `make test-trainers` and the like."""
ADAPTERS = {
    "accelerate": ("accelerate",),
    "huggingface": ("datasets", "transformers", "accelerate"),
    "jax": ("jax",),
    "keras": ("keras",),
    "lightning": ("lightning",),
    "tensorflow": ("tensorflow",),
}
"""What our packages for frameworks need; torch is in every environment that runs tests."""


@pytest.fixture(scope="session", autouse=True)
def _caches_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what tests keep out of the user's own folder; child processes too."""
    os.environ["PENSTOCK_CACHE"] = str(tmp_path_factory.mktemp("cache"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what needs what is not here, unless it is asked for; with `-m alone`, files that have no such test."""
    if collection_path in ASKED_FOR:
        return None if any(collection_path.name in argument for argument in config.args) else True
    needed = ADAPTERS.get(collection_path.name) if collection_path.parent == PACKAGES else None
    if needed is not None and any(importlib.util.find_spec(each) is None for each in needed):
        return True
    if config.option.markexpr != "alone" or collection_path.suffix != ".py":
        return None
    return True if "pytest.mark.alone" not in collection_path.read_text() else None
