"""What the service's tests share: counting, waiting, killing."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

DEADLINE_S = 45.0


def count_of(elements: Iterable[Any]) -> Counter[int]:
    """Count ids, single or in batches."""
    counted: Counter[int] = Counter()
    for element in elements:
        counted.update(np.atleast_1d(np.asarray(element)).tolist())
    return counted


def assert_exactly_once(elements: Iterable[Any], ids: Iterable[int], times: int = 1) -> None:
    counted, expected = count_of(elements), Counter(dict.fromkeys(ids, times))
    lost, twice = expected - counted, counted - expected
    assert not lost and not twice, f"lost {dict(list(lost.items())[:5])}, too many {dict(list(twice.items())[:5])}"


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it died of the last kill, and its successor has another number
        os.kill(pid, signal.SIGKILL)


class Background:
    """Runs a function on a thread; `result()` returns what it returned or raises what it raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.append((True, self._function()))
        except BaseException as error:
            self._outcome.append((False, error))

    def result(self, deadline_s: float = DEADLINE_S) -> Any:
        self._thread.join(deadline_s)
        assert self._outcome, f"still running after {deadline_s:.0f} s"
        went_well, value = self._outcome[0]
        if not went_well:
            raise value
        return value
