"""Two jobs over one source that is read by index: what one has made the other need not, soon after."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import penstock as ps
from penstock.caching.claims import Claims
from penstock.runtime import keeping_elements
from tests.caching.kit import store_at

OTHER = """
import sys, time
from pathlib import Path
from penstock.caching.claims import Claims
use = Claims(Path(sys.argv[1])).use("prefix", "another job")
print("uses", flush=True)
sys.stdin.read()
"""


def test_jobs_that_use_a_prefix_know_of_each_other_while_they_do(tmp_path):
    use = Claims(tmp_path).use("prefix", "a job")
    same = Claims(tmp_path).use("prefix", "a job")
    assert not use.has_others() and not same.has_others(), "streams of one job need nothing of each other"
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "uses\n"
    assert use.has_others()
    other.kill()
    other.communicate()
    assert not use.has_others()


def test_elements_that_another_job_has_made_in_this_epoch_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(keeping_elements, "SHARE_EVERY_S", 0.05)
    jobs = iter("ab")
    monkeypatch.setattr("penstock.runtime.kept_points.own_job", lambda: next(jobs))
    calls = Path(tmp_path / "calls")
    calls.mkdir()

    def slow(x):
        time.sleep(0.002)
        (calls / os.urandom(8).hex()).touch()
        return x

    def job(seed):
        return ps.range(400).shuffle(seed=seed).map(slow, threads=1).autocache(tmp_path / "kept", always=True)

    with job(1).iterator(threads=1) as one, job(2).iterator(threads=1) as other:
        got = [(x, y) for x, y in zip(one, other)]
    assert sorted(x for x, _ in got) == sorted(y for _, y in got) == list(range(400))
    made = len(os.listdir(calls))
    assert made < 1.4 * 400, f"{made / 400:.2f} times, of 2 by themselves"
    store_at(tmp_path / "kept")
