"""What runs in worker processes for a `DataLoader`: an order comes in, and a batch, an end or an exception goes out.

Order number t belongs to stream t mod `num_workers`, which is what torch calls a worker: `get_worker_info()`, its seed
and `worker_init_fn` are that stream's, wherever it runs. An exception is an answer like any other, so that the loader
goes on after it as torch's does.

The iterator of an iterable dataset stays here from one order to the next. An order says how many of its stream came
before it: where a stream has moved to another process, or a state was loaded, those are read again and passed over.
"""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from torch.utils.data import _utils, default_collate

from penstock.core.element import leaves
from penstock.core.errors import never_the_end
from penstock.runtime.collate import Empty
from penstock.torch.collating import default_collate_into, no_shared_files
from penstock.torch.orders import BatchOrder, read_order
from penstock.torch.repeating import NonDeterministicSampleError, difference, is_chosen, twin_of
from penstock.torch.seeding import GlobalStates, seed_globals
from penstock.wire.failures import describe_failure

BatchAnswer: TypeAlias = dict[str, Any]
"""`kind`: what it is. `batch`: what was made. `state`: where an iterable dataset then stood. `notice`: what the trainer
is to be warned of. By name, so that what cannot travel is named by its place in the batch.
"""
MADE, ENDED, FAILED = 0, 1, 2
"""What an answer is: a batch, the end of an iterable dataset's stream, or an exception."""
_calls = threading.Lock()  # a dataset is never called from two threads, and the global generators are one for all


class SampleFetch:
    """Answers orders out of one dataset. It is what a pipeline collates with, so it is sent to workers once."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any] | None,
        *,
        iterable: bool,
        batch_size: int | None,
        drop_last: bool,
        num_workers: int,
        worker_init_fn: Callable[[int], None] | None,
        seed_samples: bool,
        repeats: bool,
        strict: bool,
    ) -> None:
        """`collate_fn` None: the trainer collates. `repeats`: an index may come twice in an epoch. `strict`: a sample
        that is another when it is made again is an error.
        """
        self.dataset, self.collate_fn = dataset, collate_fn
        self.iterable, self.batch_size, self.drop_last = iterable, batch_size, drop_last
        self.num_workers, self.worker_init_fn = num_workers, worker_init_fn
        self.seed_samples, self.repeats, self.strict = seed_samples, repeats, strict

    def __call__(self, numbers: list[int]) -> BatchAnswer:
        return self.collate_into(numbers, np.empty)

    def collate_into(self, numbers: Sequence[int], empty: Empty) -> BatchAnswer:
        """Answer an order; large tensors of a batch lie in memory that `empty` gives."""
        order = read_order(numbers)
        with _calls:
            before = _utils.worker._worker_info  # a worker inside the trainer must not make it one
            try:
                return self._answer(order, empty)
            except Exception as error:
                return _answered(FAILED, msgspec.msgpack.encode(describe_failure(error)))
            finally:
                _utils.worker._worker_info = before

    def _answer(self, order: BatchOrder, empty: Empty) -> BatchAnswer:
        stream = order.task % self.num_workers
        worker = _workers.get(stream)
        if worker is None or not worker.can_serve(order):
            worker = _workers[stream] = StreamWorker(self, stream, order.base_seed)
        worker.enter()
        self._notice: str | None = None
        samples = worker.read(order) if self.iterable else self._looked_up(worker.dataset, order)
        if samples is _END:
            return _answered(ENDED)
        data = self._collated(samples, empty)
        check_on_host(data)
        return _answered(MADE, data, state=worker.state(), notice=self._notice)

    def _collated(self, samples: Any, empty: Empty) -> Any:
        if self.collate_fn is None:
            return samples
        if self.collate_fn is default_collate:
            return default_collate_into(samples, empty)
        with no_shared_files():
            return self.collate_fn(samples)  # it may keep what it returns: that must be memory of its own

    def _looked_up(self, dataset: Any, order: BatchOrder) -> Any:
        try:
            return self._samples(dataset, order)
        except StopIteration as error:
            raise never_the_end(error, f"{type(dataset).__name__}[...]") from error

    def _samples(self, dataset: Any, order: BatchOrder) -> Any:
        if self.batch_size is None and not isinstance(order.key, list):
            return self._sample(dataset, order, order.key, 0)
        together = getattr(dataset, "__getitems__", None)
        if together:
            if self.seed_samples:
                seed_globals(order.seed, order.epoch, order.task)
            return together(order.key)
        return [self._sample(dataset, order, key, place) for place, key in enumerate(order.key)]

    def _sample(self, dataset: Any, order: BatchOrder, key: Any, place: int) -> Any:
        if not self.seed_samples:
            return dataset[key]
        identity = (order.seed, order.epoch, key, *((order.task, place) if self.repeats else ()))
        seed_globals(*identity)
        sample = dataset[key]
        return self._checked(dataset, key, sample, identity) if is_chosen(*identity) else sample

    def _checked(self, dataset: Any, key: Any, sample: Any, identity: tuple[Any, ...]) -> Any:
        """Make a sample again and note a difference. What the dataset holds stays as the first time has left it."""
        kept = copy.deepcopy(sample)  # a dataset may give its own memory, and write into it the next time
        after = GlobalStates.now()
        seed_globals(*identity)
        found = difference(dataset, key, kept, twin_of(dataset))
        after.put_back()
        if found is not None and self.strict:
            raise NonDeterministicSampleError(found)
        self._notice = found or self._notice
        return sample


def _answered(kind: int, batch: Any = None, *, state: Any = None, notice: str | None = None) -> BatchAnswer:
    return {"kind": kind, "batch": batch, "state": state, "notice": notice}


def check_on_host(data: Any) -> None:
    """Refuse tensors of an accelerator: their memory is the worker's own."""
    for leaf in leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.device.type not in ("cpu", "meta"):
            raise RuntimeError(
                f"a sample holds a tensor on {leaf.device}, which cannot leave a worker process: its memory ends with "
                "that process, and a process for each worker takes its own part of the device. Return it on the host "
                "(tensor.cpu()) and move batches in the training loop; pin_memory=True makes that fast"
            )


