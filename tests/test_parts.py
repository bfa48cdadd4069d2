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


def run_two(folder: Path, beside: str, alone: str) -> subprocess.CompletedProcess[str]:
    body = f"import os, pytest\ndef test_beside(): {beside}\n@pytest.mark.alone\ndef test_alone(): {alone}\n"
    (folder / "test_two.py").write_text(body)
    settings = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-n", "0")
    command = [sys.executable, "-m", "tests", *settings, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("broken", ["test_beside", "test_alone"])
def test_a_failure_in_either_part_fails_the_run(tmp_path: Path, broken: str) -> None:
    ran = run_two(tmp_path, f"assert {broken != 'test_beside'}", f"assert {broken != 'test_alone'}")
    assert ran.returncode == 1
    assert ran.stdout.count("1 passed") == 1 and "1 failed" in ran.stdout
    assert f"test_two.py::{broken}" in ran.stdout


def test_what_fails_beside_others_and_not_alone_is_named_and_fails_nothing(tmp_path: Path) -> None:
    once = f"assert os.path.exists({str(tmp_path / 'ran')!r}) or os.mkdir({str(tmp_path / 'ran')!r})"
    ran = run_two(tmp_path, once, "pass")
    assert ran.returncode == 0
    assert "test_two.py::test_beside" in ran.stdout and "run again, alone" in ran.stdout
