"""From a pipeline to the dataset, here or in another process alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import penstock as ps

from . import functions as f
from .case import Case
from .files import write_files, write_table
from .pipelines import COLUMN_BATCH, COLUMN_SOURCES, FIELD_OF, Pipeline, Source
from .steps import apply


def _open(source: Source, folder: Path) -> ps.Dataset:
    if source.kind == "range":
        ds = ps.range(source.first, source.first + source.rows)
    elif source.kind == "items":
        ds = ps.from_items(list(range(source.first, source.first + source.rows)))
    elif source.kind == "generator":
        each = source.rows // source.files
        ds = ps.from_generator(f.split_rows(source.first, each), splits=list(range(source.files)))
    elif source.kind == "features":
        hashed = ps.transforms.SigridHash("f2", out="h2", salt=1, max_value=1000)
        clamped = ps.transforms.Clamp("f1", out="c1", low=1, high=8)
        ds = (
            ps.read_features(
                write_table(folder, source.first, source.rows, source.files), columns=["key"], batch=COLUMN_BATCH
            )
            .transform_features(
                hashed, clamped, within=["dense", "sparse", "scored"], dense=["c1", "f1"], sparse=["h2", "f2"]
            )
            .rename({"key": "id"})
        )
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
    return ds if source.kind in COLUMN_SOURCES else ds.map(f.to_row(FIELD_OF.get(source.kind)))


def build(pipeline: Pipeline, folder: Path) -> ps.Dataset:
    """Return the dataset; files are made below `folder`, once."""
    opened = [_open(source, folder) for source in pipeline.sources]
    ds = opened[0]
    if pipeline.join is not None:
        arguments = pipeline.join.arguments
        if pipeline.join.name == "concatenate":
            ds = opened[0].concatenate(*opened[1:])
        else:
            unit: Any = "elements" if arguments["unit"] == "elements" else f.size_of_row()
            ds = ps.mix(opened, arguments["weights"], unit=unit, stop=arguments["stop"])
    return apply(ds, pipeline.steps)


def build_for(case: Case, folder: Path) -> ps.Dataset:
    """Return the dataset that a case's loaders read: what is evaluated is batched by its loader."""
    steps = case.pipeline.steps[:-1] if case.modes.evaluation else case.pipeline.steps
    return build(replace(case.pipeline, steps=steps), folder)
