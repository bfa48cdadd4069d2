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
