"""One epoch of images decoded to uint8, in one mode of caching: prints how many seconds it took.

python -m ours.cache compute|put|get|get-batches|arrow FOLDER     what is kept lies below FOLDER, and is read cold
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from kept_images import BATCH, IMAGE_BYTES, IMAGES, PER_SPLIT, SHAPE, decode, forget, numbers, touch

import penstock as ps
from penstock.caching.store import open_store


def pipeline(folder: Path | None) -> ps.Dataset:
    made = ps.from_generator(numbers, splits=range(IMAGES // PER_SPLIT)).map(decode)
    return made if folder is None else made.autocache(folder, always=True, version="1")


def read(dataset: ps.Dataset) -> float:
    began = time.perf_counter()
    with dataset.iterator() as iterator:
        count = sum(np.size(row["label"]) for row in iterator if touch(row["image"]) >= 0)
    took_s = time.perf_counter() - began
    assert count == IMAGES, count
    return took_s


def write_arrow(path: Path) -> None:
    import pyarrow as pa

    schema = pa.schema([("image", pa.list_(pa.uint8(), IMAGE_BYTES)), ("label", pa.int64())])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for split in range(IMAGES // PER_SPLIT):
            rows: list[dict[str, Any]] = [decode(number) for number in numbers(split)]
            flat = pa.array(np.concatenate([row["image"].reshape(-1) for row in rows]))
            images = pa.FixedSizeListArray.from_arrays(flat, IMAGE_BYTES)
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


def warm_up() -> None:
    """Import and start what the first epoch of a process does."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            few = ps.from_generator(range, splits=[2]).map(decode).autocache(folder, always=True, version=str(number))
            for _ in (*few, *few.batch(2)):
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
    if mode == "arrow":
        if not arrow.exists():
            write_arrow(arrow)
        forget(folder)
        return read_arrow(arrow)
    forget(kept)
    return read(pipeline(kept) if mode == "get" else pipeline(kept).batch(BATCH))


if __name__ == "__main__":
    print(json.dumps({"s": run(sys.argv[1], Path(sys.argv[2]))}))
