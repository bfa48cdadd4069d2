"""What a job costs: equation 1 of tf.data service (SoCC 2023), and prices with where they were published.

Workers are charged for what they *use* (the rest goes back to the pool), a trainer's hosts for all they have: nobody
else can use what is beside an accelerator.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.policies.scaling.records import Rent
from penstock.wire.figures import JobFigures


class MachinePrice(msgspec.Struct, frozen=True, kw_only=True):
    """What a kind of machine costs, by whom and when that was published."""

    per_h: float
    source: str
    date: str


def parse_prices(text: str) -> Mapping[str, MachinePrice]:
    """Return prices by kind of machine.

    >>> parse_prices('[small]\\nper_h = 0.5\\nsource = "invoice"\\ndate = "2026-01"')["small"].per_h
    0.5
    >>> parse_prices('[small]\\nper_h = 0.5')
    Traceback (most recent call last):
        ...
    ValueError: the price of 'small' lacks source, date: say per_h, source and date for each machine
    """
    import tomllib  # slow to import, and few ask what things cost

    prices = {}
    for kind, table in tomllib.loads(text).items():
        lacking = [name for name in ("per_h", "source", "date") if name not in table]
        if lacking:
            raise ValueError(
                f"the price of {kind!r} lacks {', '.join(lacking)}: say per_h, source and date for each machine"
            )
        prices[kind] = MachinePrice(per_h=float(table["per_h"]), source=table["source"], date=table["date"])
    return prices


def published_prices() -> Mapping[str, MachinePrice]:
    """Return the prices that are shipped.

    >>> published_prices()["n2-standard-8"].date
    '2023-06'
    """
    from importlib.resources import files

    return parse_prices(files("penstock.policies").joinpath("prices.toml").read_text())


def job_cost(
    seconds: float, *, workers: float, worker_per_h: float, used: float = 1.0, trainers: int = 1, trainer_per_h: float
) -> float:
    """Return what a job costs that takes so long; `used` is the share of a worker that is charged.

    The paper's ResNet50, 112,320 steps: 80.2 dollars at 1.75 batches a second in the trainer alone, 40.6 at 4.5 with
    16 workers and a dispatcher.

    >>> alone = job_cost(112_320 / 1.75, workers=0, worker_per_h=0.08, trainer_per_h=4.5)
    >>> service = job_cost(112_320 / 4.5, workers=17, worker_per_h=0.08, trainer_per_h=4.5)
    >>> round(alone, 1), round(service, 1)
    (80.2, 40.6)
    """
    return seconds / 3600 * (trainers * trainer_per_h + workers * used * worker_per_h)


class JobCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a job has cost so far, and what it would have if its trainers had never waited."""

    trainers: float
    """Their hosts and accelerators, whole, for as long as they read."""
    workers: float
    """What they used of their processors."""
    idle: float
    """Of `trainers`: for waiting."""

    @property
    def total(self) -> float:
        return self.trainers + self.workers

    @property
    def ideal(self) -> float:
        return self.total - self.idle


def cost_of(figures: JobFigures, rent: Rent) -> JobCost:
    """Return what a job has cost so far. A worker is charged for the share of its threads that a processor worked.

    >>> from penstock.wire.figures import TrainerFigures
    >>> rank = TrainerFigures(
    ...     rank=0, replica=0, trainer="", batches=9, nbytes=0, wait_s=900.0, run_s=2700.0, skipped=0, shared=0
    ... )
    >>> cost = cost_of(JobFigures(job="j", cpu_s=7200.0, trainers=(rank,)), Rent(trainer_per_h=4.5, worker_per_h=0.5))
    >>> cost.total, cost.ideal
    (5.5, 4.375)
    """
    threads = [worker.threads for worker in figures.workers if worker.threads]
    share = len(threads) / sum(threads) if threads else 1.0
    run_s = sum(each.run_s for each in figures.trainers)
    wait_s = sum(each.wait_s for each in figures.trainers)
    return JobCost(
        trainers=(run_s + wait_s) / 3600 * rent.trainer_per_h,
        workers=figures.cpu_s * share / 3600 * rent.worker_per_h,
        idle=wait_s / 3600 * rent.trainer_per_h,
    )
