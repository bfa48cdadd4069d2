"""Storage and ingestion of feature tables: what each step of the published co-design brings, on a table like RM1.

python experiments/dsi.py [--quick] [--like rm1] [--work FOLDER] [--until PART] [--plots FOLDER]
or: make experiment E=dsi

The steps, each on top of the one before:

- `map columns`: features lie in maps; all of a row is read and decoded, then our flattening kernel picks features;
- `flattened`: a column a feature; each wanted column is a read of its own; batches pass through rows;
- `coalesced`: reads of neighbours are joined;
- `reordered`: features that are read together stand side by side, popular ones first, by the first half of the log;
- `large stripes`: eight times the rows of a stripe;
- `feature-major`: batches are made of columns without passing through rows.

Measured for the session in the middle of the second half of the log: processor seconds of extraction, and of extraction
with the session's transforms (the clock of a busy machine says little), reads, bytes, bytes in vain. What is judged
against map columns is judged against map columns without the way through rows: Arrow's decoding, our flattening kernel,
batches.
Storage time is by a model of one disk, stated, not measured: a read costs a seek of 8 ms (and 4 and 12) and its bytes
at 180 MB/s; map files are read from end to end with one seek. Nothing of it is scaled: at full width 2,304 rows like
RM1's or RM2's, and 21,504 like RM3's, are a stripe of some 256 MiB, and reads and bytes are those of the run. "Useful
rows" are rows with the features that the session asked for. The same reads go through a server of objects and a proxy
that makes each request 8 ms late, by the clock.

Beside it: tables III to VI, VIII and IX of the paper beside the same of this table; popularity (which share of the
bytes serves 80 % of the traffic) and a tier of that size, taken from the first half of the log and judged on the
second; a worker's time by class of transform; a trainer's by byte received, plain and encrypted; power, by the shares
that follow from three published figures. Targets stand beside what was seen; the exit code is 1 where one is missed.
Table VII is `make experiment E=stalls`. Standby masters are not part of this.

With `--work` what was made and measured is kept in that folder, and a run goes on where another ended; `--until` ends
after a part. With --quick the table is too narrow and short for the targets on time and on reads: only those on bytes
and popularity count.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from dsi_report import Measured, draw, report
from dsi_steps import BATCH, SEEKS_S, Seen, Work, batches_of_columns, batches_of_maps, timed, work_of, write_maps
from dsi_storage import Fetched, through_proxy
from dsi_workers import Spent, received, spent

import penstock as ps
from penstock.sources.coalescing import ReadingStatistics
from penstock.warehouse.column_sizes import column_bytes
from penstock.warehouse.generating import generate
from penstock.warehouse.layout import popular_order, reorder, tier
from penstock.warehouse.model_statistics import model
from penstock.warehouse.read_log import LoggedRead, ReadLog, popularity
from penstock.warehouse.representative import representative_session

STRIPES = 8  # small ones in a large one
STRIPE_ROWS = {"rm1": 2304, "rm2": 2304, "rm3": 21_504}
WHOLE_BYTES = 1 << 40  # stripes are cut by rows here
SESSIONS = 64
JUDGED = 8  # sessions of the second half, spread over it, whose reads are counted
NOT_ENDED = 3

T = TypeVar("T")


class EnoughError(Exception):
    """The part that was asked for is done."""


class Parts:
    """What is done once, in order; a run that was ended goes on with the part that it was at."""

    def __init__(self, folder: Path, options: dict[str, Any], until: str | None) -> None:
        self._file, self._until = folder / "parts.json", until
        self._done: dict[str, Any] = {"options": options}
        if self._file.exists():
            self._done = msgspec.json.decode(self._file.read_bytes())
        if self._done["options"] != options:
            raise SystemExit(f"{folder} has parts of {self._done['options']}; name another folder")

    def part(self, name: str, kind: type[T], make: Callable[[], T]) -> T:
        if name not in self._done:
            print(f"part: {name}", file=sys.stderr, flush=True)
            self._done[name] = msgspec.to_builtins(make())
            written = self._file.with_suffix(".new")
            written.write_bytes(msgspec.json.encode(self._done))
            os.replace(written, self._file)
        if name == self._until:
            raise EnoughError
        return msgspec.convert(self._done[name], kind, strict=False)


def most_popular(order: list[int], sizes: dict[int, float], share: float) -> list[int]:
    """Return the first features of an order that take so large a share of the bytes."""
    left = share * sum(sizes.values())
    chosen: list[int] = []
    for feature in order:
        left -= sizes.get(feature, 0.0)
        if left < 0:
            break
        chosen.append(feature)
    return chosen


def reading_of(table: ps.Table, version: int, read: LoggedRead, *, tiered: bool) -> ReadingStatistics:
    dataset = ps.read_features(table, features=read.features, batch=BATCH, version=version, tier=tiered)
    with dataset.iterator() as batches:
        for _ in batches:
            pass
        reading = batches.statistics().stages[0].reading
    assert reading is not None
    return reading


def layout(table: ps.Table, order: list[int], rows: int) -> int:
    """Write the table again, and return which version that is."""
    reorder(table, order=order, stripe=ps.StripeSize(rows=max(1, rows), bytes=WHOLE_BYTES))
    return table.version


def measured(options: argparse.Namespace, folder: Path, parts: Parts) -> Measured:
    """Do all parts that are not done yet."""
    published = model(options.like).scaled(options.scale)
    repeats, judged = (1, 2) if options.quick else (2, JUDGED)
    make = partial(generate, folder / "table", like=options.like, scale=options.scale, rows=options.rows)
    first_version = parts.part("table", int, lambda: make(partitions=options.days, sessions=SESSIONS).version)
    table = ps.Table(folder / "table")
    log = ReadLog(table.own_folder).read()
    first, second = log[: len(log) // 2], log[len(log) // 2 :]
    order = popular_order(table, first)
    by_id = [feature.id for feature in table.features.values()]

    def written_maps() -> list[str]:
        assert table.version == first_version, "maps are made of the table as it was generated"
        return [str(path) for path in write_maps(table, folder / "maps")]

    sizes = parts.part("sizes", dict[int, float], lambda: column_bytes(table))
    maps = [Path(path) for path in parts.part("maps", list[str], written_maps)]
    small = parts.part("small stripes", int, lambda: layout(table, by_id, options.rows // STRIPES))
    ordered = parts.part("popular first", int, lambda: layout(table, order, options.rows // STRIPES))
    large = parts.part("large", int, lambda: layout(table, order, options.rows))

    judged_read = second[len(second) // 2]
    session = representative_session(table, published, batch=BATCH, features=judged_read.features)
    steps: list[Seen] = []

    def step(name: str, version: int, *, by_rows: bool, transformed: bool = False, coalesce: bool = True) -> Seen:
        def open_batches(work: Work) -> Callable[..., Any]:
            if name.startswith("map columns"):
                return lambda meter: batches_of_maps(maps, table, work.read, meter)
            return lambda meter: batches_of_columns(table, work.read, meter, coalesce=coalesce)

        def run() -> Seen:
            work = work_of(session, version)
            return timed(name, work, open_batches(work), by_rows=by_rows, transformed=transformed, repeats=repeats)

        return parts.part(name, Seen, run)

    baseline = step("map columns, not by rows", first_version, by_rows=False, transformed=True)
    steps.append(step("map columns", first_version, by_rows=True, transformed=True))
    steps.append(step("flattened", small, by_rows=True, coalesce=False))
    steps.append(step("coalesced", small, by_rows=True))
    steps.append(step("reordered", ordered, by_rows=True))
    steps.append(step("large stripes", large, by_rows=True))
    steps.append(step("feature-major", large, by_rows=False, transformed=True))
    reads = second[len(second) // judged // 2 :: len(second) // judged]

    def read_all(*, tiered: bool) -> list[ReadingStatistics]:
        return [reading_of(table, large, read, tiered=tiered) for read in reads]

    def of_worker() -> Spent:
        work = work_of(session, large)
        return spent(session, large, lambda meter: batches_of_columns(table, work.read, meter, coalesce=True), work)

    def of_storage() -> dict[str, Fetched]:
        return through_proxy(table, large, work_of(session, large).read, maps, SEEKS_S[0])

    without_tier = parts.part("judged", list[ReadingStatistics], lambda: read_all(tiered=False))
    worker = parts.part("worker", Spent, of_worker)
    popular = most_popular(popularity(first), sizes, model(options.like).popular_bytes)
    parts.part("tier", int, lambda: tier(table, folder / "fast", popular))  # what is read by itself comes from there
    return Measured(
        like=options.like,
        scale=options.scale,
        quick=options.quick,
        table=table,
        first=first,
        second=second,
        read=judged_read,
        sizes=sizes,
        baseline=baseline,
        steps=steps,
        judged=without_tier,
        tiered=parts.part("tiered", list[ReadingStatistics], lambda: read_all(tiered=True)),
        worker=worker,
        received=parts.part("received", dict[str, float], lambda: received(published.read_sparse)),
        fetched=parts.part("fetched", dict[str, Fetched], of_storage),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--like", default="rm1", choices=["rm1", "rm2", "rm3"])
    parser.add_argument("--scale", type=float)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--days", type=int, default=1, help="a file each")
    parser.add_argument("--work", type=Path, help="where the table and what was measured are kept; go on there")
    parser.add_argument("--until", metavar="PART", help="end after this part; parts are told as they begin")
    parser.add_argument("--plots", type=Path, help="where plots go")
    options = parser.parse_args()
    options.scale = options.scale or (0.05 if options.quick else 1.0)
    options.rows = options.rows or (512 if options.quick else STRIPE_ROWS[options.like])
    chosen = {name: getattr(options, name) for name in ("quick", "like", "scale", "rows", "days")}
    with tempfile.TemporaryDirectory() as made:
        folder = (options.work or Path(made)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            found = measured(options, folder, Parts(folder, chosen, options.until))
        except EnoughError:
            print(f"done until {options.until}; run it again without --until for the rest", file=sys.stderr)
            return NOT_ENDED
        if options.plots is not None:
            draw(found, options.plots)
        return report(found)


if __name__ == "__main__":
    sys.exit(main())
