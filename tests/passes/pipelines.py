"""Random pipelines over numbers, rows and batches, for the property tests.

A pipeline is drawn as a list of steps: functions from a dataset to a dataset, each with the text it prints as, so that
a failing example reads like the code that makes it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

import penstock as ps

ROWS = 40
COLUMNS = {"a": "int", "b": "float", "c": "text", "d": "bool", "n": "null"}
MOST_GROWTH = 3
GROWING = frozenset({"flat_map", "repeat", "zip_self", "concatenate"})
SLOW = frozenset({"flaky", "zip", "concatenate", "cache"})


def write_files(folder: Path) -> None:
    table = pa.table(
        {
            "a": list(range(ROWS)),
            "b": [(i * 7 % 11) / 4 for i in range(ROWS)],
            "c": [("ant", "bee", "cat")[i % 3] for i in range(ROWS)],
            "d": [i % 4 < 2 for i in range(ROWS)],
            "n": [None if i % 5 == 0 else i % 7 for i in range(ROWS)],
        }
    )
    pq.write_table(table.slice(0, 26), folder / "0.parquet", row_group_size=7)
    pq.write_table(table.slice(26), folder / "1.parquet", row_group_size=7)
    with pa.OSFile(str(folder / "0.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table, max_chunksize=9)


# What the functions of the pipelines do


def plus(x):
    return x + 1


def times(x):
    return x * 3


def same(x):
    return x


def noisy(x, rng):
    return x + int(rng.integers(1000))


def is_even(x):
    return x % 2 == 0


def coin(x, rng):
    return rng.random() < 0.7


def fails_sometimes(x):
    if x % 5 == 0:
        raise ValueError(f"bad {x}")
    return x


def plus_each(xs):
    return [x + i for i, x in enumerate(xs)]


def noisy_each(xs, rng):
    return [x + int(rng.integers(1000)) for x in xs]


def children(x):
    return [x + i for i in range(x % 4)]


def noisy_children(x, rng):
    for _ in range(x % 3):
        yield x + int(rng.integers(1000))


def pair(both):
    return both[0] * 31 + both[1]


def total(batch):
    return int(batch.sum())


def as_row(x):
    return {"a": x, "b": x / 2, "c": str(x), "d": x % 2 == 0, "n": x % 7}


def digest(row):
    return zlib.crc32(repr(row).encode())


def marked(row, rng):
    return {**row, "mark": int(rng.integers(1000))}


def keeps(row):
    return digest(row) % 4 > 0


@dataclass(frozen=True)
class Drawn:
    """A pipeline drawn so far: how to build it, and what its elements are."""

    text: str
    build: Callable[[Path], ps.Dataset]
    kind: str
    """number, row or batch (of numbers), column batch"""
    columns: dict[str, str] = field(default_factory=dict)
    growth: int = 0
    """Operators so far that multiply elements."""
    once: frozenset[str] = frozenset()
    """Slow steps that were drawn already."""

    def then(self, text: str, step: Callable[[ps.Dataset], ps.Dataset], **changes) -> Drawn:
        build = self.build
        return replace(self, text=f"{self.text}.{text}", build=lambda folder: step(build(folder)), **changes)

    def __repr__(self) -> str:
        return self.text


@st.composite
def sources(draw):
    which = draw(st.sampled_from(["range", "range", "parquet", "parquet", "arrow"]))
    if which == "range":
        stop = draw(st.integers(0, 30))
        return Drawn(f"range({stop})", lambda folder: ps.range(stop), "number")
    columns = draw(st.none() | names(COLUMNS))
    batch = draw(st.sampled_from([None, None, None, 4]))
    nulls = draw(st.sampled_from([None, None, None, 0, "mask"])) if batch is None else 0
    read = ps.read_parquet if which == "parquet" else ps.read_arrow
    filled = {"n": "int"} if nulls is not None else {}
    kinds = {name: {**COLUMNS, **filled}[name] for name in columns or COLUMNS}
    return Drawn(
        f"{which}(columns={columns}, batch={batch}, nulls={nulls!r})",
        lambda folder: read(folder / f"*.{which}", columns=columns, batch=batch, nulls=nulls),
        "row" if batch is None else "column batch",
        {**kinds, **({f"{name}__mask": "bool" for name in kinds} if nulls == "mask" else {})},
    )


def names(columns):
    return st.lists(st.sampled_from(sorted(columns)), min_size=1, unique=True)


def conditions(columns):
    def about(name):
        col = ps.col(name)
        by_kind = {
            "int": st.builds(lambda k: col > k, st.integers(0, ROWS)) | st.builds(lambda k: col < k, st.integers(0, 9)),
            "float": st.builds(lambda k: ~(col < k / 4), st.integers(0, 11)),
            "text": st.builds(lambda ks: col.isin(ks), st.lists(st.sampled_from(["ant", "bee", "3"]), min_size=1)),
            "bool": st.just(col),
            "null": st.sampled_from([col.is_null(), ~col.is_null(), col != 3, ~(col >= 2)]),
        }
        return by_kind[columns[name]]

    one = st.sampled_from(sorted(name for name in columns if columns[name] in COLUMNS.values())).flatmap(about)
    return one | st.builds(lambda p, q: p & q, one, one) | st.builds(lambda p, q: p | ~q, one, one)


ANYTHING = ["shuffle", "shuffle", "take", "skip", "repeat", "prefetch", "cache", "enumerated"]
STEPS = {
    "number": [
        *("map", "map", "map", "filter", "filter", "flaky", "grouped", "flat_map", "zip", "zip_self", "concatenate"),
        *("batch", "batch", "rows", *ANYTHING),
    ],
    "row": [
        *("select", "select", "drop", "rename", "rename", "condition", "condition", "keeps", "mark", "same", "numbers"),
        *("row_batch", *ANYTHING),
    ],
    "batch": ["unbatch", "total", "rebatch", "take", "shuffle", "prefetch"],
    "column batch": ["select", "drop", "rename", "unbatch_rows", "rebatch", "take", "shuffle", "prefetch"],
}


@st.composite
def pipelines(draw, most_steps=8, nested=False):
    drawn = draw(sources())
    if nested:
        drawn = replace(drawn, growth=MOST_GROWTH - 1, once=SLOW)
    for _ in range(draw(st.integers(0, most_steps))):
        drawn = draw(next_step(drawn))
    return drawn


@st.composite
def next_step(draw, drawn):
    step = draw(st.sampled_from(STEPS[drawn.kind]))
    if step in drawn.once or (step in GROWING and drawn.growth == MOST_GROWTH):
        return drawn
    drawn = replace(drawn, growth=drawn.growth + (step in GROWING), once=drawn.once | ({step} & SLOW))
    match step:
        case "map":
            function, threads = (
                draw(st.sampled_from([plus, times, same, noisy])),
                draw(st.sampled_from([None, None, 2])),
            )
            text = f"map({function.__name__}, threads={threads})"
            return drawn.then(text, lambda ds: ds.map(function, threads=threads))
        case "filter":
            function = draw(st.sampled_from([is_even, coin]))
            return drawn.then(f"filter({function.__name__})", lambda ds: ds.filter(function))
        case "flaky":
            policy = ps.SkipErrors(budget=10**6, quarantine="/dev/null")
            return drawn.then("map(fails_sometimes, skip)", lambda ds: ds.map(fails_sometimes, on_error=policy))
        case "grouped":
            function, size = draw(st.sampled_from([plus_each, noisy_each])), draw(st.integers(1, 5))
            text = f"map({function.__name__}, batch_size={size})"
            return drawn.then(text, lambda ds: ds.map(function, batch_size=size))
        case "flat_map":
            function, name = (
                draw(st.sampled_from([children, noisy_children])),
                draw(st.sampled_from(["flat_map", "interleave"])),
            )
            return drawn.then(f"{name}({function.__name__})", lambda ds: getattr(ds, name)(function))
        case "shuffle":
            size, seed = draw(st.integers(1, 9)), draw(st.sampled_from([None, None, 5]))
            reshuffle = draw(st.booleans())
            text = f"shuffle({size}, seed={seed}, reshuffle={reshuffle})"
            return drawn.then(text, lambda ds: ds.shuffle(size, seed=seed, reshuffle=reshuffle))
        case "take" | "skip" | "repeat":
            least, most = {"take": (-1, 20), "skip": (0, 6), "repeat": (0, 2)}[step]
            count = draw(st.integers(least, most))
            return drawn.then(f"{step}({count})", lambda ds: getattr(ds, step)(count))
        case "prefetch":
            size = draw(st.sampled_from([None, 3]))
            return drawn.then(f"prefetch({size})", lambda ds: ds.prefetch(size))
        case "cache":
            return drawn.then("cache()", lambda ds: ds.cache())
        case "enumerated":
            return drawn.then(
                "enumerate().map(digest)", lambda ds: ds.enumerate().map(digest), kind="number", columns={}
            )
        case "zip" | "concatenate":
            other = draw(pipelines(most_steps=3, nested=True))
            if other.kind != "number":
                return drawn
            build = drawn.build

            def joined(folder):
                if step == "zip":
                    return build(folder).zip(other.build(folder)).map(pair)
                return build(folder).concatenate(other.build(folder))

            return replace(drawn, text=f"{drawn.text}.{step}({other.text})", build=joined)
        case "zip_self":
            return drawn.then("zip(self.map(times))", lambda ds: ds.zip(ds.map(times)).map(pair))
        case "batch" | "row_batch":
            size, drop_last = draw(st.integers(1, 6)), draw(st.booleans())
            kind = "batch" if step == "batch" else "column batch"
            text = f"batch({size}, drop_last={drop_last})"
            return drawn.then(text, lambda ds: ds.batch(size, drop_last=drop_last), kind=kind)
        case "rebatch":
            if "null" in drawn.columns.values():
                return drawn  # a batch without a null has another type
            size = draw(st.integers(1, 6))
            return drawn.then(f"rebatch({size})", lambda ds: ds.rebatch(size))
        case "unbatch" | "unbatch_rows":
            return drawn.then("unbatch()", lambda ds: ds.unbatch(), kind="number" if step == "unbatch" else "row")
        case "total":
            return drawn.then("map(total)", lambda ds: ds.map(total), kind="number")
        case "rows":
            return drawn.then("map(as_row)", lambda ds: ds.map(as_row), kind="row", columns=dict(COLUMNS))
        case "numbers":
            return drawn.then("map(digest)", lambda ds: ds.map(digest), kind="number", columns={})
        case "mark":
            columns = {**drawn.columns, "mark": "mark"}
            return drawn.then("map(marked)", lambda ds: ds.map(marked), columns=columns)
        case "same":
            return drawn.then("map(same)", lambda ds: ds.map(same))
        case "keeps":
            return drawn.then("filter(keeps)", lambda ds: ds.filter(keeps))
        case "select":
            chosen = draw(names(drawn.columns))
            columns = {name: drawn.columns[name] for name in chosen}
            return drawn.then(f"select{tuple(chosen)}", lambda ds: ds.select(*chosen), columns=columns)
        case "drop":
            chosen = draw(names(drawn.columns))
            columns = {name: kind for name, kind in drawn.columns.items() if name not in chosen}
            return (
                drawn.then(f"drop{tuple(chosen)}", lambda ds: ds.drop(*chosen), columns=columns) if columns else drawn
            )
        case "rename":
            old, new = draw(st.sampled_from(sorted(drawn.columns))), draw(st.sampled_from([*drawn.columns, "x", "y"]))
            exchange = {old: new, new: old} if new in drawn.columns else {old: new}
            columns = {exchange.get(name, name): kind for name, kind in drawn.columns.items()}
            return drawn.then(f"rename({exchange})", lambda ds: ds.rename(exchange), columns=columns)
        case "condition":
            if not set(drawn.columns.values()) & set(COLUMNS.values()):
                return drawn
            condition = draw(conditions(drawn.columns))
            return drawn.then(f"filter({condition!r})", lambda ds: ds.filter(condition))
    raise AssertionError(step)
