"""The suite runs in two parts, and the recipe fails if either does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.__main__ import verdict

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("codes", "code"), [([0, 0], 0), ([0, 5], 0), ([5, 0], 0), ([5, 1], 1), ([1, 0], 1), ([5, 5], 5)]
)
def test_a_part_may_be_empty_where_the_other_is_not(codes: list[int], code: int) -> None:
    assert verdict(codes) == code


@pytest.mark.parametrize("broken", ["test_beside", "test_alone"])
def test_a_failure_in_either_part_fails_the_run(tmp_path: Path, broken: str) -> None:
    body = "import pytest\ndef test_beside(): assert {0}\n@pytest.mark.alone\ndef test_alone(): assert {1}\n"
    (tmp_path / "test_two.py").write_text(body.format(broken != "test_beside", broken != "test_alone"))
    settings = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-n", "0")
    command = [sys.executable, "-m", "tests", *settings, str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 1
    assert ran.stdout.count("1 passed") == ran.stdout.count("1 failed") == 1
    assert f"test_two.py::{broken}\n" in ran.stdout
