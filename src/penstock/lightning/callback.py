"""The data's state in Lightning's checkpoints: what was trained, and of every rank.

Lightning saves the states of the train loaders itself, and loads them. Two things are missing, and added here:

1. Of a loader without a length it fetches one batch ahead, to know which is the last. The loader's own state counts it.
2. Rank 0 writes the file, with its own state. Here it holds the states of all ranks, and each loads its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed
from lightning.pytorch.callbacks import Callback

from penstock.core.errors import StateMismatchError

KEY = "penstock"
Notes = list[Callable[[], dict[str, Any]]]


class DataState(Callback):
    """Puts the state of the batch that was trained last, of each rank, into Lightning's checkpoints.

    trainer = lightning.Trainer(callbacks=[ps.lightning.DataState()])
    trainer.fit(model, data, ckpt_path="last.ckpt")
    """

    def __init__(self) -> None:
        self._before: Notes = []
        """Where the loaders stood when the batch before the last one ended: one batch less was fetched."""
        self._last: Notes = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._before = self._last = _notes(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._before, self._last = self._last, _notes(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        fetcher = trainer.fit_loop._data_fetcher
        ahead = fetcher is not None and bool(getattr(fetcher, "batches", None))
        states = [note() for note in (self._before if ahead else _notes(trainer))]
        if not states:
            return
        every: list[Any] = [states]
        if trainer.world_size > 1:
            every = [None] * trainer.world_size
            torch.distributed.all_gather_object(every, states)
        checkpoint[KEY] = every

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        every: list[list[Any]] | None = checkpoint.get(KEY)
        if every is None:
            return
        fit_loop = checkpoint["loops"]["fit_loop"]
        if len(every) == trainer.world_size:
            fit_loop["state_dict"]["combined_loader"] = every[trainer.global_rank]
        elif all(state.get("phase") is not None for states in every for state in states):
            # Of our pipelines, which take the states of all ranks, and deal what is left anew.
            fit_loop["state_dict"]["combined_loader"] = [list(states) for states in zip(*every)]
        else:
            raise StateMismatchError(
                f"the checkpoint has the data's state of {len(every)} ranks, and there are {trainer.world_size} now; "
                "what a sampler has dealt to ranks cannot be dealt anew in mid-epoch. Resume on as many ranks"
            )


def _notes(trainer: Any) -> Notes:
    combined = trainer.fit_loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    notes: Notes = []
    for loader in loaders:
        if hasattr(loader, "note_state"):
            notes.append(loader.note_state())
        elif hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            notes.append(partial(dict, loader.state_dict()))
    return notes
