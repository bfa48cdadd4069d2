"""The one place that names arguments of `distribute` and methods of `LocalService`."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import penstock as ps

from .modes import Modes
from .steps import apply

TRAINER_TIMEOUT_S = 5.0


def in_turn_by_split(splits: Sequence[Any], workers: int) -> list[list[int]]:
    return [[number for number in range(len(splits)) if number % workers == worker] for worker in range(workers)]


def open_loader(
    dataset: ps.Dataset,
    to: ps.LocalService | int,
    modes: Modes,
    *,
    job: str,
    ranks: int,
    rank: int,
    replica: int,
    trainer: int,
    sampler: Any,
    timeout_s: float,
) -> Any:
    """Return a loader: this rank's, this replica's, or this trainer's."""
    options: dict[str, Any] = {"job": job, "timeout": timeout_s}
    if ranks > 1 or modes.coordinated:
        options |= {"consumers": ranks, "consumer": rank}
    if replica:
        options["replica"] = replica
    if modes.sharing is not None:
        options |= {"sharing": modes.sharing, "trainer": f"trainer-{trainer}", "trainer_timeout": TRAINER_TIMEOUT_S}
        if modes.trainers_named:
            options["trainers"] = modes.trainers
    if sampler is not None:
        options["feed"] = sampler
    usual = Modes()
    for name in (
        "order",
        "guarantee",
        "uneven",
        "coordinated",
        "streams",
        "compression",
        "memory_bytes",
        "max_workers",
    ):
        if getattr(modes, name) != getattr(usual, name):
            options[name] = getattr(modes, name)
    if modes.sharding != "dynamic":
        options["sharding"] = in_turn_by_split if modes.sharding == "custom" else modes.sharding
    loader = dataset.distribute(to, **options)
    try:
        return apply(loader, modes.after)
    except BaseException:
        loader.close()
        raise


def state_of(loader: Any, *, for_all: bool = False) -> dict[str, Any]:
    return dict(loader.state_dict(all=True) if for_all else loader.state_dict())


def epoch_of(loader: Any) -> int:
    return int(loader.state_dict()["epoch"])


def start_service(workers: int, inline: int) -> ps.LocalService:
    return ps.LocalService(workers=workers, inline=inline, threads=2, memory_bytes=256 << 20)


# What may happen to a service


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
        os.kill(pid, number)


def runner_pids(service: ps.LocalService) -> list[int]:
    return sorted(service.worker_pids().values())


def kill_runner(service: ps.LocalService) -> None:
    for pid in runner_pids(service)[:1]:
        kill(pid)


def pause_runner(service: ps.LocalService, seconds: float = 0.3) -> None:
    for pid in runner_pids(service)[:1]:
        kill(pid, signal.SIGSTOP)
        time.sleep(seconds)  # how long the process stands still is what is tested
        kill(pid, signal.SIGCONT)


def kill_dispatcher(service: ps.LocalService) -> None:
    kill(service.dispatcher_pid)


def kill_all(service: ps.LocalService) -> None:
    """The process that starts the others, and all of them with it."""
    kill(service.pids()[0])


def add_worker(service: ps.LocalService) -> None:
    service.add_worker()


def remove_worker(service: ps.LocalService) -> None:
    service.remove_worker()
