"""The data of these tests: rows with random numbers of their own."""

from __future__ import annotations

import numpy as np

import penstock as ps

ROWS = 96


def row(number, rng):
    x = rng.normal(size=4).astype(np.float32)
    return {"x": x, "y": np.float32(x.sum()), "index": number}


def rows():
    return ps.range(ROWS).shuffle(seed=2).map(row)
