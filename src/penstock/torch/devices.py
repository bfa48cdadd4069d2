"""Batches on the device before they are asked for: the next one is copied while the present one is computed on.

Copies are queued on a stream of their own, out of pinned memory, so that neither the trainer's thread nor its kernels
wait for them. What is handed out is safe to use at once: the trainer's stream waits for the copy, on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.utils.data import _utils

from penstock.core.element import leaves, map_leaves


class Accelerator(Protocol):
    """What is asked of a device. Tests give one that writes down what was asked."""

    def pin(self, batch: Any) -> Any:
        """Return the batch in memory that the device can copy from by itself."""

    def copying(self) -> AbstractContextManager[Any]:
        """Queue what is done within on the stream for copies."""

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue the copy of a tensor."""

    def wait_for_copies(self, tensors: list[torch.Tensor]) -> None:
        """Have the trainer's stream wait for the copies queued so far, and the memory of some kept until it is done."""


class TorchAccelerator:
    """A device of torch's; one without streams (the host) copies at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type in ("cpu", "meta") else torch.Stream(device=device)

    def pin(self, batch: Any) -> Any:
        if self._stream is None:
            return batch
        return _utils.pin_memory.pin_memory(batch)  # type: ignore[no-untyped-call]

    def copying(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else self._stream

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)

    def wait_for_copies(self, tensors: list[torch.Tensor]) -> None:
        if self._stream is None:
            return
        present = torch.accelerator.current_stream(self._device)
        present.wait_stream(self._stream)
        for tensor in tensors:
            tensor.record_stream(present)


class OnDevice:
    """A loader's batches on a device, one ahead. `state_dict()` is of the batch handed out, not of the one ahead.

    >>> from penstock.torch import DataLoader, OnDevice
    >>> [batch.tolist() for batch in OnDevice(DataLoader(range(4), batch_size=2), "cpu")]
    [[0, 1], [2, 3]]
    """

    def __init__(self, loader: Any, device: Any, *, accelerator: Accelerator | None = None) -> None:
        self._loader = loader
        self._accelerator = accelerator or TorchAccelerator(torch.device(device))
        self._state: dict[str, Any] | None = None
        """The state after the batch handed out; None: none is read ahead, and the loader's own is right."""

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        ahead = self._taken(batches)
        while ahead is not None:
            batch, state = ahead
            self._accelerator.wait_for_copies([leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)])
            self._state = state
            ahead = self._taken(batches)
            yield batch
        self._state = None

    def _taken(self, batches: Iterator[Any]) -> tuple[Any, dict[str, Any] | None] | None:
        """Take a batch and queue its copy; None: there is none."""
        try:
            batch = next(batches)
        except StopIteration:
            return None
        state = self._loader.state_dict() if callable(getattr(self._loader, "state_dict", None)) else None
        pinned = self._accelerator.pin(batch)
        with self._accelerator.copying():
            return map_leaves(self._moved, pinned), state

    def _moved(self, leaf: Any) -> Any:
        return self._accelerator.move(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that epoch."""
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the trainer stands."""
        state: dict[str, Any] = self._loader.state_dict() if self._state is None else self._state
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next iteration where the state was taken."""
        self._state = None
        self._loader.load_state_dict(state_dict)
