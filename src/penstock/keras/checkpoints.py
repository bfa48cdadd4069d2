"""A Keras callback that saves weights and the data's state together, so that neither is ever ahead of the other."""

from __future__ import annotations

import json
import os
from os import PathLike
from pathlib import Path
from typing import Any

import keras

from penstock.core.checks import check_whole
from penstock.keras.adapting import FitData
from penstock.keras.generators import generators_of, put_generators_back

LATEST = "latest.json"


class FitCheckpoint(keras.callbacks.Callback):
    """Saves the weights, the optimizer, dropout's generators, and the state of the data after the batch trained last.

    It saves after every `every` steps, and at the end of each epoch. A training that is killed at any moment finds the
    last whole checkpoint: the weights are written first, and then a small file that names them and holds the data's
    state is put in place of the older one.

        data = ps.keras.adapt(loader)
        checkpoint = ps.keras.FitCheckpoint("run", data, every=100)
        model.fit(data, initial_epoch=checkpoint.restore(model), epochs=3, callbacks=[checkpoint])
    """

    def __init__(self, folder: str | PathLike[str], data: FitData, *, every: int | None = None) -> None:
        """`every`: after so many steps; None: at the end of epochs only."""
        super().__init__()
        if every is not None:
            check_whole("every", every, 1)
        self._folder, self._data, self._every = Path(folder), data, every
        self._epoch = 0
        self._trained = 0
        """Steps of the present epoch."""
        self.step = 0
        """Steps in all, those before a resume included."""
        self._saved_at = 0
        self._generators_then: list[Any] | None = None
        """Of the checkpoint that was restored, until the training begins."""
        self._resumed = False
        """The next epoch, or the present one, goes on where a state was taken: it may be short."""
        self._cut_short = False

    def restore(self, model: Any) -> int:
        """Load the last checkpoint into the model and the data, and return the epoch to begin with: 0 without one.

        The model is built and compiled.
        """
        try:
            latest = json.loads((self._folder / LATEST).read_text())
        except FileNotFoundError:
            return 0
        if model.optimizer is not None:
            model.optimizer.build(model.trainable_variables)
        model.load_weights(self._folder / latest["weights"])
        self._generators_then = latest["generators"]
        self._resumed = True
        self._data.load_state_dict(latest["data"])
        self.step = self._saved_at = int(latest["step"])
        return int(latest["epoch"])

    def on_train_begin(self, logs: Any = None) -> None:
        # Now: what Keras runs to build the model draws from them.
        if self._generators_then is not None:
            put_generators_back(self.model, self._generators_then)
            self._generators_then = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._trained = epoch, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # `batch` is the number of the last step of an execution, which may be of several.
        before, self._trained = self._trained, batch + 1
        self._data.trained(self._trained - before)
        self.step += self._trained - before
        if self._every is not None and self.step - self._saved_at >= self._every:
            self._save(ended=False)
        # Keras expects a whole epoch. Told to stop here, it does not ask for a batch that is not there, which on
        # TensorFlow counts a step that was none.
        if self._resumed and self._data.at_end and not self.model.stop_training:
            self.model.stop_training = self._cut_short = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._cut_short:
            self.model.stop_training = False
        self._resumed = self._cut_short = False
        steps = self.params.get("steps")
        self._save(ended=steps is not None and self._trained >= steps)  # else it was told to stop, or was resumed

    def _save(self, *, ended: bool) -> None:
        epoch = self._epoch + 1 if self._data.at_end or ended else self._epoch
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{self.step:09}.weights.h5"
        unfinished = self._folder / f"unfinished-{name}"
        self.model.save_weights(unfinished)
        os.replace(unfinished, self._folder / name)
        record = {
            "weights": name,
            "generators": generators_of(self.model),
            "data": self._data.state_dict(),
            "epoch": epoch,
            "step": self.step,
        }
        pointer = self._folder / f"{LATEST}.new"
        pointer.write_text(json.dumps(record))
        os.replace(pointer, self._folder / LATEST)
        for other in self._folder.glob("*.weights.h5"):
            if other.name != name:
                other.unlink()
        self._saved_at = self.step
