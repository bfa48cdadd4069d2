"""Pipelines for PyTorch: as tensors, and as an `IterableDataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from penstock.api.dataset import Dataset
from penstock.api.loader import Loader
from penstock.core.element import map_leaves
from penstock.core.errors import InvalidArgumentError


def tensors(pipeline: Dataset | Loader) -> TensorLoader:
    """Return what reads a dataset or a loader and gives its arrays as tensors over the same memory.

    >>> import penstock as ps
    >>> next(iter(tensors(ps.range(4).map(lambda x: {"x": x / 2}).batch(4))))["x"]
    tensor([0.0000, 0.5000, 1.0000, 1.5000], dtype=torch.float64)
    """
    return TensorLoader(pipeline)


class TensorLoader:
    """A pipeline whose arrays arrive as tensors: without a copy, and writable. Text, bytes and None stay as they are.

    It has the state of what it reads: `state_dict()`, `load_state_dict()`, `set_epoch()`, `len()`.
    """

    def __init__(self, pipeline: Dataset | Loader) -> None:
        if not isinstance(pipeline, (Dataset, Loader)):
            raise InvalidArgumentError(f"tensors() takes a dataset or a loader, not {type(pipeline).__name__}")
        self._loader = pipeline if isinstance(pipeline, Loader) else Loader(pipeline.node)

    def __iter__(self) -> Iterator[Any]:
        return map(_tensors_of, iter(self._loader))

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that epoch."""
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the trainer stands: small, JSON-able."""
        return self._loader.state_dict()

    def note_state(self) -> Callable[[], dict[str, Any]]:
        """Note down where the trainer stands, for less than a state costs; the function returned makes the state."""
        return self._loader.note_state()

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Begin the next iteration where the state was taken."""
        self._loader.load_state_dict(state_dict)

    def close(self) -> None:
        """Let go of everything at once."""
        self._loader.close()


class PipelineDataset(IterableDataset[Any]):
    """A dataset as PyTorch's `IterableDataset`, for a `DataLoader(batch_size=None)` of torch's own.

    With `num_workers=n` each of the n processes runs the pipeline and hands on every n-th element: none comes twice,
    and the pipeline's work before them is done n times over. `ds.distribute(n)` divides it instead. Under workers,
    call `set_epoch()` before each epoch: they begin anew, and do not know how many there were.

    >>> import penstock as ps
    >>> [x.tolist() for x in PipelineDataset(ps.range(4).batch(2))]
    [[0, 1], [2, 3]]
    """

    def __init__(self, dataset: Dataset) -> None:
        if not isinstance(dataset, Dataset):
            raise InvalidArgumentError(
                f"PipelineDataset takes a dataset, not {type(dataset).__name__}: a loader has processes of its own; "
                "read it as it is, or through penstock.torch.tensors(loader)"
            )
        self._dataset = dataset
        self._seed = dataset._plan.seed  # drawn here, once: workers that drew their own would divide different orders
        shared: Any = torch.zeros((), dtype=torch.int64)
        self._epoch: torch.Tensor = shared.share_memory_()  # persistent workers see it change

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that epoch."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        epoch = int(self._epoch)
        if info is None:
            self._epoch += 1
            return map(_tensors_of, self._dataset.iterator(epoch=epoch, seed=self._seed))
        elements = self._dataset.iterator(epoch=epoch, seed=self._seed, threads=1)
        return map(_tensors_of, islice(elements, info.id, None, info.num_workers))


def _tensors_of(element: Any) -> Any:
    return map_leaves(_tensor_of, element)


def _tensor_of(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biufc":
        return leaf
    if not leaf.flags.writeable or not leaf.dtype.isnative:
        leaf = leaf.astype(leaf.dtype.newbyteorder("="))
    return torch.from_numpy(leaf)
