"""How many cores and how much memory this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.core.checks import check_whole
from penstock.core.errors import InvalidArgumentError

DEFAULT_MEMORY_SHARE = 0.1  # of what the process may use: the rest is the trainer's
MAX_DEFAULT_MEMORY = 4 << 30
LEAST_MEMORY = 1 << 20
CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60  # version 1 writes no limit as a very large number


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    threads: int
    """1: everything runs in the reader's thread."""
    memory_bytes: int
    """What may be buffered between stages."""


def default_budget(threads: int | None = None, memory_bytes: int | None = None) -> Budget:
    """Return the budget from arguments, then environment, then what the machine allows."""
    if threads is not None:
        check_whole("threads", threads, 1)
    if memory_bytes is not None:
        check_whole("memory_bytes", memory_bytes, 0)
    else:
        memory_bytes = _from_environment("PENSTOCK_MEMORY_BYTES") or default_memory()
    check_memory(memory_bytes)
    threads = threads or _from_environment("PENSTOCK_THREADS") or available_cores()
    return Budget(threads=threads, memory_bytes=memory_bytes)


def check_memory(memory_bytes: int) -> None:
    """Refuse a budget that is smaller than what any pipeline holds."""
    if memory_bytes < LEAST_MEMORY:
        raise InvalidArgumentError(f"memory_bytes={memory_bytes} must be at least 1 MiB ({LEAST_MEMORY})")


def core_limits() -> dict[str, int]:
    """Return what limits the cores of this process, by name."""
    limits = {"machine": os.cpu_count() or 1}
    if hasattr(os, "sched_getaffinity"):
        limits["affinity"] = len(os.sched_getaffinity(0))
    quota = cgroup_cores()
    if quota is not None:
        limits["cgroup quota"] = quota
    slurm = _from_environment("SLURM_CPUS_PER_TASK")
    if slurm:
        limits["SLURM_CPUS_PER_TASK"] = slurm
    return limits


def available_cores() -> int:
    """Return the smallest of the machine's cores, affinity, the cgroup's quota and SLURM's share."""
    return max(1, min(core_limits().values()))


def memory_limits() -> dict[str, int]:
    """Return what limits the memory of this process, in bytes, by name."""
    limits = {"machine": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    cgroup = cgroup_memory()
    if cgroup is not None:
        limits["cgroup limit"] = cgroup
    return limits


def default_memory() -> int:
    smallest = min(memory_limits().values())
    return max(64 << 20, min(int(smallest * DEFAULT_MEMORY_SHARE), MAX_DEFAULT_MEMORY))


def cgroup_cores(root: Path = CGROUP, membership: Path = MEMBERSHIP) -> int | None:
    """Return the tightest quota of the groups this process is in, version 2 or 1, in whole cores (at least one)."""
    quotas: list[int] = []
    for folder in _cgroup_folders("cpu", root, membership):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        quota = quota or _read(folder / "cpu.cfs_quota_us").strip()
        period = period or _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(max(1, int(quota) // int(period)))
    return min(quotas, default=None)


def cgroup_memory(root: Path = CGROUP, membership: Path = MEMBERSHIP) -> int | None:
    """Return the tightest memory limit of the groups this process is in, in bytes."""
    limits: list[int] = []
    for folder in _cgroup_folders("memory", root, membership):
        texts = (_read(folder / name).strip() for name in ("memory.max", "memory.limit_in_bytes"))
        limits.extend(int(text) for text in texts if text.isdigit() and int(text) < UNLIMITED)
    return min(limits, default=None)


def _cgroup_folders(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups and of those around them; a container may see only the outermost."""
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth])


def _from_environment(name: str) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdigit():
        raise InvalidArgumentError(f"{name}={text!r} in the environment must be a whole number")
    return int(text)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
