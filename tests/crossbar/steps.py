"""The table of steps: which elements each takes and gives, how its arguments are drawn, and how it is built.

Whatever is drawn by the table means something in one process; whether it does on several workers is said in `modes`.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from typing import Any

import msgspec

import penstock as ps

from . import functions as f
from .outputs import MASK
from .pipelines import COLUMN_SOURCES, ENDS_IDENTITY, INDEXABLE, WITH_RNG, Kind, Pipeline, Step

Draw = Callable[[random.Random, Pipeline], dict[str, Any]]
Build = Callable[[ps.Dataset, dict[str, Any]], ps.Dataset]

KEPT = f"{tempfile.gettempdir()}/penstock-crossbar-{os.getuid()}"
"""Where cases keep splits: what one of them kept, others find."""
SAME: None = None
ROWS: tuple[Kind, ...] = ("row", "seq")
ANY: tuple[Kind, ...] = ("row", "seq", "batch", "padded", "ragged", "group", "packed", "maybe", "tuple")
BATCHES: tuple[Kind, ...] = ("batch",)


def _nothing(rng: random.Random, pipeline: Pipeline) -> dict[str, Any]:
    return {}


def _size(rng: random.Random, pipeline: Pipeline) -> dict[str, Any]:
    return {"size": rng.choice([1, 2, 3, 4, 7]), "drop_last": rng.random() < 0.3}


def _shuffle(rng: random.Random, pipeline: Pipeline) -> dict[str, Any]:
    by_index = not pipeline.steps and pipeline.join is None and pipeline.sources[0].kind in INDEXABLE
    sizes = [None, None, 4] if by_index else [1, 4, 16]
    return {"size": rng.choice(sizes), "seed": rng.choice([None, 1, 5])}


def draw_failing(rng: random.Random, pipeline: Pipeline) -> dict[str, Any]:
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


def _build_batch(ds: ps.Dataset, a: dict[str, Any]) -> ps.Dataset:
    collate = f.collated() if a.get("collate") else None
    mask = MASK if a.get("mask") else None
    return ds.batch(a["size"], drop_last=a["drop_last"], collate=collate, mask=mask)


def _build_holdout(ds: ps.Dataset, a: dict[str, Any]) -> ps.Dataset:
    train, held_out = ds.holdout(a["fraction"], seed=a["seed"])
    return train if a["part"] == "train" else held_out


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    takes: tuple[str, ...]
    gives: str | None
    draw: Draw = _nothing
    build: Build
    weight: float = 1.0


def _autocached(ds: Any, arguments: dict[str, Any]) -> Any:
    how = arguments.get("how", "keep")
    room = 8 << 10 if how == "evict" else 256 << 20
    return ds.autocache(f"{KEPT}-{how}", always=how != "choose", version="1", capacity_bytes=room)


STEPS: dict[str, Rule] = {
    "value": Rule(takes=ROWS, gives=SAME, build=lambda ds, a: ds.map(f.add_value()), weight=2),
    "noise": Rule(takes=ROWS, gives=SAME, build=lambda ds, a: ds.map(f.add_noise()), weight=3),
    "leaf_types": Rule(takes=("row",), gives=SAME, build=lambda ds, a: ds.map(f.add_leaf_types()), weight=0.0),
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
    "failing": Rule(takes=("row",), gives=SAME, draw=draw_failing, build=_build_failing, weight=0.0),
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
    "holdout": Rule(takes=ROWS, gives=SAME, build=_build_holdout, weight=0.0),
    "resample": Rule(takes=ROWS, gives=SAME, build=lambda ds, a: ds.resample(f.weight_of()), weight=0.0),
    "balanced": Rule(
        takes=ROWS,
        gives=SAME,
        build=lambda ds, a: ds.balanced(f.class_of(len(a["counts"])), counts=dict(enumerate(a["counts"]))),
        weight=0.0,
    ),
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
        build=_build_batch,
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
    "batch_chance": Rule(takes=BATCHES, gives=SAME, build=lambda ds, a: ds.map(f.batch_chance()), weight=0.0),
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
    "autocache": Rule(
        takes=ANY,
        gives=SAME,
        build=_autocached,
        weight=0.0,
    ),
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
    return "batch" if pipeline.sources[0].kind in COLUMN_SOURCES else "row"


def kind_of(pipeline: Pipeline, after: tuple[Step, ...] = ()) -> str | None:
    """Return what comes out, None if the steps do not fit together: a shrunken pipeline may not."""
    kind: str | None = source_kind(pipeline)
    identity = kind == "row"
    for place, step in enumerate((*pipeline.steps, *after)):
        if kind is None or (step.name in WITH_RNG and not identity):
            return None
        kind = kind_after(kind, step)
        # Behind `distribute` what a cache gives is known by its place in it.
        cached = step.name == "cache" and place >= len(pipeline.steps)
        identity = identity and step.name not in ENDS_IDENTITY and not cached
    return kind


def valid(pipeline: Pipeline, after: tuple[Step, ...] = ()) -> bool:
    several = len(pipeline.sources) > 1
    return kind_of(pipeline, after) is not None and several == (pipeline.join is not None)


def apply(ds: ps.Dataset, steps: tuple[Step, ...]) -> ps.Dataset:
    for step in steps:
        ds = STEPS[step.name].build(ds, step.arguments)
    return ds
