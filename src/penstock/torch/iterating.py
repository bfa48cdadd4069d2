"""The iterators of a `DataLoader`: in the caller's thread, and over worker processes.

Both derive from torch's, so that the sampler is iterated over and random numbers are drawn at the same moments: when
the iterator is made, `prefetch_factor * num_workers` items ahead, and one more item a batch.
"""

from __future__ import annotations

import copy
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.utils.data import IterableDataset, _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from penstock.core.errors import StateMismatchError, WaitTimeoutError, WorkersLostError, never_the_end
from penstock.torch.channels import Channel
from penstock.torch.fetching import ENDED, FAILED, MADE, BatchAnswer, is_stateful
from penstock.torch.orders import BatchOrder, write_order
from penstock.torch.resuming import LoaderPlace, generators_of, put_back, written
from penstock.torch.seeding import seed_globals, undisturbed
from penstock.wire.failures import rebuild_failure
from penstock.wire.frames import RemoteFailure

if TYPE_CHECKING:
    from penstock.torch.loader import DataLoader

_autograd: Any = torch.autograd


class Draws:
    """What one epoch has drawn from the sampler and received. It outlives the iterator: a state may be saved later."""

    def __init__(self, loader: DataLoader, at: LoaderPlace | None) -> None:
        self._generators = generators_of(loader)
        self._before: torch.Tensor | None = None
        self.epoch = loader.next_epoch
        if at is not None and at.generators:
            self.epoch = at.epoch
            self._before = torch.default_generator.get_state()
            put_back(self._generators, at.generators)
        self._begins = written(self._generators)
        self._checksums = deque([0])
        """Of all items up to each of those that were drawn and not received."""
        self.base_seed: int | None = None
        self.seed = 0
        self.streams = loader.num_workers
        self.tasks = self.yielded = 0
        self.ended: set[int] = set()
        self.states: dict[int, Any] = {}
        """Where an iterable dataset that has a state of its own stood after the last batch of each stream."""
        self.finished = False

    def add(self, key: Any) -> None:
        self._checksums.append(zlib.crc32(repr(key).encode(), self._checksums[-1]))

    def received(self, *, made: bool) -> None:
        """Count an answer to the oldest order; `made`: it is a batch."""
        self._checksums.popleft()
        self.tasks += 1
        self.yielded += made

    def failed(self) -> None:
        """Count an item whose batch could not be made, if it came to that: the next one is the next item's."""
        if len(self._checksums) > 1:
            self.received(made=False)

    def pass_over(self, at: LoaderPlace, draw: Callable[[], Any]) -> None:
        """Draw again what had been received."""
        for _ in range(at.tasks):
            try:
                draw()
            except StopIteration:
                break
        if self._checksums[-1] != at.checksum:
            raise StateMismatchError(
                f"the sampler did not give the same {at.tasks:,} items again that it had given when the state was "
                "saved, so where it stood cannot be found. It must give the same ones in the same epoch: call "
                "set_epoch() with the epoch it was saved in, or let it draw from a torch.Generator that it has as "
                "`generator`"
            )
        self._checksums = deque([at.checksum])
        self.tasks, self.yielded, self.ended = at.tasks, at.yielded, set(at.ended)
        self.states = {int(stream): state for stream, state in at.states.items()}

    def placed(self) -> None:
        """The loader stands where it is to stand: the trainer's own random numbers go on from where they were."""
        if self._before is not None:
            torch.default_generator.set_state(self._before)

    def place(self) -> LoaderPlace:
        return LoaderPlace(
            epoch=self.epoch,
            tasks=self.tasks,
            yielded=self.yielded,
            ended=tuple(sorted(self.ended)),
            checksum=self._checksums[0],
            base_seed=self.base_seed,
            seed=self.seed,
            generators=self._begins,
            states={str(stream): copy.deepcopy(state) for stream, state in self.states.items()},
            streams=self.streams,
        )


