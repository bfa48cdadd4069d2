"""`penstock jobs` and `penstock drain`: what a service does, and a word in its ear."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from penstock.cli.main import UsageError
from penstock.core.ids import JobName, WorkerId
from penstock.core.plain_text import plain_text
from penstock.wire.control import ControlClient
from penstock.wire.credentials import find_service
from penstock.wire.messages import DrainWorker, Jobs, ListJobs, ListWorkers, SteerJob, Workers

TIMEOUT_S = 10.0
JOB_COLUMNS = (
    "job",
    "owner",
    "epoch",
    "ranks",
    "clients",
    "workers",
    "target",
    "streams",
    "splits left",
    "cost",
    "status",
)
TRAINER_COLUMNS = ("job", "trainer", "epoch", "read", "skipped", "shared", "hits")
WORKER_COLUMNS = ("worker", "host", "tags", "jobs", "streams", "rounds/s", "cores", "memory", "status")
DONE = {"cancel": "cancelled", "pause": "paused", "resume": "resumed"}


def run_jobs(service: str | None, action: str | None, job: str | None) -> int:
    if action is not None and job is None:
        raise UsageError(f"which job is to be {DONE[action]}? `penstock jobs` lists them")
    with connect(service) as control:
        if action is None or job is None:
            return _list(control)
        control.ask(SteerJob(job=JobName(job), action=action), timeout_s=TIMEOUT_S, what=f"{action} {job!r}")  # type: ignore[arg-type]
        print(f"{job}: {DONE[action]}")
        return 0


def run_drain(service: str | None, worker: str) -> int:
    with connect(service) as control:
        control.ask(DrainWorker(worker=WorkerId(worker)), timeout_s=TIMEOUT_S, what=f"draining {worker!r}")
    print(f"{worker}: draining; others take over its work")
    return 0


def connect(service: str | None) -> ControlClient:
    found = find_service(service, "operator")
    return ControlClient(found.address, found.credentials, name="cli")


def _list(control: ControlClient) -> int:
    jobs = control.ask(ListJobs(), timeout_s=TIMEOUT_S, what="the list of jobs")
    workers = control.ask(ListWorkers(), timeout_s=TIMEOUT_S, what="the list of workers")
    assert isinstance(jobs, Jobs) and isinstance(workers, Workers)
    job_rows = [
        (
            each.job,
            each.owner,
            str(each.epoch),
            str(each.ranks),
            str(each.clients),
            str(each.workers),
            "all" if each.target is None else str(each.target),
            str(each.streams),
            str(each.splits_left),
            "" if each.cost is None else f"{each.cost:.2f}",
            each.status,
        )
        for each in jobs.jobs
    ]
    worker_rows = [
        (
            each.worker,
            each.host,
            ",".join(each.tags),
            ",".join(each.jobs),
            str(each.streams),
            f"{each.rounds_per_s:.1f}",
            f"{each.cores:.2f}",
            f"{each.rss_bytes >> 20} MB",
            each.status,
        )
        for each in workers.workers
    ]
    print_table("jobs", JOB_COLUMNS, job_rows, "a trainer's loader makes one when it is read")
    for each in jobs.jobs:
        if each.reason:
            print(_shown(f"{each.job}: {each.target} workers: {each.reason}"))
    trainer_rows = [
        (
            each.job,
            one.trainer,
            str(one.epoch),
            str(one.read),
            str(one.skipped),
            str(one.shared),
            f"{one.shared / one.read:.0%}" if one.read else "",
        )
        for each in jobs.jobs
        for one in each.trainers
    ]
    if trainer_rows:
        print_table("trainers", TRAINER_COLUMNS, trainer_rows)
    print_table("workers", WORKER_COLUMNS, worker_rows, "start some with `penstock worker --dispatcher ...`")
    return 0


def _shown(text: str) -> str:
    """Names and reasons are other people's: they do nothing to the terminal they are shown on."""
    return plain_text(text).replace("\n", " ")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], remedy: str = "") -> None:
    """Print a table for people, or, where nobody looks, plain aligned columns for programs; of nothing, a sentence."""
    if not rows:
        print(f"no {title}: {remedy}\n")
        return
    rows = [[_shown(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*map(Text, row))  # as it is: a name may look like markup
        Console().print(table)
        return
    widths = [max(len(line[at]) for line in (columns, *rows)) for at in range(len(columns))]
    for line in (columns, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    print()
