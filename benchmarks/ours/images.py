"""Penstock on images: with the user's opencv function, with `ps.image`, and `ps.image` in a bare loop on threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from queue import SimpleQueue
from typing import Any

import layout
import numpy as np
import tasks
from side import Workload

PACKAGES = ("penstock", "numpy", "opencv-python-headless", "simplejpeg")
FEATURES: dict[str, Any] = {"image": "bytes", "label": "int"}


def opencv_on_files(folder: str) -> Workload:
    import penstock as ps

    def augment(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"image": tasks.augment_with_opencv(example["image"], rng), "label": example["label"]}

    return _workload(ps.read_images(f"{folder}/jpeg").shuffle(), augment)


def opencv_on_records(folder: str) -> Workload:
    import penstock as ps

    def augment(record: bytes, rng: np.random.Generator) -> dict[str, Any]:
        example = ps.decode_example(record, FEATURES)
        return {"image": tasks.augment_with_opencv(example["image"], rng), "label": example["label"]}

    return _workload(ps.read_tfrecord(f"{folder}/*.tfrecord"), augment)


def image_on_records(folder: str) -> Workload:
    import penstock as ps

    return _workload(ps.read_tfrecord(f"{folder}/*.tfrecord"), augment_record)


def augment_record(record: bytes, rng: np.random.Generator) -> dict[str, Any]:
    import penstock as ps
    import penstock.image

    example = ps.decode_example(record, FEATURES)
    crop = penstock.image.random_resized_crop(example["image"], tasks.SIDE_PX, rng)
    return {"image": penstock.image.flip(crop, rng), "label": example["label"]}


def image_on_files(folder: str) -> Workload:
    import penstock as ps
    import penstock.image

    def augment(example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        crop = penstock.image.random_resized_crop(example["image"], tasks.SIDE_PX, rng)
        return {"image": penstock.image.flip(crop, rng), "label": example["label"]}

    return _workload(ps.read_images(f"{folder}/jpeg"), augment)


def _workload(source: Any, augment: Any) -> Workload:
    import cv2

    cv2.setNumThreads(0)  # as in the DataLoader's processes: our threads are the parallelism

    def open_pipeline(n: int) -> Iterator[int]:
        batches = source.repeat(tasks.passes(n, layout.IMAGES)).map(augment).batch(tasks.IMAGE_BATCH)
        return (len(batch["label"]) for batch in batches)

    return Workload(open=open_pipeline, first=layout.IMAGES, packages=PACKAGES)


def bare_threads(folder: str, threads: int) -> Workload:
    """The same calls on the same files: a counter, some threads, a queue. No order, no state, no errors, no shuffle."""
    import penstock.image

    files = layout.image_files(folder)

    def open_pipeline(n: int) -> Iterator[int]:
        total = tasks.passes(n, layout.IMAGES) * layout.IMAGES
        numbers = count()
        done: SimpleQueue[Any] = SimpleQueue()

        def work() -> None:
            rng = np.random.default_rng()
            while (start := next(numbers) * tasks.IMAGE_BATCH) < total:
                batch = np.empty((tasks.IMAGE_BATCH, tasks.SIDE_PX, tasks.SIDE_PX, 3), np.uint8)
                labels = np.empty(tasks.IMAGE_BATCH, np.int64)
                for i in range(tasks.IMAGE_BATCH):
                    with open(files[(start + i) % len(files)], "rb") as file:
                        jpeg = file.read()
                    crop = penstock.image.random_resized_crop(jpeg, tasks.SIDE_PX, rng)
                    batch[i] = penstock.image.flip(crop, rng)
                    labels[i] = start % layout.IMAGE_CLASSES
                done.put((batch, labels))

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for _ in range(total // tasks.IMAGE_BATCH):
            yield len(done.get()[1])
        for worker in workers:
            worker.join()

    return Workload(open=open_pipeline, first=layout.IMAGES, packages=PACKAGES)
