"""`penstock session`: a session of a file, read or explained."""

from __future__ import annotations

from itertools import islice
from time import perf_counter

from penstock.warehouse.session import Session


def run_session(file: str, *, batches: int | None, to: int | str | None, idle_s: float | None) -> int:
    """Read the batches, and print how many rows came how fast."""
    session = Session.from_file(file).pinned()
    print(f"version {session.version} of the table", flush=True)
    rows = count = 0
    started = perf_counter()
    with session.open(to, idle_s=idle_s) as reading:
        for batch in islice(reading, batches):
            rows += len(batch[session.label])
            count += 1
        taken_s = perf_counter() - started
    print(f"{rows} rows in {count} batches, {taken_s:.2f} s: {rows / taken_s:.0f} rows/s")
    return 0


def explain_session(file: str) -> int:
    """Print what a session reads, makes and gives."""
    print(Session.from_file(file).explain())
    return 0
