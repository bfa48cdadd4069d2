"""What is trained with Keras, in a process for each backend: `python -m tests.trainers.keras_program FOLDER`.

It prints one JSON line of what a test judges.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import keras
import numpy as np

import penstock as ps

EPOCHS, ROWS, BATCH = 3, 96, 8


class Killed(Exception):
    pass


class DieAt(keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.left = step

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise Killed


def make_rows(number, rng):
    x = rng.normal(size=4).astype(np.float32)
    return {"x": x, "y": np.float32(x.sum() + number / ROWS)}


def make_loader(**options):
    return ps.range(ROWS).shuffle(seed=3).map(make_rows).batch(BATCH).distribute(**options)


def make_model(dropout=0.1, **options):
    keras.utils.set_random_seed(5)
    layers = [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dropout(dropout), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.01), "mse", **options)
    return model


def weights(model):
    return [float(np.sum(np.abs(w))) for w in model.get_weights()] + model.get_weights()[0].ravel().tolist()


def train(folder, dies_at=None, every=5, loader=None, **compiled):
    model = make_model(**compiled)
    data = ps.keras.adapt(make_loader() if loader is None else loader, x="x", y="y")
    checkpoint = ps.keras.FitCheckpoint(folder, data, every=every)
    first = checkpoint.restore(model)
    dying = [] if dies_at is None else [DieAt(dies_at)]
    try:
        model.fit(data, initial_epoch=first, epochs=EPOCHS, callbacks=[checkpoint, *dying], verbose=0)
    except Killed:
        return None
    return {"first": first, "step": checkpoint.step, "weights": weights(model)}


def unbuilt(folder):
    """A model that Keras builds from the first batch loses none."""
    seen = []

    class Counting(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    loader = make_loader()
    data = ps.keras.adapt(loader, x="x", y="y")
    model = Counting()
    model.compile("sgd", "mse")
    history = model.fit(data, epochs=2, verbose=0, validation_data=ps.keras.adapt(make_loader(), x="x", y="y"))
    seen.append(loader.state_dict()["epoch"])
    return {"epoch": seen[0], "validated": len(history.history["val_loss"])}


def without_penstock():
    model = make_model(dropout=0)
    for _epoch, rows in enumerate(epochs_of_arrays()):
        for batch in rows:
            model.train_on_batch(batch["x"], batch["y"])
    return weights(model)


def epochs_of_arrays():
    dataset = ps.range(ROWS).shuffle(seed=3).map(make_rows).batch(BATCH)
    return [list(dataset.iterator(epoch=epoch, threads=1)) for epoch in range(EPOCHS)]


def distributed_strategy(folder):
    import tensorflow as tf

    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        return train(folder)


def main(folder):
    warnings.filterwarnings("ignore", message="Your input ran out of data")
    told = {"backend": keras.backend.backend()}
    if told["backend"] == "tensorflow":
        told["strategy"] = distributed_strategy(folder / "strategy")
    told["whole"] = train(folder / "whole")
    told["without dropout"] = train(folder / "without dropout", dropout=0)
    told["by hand"] = without_penstock()
    assert train(folder / "killed", dies_at=17) is None
    told["resumed"] = train(folder / "killed")
    assert train(folder / "killed at end", dies_at=12, every=4) is None
    told["resumed at end"] = train(folder / "killed at end", every=4)
    if told["backend"] != "torch":  # there an execution is one step
        assert train(folder / "several", dies_at=4, every=4, steps_per_execution=4) is None
        told["several steps"] = train(folder / "several", every=4, steps_per_execution=4)
    told["unbuilt"] = unbuilt(folder)
    if told["backend"] == "jax":
        with make_loader(to=2, order="deterministic") as loader:
            assert train(folder / "service", dies_at=17, loader=loader) is None
        with make_loader(to=1, order="deterministic") as loader:
            told["over processes"] = train(folder / "service", loader=loader)
        with make_loader(to=1, order="deterministic") as loader:
            told["over processes, whole"] = train(folder / "service whole", loader=loader)
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
