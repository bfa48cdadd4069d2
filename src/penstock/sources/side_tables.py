"""Injected features: a side table's rows, joined by key when a split is read.

A side table has the same days; the rows of one of its days are sorted by key once, and each stripe's keys are looked up
in them. Of rows with the same key the newest counts. A row without a partner has the features empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.core.element import Array
from penstock.graph.readers import ReadFeatures
from penstock.sources.delta_log import LoggedFile
from penstock.sources.feature_files import FeatureFile
from penstock.sources.storage import normal_path


class SideTables:
    """The side tables of one split. Holds one day of each."""

    def __init__(
        self,
        node: ReadFeatures,
        files: Sequence[Mapping[str, Sequence[LoggedFile]]],
        open_file: Callable[[str, LoggedFile], FeatureFile],
    ) -> None:
        self._injected, self._files, self._open = node.injected, files, open_file
        self._day: tuple[str, list[tuple[Array, pa.Table] | None]] | None = None

    def columns(self, day: str, keys: pa.Array) -> dict[str, pa.Array]:
        """Return the injected features of rows with these keys."""
        if self._day is None or self._day[0] != day:
            self._day = (day, [self._loaded(number, day) for number in range(len(self._injected))])
        wanted = keys.fill_null(-1).to_numpy(zero_copy_only=False)
        found: dict[str, pa.Array] = {}
        for side in self._day[1]:
            if side is None:
                continue
            known, table = side
            places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
            matches = known[places] == wanted
            rows = pa.array(places, mask=~matches)
            for name in table.column_names:
                found[name] = table.column(name).chunk(0).take(rows)
        return found

    def _loaded(self, number: int, day: str) -> tuple[Array, pa.Table] | None:
        """Return the keys of a day, sorted, and its features in the same order."""
        url, _, names = self._injected[number]
        parts: list[pa.Table] = []
        for logged in self._files[number].get(day, ()):
            with self._open(normal_path(url).rstrip("/"), logged) as file:
                there = [name for name in ("key", "time", *names) if name in file.footer.leaves]
                parts.extend(pa.table(file.read(stripe, there)) for stripe, _, _ in file.stripes())
        rows: Any = pa.concat_tables(parts, promote_options="default").combine_chunks() if parts else None
        if rows is None or not rows.num_rows:
            return None
        order = np.lexsort((rows["time"].to_numpy(), rows["key"].to_numpy()))
        keys = rows["key"].to_numpy()[order]
        last = np.append(keys[1:] != keys[:-1], True)
        chosen = rows.select([name for name in rows.column_names if name in names]).take(pa.array(order[last]))
        return keys[last], chosen.combine_chunks()
