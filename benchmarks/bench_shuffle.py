"""How random is a shuffle? The entropy of the classes in a batch of 256, read from a folder sorted by class.

100 classes of 1,000 tiny files, `shuffle(10_000)`, against the same labels fully permuted. And `shuffle()` over a
range: each element once, as far from its place as in a random permutation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import inputs
import layout
import numpy as np
from harness import Bench, main
from report import machine, our_versions, paired

import penstock as ps

BATCH = 256
SIZE = 10_000
NUMBERS = 1_000_000

Labels = np.ndarray[Any, Any]


def entropy_bits(labels: Labels) -> float:
    shares = np.bincount(labels, minlength=layout.CLASSES) / len(labels)
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())


def mean_entropy(batches: Iterator[Labels]) -> float:
    return float(np.mean([entropy_bits(labels) for labels in batches]))


def permuted(seed: int) -> Iterator[Labels]:
    labels = np.repeat(np.arange(layout.CLASSES), layout.FILES_PER_CLASS)
    np.random.default_rng(seed).shuffle(labels)
    for start in range(0, len(labels) - BATCH + 1, BATCH):
        yield labels[start : start + BATCH]


def run(bench: Bench) -> None:
    folder = inputs.class_folder()
    common = {"versions": our_versions(), "machine": machine()}
    pairs, per_class = [], []
    for seed in range(bench.options.pairs):
        dataset = ps.read_images(str(folder)).shuffle(SIZE, seed=seed).batch(BATCH, drop_last=True)
        labels = [np.array(batch["label"]) for batch in dataset]
        per_class.append(int(np.bincount(np.concatenate(labels)).max()))
        pairs.append((mean_entropy(iter(labels)), mean_entropy(permuted(seed))))
    assert max(per_class) <= layout.FILES_PER_CLASS, "an element came twice"
    case = f"class entropy, shuffle({SIZE:,}) of {layout.CLASSES * layout.FILES_PER_CLASS:,} files"
    bench.add(paired("shuffle", case, "full permutation", "bits", pairs, target=0.98, **common))

    distinct, spread = [], []
    for seed in range(bench.options.pairs):
        order = np.concatenate(list(ps.range(NUMBERS).shuffle(seed=seed).batch(4096)))
        distinct.append((float(len(np.unique(order)) * (len(order) == NUMBERS)), float(NUMBERS)))
        # A random permutation moves an element by a third of the length on average.
        spread.append((float(np.abs(order - np.arange(NUMBERS)).mean()), NUMBERS / 3))
    numbers = f"shuffle() of range({NUMBERS:,})"
    bench.add(paired("shuffle", f"{numbers}: elements", "permutation", "distinct", distinct, target=1.0, **common))
    bench.add(paired("shuffle", f"{numbers}: moved by", "n / 3", "places", spread, target=0.99, **common))


if __name__ == "__main__":
    main("shuffle", run)
