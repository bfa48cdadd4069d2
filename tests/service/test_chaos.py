"""Random kills and stops of workers, dispatcher and trainer under one seed; an independent checker counts ids."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

import penstock as ps

from .checks import assert_exactly_once, kill

ROWS = 12_000
FAULTS = 12


def dataset() -> ps.Dataset:
    return ps.range(ROWS).shuffle(seed=11).map(lambda i: time.sleep(0.0005) or i).batch(8)


class Chaos:
    """Breaks something every quarter of a second until told to stop."""

    def __init__(self, service: ps.LocalService, seed: int) -> None:
        self._service, self._random = service, random.Random(seed)
        self._stop = threading.Event()
        self.faults: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Chaos:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(20)

    def _run(self) -> None:
        while not self._stop.wait(0.25) and len(self.faults) < FAULTS:
            pids = list(self._service.worker_pids().values())
            fault = self._random.choice(["worker", "worker", "worker", "stop", "dispatcher"])
            try:
                if fault == "dispatcher":
                    kill(self._service.dispatcher_pid)
                elif pids and fault == "worker":
                    kill(self._random.choice(pids))
                elif pids:
                    pid = self._random.choice(pids)
                    os.kill(pid, signal.SIGSTOP)
                    self._stop.wait(0.5)
                    os.kill(pid, signal.SIGCONT)
                self.faults.append(fault)
            except ProcessLookupError:
                continue  # it ended by itself meanwhile


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("order", ["relaxed", "deterministic"])
def test_everything_once_whatever_dies(order: str, seed: int) -> None:
    """The trainer, too, "dies" now and then: it drops its loader and goes on from an older state."""
    dice = random.Random(1000 + seed)
    with ps.LocalService(workers=3) as service, Chaos(service, seed) as chaos:
        kept: list[np.ndarray] = []
        state: str | None = None
        while True:
            with dataset().distribute(service, job="chaos", order=order, limits=ps.Limits(timeout_s=60)) as loader:
                if state is not None:
                    loader.load_state_dict(json.loads(state))
                dies_at = dice.randrange(100, 900)
                since: list[np.ndarray] = []
                for batch in loader:
                    since.append(batch.copy())
                    if len(since) % 50 == 0:
                        kept, since, state = kept + since, [], json.dumps(loader.state_dict())
                        dies_at -= 50
                    if dies_at <= 0:
                        break  # what came since the last checkpoint is lost with the trainer
                else:
                    kept += since
                    break
    print(f"seed {seed}, {order}: {chaos.faults}")
    assert_exactly_once(kept, range(ROWS))
    if order == "deterministic":
        assert digest(kept) == digest(undisturbed())


def digest(batches: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(batch, np.int64).tobytes() for batch in batches)).hexdigest()


def undisturbed() -> list[np.ndarray]:
    with ps.LocalService(workers=1) as service:
        return [batch.copy() for batch in dataset().distribute(service, order="deterministic")]
