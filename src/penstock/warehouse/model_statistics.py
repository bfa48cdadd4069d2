"""What is published of three production models' tables (RM1, RM2, RM3), and features with those statistics.

Which features anybody reads is drawn by a score: a feature's own worth, which grows with its bytes (features that are
read are larger and cover more rows). Who reads them is drawn in `release_process`. How much bytes count, and how
unequally proposals are liked, follow from two published figures: which share of the bytes a session reads, and from
which share of the bytes 80 % of all traffic comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from penstock.core.element import Array
from penstock.core.errors import InvalidArgumentError, choice
from penstock.warehouse.release_process import MONTH_DAYS, Release, draw_release, production_share

LENGTH_SPREAD = 1.0  # of the mean lengths of features, as the sigma of a log-normal: a few features are very long
COVERAGE_CONCENTRATION = 3.0
NEW_A_MONTH = (883 + 1650 + 1933) / 6 / 13_878  # features that came to be written, per stored feature (table II)
BETA_PER_NEW = 10_148 / (883 + 1650 + 1933)
SCORED_SHARE = 0.1  # of the sparse features
DENSE_BYTES, ID_BYTES, SCORE_BYTES = 3.9, 4.45, 3.65  # a value as stored, when it is there: as measured in files
TRAFFIC = 0.8
PROPOSAL_SHARE = 1 / 600  # of the stored features: what a proposal brings, on average; 23 of RM1's
_CALIBRATION_SESSIONS = 64
_STEPS = 12
_LIKING_STEPS, _MOST_LIKING = 33, 2.0
_ATTEMPTS = 8
_NEAR = 0.01  # both shares together: no others are drawn
_ABOVE_COUNTS = 10  # times as much: a tier of the published size is to serve its traffic
_LEAST_READ_BY_ALL = 1.05  # of what one session reads: somebody always tries something


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
    bytes_read_by_all: float
    """Which share of the bytes all sessions of a month read together."""
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
            bytes_read_by_all=self.bytes_read_by_all,
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
        bytes_read_by_all=0.60,
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
        bytes_read_by_all=0.60,
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
        bytes_read_by_all=0.21,
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
    release: Release
    """The month of sessions over the table."""
    feature_of: Array
    """The feature at each place of the release."""
    seed: int

    @property
    def bytes_per_row(self) -> Array:
        """About what each feature takes in a file, a row."""
        return stored_bytes(self.coverage, self.length, self.scored)

    def sessions(self, count: int) -> list[list[int]]:
        """Return the features that each of a month's sessions reads, in order of time; any is as good as the first."""
        return [np.sort(self.feature_of[row]).tolist() for row in self.release.sessions(count)]


def stored_bytes(coverage: Array, length: Array, scored: Array) -> Array:
    """Return about what features take in a file, a row."""
    sizes: Array = coverage * np.where(length > 0, (ID_BYTES + SCORE_BYTES * scored) * length, DENSE_BYTES) + 0.15
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
    coverage = np.clip(coverage, 0.001, 1)
    length = np.where(length > 0, np.maximum(length, 1), 0)
    scored = np.zeros(count, np.bool_)
    scored[dense:] = rng.random(sparse) < SCORED_SHARE
    release, picked = _calibrated(statistics, stored_bytes(coverage, length, scored), seed)
    newest_last, feature_of = _newest_last(picked, release, count, dense)
    return DrawnFeatures(
        model=statistics,
        coverage=coverage[newest_last],
        length=length[newest_last],
        first_day=_first_days(feature_of, release, count, partitions, rng),
        scored=scored[newest_last],
        release=release,
        feature_of=feature_of,
        seed=seed,
    )


