"""Penstock for Keras: loaders that `fit` takes, on all its backends, and checkpoints that carry the data's state.

data = ps.keras.adapt(loader)
model.fit(data, epochs=3, callbacks=[ps.keras.FitCheckpoint("run", data, every=100)])
"""

from penstock.keras.adapting import FitData, adapt
from penstock.keras.checkpoints import FitCheckpoint

__all__ = ["FitCheckpoint", "FitData", "adapt"]
