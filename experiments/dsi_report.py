"""What `experiments/dsi.py` found: the paper's tables beside the same of this table, targets, a plot of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from dsi_steps import DISK_BYTES_PER_S, SEEKS_S, Seen
from dsi_storage import Fetched
from dsi_workers import Spent

import penstock as ps
from penstock.sources.coalescing import ReadingStatistics
from penstock.warehouse.model_statistics import ModelStatistics, model
from penstock.warehouse.read_log import LoggedRead, popularity

PAPER_READS = {"mean": 23_200, "p5": 18, "p25": 451, "p50": 1_240, "p75": 3_920, "p95": 97_700}
"""Table VI: the sizes of an RM1 session's reads before they are joined, in bytes."""
PAPER_PB = {"rm1": (13.45, 0.15, 11.95), "rm2": (29.18, 0.32, 25.94), "rm3": (2.93, 0.07, 1.95)}
"""Table III: all days, one day, the days a session uses."""
PAPER_TRAINER_GB_S = {"rm1": 16.50, "rm2": 4.69, "rm3": 12.00}
"""Table VIII."""
PAPER_WORKER = {
    "rm1": (11.623, 0.8, 1.37, 0.68, 24.16),
    "rm2": (7.995, 1.2, 0.96, 0.50, 9.44),
    "rm3": (36.921, 0.8, 1.01, 0.22, 55.22),
}
"""Table IX, of a node: thousands of rows a second, GB/s stored, to be transformed and made, and how many it takes."""
PAPER_CORES = 18  # of such a node (table X)
PUBLISHED_EXTRACTION, PUBLISHED_TRANSFORMED, PUBLISHED_STORAGE, PUBLISHED_POWER = 3.0, 2.94, 2.41, 2.59
WORKERS_POWER = (1 / PUBLISHED_STORAGE - 1 / PUBLISHED_POWER) / (1 / PUBLISHED_STORAGE - 1 / PUBLISHED_TRANSFORMED)
"""Which share of the power workers had, storage having the rest: it follows from what both and each of them gained."""
TRAFFIC = 0.8


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All that was measured."""

    like: str
    scale: float
    quick: bool
    table: ps.Table
    first: list[LoggedRead]
    second: list[LoggedRead]
    read: LoggedRead
    """The session of the second half that the steps are measured with."""
    sizes: dict[int, float]
    baseline: Seen
    steps: list[Seen]
    judged: list[ReadingStatistics]
    tiered: list[ReadingStatistics]
    worker: Spent
    received: dict[str, float]
    fetched: dict[str, Fetched]

    @property
    def published(self) -> ModelStatistics:
        return model(self.like)

    def bytes_of(self, read: LoggedRead) -> float:
        return sum(self.sizes.get(feature, 0.0) for feature in read.features)

    @property
    def stored(self) -> float:
        return sum(self.sizes.values())

    def served(self) -> tuple[Any, Any]:
        """Return, with popular features first, which share of the bytes serves which share of the traffic."""
        order = popularity(self.first)
        order += sorted(set(self.sizes) - set(order))
        counts: Counter[int] = Counter(feature for read in self.second for feature in read.features)
        sizes = np.array([self.sizes.get(feature, 0.0) for feature in order])
        traffic = np.cumsum([counts[feature] * size for feature, size in zip(order, sizes)])
        return np.cumsum(sizes) / self.stored, traffic / traffic[-1]

    def chunks(self) -> list[int]:
        """Return the bytes of each column chunk that a session reads of the table's first file."""
        wanted = {f"f{number}" for number in self.read.features}
        metadata = self.table.open_file(self.table.folder / self.table.snapshot().files[0].path).metadata
        columns = [metadata.row_group(0).column(leaf) for leaf in range(metadata.num_columns)]
        found: Counter[str] = Counter()
        for column in columns:
            name = column.path_in_schema.partition(".")[0]
            if name in wanted:
                found[name] += column.total_compressed_size
        return sorted(found.values())


class Targets:
    """What was to be seen, and was."""

    def __init__(self) -> None:
        self.missed: list[str] = []

    def at_least(self, what: str, seen: float, least: float, *, counts: bool = True) -> None:
        self._say(what, f"{seen:.2f}", f">= {least:.2f}", seen >= least, counts)

    def at_most(self, what: str, seen: float, most: float, *, counts: bool = True) -> None:
        self._say(what, f"{seen:.3f}", f"<= {most:.3f}", seen <= most, counts)

    def _say(self, what: str, seen: str, target: str, met: bool, counts: bool) -> None:
        verdict = "met" if met else "MISSED" if counts else "not met (does not count with --quick)"
        print(f"  {what:64} {seen:>8}  {target:>9}  {verdict}")
        if not met and counts:
            self.missed.append(what)


