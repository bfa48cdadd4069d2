"""`penstock.torch.DataLoader`: torch's class, whose workers are Penstock's."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any, Literal, get_args

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from penstock.api.loader import Loader
from penstock.core.checks import check_choice, check_whole
from penstock.core.errors import InvalidArgumentError
from penstock.torch.channels import Channel
from penstock.torch.fetching import SampleFetch
from penstock.torch.iterating import Draws, HereIter, WorkersIter
from penstock.torch.repeating import NonDeterministicSampleWarning
from penstock.torch.resuming import LoaderPlace

CollateIn = Literal["worker", "trainer"]
LEAST_AHEAD = 1


class DataLoader(TorchDataLoader[Any]):
    """torch's `DataLoader`: the same arguments, the same order, and worker processes that a run can lose.

    With `num_workers=0` everything runs in the caller's thread, as torch does it. With more, Penstock's processes make
    the batches: they never import `__main__`, one that dies is replaced without the loop noticing, and batches arrive
    in shared memory. What differs from torch is said in docs/torch.md.

    - `service`: an address, a file or a `ps.LocalService` whose workers make the batches, instead of processes of the
      loader's own. `num_workers` then says in how many streams.
    - `seed_samples`: the global generators of `random`, numpy and torch are seeded for each sample from the seed, the
      epoch and the index, so that random transforms depend on neither workers nor resume. None: with workers only.
    - `collate_in="trainer"`: workers send samples, and `collate_fn` runs here.
    - `strict`: one sample in a thousand is made twice; that the two differ is an error, and not a warning.

    >>> loader = DataLoader(range(10), batch_size=4, drop_last=True)
    >>> [batch.tolist() for batch in loader], len(loader)
    ([[0, 1, 2, 3], [4, 5, 6, 7]], 2)
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        service: str | PathLike[str] | Any = None,
        seed_samples: bool | None = None,
        collate_in: CollateIn = "worker",
        strict: bool = False,
    ) -> None:
        check_choice("collate_in", collate_in, get_args(CollateIn))
        if isinstance(dataset, Loader):
            raise InvalidArgumentError(
                "a DataLoader takes a dataset, and this is a loader, which has its own workers: read it as it is, or "
                "through penstock.torch.tensors(loader)"
            )
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self.service, self.seed_samples, self.collate_in, self.strict = service, seed_samples, collate_in, strict
        self._warned = False
        self.next_epoch = 0
        self.sample_seed: int | None = None
        """What samples are seeded with, in all epochs: the first seed that was drawn; None: none was."""
        self._loaded: LoaderPlace | None = None
        self._draws: Draws | None = None
        """What the last iteration has drawn and received."""
        self._channels: list[Channel] = []
        """Ways to workers that no iterator reads at the moment."""
        weakref.finalize(self, _close_all, self._channels)

    def __getattr__(self, name: str) -> Any:
        if name == "_is_accelerate_prepared":  # what accelerator.prepare() asks first
            raise InvalidArgumentError(
                "accelerator.prepare() would make a plain DataLoader of torch's of this one, without workers and "
                "state. Prepare it with penstock.accelerate.prepare(accelerator, loader), and all else as always"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def seeds_samples(self) -> bool:
        chosen = self.num_workers > 0 if self.seed_samples is None else self.seed_samples
        return chosen and not isinstance(self.dataset, IterableDataset)

    def _get_iterator(self) -> Any:
        if self.num_workers == 0:
            return HereIter(self)
        self.check_worker_number_rationality()
        return WorkersIter(self)

    # Where it stands

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that epoch, for the sampler too, if it has `set_epoch`."""
        check_whole("epoch", epoch, 0)
        self.next_epoch = epoch
        sampler: Any = self._index_sampler
        while sampler is not None:
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)
            sampler = getattr(sampler, "sampler", None)

    def state_dict(self) -> dict[str, Any]:
        """Return where the trainer stands: the batches it has received, not those that were made ahead. JSON-able.

        >>> loader = DataLoader(range(6), batch_size=2)
        >>> batches = iter(loader); _ = next(batches)
        >>> state = loader.state_dict(); loader.load_state_dict(state)
        >>> [batch.tolist() for batch in loader]
        [[2, 3], [4, 5]]
        """
        if self._loaded is not None:
            return self._loaded.plain()
        if self._draws is not None and not self._draws.finished and self.next_epoch == self._draws.epoch + 1:
            return self._draws.place().plain()
        return LoaderPlace(epoch=self.next_epoch, seed=self.sample_seed).plain()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next iteration where the state was taken; taken after the loop had ended, at the next epoch."""
        self._loaded = LoaderPlace.read(state_dict)
        self.next_epoch = self._loaded.epoch
        if self._loaded.seed is not None:
            self.sample_seed = self._loaded.seed

    def take_loaded(self) -> LoaderPlace | None:
        """Return the place to begin at, once. For the iterators."""
        loaded, self._loaded = self._loaded, None
        return loaded

    def begun(self, draws: Draws) -> None:
        """Be told which epoch is read. For the iterators."""
        self._draws = draws
        self.next_epoch = draws.epoch + 1

    # Ways to workers

    def take_channel(self) -> Channel:
        """Return a way to workers that have the dataset as it is now. For the iterators."""
        sampler: Any = self._index_sampler
        fetch = SampleFetch(
            self.dataset,
            None if self.collate_in == "trainer" else self.collate_fn,
            iterable=isinstance(self.dataset, IterableDataset),
            batch_size=self.batch_size if self._auto_collation else None,
            drop_last=self.drop_last,
            num_workers=self.num_workers,
            worker_init_fn=self.worker_init_fn,
            seed_samples=self.seeds_samples,
            repeats=bool(getattr(getattr(sampler, "sampler", sampler), "replacement", False)),
            strict=self.strict,
        )
        wanted = Channel(
            fetch,
            self.num_workers if self.service is None else self.service,
            ahead=max(LEAST_AHEAD, (self.prefetch_factor or 0) * self.num_workers),
            streams=self.num_workers,
            timeout_s=self.timeout or None,
        )
        while self._channels:
            found = self._channels.pop()
            if found.sent == wanted.fingerprint():
                return found
            found.close()  # the dataset was changed since: its workers have the old one
        return wanted

    def warn_once(self, notice: str) -> None:
        """Say what a worker has found out about the dataset. For the iterators."""
        if not self._warned:
            self._warned = True
            warnings.warn(notice, NonDeterministicSampleWarning, stacklevel=5)

    def give_channel(self, channel: Channel) -> None:
        """Take a way to workers back. For the iterators."""
        self._channels.append(channel)

    def close(self) -> None:
        """Let the worker processes go; the next iteration starts others."""
        self._iterator = None
        _close_all(self._channels)


def _close_all(channels: list[Channel]) -> None:
    while channels:
        channels.pop().close()
