"""Loaders under Accelerate.

`accelerator.prepare` makes a plain DataLoader of whatever it takes for one, and loses workers, seeds and state. What is
made here it hands back as it is. Batches are dealt to ranks once: by the service, by the sampler that was given, or,
where neither does, by a sampler put in here.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from accelerate.state import GradientState
from accelerate.utils import broadcast_object_list, send_to_device
from torch.utils.data import DataLoader as PlainDataLoader
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from penstock.api.dataset import Dataset
from penstock.api.loader import Loader
from penstock.api.reading_ahead import ReadAhead
from penstock.core.checks import check_whole
from penstock.core.errors import InvalidArgumentError, StateMismatchError
from penstock.torch.loader import DataLoader
from penstock.torch.pipelines import TensorLoader


def prepare(accelerator: Any, loader: Any, *, even_batches: bool = True) -> AcceleratedLoader:
    """Return a loader for an accelerator: its batches on the device, its state in `save_state` and `load_state`.

    It takes a dataset or a loader of Penstock's, or a `penstock.torch.DataLoader`, which stays one. On several ranks a
    DataLoader whose sampler does not deal to them gets one that does; with `even_batches` ranks that would have fewer
    batches repeat some. A pipeline is dealt by its service: `distribute(..., ranks=ps.Ranks(count, rank))`.
    """
    if isinstance(loader, AcceleratedLoader):
        return loader
    ranks = accelerator.num_processes
    if isinstance(loader, DataLoader):
        length = None if isinstance(loader.dataset, IterableDataset) else len(loader.dataset)  # type: ignore[arg-type]
        rows = length if not loader.drop_last else None
        dealt = _dealt(accelerator, loader, even_batches) if ranks > 1 else loader
        made = AcceleratedLoader(accelerator, dealt, rows_in_all=rows, rows_a_step=(loader.batch_size or 1) * ranks)
    elif isinstance(loader, (Dataset, Loader)):
        count = loader._sources[0].backend.options.ranks.count if isinstance(loader, Loader) and loader._sources else 1
        if count != ranks:
            raise InvalidArgumentError(
                f"prepare() on {ranks} ranks of a loader that deals to {count}: each rank would read the same. Make "
                "it with distribute(service, job=..., ranks=ps.Ranks(count, rank)), of accelerator.num_processes and "
                "process_index"
            )
        made = AcceleratedLoader(accelerator, TensorLoader(loader))
    elif isinstance(loader, PlainDataLoader):
        raise InvalidArgumentError(
            "prepare() takes a penstock.torch.DataLoader; give torch's own to accelerator.prepare()"
        )
    else:
        made = AcceleratedLoader(accelerator, loader)
    _register(accelerator, made)
    return made


def skip_first_batches(loader: AcceleratedLoader, num_batches: int = 0) -> AcceleratedLoader:
    """Return the loader, whose next epoch begins after its first `num_batches` batches, once.

    What a loaded state has passed over counts: at a state of 7 batches, `skip_first_batches(loader, 7)` skips none.
    """
    check_whole("num_batches", num_batches, 0)
    loader.skip_to = num_batches
    return loader


class AcceleratedLoader:
    """A loader of which batches arrive on the accelerator's device; `prepare` makes it.

    It knows when a batch is the last one, as gradient accumulation and `gather_for_metrics` ask, and fetches one ahead
    for that. `state_dict()` is of the batches that the loop has received.
    """

    _is_accelerate_prepared = True

    def __init__(
        self, accelerator: Any, loader: Any, *, rows_in_all: int | None = None, rows_a_step: int | None = None
    ) -> None:
        """`rows_in_all`: how many rows all ranks have together; None: it is not known, or none is filled up."""
        self.loader = loader
        self.skip_to = 0
        self.end_of_dataloader = False
        self.remainder = -1
        """How many rows of the last step, over all ranks, are no repetitions; -1: it is not known."""
        self._last_rows = -1 if rows_in_all is None or not rows_a_step else rows_in_all % rows_a_step
        self._device = accelerator.device
        self._gradients = GradientState()
        self._ahead: ReadAhead | None = None
        self._received = 0
        self._loaded_epoch: int | None = None
        """The epoch that a loaded state lies in, until it is read."""

    def __iter__(self) -> Iterator[Any]:
        ahead = self._ahead = ReadAhead(self.loader)
        self.end_of_dataloader, self.remainder = False, self._last_rows
        begins_at, skip_to = self._received, self.skip_to
        self.skip_to, self._loaded_epoch = 0, None
        self._gradients._add_dataloader(self)
        try:
            for batch in ahead:
                ahead.trained()
                self._received += 1
                if self._received <= skip_to:
                    continue
                self.end_of_dataloader = ahead.exhausted
                yield send_to_device(batch, self._device)
            self._received = 0
        finally:
            self._gradients._remove_dataloader(self)
            if self._ahead is not ahead:
                self._received = begins_at  # another iteration has begun, and counts for itself

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def dataset(self) -> Any:
        # As of an attribute that is not there: whoever can do without it goes on.
        raise AttributeError(
            "a loader that Penstock prepared has no dataset; skip by ps.accelerate.skip_first_batches(loader, n)"
        )

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that epoch. A state that was loaded and lies in it stays where the epoch begins."""
        if epoch != self._loaded_epoch:
            self.loader.set_epoch(epoch)
            self._received, self._loaded_epoch = 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop stands: the batches it has received."""
        state = self.loader.state_dict() if self._ahead is None else self._ahead.state_dict()
        return {"loader": state, "batches": self._received}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next iteration where the state was taken."""
        self.loader.load_state_dict(state_dict["loader"])
        self._ahead, self._received = None, int(state_dict["batches"])
        self._loaded_epoch = state_dict["loader"].get("epoch") if self._received else None