class _Resumable(_BaseDataLoaderIter):
    """What both iterators have: they begin at a place, and note what they draw."""

    _base_seed: Any  # an int; torch's annotations have it a float too
    _dataset: Any

    def _begin(self, loader: DataLoader) -> LoaderPlace | None:
        """Return where to begin; call it before torch draws anything."""
        at = loader.take_loaded()
        self._draws = Draws(loader, at)
        loader.begun(self._draws)
        return None if at is None or not at.generators else at

    def _go_to(self, loader: DataLoader, at: LoaderPlace | None) -> None:
        if at is not None:
            if at.base_seed is not None:
                self._base_seed = at.base_seed
            self._draws.pass_over(at, self._next_index)
            self._num_yielded = at.yielded
        self._draws.base_seed = self._base_seed
        if loader.sample_seed is None:
            loader.sample_seed = self._base_seed
        self._draws.seed = loader.sample_seed

    def _next_index(self) -> Any:
        key = super()._next_index()  # type: ignore[no-untyped-call]
        self._draws.add(key)
        return key


class HereIter(_Resumable, _SingleProcessDataLoaderIter):
    """In the caller's thread: torch's own, which knows where it stands."""

    def __init__(self, loader: DataLoader) -> None:
        at = self._begin(loader)
        super().__init__(loader)
        self._seeds = loader.seeds_samples
        self._go_to(loader, at)
        self._stateful = isinstance(self._dataset, IterableDataset) and is_stateful(self._dataset)
        if at is not None and self._draws.states:
            self._dataset.load_state_dict(self._draws.states[0])
            self._dataset_fetcher.dataset_iter = iter(self._dataset)
        elif at is not None and isinstance(self._dataset, IterableDataset):
            self._read_again(at.tasks, loader.batch_size or 1)
        self._draws.placed()
        if not isinstance(self._dataset, IterableDataset):
            if self._seeds:
                self._dataset_fetcher.dataset = _Seeded(self._dataset, self)
            self._dataset_fetcher = _Lookup(self._dataset_fetcher, seeded=self._seeds)

    def _read_again(self, batches: int, size: int) -> None:
        warnings.warn(
            f"an IterableDataset begins after {batches:,} batches that were received before, which are read again and "
            "passed over: it cannot be placed there directly",
            stacklevel=5,
        )
        for _ in range(batches):
            self._dataset_fetcher.fetch([None] * size)

    def _next_data(self) -> Any:
        try:
            data = super()._next_data()  # type: ignore[no-untyped-call]
        except StopIteration:
            self._draws.finished = True
            raise
        except Exception:
            self._draws.failed()
            raise
        self._draws.received(made=True)
        if self._stateful:
            self._draws.states[0] = copy.deepcopy(self._dataset.state_dict())
        return data


class _Lookup:
    """A fetcher of a map-style dataset: a `StopIteration` is not the end, and samples that are seeded leave the random
    numbers of the trainer as they are. The sampler is not asked within: what it draws is the trainer's.
    """

    def __init__(self, fetcher: Any, *, seeded: bool) -> None:
        self._fetcher, self._seeded = fetcher, seeded

    def fetch(self, keys: Any) -> Any:
        try:
            with undisturbed() if self._seeded else nullcontext():
                return self._fetcher.fetch(keys)
        except StopIteration as error:
            raise never_the_end(error, f"{type(self._fetcher.dataset).__name__}[...]") from error


class _Seeded:
    """A map-style dataset whose samples draw what they draw in worker processes."""

    def __init__(self, dataset: Any, epoch: HereIter) -> None:
        self._dataset, self._epoch = dataset, epoch

    def __getitem__(self, key: Any) -> Any:
        seed_globals(self._epoch._draws.seed, self._epoch._draws.epoch, key)
        return self._dataset[key]


