"""Statistics in words: which stage limits, by how much, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.runtime.stats import PaddingStatistics, StageStatistics, Statistics

INPUT_BOUND = 0.05  # a reader that waits less than this is not held up
MANY_THREADS = 8


def verdict(statistics: Statistics) -> str:
    """Say whether the reader waits, which stage is the reason, and what to do.

    >>> from penstock.runtime.stats import StageMeter
    >>> slow = StageMeter("map(decode)"); slow.elements, slow.work_s, slow.threads = 100, 1.6, 2
    >>> print(verdict(Statistics(stages=(slow.snapshot(),), elements=100, read_s=0.8, idle_s=0.2, buffered_elements=0,
    ...     buffered_bytes=0, memory_budget_bytes=1, threads=2)))
    input-bound: the reader waits 80 % of the time, for map(decode) (100 % of the work, 2 threads).
    All 2 cores are at work: use more cores or machines, or do less per element.
    """
    if not statistics.elements:
        return "no verdict: nothing was read yet"
    limiting = limiting_stage(statistics)
    if limiting is None or statistics.wait_fraction < INPUT_BOUND:
        return f"not input-bound: the reader waits {statistics.wait_fraction:.0%} of the time.".replace("%", " %")
    total = sum(stage.busy_s for stage in statistics.stages) or 1.0
    where = f"{limiting.threads} threads" if limiting.threads else "in the reader's thread"
    said = (
        f"input-bound: the reader waits {statistics.wait_fraction:.0%} of the time, for {limiting.name} "
        f"({limiting.busy_s / total:.0%} of the work, {where})."
    ).replace("%", " %")
    return f"{said}\n{remedy(limiting, statistics)}"


def limiting_stage(statistics: Statistics) -> StageStatistics | None:
    """Return the stage with the most time per thread: the one that makes the rest wait."""
    busy = [stage for stage in statistics.stages if stage.busy_s > 0]
    return max(busy, key=lambda stage: stage.busy_s / max(stage.threads, 1), default=None)


def remedy(stage: StageStatistics, statistics: Statistics) -> str:
    if stage.holds_gil:
        return (
            f"{stage.name} holds the GIL, so threads do not help: run the pipeline in several processes, "
            "or use a library that releases it."
        )
    if stage.cpu_s and stage.busy_s > 3 * stage.cpu_s:
        more = 2 * max(stage.threads, MANY_THREADS)
        return f"{stage.name} mostly waits (disk, network): give it more threads, threads={more}."
    if stage.threads >= statistics.threads > 1:
        return f"All {statistics.threads} cores are at work: use more cores or machines, or do less per element."
    return "It runs in the reader's thread: a faster source or function, or caching what is above it, would help."


def analyze_table(statistics: Statistics) -> str:
    """Return the stages as an aligned table, and what was padded as another."""
    rows = [("stage", "elements", "busy s", "µs each", "threads", "buffered", "GIL", "skipped")]
    for stage in statistics.stages:
        gil = {True: "held", False: "released", None: "-"}[stage.holds_gil]
        rows.append(
            (
                stage.name,
                f"{stage.elements:,}",
                f"{stage.busy_s:.2f}",
                f"{1e6 * stage.seconds_per_element:,.1f}",
                str(stage.threads) if stage.threads else "reader's",
                f"{stage.buffered_elements:,}",
                gil,
                str(stage.skipped),
            )
        )
    buckets = [
        (f"{stage.name}{_bucket(stage, bucket)}", f"{bucket.batches:,}", f"{bucket.rows:,}", _percent(bucket))
        for stage in statistics.stages
        for bucket in stage.padding
    ]
    if not buckets:
        return _aligned(rows)
    return f"{_aligned(rows)}\n\n{_aligned([('padded', 'batches', 'rows', 'padding'), *buckets])}"


def _bucket(stage: StageStatistics, bucket: PaddingStatistics) -> str:
    if bucket.up_to is not None:
        return f", up to {bucket.up_to}"
    return ", longer" if len(stage.padding) > 1 else ""


def _percent(bucket: PaddingStatistics) -> str:
    return f"{100 * bucket.padding_fraction:.1f} %"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    )
