"""`python -m tests [what pytest takes]`: tests beside each other, then those that measure, one after the other.

Most tests wait for processes more than they compute, so a few more of them than processors run at a time. A test that
compares clocks, memory or processor time with a bound has the mark `alone`. What fails beside others is named, and then
judged alone: a fault planted at the wrong moment because processors are busy is not the code's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

JOBS = (os.cpu_count() or 1) + 1
BESIDE = ("-n", str(JOBS), "--dist", "worksteal", "-m", "not alone")
AGAIN = ("-n", "0", "-m", "not alone", "--last-failed", "--last-failed-no-failures", "none")
ALONE = ("-m", "alone")
WENT_ON = {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED}
"""How a part may end after which the next one runs: not when it was interrupted, or stopped at a failure by `-x`."""


def main(arguments: Sequence[str]) -> int:
    codes: list[int] = []
    for part in (BESIDE, ALONE):
        codes.append(_run(part, arguments))
        if part is BESIDE and codes[-1] == pytest.ExitCode.TESTS_FAILED:
            print("what failed beside others is run again, alone:", flush=True)
            again = _run(AGAIN, arguments)
            codes[-1] = codes[-1] if again == pytest.ExitCode.NO_TESTS_COLLECTED else again
        if codes[-1] not in WENT_ON:
            return codes[-1]
    return verdict(codes)


def _run(part: Sequence[str], arguments: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *part, *arguments]).returncode


def verdict(codes: Sequence[int]) -> int:
    """Return the exit code of parts that ended so: a part may be empty where another was not.

    >>> verdict([0, 5]), verdict([5, 1]), verdict([1, 0]), verdict([5, 5])
    (0, 1, 1, 5)
    """
    told = [code for code in codes if code != pytest.ExitCode.NO_TESTS_COLLECTED]
    return max(told, default=int(pytest.ExitCode.NO_TESTS_COLLECTED))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