class WorkersIter(_Resumable):
    """Over worker processes."""

    def __init__(self, loader: DataLoader) -> None:
        at = self._begin(loader)
        super().__init__(loader)
        self._owner = weakref.ref(loader)
        self._channel: Channel | None = loader.take_channel()
        self._collate_here = loader.collate_fn if loader.collate_in == "trainer" else None
        self._iterable = isinstance(self._dataset, IterableDataset)
        self._prefetch = (loader.prefetch_factor or 0) * self._num_workers
        self._enter(loader, at)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin the next epoch with the same workers: torch calls it where they are persistent."""
        self._enter(loader, self._begin(loader))

    def _enter(self, loader: DataLoader, at: LoaderPlace | None) -> None:
        super()._reset(loader)
        assert self._channel is not None
        if at is not None and self._iterable and at.streams != self._num_workers:
            raise StateMismatchError(
                f"the state is of an IterableDataset read with num_workers={at.streams}, and this loader has "
                f"{self._num_workers}: each worker's part is its own; use {at.streams}"
            )
        self._go_to(loader, at)
        self._states_to_load = dict(self._draws.states)
        self._sent = self._draws.tasks
        draw = weakref.WeakMethod(self._draw)  # the service's threads hold the queue: a loop that is left must let go
        self._channel.orders.begin(lambda: (alive := draw()) is not None and alive())
        for _ in range(self._prefetch):
            self._draw()
        self._draws.placed()
        self._answers = self._channel.open() if self._sent > self._draws.tasks else iter(())

    def _draw(self) -> bool:
        """Draw one item more and order it; return whether there was one."""
        try:
            key = self._next_index()
        except StopIteration:
            return False
        assert self._channel is not None
        order = BatchOrder(
            task=self._sent,
            base_seed=self._base_seed,
            seed=self._draws.seed,
            epoch=self._draws.epoch,
            key=self._states_to_load.pop(self._sent % self._num_workers, None) if self._iterable else key,
        )
        self._channel.orders.put(write_order(order))
        self._sent += 1
        return True

    def __next__(self) -> Any:
        if self._iterable or _autograd._profiler_enabled():
            return super().__next__()
        data = self._next_data()  # a record for a profiler that is not there takes 40 us of the trainer's time
        self._num_yielded += 1
        return data

    def _next_data(self) -> Any:
        draws = self._draws
        while draws.tasks < self._sent and len(draws.ended) < self._num_workers:
            self._draw()
            answer = self._answer()
            kind, data = answer["kind"], answer["batch"]
            stream = draws.tasks % self._num_workers
            if answer["state"] is not None:
                draws.states[stream] = answer["state"]
            draws.received(made=kind == MADE)
            if kind == ENDED:
                draws.ended.add(stream)
                continue
            if kind == FAILED:
                raise rebuild_failure(msgspec.msgpack.decode(bytes(data), type=RemoteFailure))
            if answer["notice"] is not None and (loader := self._owner()) is not None:
                loader.warn_once(answer["notice"])
            if self._collate_here is not None:
                data = self._collate_here(data)
            return self._pinned(data) if self._pin_memory else data
        draws.finished = True
        self._let_go()
        raise StopIteration

    def _pinned(self, data: Any) -> Any:
        return _utils.pin_memory.pin_memory(data, self._pin_memory_device)  # type: ignore[no-untyped-call]

    def _answer(self) -> BatchAnswer:
        try:
            return next(self._answers)
        except WaitTimeoutError as error:
            raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds") from error
        except WorkersLostError as error:
            batch = self._draws.tasks + (error.stream - self._draws.tasks) % self._num_workers
            raise RuntimeError(
                f"DataLoader worker exited unexpectedly: {error.lost} processes were lost one after the other at batch "
                f"{batch:,} of epoch {self._draws.epoch}, or at the next that the same worker makes. A sample ends its "
                "process, crashes in C code, or takes more memory than there is; with num_workers=0 it does so here"
            ) from error

    def _let_go(self) -> None:
        """Give the way to workers back, so that the next iterator has it."""
        if self._channel is None or self._persistent_workers:
            return
        channel, self._channel = self._channel, None
        self._answers = iter(())
        self._sent = self._draws.tasks
        owner = self._owner()
        if owner is None:
            channel.close()
        else:
            owner.give_channel(channel)

    def __del__(self) -> None:
        channel = getattr(self, "_channel", None)
        if channel is not None and self._persistent_workers:
            channel.close()
        elif channel is not None:
            self._let_go()
