"""docs/security.md names a test for each claim, and each test of ours stands there for one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def test_every_test_that_a_claim_names_is_there() -> None:
    named = set(re.findall(r"tests/[\w/]+\.py", PAGE))
    assert named and not [path for path in named if not (ROOT / path).exists()]


def test_every_test_of_security_shows_a_claim() -> None:
    ours = {f"tests/security/{path.name}" for path in Path(__file__).parent.glob("test_*.py")}
    ours.remove(f"tests/security/{Path(__file__).name}")
    assert not [path for path in sorted(ours) if path not in PAGE]


def test_every_recipe_that_the_page_names_is_there() -> None:
    recipes = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert not set(re.findall(r"`make ([a-z-]+)", PAGE)) - recipes
