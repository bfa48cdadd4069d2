"""Maps of features, as services log them, to columns, as tables store them.

A logged row has maps from a feature's id to its value. One pass sorts the entries of all rows by feature (stably, so
that rows stay in order), and each feature's part is then its column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.element import Array
from penstock.warehouse.features import Feature


def flatten(maps: Mapping[str, pa.Array], features: Mapping[int, Feature], rows: int) -> dict[str, pa.Array]:
    """Return the columns of the features that are in the maps, by kind: `dense`, `sparse` and `scored`.

    Of an id that a row has twice the last counts; ids that are not among `features` are left out.

    >>> logged = pa.array([{7: 0.5}, {}, {7: 1.5}], pa.map_(pa.int64(), pa.float32()))
    >>> flatten({"dense": logged}, {7: Feature(id=7)}, 3)["f7"].to_pylist()
    [0.5, None, 1.5]
    """
    columns: dict[str, pa.Array] = {}
    for kind, column in maps.items():
        wanted = {number for number, feature in features.items() if feature.kind == kind}
        for number, (places, entries) in _by_feature(column, rows).items():
            if number in wanted:
                columns[f"f{number}"] = _column(kind, column.items, places, entries, rows)
    return columns


def _by_feature(column: pa.Array, rows: int) -> dict[int, tuple[Array, Array]]:
    """Return, for each id in a map column, the rows that have it and the places of its entries."""
    offsets = np.asarray(column.offsets)
    ids = np.asarray(column.keys)[offsets[0] : offsets[-1]]
    row_of = np.repeat(np.arange(rows), np.diff(offsets))
    order = np.argsort(ids, kind="stable")
    found, starts = np.unique(ids[order], return_index=True)
    parts = np.split(order, starts[1:])
    return {int(number): (row_of[part], part + offsets[0]) for number, part in zip(found, parts)}


def _column(kind: str, items: Any, places: Array, entries: Array, rows: int) -> pa.Array:
    picks = np.full(rows, -1, np.int64)
    picks[places] = entries
    taken = items.take(pa.array(picks, mask=picks < 0))
    return taken.cast(pa.float32()) if kind == "dense" else taken
