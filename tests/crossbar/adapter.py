"""The one place that names arguments of `distribute` and methods of `LocalService`."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import penstock as ps
from penstock.core.errors import RefusedError
from penstock.core.ids import JobName
from penstock.wire.modes import WorkersAsked
from penstock.wire.scaling import ScaleJob

from .functions import collated
from .modes import Modes
from .moving import moving_loader
from .outputs import MASK
from .pipelines import Step
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
    of_several = ranks > 1 or modes.coordinated
    share = None
    if modes.sharing is not None:
        share = ps.Share(
            modes.sharing,
            f"trainer-{trainer}",
            trainer_timeout_s=TRAINER_TIMEOUT_S,
            trainers=modes.trainers if modes.trainers_named else None,
        )
    moves = modes.moving_cut and ranks == 1
    distribute: Callable[..., Any] = partial(moving_loader, dataset) if moves else dataset.distribute
    loader = distribute(
        to,
        job=job,
        ranks=ps.Ranks(ranks, rank if of_several else None, modes.uneven, modes.coordinated, replica, modes.reach),
        order=modes.order,
        sharding=ps.Sharding(
            modes.sharding,
            modes.guarantee,
            modes.streams,
            in_turn_by_split if modes.sharding == "custom" else None,
        ),
        sharing=share,
        feed=sampler,
        placement=ps.Placement(max_workers=modes.max_workers, read_by="trainer" if modes.read_here else "workers"),
        transport=modes.transport,
        limits=ps.Limits(timeout_s=timeout_s, memory_bytes=modes.memory_bytes),
    )
    try:
        return apply(loader, modes.after)
    except BaseException:
        loader.close()
        raise


def open_evaluation(
    dataset: ps.Dataset, to: ps.LocalService | int, batch: Step, *, job: str, ranks: int, rank: int
) -> Any:
    """Return an evaluation's loader: this rank's."""
    return dataset.evaluation(
        batch.arguments["size"],
        to,
        ranks=ps.Ranks(ranks, rank) if ranks > 1 else None,
        mask=MASK,
        collate=collated() if batch.arguments.get("collate") else None,
        job=job,
    )


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


def _scale(service: ps.LocalService, workers: WorkersAsked) -> None:
    control = service._processes.control()
    for job in service.jobs():
        with contextlib.suppress(RefusedError):  # it ended meanwhile
            control.ask(ScaleJob(job=JobName(job.job), workers=workers), timeout_s=30.0, what="scaling")


def scale_up(service: ps.LocalService) -> None:
    _scale(service, 8)


def scale_down(service: ps.LocalService) -> None:
    _scale(service, 1)


def scale_auto(service: ps.LocalService) -> None:
    _scale(service, "auto")