def is_stateful(dataset: Any) -> bool:
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


_END = object()
_workers: dict[int, StreamWorker] = {}
"""This process's streams; it runs one job's code, so they are of one dataset."""


class StreamWorker:
    """One stream of a dataset, which takes itself for one of torch's workers."""

    def __init__(self, fetch: SampleFetch, number: int, base_seed: int) -> None:
        self._fetch, self._number, self._base_seed = fetch, number, base_seed
        self._epoch: int | None = None
        self._iterator: Iterator[Any] = iter(())
        self._taken = 0
        self._ended = False
        self._states: GlobalStates | None = None
        self.dataset = self._own_dataset(fetch)
        self._info = _utils.worker.WorkerInfo(
            id=number, num_workers=fetch.num_workers, seed=base_seed + number, dataset=self.dataset
        )
        torch.set_num_threads(1)
        self.enter()
        self._seed()
        if fetch.worker_init_fn is not None:
            fetch.worker_init_fn(number)

    @staticmethod
    def _own_dataset(fetch: SampleFetch) -> Any:
        """Return the dataset as it was sent, where a stream may change it: two of them may be in one process."""
        if fetch.iterable:
            return copy.deepcopy(fetch.dataset)
        return fetch.dataset if fetch.worker_init_fn is None else copy.copy(fetch.dataset)

    def state(self) -> Any:
        """Return where an iterable dataset stands by its own account; None: it has none to give."""
        return self.dataset.state_dict() if self._fetch.iterable and is_stateful(self.dataset) else None

    def can_serve(self, order: BatchOrder) -> bool:
        """Say whether it is of the order's seed, and has not read past it."""
        past = order.epoch == self._epoch and order.task // self._fetch.num_workers < self._taken
        return order.base_seed == self._base_seed and not past

    def enter(self) -> None:
        """Be what `get_worker_info()` tells of."""
        _utils.worker._worker_info = self._info

    def _seed(self) -> None:
        seed = self._base_seed + self._number
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        state: Any = _utils.worker._generate_state  # as torch seeds numpy
        np.random.seed(state(self._base_seed, self._number))

    def read(self, order: BatchOrder) -> Any:
        """Return the samples of an order from the iterable dataset, or `_END`."""
        number = order.task // self._fetch.num_workers
        if self._states is not None:
            self._states.put_back()
        if order.epoch != self._epoch:
            self._begin(order.epoch, number, order.key)
        if number > self._taken:
            warnings.warn(
                f"stream {self._number} of an IterableDataset begins after {number:,} batches that were received "
                "before, which are read again and passed over: it cannot be placed there directly",
                stacklevel=2,
            )
            while self._taken < number:
                self._next()
        samples = self._next()
        self._states = GlobalStates.now()
        return samples

    def _begin(self, epoch: int, number: int, state: Any) -> None:
        if self._epoch is not None:  # a later epoch of persistent workers
            seed_globals(self._base_seed, self._number, epoch)
        self._epoch, self._taken, self._ended = epoch, 0, False
        if state is not None:
            self.dataset.load_state_dict(state)
            self._taken = number
        self._iterator = iter(self.dataset)

    def _next(self) -> Any:
        self._taken += 1
        size = self._fetch.batch_size
        if self._ended:
            return _END
        if size is None:
            return next(self._iterator, _END)
        samples: list[Any] = []
        for sample in self._iterator:
            samples.append(sample)
            if len(samples) == size:
                return samples
        self._ended = True
        return _END if not samples or self._fetch.drop_last else samples
