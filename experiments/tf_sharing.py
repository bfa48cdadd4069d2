"""tf.data service with its cross-trainer cache, in the peers' environment.

python tf_sharing.py '{"jobs": n, "steps": n, "step_s": s}'    # one JSON line

Trainers are threads of one process, which costs tf.data service less than a process for each would.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))  # its servers are started as there

import tensorflow as tf
from peers.tf_service import SERVICE, Servers
from sweep import ROW_CPU_S, ROWS, SHAPE, cpu_seconds, measure, train


def make_row(i: Any, rounds: int) -> Any:
    """Do work on an image `rounds` times over, and return one."""
    scratch = tf.while_loop(
        lambda n, _: n < rounds,
        lambda n, x: (n + 1, tf.sin(x) + 1.0),
        (tf.constant(0), tf.zeros([64 << 10]) + tf.cast(i, tf.float32)),
    )[1]
    value = tf.cast(tf.cast(i, tf.float32) % 251 + 0.0 * scratch[0], tf.uint8)
    return tf.fill(SHAPE, value)


def calibrated() -> int:
    """Return how many rounds cost what a row is to cost."""

    def cost_s(rounds: int) -> float:
        rows = iter(tf.data.Dataset.range(200).map(lambda i: make_row(i, rounds)))
        next(rows)
        began = time.process_time()
        for _ in range(50):
            next(rows)
        return (time.process_time() - began) / 50

    few, many = cost_s(2), cost_s(22)
    return max(1, round(2 + (ROW_CPU_S - few) * 20 / (many - few)))


def main() -> None:
    given = json.loads(sys.argv[1])
    jobs, steps, step_s = given["jobs"], given["steps"], given["step_s"]
    rounds = calibrated()
    servers = Servers(1)
    pids = {servers._process.pid}
    dataset = tf.data.Dataset.range(1 << 40).map(lambda i: make_row(i, rounds), num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.batch(ROWS).repeat()
    taken: list[list[float]] = [[] for _ in range(jobs)]

    def trainer(number: int) -> None:
        cache = SERVICE.CrossTrainerCache(trainer_id=f"t{number}")
        shared = dataset.apply(
            SERVICE.distribute(
                "parallel_epochs",
                servers.address,
                job_name="sweep",
                max_outstanding_requests=2,
                compression=None,
                cross_trainer_cache=cache,
            )
        )
        train(iter(shared), step_s, lambda: taken[number].append(time.monotonic()))

    for number in range(jobs):
        threading.Thread(target=trainer, args=(number,), daemon=True).start()
    outcome = measure(taken, steps, lambda: cpu_seconds(pids))
    print(json.dumps(asdict(outcome)), flush=True)
    servers._process.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
