"""What was compiled is kept where nobody else writes, and loaded from there; elsewhere nothing is kept, or believed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.kernels import compiling

PROGRAM = """
import numpy as np
from penstock.kernels import single_values
assert single_values.positive_modulus(np.array([-7, 8]), 5).tolist() == [3, 3]
stats = single_values._positive_modulus.ready().stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def run(cache: Path) -> tuple[str, str]:
    environment = {**os.environ, compiling.CACHE_VARIABLE: str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_a_kernel_is_compiled_once_and_kept_in_a_directory_that_only_its_owner_reads(tmp_path: Path) -> None:
    assert run(tmp_path / "cache") == ("0 1", "")
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o700
    assert run(tmp_path / "cache") == ("1 0", "")
    kept.chmod(0o755)
    shown, warned = run(tmp_path / "cache")
    assert shown == "0 1" and "compiled kernels are not kept" in warned and "has mode 0755" in warned


def test_a_directory_of_somebody_else_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safe = tmp_path / "safe"
    safe.mkdir(mode=0o700)
    assert compiling.unsafe(safe) is None
    (tmp_path / "link").symlink_to(safe)
    assert compiling.unsafe(tmp_path / "link") == "is no directory"
    for mode in (0o701, 0o720, 0o777):
        safe.chmod(mode)
        assert compiling.unsafe(safe) == f"has mode {mode:04o}"
    safe.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert compiling.unsafe(safe) == f"belongs to user {safe.stat().st_uid}"
