"""`make rotation` in short: all keys are rotated while processes are killed, and an epoch is read once."""

from __future__ import annotations

from pathlib import Path

from tests.security.rotation import rotate_under_kills


def test_keys_are_rotated_while_processes_are_killed_and_nothing_is_lost_or_comes_twice(tmp_path: Path) -> None:
    found = rotate_under_kills(tmp_path, kills=4, rotations=1, elements=3_000, seed=3)
    assert (found["lost"], found["twice"], found["left_to_do"]) == (0, 0, 0), found
    assert sum(found["killed"].values()) == 4 + 4, found
