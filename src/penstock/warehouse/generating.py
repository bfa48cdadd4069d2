"""A representative table: rows of features with a model's published statistics, a day at a time, all by one seed."""

from __future__ import annotations

import datetime
from os import PathLike
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.element import Array
from penstock.core.errors import InvalidArgumentError
from penstock.warehouse.features import Feature, Lifecycle
from penstock.warehouse.model_statistics import BETA_PER_NEW, DrawnFeatures, draw_features, model
from penstock.warehouse.read_log import ReadLog
from penstock.warehouse.table import Table
from penstock.warehouse.writing import StripeSize

FIRST_DAY = datetime.date(2026, 1, 1)
LABEL_SHARE = 0.04
IDS = 1 << 33  # of each sparse feature; low ones are more frequent
_WRITTEN: tuple[Lifecycle, ...] = ("experimental", "active", "deprecated")
_WRITTEN_SHARES = (883 / 4466, 1650 / 4466, 1933 / 4466)


def generate(
    url: str | PathLike[str],
    *,
    like: str,
    scale: float = 1.0,
    rows: int = 2048,
    partitions: int | None = None,
    sessions: int = 64,
    seed: int = 0,
    stripe: StripeSize | None = None,
) -> Table:
    """Make a table with the statistics of rm1, rm2 or rm3, and a read log of sessions over it.

    `scale` is the share of the features (1: all of them), `rows` how many a day has, `partitions` how many days (None:
    as many as the model stores). Each day is a commit of its own: what was stopped goes on where it stopped.
    """
    statistics = model(like).scaled(scale)
    days = statistics.stored_partitions if partitions is None else partitions
    if days < 1 or rows < 1:
        raise InvalidArgumentError(f"partitions={days}, rows={rows}: at least one of either")
    drawn = draw_features(statistics, partitions=days, seed=seed)
    table = Table(url)
    if table.version < 0:
        table = Table.create(url, _features(drawn), stripe=stripe)
        log = ReadLog(table.own_folder)
        used = min(statistics.used_partitions, days)
        for number, features in enumerate(drawn.sessions(sessions)):
            log.add(
                features,
                [_day(days - used + k) for k in range(used)],
                session=f"{like}-{number}",
                at_s=number,
            )
    for day in range(days):
        table.append(_rows(drawn, day, rows), date=_day(day), progress=("generate", day))
    return table


def _day(number: int) -> str:
    return (FIRST_DAY + datetime.timedelta(days=number)).isoformat()


def _features(drawn: DrawnFeatures) -> list[Feature]:
    rng = np.random.default_rng([drawn.seed, 3])
    count = len(drawn.coverage)
    written = rng.choice(3, count, p=_WRITTEN_SHARES)
    dense = drawn.model.stored_dense
    found = [
        Feature(
            id=number,
            name=f"{drawn.model.name}_{number}",
            kind="dense" if number < dense else "scored" if drawn.scored[number] else "sparse",
            owner=f"team{number % 17}",
            lifecycle=_WRITTEN[written[number]],
        )
        for number in range(count)
    ]
    betas = round(BETA_PER_NEW * np.count_nonzero(drawn.first_day))
    found += [Feature(id=count + number, name=f"beta_{number}", lifecycle="beta") for number in range(betas)]
    return found


def _rows(drawn: DrawnFeatures, day: int, rows: int) -> pa.Table:
    rng = np.random.default_rng([drawn.seed, 4, day])
    midnight = int(datetime.datetime.combine(FIRST_DAY, datetime.time(), datetime.UTC).timestamp()) + day * 86_400
    columns: dict[str, Any] = {
        "key": np.arange(day * rows, (day + 1) * rows),
        "time": midnight + np.sort(rng.integers(0, 86_400, rows)),
        "label": (rng.random(rows) < LABEL_SHARE).astype(np.float32),
    }
    for number in np.flatnonzero(drawn.first_day <= day).tolist():
        there = rng.random(rows) < drawn.coverage[number]
        if not drawn.length[number]:
            columns[f"f{number}"] = pa.array(rng.standard_normal(rows, np.float32), mask=~there)
            continue
        lengths = np.where(there, rng.geometric(1 / max(1.0, drawn.length[number]), rows), 0)
        columns[f"f{number}"] = _lists(lengths, rng, scored=bool(drawn.scored[number]))
    return pa.table(columns)


def _lists(lengths: Array, rng: np.random.Generator, *, scored: bool) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    count = int(offsets[-1])
    skewed = rng.random(count, np.float32) ** 2
    ids = pa.array((skewed * IDS).astype(np.int64))
    if scored:
        scores = pa.array(rng.random(count, np.float32))
        return pa.ListArray.from_arrays(pa.array(offsets), pa.StructArray.from_arrays([ids, scores], ["id", "score"]))
    return pa.ListArray.from_arrays(pa.array(offsets), ids)
