"""Try four learning rates at once over one input pipeline, whose work is done once for all of them.

python examples/sweep_shared.py
"""

import multiprocessing
from typing import Any

import numpy as np

import penstock as ps

ROWS, BATCH, EPOCHS, FEATURES = 2000, 50, 3, 8
RATES = (0.3, 0.1, 0.03, 0.01)


def sample(number: int, rng: np.random.Generator) -> dict[str, np.ndarray]:  # in place of decoding and augmenting
    x = rng.normal(size=FEATURES)
    return {"x": x, "y": x @ np.arange(FEATURES) + 0.1 * rng.normal()}


def train(service: str, rate: float, results: Any) -> None:
    """One trainer of the sweep: a process, on this host or another, of this framework or another."""
    samples = ps.range(ROWS).shuffle(seed=1).map(sample).batch(BATCH)
    # Every trainer has a name of its own. "wait" gives each of them every batch; with "skip" the fastest never waits,
    # and a slow one misses what has left the window.
    loader = samples.distribute(
        service, job="sweep", sharing=ps.Share("wait", f"rate {rate}", window_bytes=1 << 20, trainers=len(RATES))
    )
    weights = np.zeros(FEATURES)
    read = made = 0
    with loader:
        for _ in range(EPOCHS):
            for batch in loader:
                error = batch["x"] @ weights - batch["y"]
                weights -= rate * batch["x"].T @ error / len(error)
            statistics = loader.statistics()
            read += statistics.elements
            made += statistics.elements - statistics.shared
    results.put((rate, float(np.mean(error**2)), read, made))


def main() -> None:
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with ps.LocalService(workers=1) as service:
        trainers = [context.Process(target=train, args=(str(service.service_file), rate, results)) for rate in RATES]
        for trainer in trainers:
            trainer.start()
        found = sorted(results.get(timeout=90) for _ in trainers)
        for trainer in trainers:
            trainer.join()
    for rate, loss, read, _ in found:
        print(f"rate {rate}: loss {loss:.3f} after {read} batches")
    best = min(found, key=lambda one: one[1])
    print(f"best rate {best[0]}; {sum(one[2] for one in found)} batches read, {sum(one[3] for one in found)} made")


if __name__ == "__main__":
    main()
