"""tf.data service with its cross-trainer cache, in the peers' environment.

python tf_sharing.py '{"jobs": n, "steps": n, "folder": "images", "normalized": true}'    # one JSON line

Trainers are threads of one process, which costs tf.data service less than a process for each would.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict

from sweep import BATCH, STEP_S, cpu_seconds, measure, train

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

from peers.tf_data import image_batches
from peers.tf_service import SERVICE, Servers


def main() -> None:
    given = json.loads(sys.argv[1])
    jobs, steps = given["jobs"], given["steps"]
    servers = Servers(1)
    pids = {servers._process.pid}
    dataset = image_batches(given["folder"], None, normalized=given["normalized"], batch=BATCH)
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
        train(iter(shared), STEP_S, lambda: taken[number].append(time.monotonic()))

    for number in range(jobs):
        threading.Thread(target=trainer, args=(number,), daemon=True).start()
    outcome = measure(taken, steps, lambda: (cpu_seconds(pids),) * 2)
    print(json.dumps(asdict(outcome)), flush=True)
    servers._process.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
