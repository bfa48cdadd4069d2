"""Keras `fit` with `offload=`: workers of a service help where the input is too slow, and nothing else changes.

pip install 'penstock[keras]' torch
KERAS_BACKEND=torch python examples/offload_keras.py    # or jax, or tensorflow
"""

import os
import time

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

import penstock as ps


def row(number, rng):
    time.sleep(0.002)  # work that this host has too few processors for
    x = rng.normal(size=8).astype(np.float32)
    return {"x": x, "y": np.float32(np.sin(x).sum())}


DATASET = ps.range(1600).shuffle(seed=1).map(row, threads=1).batch(16)


def train(data):
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(data, epochs=2, verbose=0)
    return [weights.tolist() for weights in model.get_weights()]


def main():
    with ps.LocalService(workers=2, threads=1) as service:  # or the address of one on other hosts
        with DATASET.distribute(service, order="deterministic") as loader:
            plain = train(ps.keras.adapt(loader, x="x", y="y"))
        weights = train(ps.keras.adapt(DATASET, x="x", y="y", offload=service))
    assert weights == plain
    print("the same weights with offload=, bit for bit")


if __name__ == "__main__":
    main()
