"""`penstock scale`, `penstock jobs why` and `penstock jobs cost`: how many workers a job has, why, and for how much."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli.jobs import TIMEOUT_S, connect, print_table
from penstock.cli.main import UsageError
from penstock.core.ids import JobName
from penstock.policies.cost import cost_of, parse_prices, published_prices
from penstock.policies.scaling.records import Rent
from penstock.wire.caching import CachingLine
from penstock.wire.messages import FiguresAnswer, GetFigures, Jobs, ListJobs, NotKnown
from penstock.wire.modes import WorkersAsked
from penstock.wire.scaling import DecisionLine, Decisions, GetDecisions, ScaleJob

WHY_COLUMNS = ("ago", "target", "got", "reason", "demand/s", "worker/s", "waiting", "busy")
CACHING_COLUMNS = ("ago", "source", "elements are", "reason", "an element takes")
COST_COLUMNS = ("job", "total", "trainers", "of it idle", "workers", "ideal")


def run_scale(service: str | None, job: str, workers: WorkersAsked) -> int:
    with connect(service) as control:
        control.ask(ScaleJob(job=JobName(job), workers=workers), timeout_s=TIMEOUT_S, what=f"scaling {job!r}")
    said = (
        "as it asked for itself"
        if workers is None
        else workers
        if isinstance(workers, (int, str))
        else "{}-{}".format(*workers)
    )
    print(f"{job}: workers {said}")
    return 0


def run_why(service: str | None, job: str | None) -> int:
    if job is None:
        raise UsageError("which job? `penstock jobs` lists them")
    with connect(service) as control:
        answer = control.ask(GetDecisions(job=JobName(job)), timeout_s=TIMEOUT_S, what=f"decisions about {job!r}")
    if isinstance(answer, NotKnown):
        raise UsageError(f"there is no job {job!r}; `penstock jobs` lists those there are")
    assert isinstance(answer, Decisions)
    rows = [_why_row(each) for each in answer.decisions]
    print_table("decisions", WHY_COLUMNS, rows, "nobody said how many workers it has: it takes all that fit")
    if answer.caching:
        print_table("caching", CACHING_COLUMNS, [_caching_row(each) for each in answer.caching], "")
    return 0


def _why_row(line: DecisionLine) -> tuple[str, ...]:
    reason = "; ".join(filter(None, (line.reason, line.shortage)))
    figures = [line.figures.get(name) for name in ("demand_per_s", "worker_per_s")]
    shares = [line.figures.get(name) for name in ("waiting", "busy")]
    return (
        f"{line.ago_s:.0f} s" if line.ago_s >= 0 else "before a restart",
        str(line.target),
        str(line.allotted),
        reason,
        *("" if value is None else f"{value:.3g}" for value in figures),
        *("" if value is None else f"{value:.0%}" for value in shares),
    )


def _caching_row(line: CachingLine) -> tuple[str, ...]:
    return (
        f"{line.ago_s:.0f} s" if line.ago_s >= 0 else "before a restart",
        str(line.source),
        f"kept at point {line.point}" if line.point else "computed",
        line.reason,
        ", ".join(f"{mode} {seconds * 1e3:.3g} ms" for mode, seconds in line.seconds_by_mode.items()),
    )


def run_cost(options: argparse.Namespace) -> int:
    if options.prices is None:
        raise UsageError("what do machines cost? give --prices a TOML file with [worker] and [trainer]")
    rent = _rent(options)
    with connect(options.service) as control:
        jobs = control.ask(ListJobs(), timeout_s=TIMEOUT_S, what="the list of jobs")
        assert isinstance(jobs, Jobs)
        rows = []
        for name in [each.job for each in jobs.jobs if options.job in (None, each.job)]:
            answer = control.ask(GetFigures(job=JobName(name)), timeout_s=TIMEOUT_S, what=f"figures of {name!r}")
            if isinstance(answer, FiguresAnswer):
                cost = cost_of(answer.figures, rent)
                parts = (cost.total, cost.trainers, cost.idle, cost.workers, cost.ideal)
                rows.append((name, *(f"{part:.4f}" for part in parts)))
    if options.job is not None and not rows:
        raise UsageError(f"there is no job {options.job!r}; `penstock jobs` lists those there are")
    print_table("costs", COST_COLUMNS, rows, "there are no jobs")
    return 0


def _rent(options: argparse.Namespace) -> Rent:
    try:
        prices = {**published_prices(), **parse_prices(Path(options.prices).read_text())}
    except (OSError, ValueError) as error:
        raise UsageError(f"{options.prices}: {error}") from None
    for kind in (options.worker, options.trainer):
        if kind not in prices:
            raise UsageError(f"{options.prices} has no price of {kind!r}; it has {', '.join(sorted(prices))}")
    return Rent(trainer_per_h=prices[options.trainer].per_h, worker_per_h=prices[options.worker].per_h)