def _dealt(accelerator: Any, loader: DataLoader, even_batches: bool) -> DataLoader:
    """Return the loader of the same class whose batches are dealt to ranks in turn; as it is, if its sampler deals."""
    sampler: Any = loader.sampler
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise InvalidArgumentError(
            f"prepare() on {accelerator.num_processes} ranks of a DataLoader without a batch sampler: what an "
            "IterableDataset yields is not dealt to ranks. Read it as a pipeline, through distribute(ranks=...)"
        )
    if not isinstance(sampler, (RandomSampler, SequentialSampler)):
        return loader
    generator = loader.generator
    if isinstance(sampler, RandomSampler):
        (seed,) = broadcast_object_list([int(torch.empty((), dtype=torch.int64).random_())])
        sampler = copy.copy(sampler)
        generator = sampler.generator = torch.Generator().manual_seed(seed)
    batch_sampler = copy.copy(loader.batch_sampler)
    batch_sampler.sampler = sampler  # type: ignore[attr-defined]
    shard = BatchSamplerShard(
        batch_sampler, accelerator.num_processes, accelerator.process_index, even_batches=even_batches
    )
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    more = ("prefetch_factor", "persistent_workers", "in_order", "service", "seed_samples", "collate_in")
    kept = {name: getattr(loader, name) for name in (*names, *more)}
    return type(loader)(loader.dataset, batch_sampler=shard, generator=generator, **kept)


def _register(accelerator: Any, loader: AcceleratedLoader) -> None:
    """Have each rank's state written and read with the accelerator's checkpoints, in a file of its own."""
    number = sum(getattr(hook, "of_penstock", False) for hook in accelerator._save_model_state_pre_hook.values())
    name = f"penstock-data-{number}-rank-{accelerator.process_index}-of-{accelerator.num_processes}.json"

    def save(models: Any, weights: Any, folder: str) -> None:
        Path(folder, name).write_text(json.dumps(loader.state_dict()))

    def load(models: Any, folder: str) -> None:
        if not Path(folder, name).exists():
            found = sorted(path.name for path in Path(folder).glob(f"penstock-data-{number}-*"))
            raise StateMismatchError(
                f"{folder} has no {name}, but {', '.join(found) or 'none of its kind'}: resume on as many ranks, "
                "with the loaders prepared in the same order"
            )
        loader.load_state_dict(json.loads(Path(folder, name).read_text()))

    save.of_penstock = True  # type: ignore[attr-defined]
    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
