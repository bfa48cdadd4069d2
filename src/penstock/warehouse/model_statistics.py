"""What is published of three production models' tables (RM1, RM2, RM3), and features with those statistics.

A session's features are drawn by a score: a feature's own worth, which grows with its bytes (popular features are
larger and cover more rows), and a share of chance that differs from session to session. How strong either is follows
from two published figures, by bisection: which share of the bytes a session reads, and from which share of the bytes
80 % of all traffic comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from penstock.core.element import Array
from penstock.core.errors import InvalidArgumentError, choice

LENGTH_SPREAD = 1.0  # of the mean lengths of features, as the sigma of a log-normal: a few features are very long
COVERAGE_CONCENTRATION = 3.0
NEW_A_MONTH = (883 + 1650 + 1933) / 6 / 13_878  # features that came to be written, per stored feature (table II)
BETA_PER_NEW = 10_148 / (883 + 1650 + 1933)
SCORED_SHARE = 0.1  # of the sparse features
DENSE_BYTES, ID_BYTES = 3.9, 5.4  # a value as stored, when it is there
TRAFFIC = 0.8
_CALIBRATION_SESSIONS = 32
_STEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatistics:
    """One model's figures: tables III to V, figure 7, of the paper on data storage and ingestion at Meta."""

    name: str
    stored_dense: int
    stored_sparse: int
    coverage: float
    mean_length: float
    read_dense: int
    read_sparse: int
    derived: int
    bytes_used: float
    """Which share of the stored bytes a session reads."""
    popular_bytes: float
    """From which share of the bytes 80 % of all traffic comes."""
    stored_partitions: int
    used_partitions: int

    def scaled(self, scale: float) -> ModelStatistics:
        """Return the same of a narrower table: features stored, read and derived are fewer by the same factor."""
        if not 0 < scale <= 1:
            raise InvalidArgumentError(f"scale={scale!r} is a share of the features: above 0, at most 1")

        def part(count: int) -> int:
            return max(1, round(count * scale))

        return ModelStatistics(
            name=self.name,
            stored_dense=part(self.stored_dense),
            stored_sparse=part(self.stored_sparse),
            coverage=self.coverage,
            mean_length=self.mean_length,
            read_dense=part(self.read_dense),
            read_sparse=part(self.read_sparse),
            derived=part(self.derived),
            bytes_used=self.bytes_used,
            popular_bytes=self.popular_bytes,
            stored_partitions=self.stored_partitions,
            used_partitions=self.used_partitions,
        )


MODELS = {
    "rm1": ModelStatistics(
        name="rm1",
        stored_dense=12_115,
        stored_sparse=1_763,
        coverage=0.45,
        mean_length=25.97,
        read_dense=1_221,
        read_sparse=298,
        derived=304,
        bytes_used=0.37,
        popular_bytes=0.39,
        stored_partitions=90,
        used_partitions=80,
    ),
    "rm2": ModelStatistics(
        name="rm2",
        stored_dense=12_596,
        stored_sparse=1_817,
        coverage=0.41,
        mean_length=25.57,
        read_dense=1_113,
        read_sparse=306,
        derived=317,
        bytes_used=0.34,
        popular_bytes=0.37,
        stored_partitions=91,
        used_partitions=81,
    ),
    "rm3": ModelStatistics(
        name="rm3",
        stored_dense=5_707,
        stored_sparse=188,
        coverage=0.29,
        mean_length=19.64,
        read_dense=504,
        read_sparse=42,
        derived=1,
        bytes_used=0.21,
        popular_bytes=0.18,
        stored_partitions=42,
        used_partitions=28,
    ),
}


def model(name: str) -> ModelStatistics:
    """Return the figures of rm1, rm2 or rm3."""
    if name not in MODELS:
        raise choice("like", name, list(MODELS))
    return MODELS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnFeatures:
    """Features by id (dense ones first), drawn once for a table."""

    model: ModelStatistics
    coverage: Array
    length: Array
    """Mean length where there is a list; 0 for dense features."""
    first_day: Array
    """From which day on a feature is written; 0: from the first."""
    scored: Array
    worth: Array
    """What speaks for reading a feature, beside its bytes and chance."""
    bias: float
    """How much bytes speak for a feature."""
    chance: float
    """How much sessions differ."""
    seed: int

    @property
    def bytes_per_row(self) -> Array:
        """About what each feature takes in a file, a row."""
        return stored_bytes(self.coverage, self.length)

    def session(self, number: int) -> list[int]:
        """Return the features that a session reads; session 0 is the representative one."""
        scores = self.worth + self.bias * _standard(self.bytes_per_row, self.model.stored_dense)
        rng = np.random.default_rng([self.seed, 7, number])
        picked = _picked(self.model, scores + self.chance * rng.standard_normal(len(scores)))
        return [int(number) for number in picked]


