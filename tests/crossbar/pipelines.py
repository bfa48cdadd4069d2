"""Random pipelines: one or several sources, an operator that joins them, and steps.

A pipeline is a value. `build` makes the dataset of it, here or in another process alike; the tables say which steps
may follow which kind of element, so that whatever is drawn means something in one process.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

import penstock as ps

from . import functions as f
from .files import WRITERS, write_files

Kind = Literal["row", "seq", "batch", "padded", "ragged", "group", "packed", "maybe", "tuple"]

MEMORY_SOURCES = ("range", "items", "generator")
INDEXABLE = frozenset({"range", "items", "numpy"})
FIELD_OF = {"jsonl": "id", "csv": "id", "parquet": "id", "webdataset": "cls"}


COLUMN_BATCH = 3


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
        seeds = [source.shuffle[1] for source in self.sources if source.shuffle is not None]
        seeds += [step.arguments["seed"] for step in self.steps if step.name == "shuffle"]
        return not seeds or None in seeds

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


# Steps: name → (kinds it takes, kind it gives or None for the same, how it is drawn, how it is built)

Draw = Callable[[random.Random, Pipeline], dict[str, Any]]
Build = Callable[[ps.Dataset, dict[str, Any]], ps.Dataset]

SAME: None = None
ROWS: tuple[Kind, ...] = ("row", "seq")
ANY: tuple[Kind, ...] = ("row", "seq", "batch", "padded", "ragged", "group", "packed", "maybe", "tuple")
BATCHES: tuple[Kind, ...] = ("batch",)

REGROUPING = frozenset({"batch", "padded_batch", "ragged_batch", "rebatch", "bucket", "group"})
COUNTED = frozenset({"take", "skip", "enumerate", "zip"})
WITH_RNG = frozenset({"noise", "filter_rng", "flat_map_rng"})
ONCE = frozenset({"repeat", "blob", "slow", "none", "cache"})
"""A second one would cost time or memory, and say nothing new."""
ENDS_IDENTITY = REGROUPING | {"unbatch", "pack", "lists"}
"""After these an element is not the same one on every number of streams: nothing below draws from `rng`."""


def _nothing(rng: random.Random, pipeline: Pipeline) -> dict[str, Any]:
    return {}


def _size(rng: random.Random, pipeline: Pipeline) -> dict[str, Any]:
    return {"size": rng.choice([1, 2, 3, 4, 7]), "drop_last": rng.random() < 0.3}


def _shuffle(rng: random.Random, pipeline: Pipeline) -> dict[str, Any]:
    by_index = not pipeline.steps and pipeline.join is None and pipeline.sources[0].kind in INDEXABLE
    sizes = [None, None, 4] if by_index else [1, 4, 16]
    return {"size": rng.choice(sizes), "seed": rng.choice([None, 1, 5])}


def _failing(rng: random.Random, pipeline: Pipeline) -> dict[str, Any]:
    source = pipeline.sources[0]
    hows = ("map", "map", "filter", "flat_map", "generator", "interleave", "lists")
    return {
        "error": rng.choice(list(f.ERRORS)),
        "at": source.first + rng.randrange(max(1, source.rows)),
        "how": rng.choice(hows),
    }


def _build_failing(ds: ps.Dataset, a: dict[str, Any]) -> ps.Dataset:
    function = f.failing(a["error"], a["at"], a["how"])
    match a["how"]:
        case "map":
            return ds.map(function)
        case "filter":
            return ds.filter(function)
        case "flat_map" | "generator":
            return ds.flat_map(function)
        case "interleave":
            return ds.interleave(function, cycle=3)
        case _:
            return ds.map(function, batch_size=4)


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    takes: tuple[str, ...]
    gives: str | None
    draw: Draw = _nothing
    build: Build
    weight: float = 1.0


STEPS: dict[str, Rule] = {
    "value": Rule(takes=ROWS, gives=SAME, build=lambda ds, a: ds.map(f.add_value()), weight=2),
    "noise": Rule(takes=ROWS, gives=SAME, build=lambda ds, a: ds.map(f.add_noise()), weight=3),
    "blob": Rule(
        takes=("row",),
        gives=SAME,
        draw=lambda rng, p: {"size": rng.choice(list(f.BLOB_BYTES))},
        build=lambda ds, a: ds.map(f.add_blob(a["size"])),
        weight=0.7,
    ),
    "lists": Rule(
        takes=("row",),
        gives=SAME,
        draw=lambda rng, p: {"size": rng.choice([1, 3])},
        build=lambda ds, a: ds.map(f.each_of_a_list(), batch_size=a["size"]),
        weight=0.4,
    ),
    "none": Rule(takes=("row",), gives="maybe", build=lambda ds, a: ds.map(f.sometimes_none()), weight=0.3),
    "slow": Rule(
        takes=ANY,
        gives=SAME,
        draw=lambda rng, p: {"seconds": rng.choice([0.001, 0.003])},
        build=lambda ds, a: ds.map(f.slowly(a["seconds"])),
        weight=0.3,
    ),
    "failing": Rule(takes=("row",), gives=SAME, draw=_failing, build=_build_failing, weight=0.0),
    "filter": Rule(takes=ROWS, gives=SAME, build=lambda ds, a: ds.filter(f.not_a_third()), weight=1.2),
    "filter_column": Rule(
        takes=ROWS,
        gives=SAME,
        draw=lambda rng, p: {"above": rng.choice([3, 10])},
        build=lambda ds, a: ds.filter(ps.col("id") > a["above"]),
        weight=0.7,
    ),
    "filter_rng": Rule(takes=ROWS, gives=SAME, build=lambda ds, a: ds.filter(f.by_chance()), weight=0.7),
    "filter_all": Rule(takes=ROWS, gives=SAME, build=lambda ds, a: ds.filter(f.none_at_all()), weight=0.2),
    "flat_map": Rule(takes=ROWS, gives=SAME, build=lambda ds, a: ds.flat_map(f.children()), weight=1),
    "flat_map_rng": Rule(takes=ROWS, gives=SAME, build=lambda ds, a: ds.flat_map(f.lazy_children()), weight=0.7),
    "interleave": Rule(
        takes=ROWS,
        gives=SAME,
        draw=lambda rng, p: {"cycle": rng.choice([1, 3]), "block": rng.choice([1, 2])},
        build=lambda ds, a: ds.interleave(f.children(), cycle=a["cycle"], block=a["block"]),
    ),
    "shuffle": Rule(
        takes=ANY, gives=SAME, draw=_shuffle, build=lambda ds, a: ds.shuffle(a["size"], seed=a["seed"]), weight=2
    ),
    "repeat": Rule(
        takes=ANY,
        gives=SAME,
        draw=lambda rng, p: {"count": rng.choice([2, 2, 3, -1])},
        build=lambda ds, a: ds.repeat(a["count"]),
        weight=1,
    ),
    "tokens": Rule(takes=("row",), gives="seq", build=lambda ds, a: ds.map(f.add_tokens()), weight=2.5),
    "batch": Rule(
        takes=("row",),
        gives="batch",
        draw=_size,
        build=lambda ds, a: ds.batch(a["size"], drop_last=a["drop_last"]),
        weight=6,
    ),
    "padded_batch": Rule(
        takes=("seq",),
        gives="padded",
        draw=_size,
        build=lambda ds, a: ds.padded_batch(a["size"], drop_last=a["drop_last"]),
        weight=2,
    ),
    "ragged_batch": Rule(
        takes=("seq",),
        gives="ragged",
        draw=_size,
        build=lambda ds, a: ds.ragged_batch(a["size"], drop_last=a["drop_last"]),
        weight=2,
    ),
    "bucket": Rule(
        takes=("seq",),
        gives="padded",
        draw=lambda rng, p: {"size": rng.choice([1, 2, 3]), "drop_last": rng.random() < 0.2},
        build=lambda ds, a: ds.bucket_by_length(
            f.length_of_row(), boundaries=[3, 5], batch_size=a["size"], drop_last=a["drop_last"]
        ),
        weight=3,
    ),
    "group": Rule(
        takes=ROWS,
        gives="group",
        draw=lambda rng, p: {"keys": rng.choice([1, 3]), "size": rng.choice([2, 4]), "drop_last": rng.random() < 0.2},
        build=lambda ds, a: ds.group_by_window(f.key_of(a["keys"]), size=a["size"], drop_last=a["drop_last"]),
        weight=1,
    ),
    "pack": Rule(
        takes=("row",),
        gives="packed",
        draw=lambda rng, p: {"length": rng.choice([5, 12]), "lookahead": rng.choice([1, 9])},
        build=lambda ds, a: ds.map(f.only_tokens()).pack(a["length"], lookahead=a["lookahead"]),
        weight=0.8,
    ),
    "batch_map": Rule(takes=BATCHES, gives=SAME, build=lambda ds, a: ds.map(f.batch_column()), weight=1),
    "unbatch": Rule(takes=BATCHES, gives="row", build=lambda ds, a: ds.unbatch(), weight=0.7),
    "rebatch": Rule(
        takes=BATCHES,
        gives=SAME,
        draw=_size,
        build=lambda ds, a: ds.rebatch(a["size"], drop_last=a["drop_last"]),
        weight=1,
    ),
    "select": Rule(takes=("row", "batch"), gives=SAME, build=lambda ds, a: ds.select("id"), weight=0.6),
    "cache": Rule(takes=ANY, gives=SAME, build=lambda ds, a: ds.cache(), weight=0.3),
    "prefetch": Rule(takes=ANY, gives=SAME, build=lambda ds, a: ds.prefetch(2), weight=0.5),
    "shard": Rule(takes=ANY, gives=SAME, build=lambda ds, a: ds.shard(), weight=0.0),
    "take": Rule(
        takes=ANY,
        gives=SAME,
        draw=lambda rng, p: {"count": rng.choice([0, 1, 5, 1000])},
        build=lambda ds, a: ds.take(a["count"]),
        weight=0.15,
    ),
    "skip": Rule(
        takes=ANY,
        gives=SAME,
        draw=lambda rng, p: {"count": rng.choice([1, 5])},
        build=lambda ds, a: ds.skip(a["count"]),
        weight=0.15,
    ),
    "enumerate": Rule(takes=ANY, gives="tuple", build=lambda ds, a: ds.enumerate(), weight=0.15),
    "zip": Rule(takes=ANY, gives="tuple", build=lambda ds, a: ds.zip(ps.range(10)), weight=0.1),
}


def kind_after(kind: str, step: Step) -> str | None:
    """Return what a step gives, None if it does not take such elements."""
    rule = STEPS[step.name]
    if kind not in rule.takes:
        return None
    return rule.gives or kind


def source_kind(pipeline: Pipeline) -> str:
    return "batch" if pipeline.sources[0].kind == "parquet_batches" else "row"


def kind_of(pipeline: Pipeline, after: tuple[Step, ...] = ()) -> str | None:
    """Return what comes out, None if the steps do not fit together: a shrunken pipeline may not."""
    kind: str | None = source_kind(pipeline)
    identity = kind == "row"
    for step in (*pipeline.steps, *after):
        if kind is None or (step.name in WITH_RNG and not identity):
            return None
        kind = kind_after(kind, step)
        identity = identity and step.name not in ENDS_IDENTITY
    return kind


def valid(pipeline: Pipeline, after: tuple[Step, ...] = ()) -> bool:
    several = len(pipeline.sources) > 1
    return kind_of(pipeline, after) is not None and several == (pipeline.join is not None)


# Building


def _open(source: Source, folder: Path) -> ps.Dataset:
    if source.kind == "range":
        ds = ps.range(source.first, source.first + source.rows)
    elif source.kind == "items":
        ds = ps.from_items(list(range(source.first, source.first + source.rows)))
    elif source.kind == "generator":
        each = source.rows // source.files
        ds = ps.from_generator(f.split_rows(source.first, each), splits=list(range(source.files)))
    else:
        paths = write_files(folder, source.kind, source.first, source.rows, source.files)
        readers: dict[str, Callable[[Any], ps.Dataset]] = {
            "text": ps.read_text,
            "jsonl": ps.read_jsonl,
            "csv": ps.read_csv,
            "numpy": ps.read_numpy,
            "parquet": ps.read_parquet,
            "parquet_batches": lambda paths: ps.read_parquet(paths, batch=COLUMN_BATCH),
            "tfrecord": ps.read_tfrecord,
            "webdataset": ps.read_webdataset,
        }
        ds = readers[source.kind](paths)
    if source.shuffle is not None:
        size, seed = source.shuffle
        ds = ds.shuffle(size, seed=seed)
    return ds if source.kind == "parquet_batches" else ds.map(f.to_row(FIELD_OF.get(source.kind)))


def build(pipeline: Pipeline, folder: Path) -> ps.Dataset:
    """Return the dataset; files are made below `folder`, once."""
    opened = [_open(source, folder) for source in pipeline.sources]
    ds = opened[0]
    if pipeline.join is not None:
        arguments = pipeline.join.arguments
        if pipeline.join.name == "concatenate":
            ds = opened[0].concatenate(*opened[1:])
        else:
            unit = "elements" if arguments["unit"] == "elements" else f.size_of_row()
            ds = ps.mix(opened, arguments["weights"], unit=unit, stop=arguments["stop"])
    return apply(ds, pipeline.steps)


def apply(ds: Any, steps: tuple[Step, ...]) -> Any:
    for step in steps:
        ds = STEPS[step.name].build(ds, step.arguments)
    return ds


# Drawing


def draw_source(rng: random.Random, first: int, *, rows: int | None = None) -> Source:
    kind = rng.choice([*["range"] * 4, "items", "items", "generator", *WRITERS])
    count = rng.choice([0, 1, 3, 10, 24, 24, 40, 40, 64]) if rows is None else rows
    files = 1 if kind in ("range", "items") else rng.choice([1, 2, 3, 5])
    if kind == "generator":
        count = max(1, count // files) * files if count else 0
    sizes = [None, 5] if kind in INDEXABLE else [5]
    shuffle = (rng.choice(sizes), rng.choice([None, 1, 2])) if rng.random() < 0.35 else None
    return Source(kind=kind, rows=count, files=files, first=first, shuffle=shuffle)


def draw_join(rng: random.Random, sources: int) -> Step:
    if rng.random() < 0.3:
        return Step("concatenate")
    weights = [1.0] * sources if rng.random() < 0.5 else [float(rng.choice([1, 2, 5])) for _ in range(sources)]
    unit = "elements" if rng.random() < 0.7 else "size"
    return Step("mix", {"weights": weights, "unit": unit, "stop": rng.choice(["first", "all", "all", "never"])})


def draw_step(rng: random.Random, pipeline: Pipeline, kind: str, *, identity: bool) -> Step:
    names = [
        name
        for name, rule in STEPS.items()
        if kind in rule.takes and rule.weight and (identity or name not in WITH_RNG)
    ]
    name = rng.choices(names, [STEPS[name].weight for name in names])[0]
    return Step(name, STEPS[name].draw(rng, pipeline))


def draw_pipeline(rng: random.Random, way: str = "plain") -> Pipeline:
    """`way` is how it will be read: by a sampler and in coordinated steps only some pipelines can be."""
    if way == "feed":
        return _draw_fed(rng)
    several = rng.random() < 0.25
    count = rng.choice([2, 2, 3]) if several else 1
    sources = tuple(draw_source(rng, 1000 * number) for number in range(count))
    if several:  # columns of one source beside rows of another would be two kinds of elements
        sources = tuple(replace(s, kind="parquet") if s.kind == "parquet_batches" else s for s in sources)
    pipeline = Pipeline(sources=sources, join=draw_join(rng, count) if several else None)
    kind, identity = source_kind(pipeline), source_kind(pipeline) == "row"
    steps: list[Step] = []
    if kind == "row" and rng.random() < 0.08:
        steps.append(Step("failing", _failing(rng, pipeline)))
    most = 2 if way == "coordinated" else 4
    for _ in range(min(most, rng.choice([0, 1, 1, 2, 2, 3, 4]))):
        step = draw_step(rng, replace(pipeline, steps=tuple(steps)), kind, identity=identity)
        if step.name in ONCE and any(each.name == step.name for each in steps):
            continue
        kind = kind_after(kind, step) or kind
        identity = identity and step.name not in ENDS_IDENTITY
        steps.append(step)
    if way == "coordinated" and kind in ROWS and rng.random() < 0.85:
        name = rng.choice(["bucket", "bucket", "padded_batch", "group", "batch"])
        if kind == "row" and name in ("bucket", "padded_batch"):
            steps.append(Step("tokens"))
        if kind == "row" or name != "batch":
            steps.append(Step(name, STEPS[name].draw(rng, pipeline)))
    return _of_bounded_size(replace(pipeline, steps=tuple(steps)))


def _draw_fed(rng: random.Random) -> Pipeline:
    source = Source(kind=rng.choice(sorted(INDEXABLE)), rows=rng.choice([1, 3, 10, 24, 40]))
    names = rng.sample(["value", "noise", "blob", "prefetch", "cache", "tokens", "slow"], rng.choice([0, 1, 2, 3]))
    pipeline = Pipeline(sources=(source,))
    names.sort(key=lambda name: name == "tokens")  # rows of unequal lengths are for padded batches alone
    if rng.random() < 0.5:
        names.append(rng.choice(["padded_batch", "ragged_batch"]) if "tokens" in names else "batch")
    steps = tuple(Step(name, STEPS[name].draw(rng, pipeline)) for name in names)
    return _of_bounded_size(replace(pipeline, steps=steps))


def _of_bounded_size(pipeline: Pipeline) -> Pipeline:
    """Return it with fewer rows where they are large: megabytes are for the way they travel, not for their number."""
    blob = pipeline.find("blob")
    if blob is None:
        return pipeline
    most = 12 if blob.arguments["size"].startswith("1M") else 40
    sources = tuple(replace(s, rows=min(s.rows, most // s.files * s.files)) for s in pipeline.sources)
    return replace(pipeline, sources=sources)
