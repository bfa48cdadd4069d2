"""One epoch of images decoded to uint8, in one mode of caching: prints how many seconds it took.

python -m ours.cache compute|put|get|arrow FOLDER     entries and the Arrow file lie below FOLDER, and are read cold
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from penstock.caching.store import open_store

IMAGES, SHAPE = 600, (224, 224, 3)
PER_SPLIT = 50


def decode(number: int) -> dict[str, Any]:
    """Stand in for a decoder: 2 to 3 ms of a processor, and an image's bytes."""
    values = np.sin(np.arange(number, number + SHAPE[0] * SHAPE[1], dtype=np.float64))
    plane = (127.5 * (values + 1)).astype(np.uint8)
    return {"image": np.repeat(plane, SHAPE[2]).reshape(SHAPE), "label": number % 1000}


def numbers(split: int) -> Any:
    yield from range(split * PER_SPLIT, (split + 1) * PER_SPLIT)


def pipeline(folder: Path | None) -> ps.Dataset:
    made = ps.from_generator(numbers, splits=range(IMAGES // PER_SPLIT)).map(decode)
    return made if folder is None else made.autocache(folder, always=True, version="1")


def touch(image: np.ndarray[Any, Any]) -> int:
    return int(image.reshape(-1).view(np.uint64).sum())


def read(dataset: ps.Dataset) -> float:
    began = time.perf_counter()
    with dataset.iterator() as iterator:
        count = sum(1 for row in iterator if touch(row["image"]) >= 0)
    took_s = time.perf_counter() - began
    assert count == IMAGES, count
    return took_s


def write_arrow(path: Path) -> None:
    import pyarrow as pa

    width = SHAPE[0] * SHAPE[1] * SHAPE[2]
    schema = pa.schema([("image", pa.list_(pa.uint8(), width)), ("label", pa.int64())])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for split in range(IMAGES // PER_SPLIT):
            rows = [decode(number) for number in numbers(split)]
            flat = pa.array(np.concatenate([row["image"].reshape(-1) for row in rows]))
            images = pa.FixedSizeListArray.from_arrays(flat, width)
            writer.write_batch(pa.record_batch([images, pa.array([row["label"] for row in rows])], schema=schema))


def read_arrow(path: Path) -> float:
    import pyarrow as pa

    began, count = time.perf_counter(), 0
    with pa.OSFile(str(path), "rb") as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            flat = batch.column(0).flatten().to_numpy()
            for image in flat.reshape(batch.num_rows, *SHAPE):
                touch(image)
                count += 1
    assert count == IMAGES, count
    return time.perf_counter() - began


def forget(folder: Path) -> None:
    """Have the next read of the files come from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def warm_up() -> None:
    """Import and start what the first epoch of a process does."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            few = ps.from_generator(range, splits=[2]).map(decode).autocache(folder, always=True, version=str(number))
            for _ in (*few, *few):
                pass
            open_store(folder).flush(60)


def run(mode: str, folder: Path) -> float:
    warm_up()
    kept, arrow = folder / "kept", folder / "images.arrow"
    if mode == "compute":
        return read(pipeline(None))
    if mode == "put":
        took_s = read(pipeline(kept))
        open_store(str(kept)).flush(60)
        return took_s
    if mode == "get":
        forget(kept)
        return read(pipeline(kept))
    if not arrow.exists():
        write_arrow(arrow)
    forget(folder)
    return read_arrow(arrow)


if __name__ == "__main__":
    print(json.dumps({"s": run(sys.argv[1], Path(sys.argv[2]))}))
