"""tf.data service: a dispatcher and a worker in a process of their own, gRPC, no compression.

python -m peers.tf_service serve WORKERS        # prints its address; ends when its stdin is closed
python -m peers.tf_service first ADDRESS        # prints the clock at the first batch
python -m peers.tf_service latencies ELEMENTS   # of next() on 1 KB elements, one JSON line
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf
import transfers
from side import Workload

PACKAGES = ("tensorflow-cpu", "numpy")
AUTO = tf.data.AUTOTUNE
SERVICE = tf.data.experimental.service
NOTES = {
    "how": "1 dispatcher, 1 worker in another process, parallel_epochs, compression=None, prefetch(AUTOTUNE)",
}


class Servers:
    """The dispatcher and its workers, beside us; they end with us, because their stdin does."""

    def __init__(self, workers: int) -> None:
        here = Path(__file__).resolve().parent.parent
        self._process = subprocess.Popen(
            [sys.executable, "-m", "peers.tf_service", "serve", str(workers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=here,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        if not self.address:
            raise RuntimeError(f"tf.data service did not start: exit code {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(workers: int) -> None:
    dispatcher = SERVICE.DispatchServer(SERVICE.DispatcherConfig(port=0, protocol="grpc"))
    address = dispatcher.target.split("://")[1]
    alive = [
        SERVICE.WorkerServer(SERVICE.WorkerConfig(dispatcher_address=address, protocol="grpc", port=0))
        for _ in range(workers)
    ]
    print(dispatcher.target, flush=True)
    sys.stdin.read()
    os._exit(0 if alive else 1)  # stopping the servers in order takes seconds, and nobody reads any more


def remote(dataset: Any, address: str) -> Any:
    return dataset.apply(SERVICE.distribute("parallel_epochs", address, compression=None)).prefetch(AUTO)


def batches_dataset(batches: int) -> Any:
    def make(i: Any) -> Any:
        rows = tf.cast((i * transfers.ROWS + tf.range(transfers.ROWS, dtype=tf.int64)) % transfers.VALUES, tf.uint8)
        return tf.broadcast_to(tf.reshape(rows, [transfers.ROWS, 1, 1, 1]), transfers.BATCH_SHAPE)

    return tf.data.Dataset.range(batches).map(make, num_parallel_calls=AUTO)


def elements_dataset(elements: int) -> Any:
    return tf.data.Dataset.range(elements).map(lambda i: tf.fill([transfers.FLOATS], tf.cast(i, tf.float32)))


def as_array(tensor: Any) -> Any:
    return np.asarray(memoryview(tensor))  # its own memory: `.numpy()` would copy


def batches() -> Workload:
    """9.6 MB batches; figures are megabytes."""
    servers = Servers(1)

    def open_pipeline(n: int) -> Iterator[float]:
        check = transfers.BatchCheck()
        for batch in remote(batches_dataset(transfers.batches_of(n)), servers.address):
            check(as_array(batch))
            yield transfers.BATCH_MB

    return Workload(open=open_pipeline, first=500, packages=PACKAGES, notes=NOTES)


def elements() -> Workload:
    servers = Servers(1)

    def open_pipeline(n: int) -> Iterator[int]:
        check = transfers.ElementCheck()
        for element in remote(elements_dataset(n), servers.address):
            check(as_array(element))
            yield 1

    return Workload(open=open_pipeline, first=1000, packages=PACKAGES, notes=NOTES)


def first(address: str) -> None:
    batch = as_array(next(iter(remote(batches_dataset(1000), address))))
    at = time.perf_counter()
    transfers.BatchCheck()(batch)
    print(json.dumps({"at": at}), flush=True)
    os._exit(0)  # only the way to the first batch is measured


def latencies(elements: int) -> None:
    servers = Servers(1)
    iterator = iter(remote(elements_dataset(elements), servers.address))
    print(json.dumps({"seconds": transfers.timed_nexts(iterator, as_array)}))
    servers.close()


def main() -> None:
    what, argument = sys.argv[1], sys.argv[2]
    match what:
        case "serve":
            serve(int(argument))
        case "first":
            first(argument)
        case "latencies":
            latencies(int(argument))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