def _calibrated(statistics: ModelStatistics, sizes: Array, seed: int) -> tuple[Release, Array]:
    """Return who reads what, and the feature at each of its places, so that both published shares hold.

    Either share jumps as a proposal or a large list is read or not: what comes nearest counts.
    """
    used, popular = statistics.bytes_used, statistics.popular_bytes
    by_all = max(_LEAST_READ_BY_ALL, statistics.bytes_read_by_all / used)
    production = production_share(used, by_all * used, popular, TRAFFIC)
    read = statistics.read_dense, statistics.read_sparse
    dense, sparse = statistics.stored_dense, statistics.stored_sparse
    ever = min(dense, round(by_all * read[0])), min(sparse, round(by_all * read[1]))
    proposal_features = max(1.0, (dense + sparse) * PROPOSAL_SHARE)
    standard = _standard(sizes, dense)
    tried: list[tuple[float, Release, Array]] = []
    for attempt in range(_ATTEMPTS):
        rng = np.random.default_rng([seed, 2, attempt])
        worth = rng.standard_normal(len(sizes))
        shuffled = rng.permutation(ever[0]), rng.permutation(ever[1])
        for liking in np.linspace(0, _MOST_LIKING, _LIKING_STEPS).tolist():
            release = draw_release(
                read,
                ever,
                production=production,
                proposal_features=proposal_features,
                liking=liking,
                seed=seed + (attempt << 32),
            )
            reads = release.sessions(_CALIBRATION_SESSIONS)
            bytes_used = partial(_bytes_used, reads, sizes, worth, standard, dense, shuffled)
            bias = _bisected(bytes_used, used)
            picked = _picked(worth + bias * standard, dense, shuffled)
            above = _popular_bytes(reads, sizes[picked] / sizes.sum(), picked) - popular
            off = abs(bytes_used(bias) - used) + max(-above, _ABOVE_COUNTS * above)
            tried.append((off, release, picked))
        if min(off for off, _, _ in tried) < _NEAR:
            break
    _, release, picked = min(tried, key=lambda each: each[0])
    return release, picked


def _newest_last(picked: Array, release: Release, count: int, dense: int) -> tuple[Array, Array]:
    """Return which drawn feature gets each id, and the id at each place of the release.

    Features of a kind that are registered in the month of the sessions have the last ids, proposal after proposal; of
    all others the id says nothing.
    """
    registered = np.zeros(count)
    registered[picked] = release.registered
    kind = np.arange(count) >= dense
    newest_last = np.lexsort([np.arange(count), registered, kind])
    id_of = np.empty(count, np.int64)
    id_of[newest_last] = np.arange(count)
    return newest_last, id_of[picked]


def _first_days(feature_of: Array, release: Release, count: int, partitions: int, rng: np.random.Generator) -> Array:
    """Return from which day on each feature is written: the month of the sessions ends with the table's last day."""
    before = max(0, partitions - MONTH_DAYS)
    new = rng.random(count) < NEW_A_MONTH * before / MONTH_DAYS
    first_day = np.where(new, rng.integers(0, max(1, before), count), 0)
    came = partitions - MONTH_DAYS + np.floor(release.came * MONTH_DAYS).astype(np.int64)
    first_day[feature_of] = np.where(release.came > 0, np.maximum(0, came), first_day[feature_of])
    return first_day


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


def _picked(scores: Array, dense: int, shuffled: tuple[Array, Array]) -> Array:
    """Return the features of either kind with the greatest scores, mixed."""
    first, second = (np.argsort(-part, kind="stable") for part in (scores[:dense], scores[dense:]))
    return np.concatenate([first[: len(shuffled[0])][shuffled[0]], second[: len(shuffled[1])][shuffled[1]] + dense])


def _bytes_used(
    reads: Array,
    sizes: Array,
    worth: Array,
    standard: Array,
    dense: int,
    shuffled: tuple[Array, Array],
    bias: float,
) -> float:
    picked = _picked(worth + bias * standard, dense, shuffled)
    return float((reads @ sizes[picked]).mean() / sizes.sum())


def _popular_bytes(reads: Array, shares: Array, features: Array) -> float:
    """Return which share of the bytes 80 % of the later sessions' traffic needs, by the popularity of the earlier."""
    half = len(reads) // 2
    earlier = reads[:half]
    order = np.lexsort([features, *~earlier[::-1], -earlier.sum(axis=0)])  # as `read_log.popularity` has it
    traffic = np.cumsum((reads[half:].sum(axis=0) * shares)[order])
    place = int(np.searchsorted(traffic, TRAFFIC * traffic[-1]))
    return float(shares[order[: place + 1]].sum())
