"""Pipelines as values: one or several sources, an operator that joins them, and steps by names of ours."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Kind = Literal["row", "seq", "batch", "padded", "ragged", "group", "packed", "maybe", "tuple"]

MEMORY_SOURCES = ("range", "items", "generator")
INDEXABLE = frozenset({"range", "items", "numpy"})
FIELD_OF = {"jsonl": "id", "csv": "id", "parquet": "id", "webdataset": "cls"}


COLUMN_BATCH = 3
COLUMN_SOURCES = frozenset({"parquet_batches", "features"})
"""Sources that give batches of columns."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Ids from `first` on, in so many files (or splits of a generator). `shuffle` is [size, seed], each may be None."""

    kind: str = "range"
    rows: int = 24
    files: int = 1
    first: int = 0
    shuffle: tuple[int | None, int | None] | None = None


class Step(msgspec.Struct, frozen=True):
    """An operator by a name of ours, with its arguments."""

    name: str
    arguments: dict[str, Any] = {}

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.arguments.items())})"


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    sources: tuple[Source, ...] = (Source(),)
    join: Step | None = None
    steps: tuple[Step, ...] = ()

    def has(self, *names: str) -> bool:
        return any(step.name in names for step in (*self.steps, *([] if self.join is None else [self.join])))

    def find(self, *names: str) -> Step | None:
        return next((step for step in self.steps if step.name in names), None)

    @property
    def endless(self) -> bool:
        return self.never_stops or any(step.name == "repeat" and step.arguments["count"] < 0 for step in self.steps)

    @property
    def never_stops(self) -> bool:
        return self.join is not None and self.join.name == "mix" and self.join.arguments["stop"] == "never"

    @property
    def unseeded(self) -> bool:
        """Whether a seed is drawn for it, where it is built."""
        return not self.seeds or None in self.seeds

    @property
    def seeds(self) -> list[int | None]:
        """What its shuffles were given, the first one's first."""
        of_sources = [source.shuffle[1] for source in self.sources if source.shuffle is not None]
        return [*of_sources, *(step.arguments["seed"] for step in self.steps if step.name == "shuffle")]

    @property
    def rows(self) -> int:
        return sum(source.rows for source in self.sources)

    def __str__(self) -> str:
        sources = [_source_text(source) for source in self.sources]
        head = sources[0] if self.join is None else f"{self.join} of [{', '.join(sources)}]"
        return " → ".join([head, *map(str, self.steps)])


def _source_text(source: Source) -> str:
    shuffle = "" if source.shuffle is None else f".shuffle{source.shuffle}"
    return f"{source.kind}({source.rows} rows, {source.files} files){shuffle}"


REGROUPING = frozenset({"batch", "padded_batch", "ragged_batch", "rebatch", "bucket", "group"})
COUNTED = frozenset({"take", "skip", "enumerate", "zip"})
WITH_RNG = frozenset({"noise", "filter_rng", "flat_map_rng", "resample", "balanced"})
ONCE = frozenset({"repeat", "blob", "slow", "none", "cache"})
"""A second one would cost time or memory, and say nothing new."""
WITH_RNG_OF_ROWS = frozenset({"filter_rng", "flat_map_rng", "resample", "balanced"})
"""Chance decides there which rows come, and how often."""
SPLIT_LOCAL = frozenset({"value", "blob", "none", "slow", "tokens", "select", "prefetch", "leaf_types", "filter"})
"""Before a point that keeps splits: none draws from `rng`, and none mixes what splits give."""
ENDS_IDENTITY = REGROUPING | {"unbatch", "pack", "lists"}
"""After these an element is not the same one on every number of streams: nothing below draws from `rng`."""
