"""Penstock's service: batches, small elements and images through worker processes.

python -m ours.service first                # prints the clock at the first batch of `distribute(2)`
python -m ours.service latencies ELEMENTS   # of next() on 1 KB elements, one JSON line
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tasks
import transfers
from ours.interface import encrypted_service
from side import Workload

import penstock as ps

PACKAGES = ("penstock", "numpy", "pyzmq")
Array = np.ndarray[Any, Any]


class Rows:
    """Row j is a view of one number: `batch()` writes its 150 KB once, straight into the batch's memory."""

    def __init__(self) -> None:
        self._rows = [np.broadcast_to(np.uint8(value), transfers.ROW_SHAPE) for value in range(transfers.VALUES)]

    def __call__(self, number: int) -> Array:
        return self._rows[number % transfers.VALUES]


def small(numbers: list[int]) -> list[Array]:
    rows = np.empty((len(numbers), transfers.FLOATS), np.float32)
    rows[:] = np.array(numbers, np.float32)[:, None]
    return list(rows)


def batches_dataset(batches: int) -> ps.Dataset:
    return ps.range(batches * transfers.ROWS).map(Rows).batch(transfers.ROWS)


def elements_dataset(elements: int) -> ps.Dataset:
    return ps.range(elements).map(small, batch_size=1024)


def set_path(path: str) -> str:
    """Choose how payloads travel, for this process and the workers it starts; return a note."""
    os.environ.pop("PENSTOCK_NO_SLABS", None)
    if path == "slabs":
        return "memory slabs of one host"
    os.environ["PENSTOCK_NO_SLABS"] = "1"
    return "loopback TCP, encrypted" if path == "tcp" else "the sockets of one host"


def one_worker(path: str, threads: int | None = None) -> str | ps.LocalService:
    """Start a service of one worker process, reached as `path` says; return what names it."""
    return encrypted_service(threads) if path == "tcp" else ps.LocalService(workers=1, threads=threads)


def batches(path: str) -> Workload:
    """9.6 MB batches through one worker process; figures are megabytes."""
    note = set_path(path)
    service = one_worker(path, threads=1)  # rows this cheap only meet on the GIL with more

    def open_pipeline(n: int) -> Iterator[float]:
        check = transfers.BatchCheck()
        with batches_dataset(transfers.batches_of(n)).distribute(service) as loader:
            for batch in loader:
                check(batch)
                yield transfers.BATCH_MB

    return Workload(
        open=open_pipeline, first=3000, packages=PACKAGES, notes={"how": f"1 worker process of 1 thread; {note}"}
    )


def elements(path: str) -> Workload:
    """1 KB elements through one worker process, taken one by one."""
    note = set_path(path)
    service = one_worker(path)

    def open_pipeline(n: int) -> Iterator[int]:
        check = transfers.ElementCheck()
        with elements_dataset(n).distribute(service) as loader:
            for element in loader:
                check(element)
                yield 1

    return Workload(open=open_pipeline, first=200_000, packages=PACKAGES, notes={"how": f"1 worker process; {note}"})


class Augment:
    """The opencv function of `bench_images`; made once in each process, so that opencv's own threads are off there."""

    def __init__(self) -> None:
        import cv2

        cv2.setNumThreads(0)

    def __call__(self, example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"image": tasks.augment_with_opencv(example["image"], rng), "label": example["label"]}


def images(folder: str, workers: int) -> Workload:
    """The images pipeline through so many worker processes; 0: in this one."""
    import layout

    service = ps.LocalService(workers=workers) if workers else None

    def open_pipeline(n: int) -> Iterator[int]:
        passes = tasks.passes(n, layout.IMAGES)
        dataset = ps.read_images(f"{folder}/jpeg").shuffle().repeat(passes).map(Augment).batch(tasks.IMAGE_BATCH)
        stream = dataset if service is None else dataset.distribute(service)
        return (len(batch["label"]) for batch in stream)

    return Workload(open=open_pipeline, first=layout.IMAGES, packages=(*PACKAGES, "opencv-python-headless"))


def first() -> None:
    loader = batches_dataset(1000).distribute(2)
    batch = next(iter(loader))
    at = time.perf_counter()
    print(json.dumps({"at": at, "row": int(batch[0, 0, 0, 0])}), flush=True)
    loader.close()


def latencies(elements: int) -> None:
    with ps.LocalService(workers=1) as service, elements_dataset(elements).distribute(service) as loader:
        print(json.dumps({"seconds": transfers.timed_nexts(iter(loader))}))


def main() -> None:
    match sys.argv[1:]:
        case ["first"]:
            first()
        case ["latencies", count]:
            latencies(int(count))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
