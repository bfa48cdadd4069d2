"""The data's state in checkpoints of `torch.distributed.checkpoint`, beside models and optimizers that ranks share.

Such a checkpoint has one value for each name, whichever rank gave it, and loads what the program already has names for.
A loader's state differs from rank to rank and has other names in the middle of an epoch than before its beginning. So
the states of all ranks are one text under one name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import torch.distributed as dist

from penstock.core.errors import StateMismatchError
from penstock.torch.loader import DataLoader

_NAME = "ranks"


class SavesState(Protocol):
    """A loader: `DataLoader`, `TensorLoader`, `OnDevice`, a loader of a pipeline."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> None: ...


class RankStates:
    """Where the loaders of all ranks stand: what `torch.distributed.checkpoint` saves and loads as a part of its own.

    `dcp.save({"model": ..., "data": RankStates(loader)}, checkpoint_id=...)` and the same with `dcp.load`, on every
    rank. `group` is the process group whose ranks read the data; None: all. Loaded on another number of ranks, a
    pipeline over a service goes on where all of them stood; a `DataLoader` cannot, and says so.

    >>> loader = DataLoader(range(6), batch_size=2)
    >>> batches = iter(loader); _ = next(batches)
    >>> saved = RankStates(loader).state_dict()
    >>> again = DataLoader(range(6), batch_size=2)
    >>> RankStates(again).load_state_dict(saved); [batch.tolist() for batch in again]
    [[2, 3], [4, 5]]
    """

    def __init__(self, loader: SavesState, *, group: Any = None) -> None:
        self._loader, self._group = loader, group

    def state_dict(self) -> dict[str, str]:
        """Return the states of all ranks, which must call this together."""
        return {_NAME: json.dumps(self._gathered(self._loader.state_dict()))}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the next iteration where this rank, or all ranks together, stood."""
        if _NAME not in state_dict:
            raise StateMismatchError("these are not the states of ranks; load what penstock.torch.RankStates has saved")
        states = json.loads(state_dict[_NAME])
        rank, count = self._seat()
        if len(states) == count:
            self._loader.load_state_dict(states[rank])
        elif isinstance(self._loader, DataLoader):
            raise StateMismatchError(
                f"the checkpoint was saved by {len(states)} ranks, and there are {count}: a DataLoader's sampler "
                "belongs to its rank; load it on as many ranks, or read a pipeline over a service, which is dealt anew"
            )
        else:
            self._loader.load_state_dict(states)

    def _seat(self) -> tuple[int, int]:
        if not dist.is_initialized():
            return 0, 1
        return dist.get_rank(self._group), dist.get_world_size(self._group)

    def _gathered(self, state: Any) -> list[Any]:
        _, count = self._seat()
        if count == 1:
            return [state]
        states: list[Any] = [None] * count
        dist.all_gather_object(states, state, group=self._group)
        return states
