"""A service for the tests of a module, and readers in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import penstock as ps

WAIT_S = 60.0


@pytest.fixture(scope="module")
def service() -> Iterator[ps.LocalService]:
    with ps.LocalService(workers=2, threads=2) as running:
        yield running


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PENSTOCK_SERVICE"):
        monkeypatch.delenv(name, raising=False)


def rows(batches: Any) -> list[int]:
    """Return all values of batches, in the order they came."""
    return [value for batch in batches for value in np.asarray(batch).ravel().tolist()]


def in_threads(count: int, read: Callable[[int], Any]) -> list[Any]:
    """Run one reader a thread and return what each returned."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = read(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads), "a reader hangs"
    if errors:
        raise errors[0]
    return results