def stored_bytes(coverage: Array, length: Array) -> Array:
    """Return about what features take in a file, a row."""
    sizes: Array = coverage * np.where(length > 0, ID_BYTES * length, DENSE_BYTES) + 0.15
    return sizes


def draw_features(statistics: ModelStatistics, *, partitions: int, seed: int) -> DrawnFeatures:
    """Return features with a model's statistics, the same for the same seed."""
    rng = np.random.default_rng([seed, 1])
    dense, sparse = statistics.stored_dense, statistics.stored_sparse
    count = dense + sparse
    mean = statistics.coverage
    coverage = rng.beta(COVERAGE_CONCENTRATION * mean, COVERAGE_CONCENTRATION * (1 - mean), count)
    coverage *= mean / coverage.mean()
    length = np.zeros(count)
    length[dense:] = rng.lognormal(0, LENGTH_SPREAD, sparse)
    length[dense:] *= statistics.mean_length * coverage[dense:].sum() / (length[dense:] * coverage[dense:]).sum()
    new = rng.random(count) < NEW_A_MONTH * partitions / 30
    first_day = np.where(new, rng.integers(0, max(1, partitions), count), 0)
    scored = np.zeros(count, np.bool_)
    scored[dense:] = rng.random(sparse) < SCORED_SHARE
    worth = rng.standard_normal(count)
    sizes = stored_bytes(np.clip(coverage, 0.001, 1), np.where(length > 0, np.maximum(length, 1), 0))
    chances = np.random.default_rng([seed, 2]).standard_normal((_CALIBRATION_SESSIONS, count))
    bias, chance = 1.0, 0.5
    for _ in range(3):  # the two figures depend on each other a little
        bias = _bisected(partial(_bytes_used, statistics, sizes, worth, chances, chance), statistics.bytes_used)
        chance = _bisected(partial(_popular_bytes, statistics, sizes, worth, chances, bias), statistics.popular_bytes)
    return DrawnFeatures(
        model=statistics,
        coverage=np.clip(coverage, 0.001, 1),
        length=np.where(length > 0, np.maximum(length, 1), 0),
        first_day=first_day,
        scored=scored,
        worth=worth,
        bias=bias,
        chance=chance,
        seed=seed,
    )


def _bisected(figure: Callable[[float], float], target: float) -> float:
    """Return where a growing figure reaches a target, or the end that is nearest to it."""
    low, high = 0.0, 5.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if figure(middle) < target:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _standard(sizes: Array, dense: int) -> Array:
    """Return how large each feature is among those of its kind."""
    logs = np.log(sizes)
    found = np.empty_like(logs)
    for part in (slice(0, dense), slice(dense, None)):
        spread = logs[part].std() or 1.0
        found[part] = (logs[part] - logs[part].mean()) / spread
    return found


def _picked(statistics: ModelStatistics, scores: Array) -> Array:
    dense = statistics.stored_dense
    first = _greatest(scores[:dense], statistics.read_dense)
    second = _greatest(scores[dense:], statistics.read_sparse) + dense
    return np.sort(np.concatenate([first, second]))


def _greatest(scores: Array, count: int) -> Array:
    if count >= len(scores):
        return np.arange(len(scores))
    return np.argpartition(-scores, count)[:count]


def _sessions(
    statistics: ModelStatistics, sizes: Array, worth: Array, bias: float, chance: float, chances: Array
) -> list[Array]:
    scores = worth + bias * _standard(sizes, statistics.stored_dense)
    return [_picked(statistics, scores + chance * row) for row in chances]


def _bytes_used(
    statistics: ModelStatistics, sizes: Array, worth: Array, chances: Array, chance: float, bias: float
) -> float:
    picked = _sessions(statistics, sizes, worth, bias, chance, chances[:8])
    return float(np.mean([sizes[ids].sum() for ids in picked]) / sizes.sum())


def _popular_bytes(
    statistics: ModelStatistics, sizes: Array, worth: Array, chances: Array, bias: float, chance: float
) -> float:
    """Return which share of the bytes 80 % of the later sessions' traffic needs, by the popularity of the earlier."""
    picked = _sessions(statistics, sizes, worth, bias, chance, chances)
    half = len(picked) // 2
    before, after = np.zeros(len(sizes)), np.zeros(len(sizes))
    for ids in picked[:half]:
        before[ids] += 1
    for ids in picked[half:]:
        after[ids] += 1
    order = np.argsort(-before, kind="stable")
    traffic = np.cumsum(after[order] * sizes[order])
    place = int(np.searchsorted(traffic, TRAFFIC * traffic[-1]))
    return float(sizes[order[: place + 1]].sum() / sizes.sum())
