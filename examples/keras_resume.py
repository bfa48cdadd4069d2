"""A Keras training that dies in mid-epoch, and goes on from its checkpoint as if nothing had happened.

pip install 'penstock[keras]' torch
KERAS_BACKEND=torch python examples/keras_resume.py    # or jax, or tensorflow
"""

import os
import tempfile
import warnings

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

import penstock as ps

EPOCHS, DIES_AT = 3, 13


class Died(Exception):
    pass


class DieAt(keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.steps_left = step

    def on_train_batch_end(self, batch, logs=None):
        self.steps_left -= 1
        if self.steps_left == 0:
            raise Died


def row(number, rng):
    x = rng.normal(size=8).astype(np.float32)
    return {"x": x, "y": np.float32(np.sin(x).sum())}


def make_model():
    keras.utils.set_random_seed(7)
    layers = [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse")
    return model


def train(folder, dies_at=None):
    model = make_model()
    loader = ps.range(320).shuffle(seed=1).map(row).batch(32).distribute()
    data = ps.keras.adapt(loader, x="x", y="y")
    checkpoint = ps.keras.FitCheckpoint(folder, data, every=3)
    callbacks = [checkpoint] if dies_at is None else [checkpoint, DieAt(dies_at)]
    model.fit(data, initial_epoch=checkpoint.restore(model), epochs=EPOCHS, callbacks=callbacks, verbose=0)
    return model, checkpoint.step


def main():
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as disturbed, tempfile.TemporaryDirectory() as undisturbed:
        try:
            train(disturbed, dies_at=DIES_AT)
        except Died:
            print(f"died after step {DIES_AT}")
        resumed, steps = train(disturbed)
        expected, _ = train(undisturbed)
    same = all(np.array_equal(a, b) for a, b in zip(resumed.get_weights(), expected.get_weights()))
    assert same, "the weights differ"
    print(f"after {steps} steps on {keras.backend.backend()} the weights are those of an undisturbed run, bit for bit")


if __name__ == "__main__":
    main()
