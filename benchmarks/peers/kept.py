"""One epoch of images that a peer kept, read cold in batches: prints how many seconds it took.

python -m peers.kept tf-snapshot|tf-cache|torch FOLDER     what is kept lies below FOLDER, and is written if it is not
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
from kept_images import BATCH, IMAGES, SHAPE, decode, forget, touch


def tf_batches(kept: str, folder: Path, images: int) -> Iterable[Any]:
    import tensorflow as tf

    def decoded(number: Any) -> tuple[Any, Any]:
        image = tf.numpy_function(lambda each: decode(int(each))["image"], [number], tf.uint8)
        return tf.ensure_shape(image, SHAPE), number % 1000

    made = tf.data.Dataset.range(images).map(decoded, num_parallel_calls=tf.data.AUTOTUNE)
    # Without compression, which would take the processor that is to read them.
    made = made.snapshot(str(folder), compression=None) if kept == "tf-snapshot" else made.cache(str(folder / "file"))
    return made.batch(BATCH).prefetch(tf.data.AUTOTUNE).as_numpy_iterator()


def torch_batches(folder: Path, images: int, processes: int) -> Iterable[Any]:
    """Give what the loader makes of a folder with an array a file, as the default collation puts it together."""
    from torch.utils.data import DataLoader, Dataset

    class Arrays(Dataset[Any]):
        def __len__(self) -> int:
            return images

        def __getitem__(self, number: int) -> tuple[Any, int]:
            return np.load(folder / f"{number:05}.npy"), number % 1000

    for images_, labels in DataLoader(Arrays(), batch_size=BATCH, num_workers=processes):
        yield images_.numpy(), labels


def write_arrays(folder: Path, images: int) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(images):
        path = folder / f"{number:05}.npy"
        if not path.exists():
            np.save(path, decode(number)["image"])


def read(batches: Callable[[], Iterable[Any]], images: int) -> float:
    began = time.perf_counter()
    count = sum(len(images_) for images_, _ in batches() if touch(images_) >= 0)
    took_s = time.perf_counter() - began
    assert count == images, count
    return took_s


def run(kept: str, folder: Path) -> float:
    """Read twice, a few images first, which imports and starts what it needs; of several ways, the best counts."""
    took: list[float] = []
    for processes in (0, 2) if kept == "torch" else (0,):
        for images in (2 * BATCH, IMAGES):
            there = folder / f"{kept}-{images}"

            def batches(images: int = images, there: Path = there, processes: int = processes) -> Iterable[Any]:
                return torch_batches(there, images, processes) if kept == "torch" else tf_batches(kept, there, images)

            if kept == "torch":
                write_arrays(there, images)
            elif not there.exists():
                there.mkdir()
                read(batches, images)
            forget(there)
            seconds = read(batches, images)
        took.append(seconds)
    return min(took)


if __name__ == "__main__":
    print(json.dumps({"s": run(sys.argv[1], Path(sys.argv[2]))}))
