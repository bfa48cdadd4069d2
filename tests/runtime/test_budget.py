"""Cores and memory that this process may use, from whatever limits it."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import InvalidArgumentError
from penstock.runtime.budget import available_cores, cgroup_cores, cgroup_memory, default_budget


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_nested_groups_of_version_2_give_the_tightest_limit(tmp_path):
    write(tmp_path / "self", "0::/slurm/job7\n")
    write(tmp_path / "fs/slurm/job7/cpu.max", "max 100000\n")
    write(tmp_path / "fs/slurm/cpu.max", "350000 100000\n")
    write(tmp_path / "fs/slurm/job7/memory.max", "2000000000\n")
    write(tmp_path / "fs/slurm/memory.max", "max\n")
    assert cgroup_cores(tmp_path / "fs", tmp_path / "self") == 3
    assert cgroup_memory(tmp_path / "fs", tmp_path / "self") == 2_000_000_000


def test_version_1_is_read_too(tmp_path):
    write(tmp_path / "self", "4:memory:/docker/a\n1:cpu,cpuacct:/docker/a\n")
    write(tmp_path / "fs/cpu,cpuacct/docker/a/cpu.cfs_quota_us", "50000\n")
    write(tmp_path / "fs/cpu,cpuacct/docker/a/cpu.cfs_period_us", "100000\n")
    write(tmp_path / "fs/memory/docker/a/memory.limit_in_bytes", "9223372036854771712\n")
    assert cgroup_cores(tmp_path / "fs", tmp_path / "self") == 1
    assert cgroup_memory(tmp_path / "fs", tmp_path / "self") is None


def test_no_group_is_no_limit(tmp_path):
    assert cgroup_cores(tmp_path, tmp_path / "none") is None and cgroup_memory(tmp_path, tmp_path / "none") is None


def test_arguments_come_before_the_environment_and_that_before_the_machine(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    assert available_cores() == 1
    monkeypatch.setenv("PENSTOCK_THREADS", "3")
    monkeypatch.setenv("PENSTOCK_MEMORY_BYTES", str(1 << 28))
    assert (default_budget().threads, default_budget().memory_bytes) == (3, 1 << 28)
    assert default_budget(2, 1 << 29).threads == 2
    monkeypatch.setenv("PENSTOCK_THREADS", "many")
    with pytest.raises(InvalidArgumentError, match="PENSTOCK_THREADS='many'"):
        default_budget()


def test_a_budget_too_small_is_refused():
    with pytest.raises(InvalidArgumentError, match="at least 1 MiB"):
        ps.range(3).iterator(memory_bytes=1000)
    with pytest.raises(InvalidArgumentError, match="at least 1 MiB"):
        ps.range(3).iterator(memory_bytes=0)


def test_a_slow_reader_leaves_no_more_than_the_budget_buffered():
    ds = ps.range(10_000).map(lambda x: np.zeros(100_000, np.uint8), threads=2).prefetch()
    with ds.iterator(memory_bytes=4 << 20, threads=2) as iterator:
        for _ in range(20):
            next(iterator)
        most = max(iterator.statistics().buffered_bytes for _ in range(200))
    assert most <= 5 << 20


def test_large_elements_that_cost_nothing_are_made_no_further_ahead_than_the_budget_allows():
    made: list[int] = []

    def block(i: int) -> np.ndarray:
        made.append(i)
        return np.empty(1 << 20, np.uint8)

    with ps.range(100_000).map(block, threads=2).prefetch().iterator(memory_bytes=8 << 20, threads=2) as iterator:
        ahead = 0
        for read in range(300):
            next(iterator)
            ahead = max(ahead, len(made) - read)
    assert ahead <= 32  # each of the two buffers, what is worked on for it, and what the reader holds: 4 MiB each


def test_many_threads_of_a_function_that_waits_make_no_more_at_once_than_the_budget_allows():
    lock = threading.Lock()
    under_way = most = 0

    def block(i):
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        made = np.full(1 << 17, i, np.float64)  # 1 MiB
        time.sleep(0.01)
        with lock:
            under_way -= 1
        return made

    with ps.range(400).map(block).batch(2).iterator(memory_bytes=8 << 20, threads=2) as iterator:
        assert sum(1 for _ in iterator) == 200
    assert 2 <= most <= 4
