"""Freed memory of a runner goes back to the system, where there is more than there should be."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock.processes.nursery_start import ENVIRONMENT

MIB = 1 << 20
FREED = f"""
import sys
import numpy as np
from penstock.wire.allocation import OwnMemory, own_bytes

before = own_bytes()
memory = OwnMemory(int(sys.argv[1]))
blocks = [np.ones({MIB}, np.uint8) for _ in range(48)]
memory.give_back(0.0)
all_in_use = own_bytes()
kept = blocks[::8]  # what is freed lies between
del blocks
memory.give_back(0.5)
too_soon = own_bytes()
memory.give_back(1.0)
print(*(each - before for each in (all_in_use, too_soon, own_bytes())), len(kept))
"""


@pytest.mark.parametrize(("more_bytes", "left_mib"), [(12 * MIB, 6), (96 * MIB, 48)])
def test_what_is_freed_is_given_back_where_there_is_too_much(more_bytes: int, left_mib: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FREED, str(more_bytes)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **ENVIRONMENT},
    )
    all_in_use, too_soon, after, _ = map(int, done.stdout.split())
    assert all_in_use == pytest.approx(48 * MIB, abs=MIB)
    assert too_soon == pytest.approx(all_in_use, abs=MIB), "all was in use: it is tried again a second later"
    assert after == pytest.approx(left_mib * MIB, abs=2 * MIB)
