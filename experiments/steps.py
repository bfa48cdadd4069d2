"""Training in step, as both environments simulate it: sentences, what a step costs, and ranks that wait for each other.

Only the standard library and numpy: the peers' environment has no Penstock.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.synchronize
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

LONGEST = 512
BATCH = 16
SECONDS_A_TOKEN = 0.0001
"""A step sleeps that long for each token of its padded length: 51 ms for a batch of the longest sentences."""
WARM_UP = 60
"""Steps that cost nothing and do not count: windows of long, rare sentences fill only after many short ones."""
PATIENCE_S = 120.0


def sentence_lengths(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return lengths as in text corpora: half are below 100 tokens, the tail goes up to 512."""
    drawn = np.random.default_rng(7).lognormal(np.log(100), 0.8, count)
    return np.clip(drawn.astype(np.int64), 1, LONGEST)


def boundaries(width: int) -> list[int]:
    """Return bucket boundaries at every multiple of `width`."""
    return list(range(width, LONGEST, width))


@dataclass(frozen=True)
class Outcome:
    """One way of reading, with so many consumers."""

    seconds: float
    steps: int
    tokens: int
    padding: int

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def padding_share(self) -> float:
        """Padding for each token."""
        return self.padding / self.tokens


def run_ranks(rank: Callable[..., Iterator[Any]], consumers: int, steps: int, arguments: dict[str, Any]) -> Outcome:
    """Read with so many processes, each over `rank(consumer, consumers, **arguments)`, for so many steps."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(consumers)
    results: Any = context.Queue()
    processes = [
        context.Process(
            target=_train, args=(rank, consumer, consumers, steps, barrier, results, arguments), daemon=True
        )
        for consumer in range(consumers)
    ]
    for process in processes:
        process.start()
    try:
        outcomes = [Outcome(**results.get(timeout=PATIENCE_S + 2 * steps)) for _ in processes]
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
    return Outcome(
        seconds=max(one.seconds for one in outcomes),
        steps=steps,
        tokens=sum(one.tokens for one in outcomes),
        padding=sum(one.padding for one in outcomes),
    )


def _train(
    rank: Callable[..., Iterator[Any]],
    consumer: int,
    consumers: int,
    steps: int,
    barrier: multiprocessing.synchronize.Barrier,
    results: Any,
    arguments: dict[str, Any],
) -> None:
    batches = rank(consumer, consumers, **arguments)
    began, tokens, values = 0.0, 0, 0
    for number in range(WARM_UP + steps):
        if number == WARM_UP:
            began, tokens, values = time.perf_counter(), 0, 0
        batch = next(batches)
        if number >= WARM_UP:
            time.sleep(batch.shape[1] * SECONDS_A_TOKEN)  # the forward and the backward pass
        barrier.wait(PATIENCE_S)  # the exchange of gradients
        tokens += int(np.count_nonzero(batch))
        values += batch.size
    seconds = time.perf_counter() - began
    results.put(asdict(Outcome(seconds=seconds, steps=steps, tokens=tokens, padding=values - tokens)))
    barrier.wait(PATIENCE_S)  # nobody leaves while another still reads
