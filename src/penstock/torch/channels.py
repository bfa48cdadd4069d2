"""A way to worker processes: a job that answers orders, and what its feed draws them from.

The loader draws from the user's sampler when and as often as torch does, and leaves the orders here; the job's feed
takes them from here. So nothing in the service decides when a sampler is asked.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import penstock as ps
from penstock.api.loader import make_loader
from penstock.graph.value_digest import arrays_unchanged
from penstock.processes.nursery_start import start_own_service
from penstock.submission.options import check_options
from penstock.torch.fetching import BatchAnswer, SampleFetch
from penstock.torch.orders import LARGEST

_LONGEST_ORDER = 1 << 30  # numbers
_MOST_LOST = 5  # processes over one batch: some may be killed from outside


class OrderQueue:
    """The sampler that the job's feed sees: orders that were drawn and not sent yet."""

    def __init__(self) -> None:
        self._orders: deque[list[int]] = deque()
        self._draw_more: Callable[[], bool] = lambda: False

    def begin(self, draw_more: Callable[[], bool]) -> None:
        """Begin an epoch. `draw_more` puts in another order, or returns False: there is none."""
        self._orders.clear()
        self._draw_more = draw_more

    def put(self, order: list[int]) -> None:
        self._orders.append(order)

    def __iter__(self) -> Iterator[list[int]]:
        while self._orders or self._draw_more():
            yield self._orders.popleft()


class Channel:
    """One job, read epoch after epoch."""

    def __init__(self, fetch: SampleFetch, to: Any, *, ahead: int, streams: int, timeout_s: float | None) -> None:
        self.orders = OrderQueue()
        self._pipeline = ps.range(LARGEST).batch(_LONGEST_ORDER, collate=fetch)
        self.sent = ""
        """The fingerprint of what was sent to workers: dataset, collate function and the rest, by their content."""
        self._to, self._ahead, self._streams, self._timeout_s = to, ahead, streams, timeout_s
        self._loader: ps.Loader | None = None

    def open(self) -> Iterator[BatchAnswer]:
        """Begin an epoch: answers come in the order of the orders."""
        if self._loader is not None:
            return iter(self._loader)
        self._loader = self._distribute()  # first: processes import torch while this one looks at the dataset
        with arrays_unchanged():
            self.sent = self.fingerprint()
            return iter(self._loader)

    def fingerprint(self) -> str:
        """Return the fingerprint of what would be sent now."""
        return self._pipeline.fingerprint()

    def _distribute(self) -> ps.Loader:
        options = check_options(
            job=f"torch-{uuid.uuid4().hex[:12]}",  # a rank's own sampler feeds it: it is nobody else's job
            feed=ps.Feed(self.orders, ahead=self._ahead),
            sharding=ps.Sharding(streams=self._streams),
            limits=ps.Limits(timeout_s=self._timeout_s, lost_workers=_MOST_LOST),
        )
        # As `Dataset.distribute` does it, with torch imported once, before workers are forked.
        processes = start_own_service(self._to, preload="torch") if isinstance(self._to, int) else None
        try:
            return make_loader(self._pipeline, self._to, options, processes)
        except BaseException:
            if processes is not None:
                processes.close()
            raise

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