def print_tables(found: Measured) -> None:
    """Print what the paper's tables III to VI have, of this table."""
    files, expected, second = found.table.snapshot().files, found.published.scaled(found.scale), found.second
    kinds = Counter(found.table.features[number].kind for number in found.read.features)
    used = float(np.mean([len(read.features) for read in second])) / len(found.sizes)
    of_all, of_day, of_used = PAPER_PB[found.like]
    print(f"tables of the paper, and of this table ({len(found.sizes)} features that are stored)")
    print(
        f"  III  {sum(file.size for file in files) / 1e6:,.0f} MB in {len(files)} days here; in the paper {of_all} PB "
        f"in {expected.stored_partitions} days, {of_day} a day; sessions use {of_used} in {expected.used_partitions}"
    )
    print(
        f"  IV   read: {kinds['dense']} dense and {kinds['sparse'] + kinds['scored']} sparse, of "
        f"{expected.read_dense} and {expected.read_sparse} by the paper's at this width"
    )
    asked = (expected.read_dense + expected.read_sparse) / (expected.stored_dense + expected.stored_sparse)
    print(f"  V    {used:.1%} of the features are read, {asked:.1%} by the paper's")
    chunks = found.chunks()
    quantiles = {f"p{q}": float(np.percentile(chunks, q)) for q in (5, 25, 50, 75, 95)}
    shown = {"mean": float(np.mean(chunks)), **quantiles}
    told = ", ".join(f"{name} {value:,.0f} ({PAPER_READS[name]:,})" for name, value in shown.items())
    print(f"  VI   bytes of a column in a stripe, and of RM1's reads in the paper: {told}")


def print_worker(found: Measured) -> None:
    """Print tables VIII and IX, a worker's time by what it is for, and a trainer's by way."""
    worker, needed = found.worker, PAPER_TRAINER_GB_S[found.like]
    rows, stored, before, made, nodes = PAPER_WORKER[found.like]
    ours = [worker.per_core(n) / 1e9 for n in (worker.stored_bytes, worker.batch_bytes, worker.made_bytes)]
    per_core = worker.per_core(worker.rows)
    print(f"  VIII a trainer node takes {needed} GB/s in the paper: {needed / ours[2]:,.0f} cores of this machine")
    print(
        f"  IX   a core here: {per_core:,.0f} rows/s, {ours[0]:.3f} GB/s stored, {ours[1]:.3f} to be transformed, "
        f"{ours[2]:.3f} made; in the paper {rows * 1e3 / PAPER_CORES:,.0f} rows/s, {stored / PAPER_CORES:.3f}, "
        f"{before / PAPER_CORES:.3f}, {made / PAPER_CORES:.3f} GB/s (a node of {PAPER_CORES} cores; the "
        f"trainer takes {nodes}; RM2's were bound by their network, RM3's by their memory)"
    )
    total = worker.cpu_s
    shares = {"extract": worker.extract_s, **worker.by_class_s, "into batches": worker.gather_s, "rest": worker.rest_s}
    print("  a worker's processor time: " + ", ".join(f"{name} {s / total:.1%}" for name, s in shares.items()))
    print("  a trainer's, by GB received: " + ", ".join(f"{way} {s:.2f} s" for way, s in found.received.items()))
    for name, fetched in found.fetched.items():
        rate = found.worker.rows / fetched.seconds
        print(
            f"  {name}, from a server of objects, each request {SEEKS_S[0] * 1e3:.0f} ms late: {fetched.reads} reads, "
            f"{fetched.nbytes / 1e6:.1f} MB, {fetched.seconds:.2f} s by the clock, {rate:,.0f} useful rows/s"
        )


def print_steps(found: Measured) -> None:
    maps = found.steps[0]
    print(f"\n{maps.rows} rows like {found.like}'s; a session of the log's second half")
    print(
        f"{'step':24} {'rows/cpu s':>10} {'x':>6} {'reads':>7} {'MB':>7} {'in vain':>8}  useful rows/disk s, x of maps"
    )
    for step in (found.baseline, *found.steps):
        ratios = "  ".join(f"{step.rows_per_disk_s(s) / maps.rows_per_disk_s(s):5.2f}" for s in SEEKS_S)
        reading = step.reading
        print(
            f"{step.name:24} {step.rows_per_cpu_s:10,.0f} {step.rows_per_cpu_s / maps.rows_per_cpu_s:6.2f} "
            f"{reading.reads:7} {reading.read_bytes / 1e6:7.1f} {reading.in_vain_fraction:8.1%}  {ratios}"
        )
    print(f"seeks of {', '.join(f'{s * 1e3:.0f} ms' for s in SEEKS_S)}; {DISK_BYTES_PER_S / 1e6:.0f} MB/s\n")


