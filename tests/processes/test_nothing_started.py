"""Arguments are checked before any process is started: in a process of its own, which counts what it starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNTING = """
import sys
started = []
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "os.exec"}
sys.addaudithook(lambda event, _: started.append(event) if event in STARTS else None)
import penstock as ps
"""


def started_by(code: str) -> list[str]:
    """Run the code; return the error it ended with, if any, and each start of a process."""
    program = f"{COUNTING}\ntry:\n    {code}\nexcept ps.PenstockError as error:\n    print(type(error).__name__)\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nprint(*started, sep='\\n')"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("ps.range(10).distribute(0)", "InvalidArgumentError"),
        ("ps.range(10).distribute(-1)", "InvalidArgumentError"),
        ("ps.range(10).distribute(True)", "InvalidArgumentError"),
        ("ps.range(10).distribute(2.0)", "InvalidArgumentError"),
        ("ps.range(10).distribute(1, order='sideways')", "InvalidArgumentError"),
        ("ps.range(10).distribute(1, sharding=ps.Sharding(streams=2))", "InvalidArgumentError"),
        ("ps.range(10).distribute(1, ranks=ps.Ranks(2))", "InvalidArgumentError"),
        ("ps.range(10).distribute(1, sharing='sometimes')", "InvalidArgumentError"),
        ("ps.range(10).distribute(1, limits=ps.Limits(memory_bytes=0))", "InvalidArgumentError"),
        ("ps.range(10).distribute(1, feed=7)", "InvalidArgumentError"),
        ("ps.range(10).shuffle().distribute(1, feed=[1, 2])", "InvalidPipelineError"),
        ("ps.LocalService(workers=-1)", "InvalidArgumentError"),
        ("ps.LocalService(workers=1, memory_bytes=1)", "InvalidArgumentError"),
    ],
)
def test_a_bad_argument_starts_nothing(call: str, error: str) -> None:
    assert started_by(call) == [error]


def test_good_arguments_start_one_process_which_starts_the_others() -> None:
    assert started_by("ps.range(10).distribute(1).close()") == ["subprocess.Popen"]
