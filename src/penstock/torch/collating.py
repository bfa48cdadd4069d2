"""torch's `default_collate` in worker processes: into memory that the trainer maps, where torch makes a file for each.

In a worker of its own torch stacks tensors into a new file of shared memory. Here that would be a copy too many, new
pages for every batch, and a full `/dev/shm` in containers that have little of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import _utils

from penstock.core.leaf_types import lying_in
from penstock.runtime.buffers import is_large
from penstock.runtime.collate import Empty

_torchs: Any = _utils.collate.collate_tensor_fn


def default_collate_into(samples: Sequence[Any], empty: Empty) -> Any:
    """Return what `default_collate` returns, with large tensors in memory that `empty` gives.

    >>> default_collate_into([(torch.ones(2), "a"), (torch.zeros(2), "b")], np.empty)
    [tensor([[1., 1.],
            [0., 0.]]), ('a', 'b')]
    """
    functions = dict(_utils.collate.default_collate_fn_map)
    if functions.get(torch.Tensor) is _torchs:
        functions[torch.Tensor] = partial(_stacked, empty=empty)
    collate: Any = _utils.collate.collate
    return collate(samples, collate_fn_map=functions)


@contextmanager
def no_shared_files() -> Iterator[None]:
    """Have `default_collate` stack tensors into the process's own memory: for functions that call it."""
    functions: Any = _utils.collate.default_collate_fn_map
    changes = functions.get(torch.Tensor) is _torchs
    if changes:
        functions[torch.Tensor] = _stacked
    try:
        yield
    finally:
        if changes:
            functions[torch.Tensor] = _torchs


def _stacked(
    batch: Sequence[torch.Tensor],
    *,
    collate_fn_map: dict[Any, Callable[..., Any]] | None = None,
    empty: Empty = np.empty,
) -> Any:
    out = None if empty is np.empty else _place_for(batch, empty)
    if out is not None:
        return torch.stack(list(batch), 0, out=out)
    worker, _utils.worker._worker_info = _utils.worker._worker_info, None  # torch makes a file only where there is one
    try:
        return _torchs(batch, collate_fn_map=collate_fn_map)
    finally:
        _utils.worker._worker_info = worker


def _place_for(batch: Sequence[torch.Tensor], empty: Empty) -> torch.Tensor | None:
    """Return a tensor to stack a batch into; None: it is small, or not of plain tensors that are alike."""
    first = batch[0]
    dtype, shape = _numpy_dtype(first.dtype), (len(batch), *first.shape)
    if dtype is None or not is_large(shape, dtype) or not all(_alike(first, tensor) for tensor in batch):
        return None
    place: torch.Tensor = lying_in(empty(shape, dtype))
    return place


def _alike(first: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.shape == first.shape
        and tensor.dtype == first.dtype
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_nested)
    )


@cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except (TypeError, RuntimeError):
        return None  # bfloat16 and its kin