def report(found: Measured) -> int:
    """Print everything, and return 1 if a target is missed."""
    print_tables(found)
    print_worker(found)
    print_steps(found)
    targets, slow = Targets(), not found.quick
    base, last, published = found.baseline, found.steps[-1], found.published
    used = float(np.mean([found.bytes_of(read) for read in found.second])) / found.stored
    targets.at_most("share of bytes that a session reads, off the published", abs(used - published.bytes_used), 0.03)
    extraction = last.rows_per_cpu_s / base.rows_per_cpu_s
    targets.at_least("extraction, of map columns", extraction, PUBLISHED_EXTRACTION, counts=slow)
    worker = last.transformed_per_cpu_s / base.transformed_per_cpu_s
    targets.at_least("extraction and transforms, of map columns", worker, PUBLISHED_TRANSFORMED, counts=slow)
    own_share = found.bytes_of(found.read) / found.stored
    storage = last.rows_per_disk_s() / base.rows_per_disk_s()
    targets.at_least("useful rows through the disk model, of map columns", storage, PUBLISHED_STORAGE, counts=slow)
    targets.at_least("the same, of 1 / (share of bytes used)", storage * own_share, 0.9, counts=slow)
    vain = float(np.mean([reading.in_vain_fraction for reading in found.judged]))
    targets.at_most("bytes in vain, second half of the log", vain, 0.15)
    chunks = sum(reading.column_chunks for reading in found.judged)
    reads = sum(reading.reads for reading in found.judged)
    targets.at_most("reads, of projected column chunks", reads / chunks, 1 / 20, counts=slow)
    taken, served = found.served()
    share = float(taken[np.searchsorted(served, TRAFFIC)])
    targets.at_most("share of bytes for 80 % of traffic, off the published", abs(share - published.popular_bytes), 0.03)
    wanted = sum(reading.read_bytes - reading.bytes_in_vain for reading in found.tiered)
    from_tier = sum(reading.tier_bytes for reading in found.tiered)
    targets.at_least("traffic that a tier of that size serves", min(1.0, from_tier / wanted), TRAFFIC)
    power = 1 / (WORKERS_POWER / worker + (1 - WORKERS_POWER) / storage)
    print(
        f"\npower, if workers have {WORKERS_POWER:.0%} of it and storage the rest: {power:.2f} times less than with "
        f"map columns (in the paper {PUBLISHED_POWER})"
    )
    return 1 if targets.missed else 0


def draw(found: Measured, folder: Path) -> None:
    """Draw the steps, the popularity of bytes (figure 7), the sizes of reads (table VI), and where time goes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, ((steps, popular, sizes), (worker, trainer, storage)) = pyplot.subplots(2, 3, figsize=(16, 9))
    names, maps = [step.name for step in found.steps], found.steps[0]
    cpu = [step.rows_per_cpu_s / maps.rows_per_cpu_s for step in found.steps]
    steps.bar(names, cpu, width=0.4, align="edge")
    disk = [step.rows_per_disk_s() / maps.rows_per_disk_s() for step in found.steps]
    steps.bar(names, disk, width=-0.4, align="edge")
    steps.legend(["by processor time", "by the disk model, 8 ms"])
    steps.set(ylabel="rows, of map columns")
    taken, served = found.served()
    popular.plot(taken, served)
    popular.axvline(found.published.popular_bytes, linestyle=":")
    popular.axhline(TRAFFIC, linestyle=":")
    popular.set(xlabel="share of the bytes, popular first", ylabel="share of the traffic", title="figure 7")
    chunks = found.chunks()
    sizes.plot(chunks, np.linspace(0, 1, len(chunks)))
    sizes.plot([PAPER_READS[f"p{q}"] for q in (5, 25, 50, 75, 95)], [0.05, 0.25, 0.5, 0.75, 0.95], "x")
    sizes.set(xscale="log", xlabel="bytes of a column in a stripe", title="table VI (x: the paper's reads)")
    spent = found.worker
    _bars(worker, {"extract": spent.extract_s, **spent.by_class_s, "into batches": spent.gather_s})
    worker.set(ylabel="processor seconds", title="a worker's time (figure 9)")
    _bars(trainer, found.received)
    trainer.set(ylabel="processor seconds a GB", title="a trainer's time (figure 8)")
    _bars(storage, {name: spent.rows / each.seconds for name, each in found.fetched.items()})
    storage.set(ylabel="useful rows/s by the clock", title="from a server of objects, 8 ms late")
    for panel in (steps, worker, trainer):
        panel.tick_params(axis="x", rotation=30)
    figure.suptitle(f"a table like {found.like}, {found.scale:g} of its width")
    figure.tight_layout()
    figure.savefig(folder / f"dsi_{found.like}.png", dpi=120)
    print(f"drawn: {folder / f'dsi_{found.like}.png'}\n")


def _bars(panel: Any, values: dict[str, float]) -> None:
    names: Sequence[str] = list(values)
    panel.bar(names, [values[name] for name in names])
