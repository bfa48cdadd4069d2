"""Batches as JAX arrays: a thread reads the loader and starts the transfers, so that the step finds its batch there."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from penstock.api.dataset import Dataset
from penstock.api.loader import NEWER_ITERATOR, Loader
from penstock.api.reading_ahead import ReadAhead
from penstock.core.checks import check_whole
from penstock.core.element import map_leaves
from penstock.core.errors import InvalidArgumentError, SupersededError

_LOOK_EVERY_S = 0.1  # how soon the thread of a reading that was given up ends
_END = object()


def arrays(pipeline: Dataset | Loader, *, sharding: Any = None, ahead: int = 2) -> ArrayLoader:
    """Return what reads a dataset or a loader and gives its arrays as JAX arrays on devices.

    `sharding` is a `jax.sharding.Sharding`, say `NamedSharding(mesh, PartitionSpec("data"))`. Each process gives its
    own batch, and gets the array that all of them make together: rank r's rows lie on its own devices, and nothing is
    sent between hosts. None: the default device. `ahead` batches are put on devices before they are asked for.

    >>> import penstock as ps
    >>> batch = next(iter(arrays(ps.range(4).map(lambda x: {"x": x / 2, "name": f"n{x}"}).batch(4))))
    >>> batch["x"].shape, batch["name"].tolist()
    ((4,), ['n0', 'n1', 'n2', 'n3'])
    """
    return ArrayLoader(pipeline, sharding=sharding, ahead=ahead)


class ArrayLoader:
    """A pipeline whose arrays arrive on devices. Text, bytes and None stay as they are.

    Its state is that after the batch that was received last, whatever lies on devices already.
    """

    def __init__(self, pipeline: Dataset | Loader, *, sharding: Any = None, ahead: int = 2) -> None:
        if not isinstance(pipeline, (Dataset, Loader)):
            raise InvalidArgumentError(f"arrays() takes a dataset or a loader, not {type(pipeline).__name__}")
        check_whole("ahead", ahead, 1)
        self._loader = pipeline if isinstance(pipeline, Loader) else Loader(pipeline.node)
        self._sharding, self._depth = sharding, ahead
        self._ahead: ReadAhead | None = None
        self._stop = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        self._stop.set()
        stop = self._stop = threading.Event()
        ahead = self._ahead = ReadAhead(self._loader)
        return self._received(ahead, stop)

    def _received(self, ahead: ReadAhead, stop: threading.Event) -> Iterator[Any]:
        placed: queue.Queue[Any] = queue.Queue(self._depth)
        thread = threading.Thread(target=self._place, args=(ahead, placed, stop), name="penstock-jax", daemon=True)
        thread.start()
        try:
            while True:
                if stop.is_set():  # nothing is placed any more
                    raise SupersededError(NEWER_ITERATOR)
                batch, failure = placed.get()
                if failure is not None:
                    raise failure
                if batch is _END:
                    return
                ahead.trained()
                yield batch
        finally:
            stop.set()

    def _place(self, ahead: ReadAhead, placed: queue.Queue[Any], stop: threading.Event) -> None:
        """Run in the thread: read, and start the transfer to devices."""
        try:
            for batch in ahead:
                if not _put(placed, (map_leaves(self._array_of, batch), None), stop):
                    return
            _put(placed, (_END, None), stop)
        except BaseException as error:
            _put(placed, (None, error), stop)

    def _array_of(self, leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biufc" + "V":
            return leaf
        if leaf.dtype.kind == "V" and leaf.dtype.name != "bfloat16":
            return leaf
        if self._sharding is None:
            return jax.device_put(leaf)
        return jax.make_array_from_process_local_data(self._sharding, leaf)

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that epoch."""
        self._loader.set_epoch(epoch)
        self._ahead = None

    def state_dict(self, all: bool = False) -> dict[str, Any]:
        """Return where the trainer stands: JSON-able, for Orbax's `JsonSave`.

        With `all` it stands for every process and is the same on each, as Orbax writes it once: for loaders with
        `order="deterministic"` or coordinated reads.
        """
        state = self._loader.state_dict() if self._ahead is None else self._ahead.state_dict()
        return self._loader._for_all(state) if all else state

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Begin the next iteration where the state was taken."""
        self._loader.load_state_dict(state_dict)
        self._ahead = None

    def close(self) -> None:
        """Let go of everything at once."""
        self._stop.set()
        self._loader.close()


def _put(placed: queue.Queue[Any], item: Any, stop: threading.Event) -> bool:
    """Put an item where it is received; return False if nobody receives any more."""
    while not stop.is_set():
        try:
            placed.put(item, timeout=_LOOK_EVERY_S)
            return True
        except queue.Full:
            continue
    return False
