"""Tiny files of every format with the ids of a source, made below a folder of the case's own."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import penstock as ps
from penstock.sources.tfrecord import TFRecordWriter


def _text(path: Path, ids: Sequence[int]) -> None:
    path.write_text("".join(f"{i}\n" for i in ids))


def _jsonl(path: Path, ids: Sequence[int]) -> None:
    path.write_text("".join(json.dumps({"id": i}) + "\n" for i in ids))


def _csv(path: Path, ids: Sequence[int]) -> None:
    path.write_text("id\n" + "".join(f"{i}\n" for i in ids))


def _numpy(path: Path, ids: Sequence[int]) -> None:
    np.save(path, np.asarray(ids, np.int64).reshape(-1, 1))


def _parquet(path: Path, ids: Sequence[int]) -> None:
    pq.write_table(pa.table({"id": pa.array(ids, pa.int64())}), path, row_group_size=4)


def _tfrecord(path: Path, ids: Sequence[int]) -> None:
    with TFRecordWriter(str(path)) as writer:
        for i in ids:
            writer.write(str(i).encode())


def _webdataset(path: Path, ids: Sequence[int]) -> None:
    with tarfile.open(path, "w") as shard:
        for i in ids:
            content = str(i).encode()
            member = tarfile.TarInfo(f"{i:06d}.cls")
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))


WRITERS: dict[str, tuple[str, Callable[[Path, Sequence[int]], None]]] = {
    "text": ("txt", _text),
    "jsonl": ("jsonl", _jsonl),
    "csv": ("csv", _csv),
    "numpy": ("npy", _numpy),
    "parquet": ("parquet", _parquet),
    "parquet_batches": ("parquet", _parquet),
    "tfrecord": ("tfrecord", _tfrecord),
    "webdataset": ("tar", _webdataset),
}


def write_table(folder: Path, first: int, rows: int, files: int) -> str:
    """Return a feature table of so many files, whose keys are the ids; features follow from the key."""
    home = folder / f"features-{first}-{rows}-{files}"
    if not home.exists():
        draft = folder / f"features-draft-{first}-{rows}-{files}"
        table = ps.Table.create(
            draft, [ps.Feature(id=1), ps.Feature(id=2, kind="sparse"), ps.Feature(id=3, kind="scored")]
        )
        for number in range(files):
            ids = range(first + rows * number // files, first + rows * (number + 1) // files)
            if ids:
                table.append(_features(ids), date=f"2026-01-{number + 1:02d}")
        draft.rename(home)
    return str(home)


def _features(ids: Sequence[int]) -> pa.Table:
    scored = [[{"id": i, "score": i / 2}] * (i % 2) for i in ids]
    return pa.table(
        {
            "key": pa.array(ids, pa.int64()),
            "time": pa.array([0] * len(ids), pa.int64()),
            "label": pa.array([float(i % 2) for i in ids], pa.float32()),
            "f1": pa.array([None if i % 5 == 0 else i / 4 for i in ids], pa.float32()),
            "f2": pa.array([list(range(i, i + i % 4)) for i in ids], pa.list_(pa.int64())),
            "f3": pa.array(scored, pa.list_(pa.struct([("id", pa.int64()), ("score", pa.float32())]))),
        }
    )


def write_files(folder: Path, kind: str, first: int, rows: int, files: int) -> list[str]:
    """Return the paths of `files` files with the ids from `first` on; the same arguments give the same files."""
    extension, write = WRITERS[kind]
    home = folder / f"{kind}-{first}-{rows}-{files}"
    paths = [home / f"{number:03d}.{extension}" for number in range(files)]
    if not home.exists():
        home.mkdir(parents=True)
        ids = list(range(first, first + rows))
        for number, path in enumerate(paths):
            write(path, ids[len(ids) * number // files : len(ids) * (number + 1) // files])
    return [str(path) for path in paths]
