"""Whether to keep what a pipeline makes, and at which point: the cheapest way to the end of the job.

Words. A *point* is a place in the pipeline after which elements may be kept. Computing makes them in every epoch;
keeping at a point makes them once, writes them, and gets them from then on. All figures are by element of the source.

The one idea: stages overlap, so an element takes as long as the slowest of what goes on side by side,

    seconds = max(processor time / (workers x cores), time that holds the GIL / workers,
                  slowest stage on its threads / workers, source, cache, trainer)

of which each mode has its own. Summing them, as Cachew's rule does (`cachew_choice` below, as the paper has it), takes
a disk for slow that nobody waits for. Computing goes on while it is measured, so that how long it takes is seen, too:
where that is longer than its bounds explain, what they miss is taken to slow down the other modes' stages as well. Of
a mode that ran, what was seen counts and not what was predicted.

What is left decides: keeping pays one epoch of writing and then epochs of getting. Equals compute; a trainer that does
not wait is given no cache to fill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import replace

TIE = 1.05  # closer than this the measurements do not tell; and computing needs no disk
COPY_S_PER_BYTE = 1 / 1.5e9  # processor time of putting an element's bytes together and summing them, or of the reverse
EPOCHS_UNTOLD = 10  # where nobody said how many there will be: few trainings have fewer

CacheMode: TypeAlias = Literal["compute", "keep"]


class StorageSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What one location gives for requests of one size: measured, of reads or of writes."""

    nbytes: int
    parallel: int
    latency_s: float
    """Of one request, alone."""
    bytes_per_s: float
    """Of all requests together."""


class StorageModel(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a location."""

    reads: tuple[StorageSpeed, ...]
    writes: tuple[StorageSpeed, ...]

    def read_s(self, nbytes: float) -> float:
        return _seconds(self.reads, nbytes)

    def write_s(self, nbytes: float) -> float:
        return _seconds(self.writes, nbytes)


def _seconds(speeds: Sequence[StorageSpeed], nbytes: float) -> float:
    """Return how long so many bytes take in the best of the ways that were measured."""
    return min((nbytes / speed.bytes_per_s for speed in speeds), default=0.0)


class PointProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What it takes to make an element up to a point."""

    number: int
    cpu_s: float
    gil_s: float
    """How much of that is spent with the GIL held."""
    nbytes: float
    """Of an element there."""
    rest_stage_s: float = 0.0
    """How long the slowest stage behind it takes, on the threads it has, or stages that share one."""
    after_read_s: float | None = None
    """How long the same thread works on an element after it has read it from the cache; None: another reads ahead."""


class PipelineProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What a run measured, by element of the source."""

    cpu_s: float
    """Over all of the pipeline."""
    gil_s: float
    source_s: float
    """How long a worker waits for the source's storage, for each element that it reads."""
    points: tuple[PointProfile, ...]
    stage_s: float = 0.0
    """How long the slowest stage takes, on the threads it has, or stages that share one: it may wait for something that
    is no processor."""
    seen_s: float = 0.0
    """How long an element took, all in all; 0: it was not seen."""
    trainer_s: float = 0.0
    """How long the trainer is busy with an element; 0: it waits for every one."""


class CacheDemand(msgspec.Struct, frozen=True, kw_only=True):
    """For how long, and with what."""

    epochs_left: int = EPOCHS_UNTOLD
    workers: int = 1
    """That were there when it was measured."""
    max_workers: int = 1
    cores: int = 1
    """Of a worker."""
    worker_per_h: float = 0.0
    """The price of a worker; 0: only time counts."""
    trainer_per_h: float = 0.0


class CacheChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What is done from the next split on."""

    mode: CacheMode
    point: int
    """At which point elements are kept; 0: at none."""
    workers: int
    """How many of them the mode needs to be as fast as it can be."""
    seconds_by_mode: Mapping[str, float]
    """How long an element takes, on average over the epochs that are left: "compute", and "keep 1", "keep 2" for each
    point."""
    reason: str


class _Bounds(msgspec.Struct, frozen=True):
    """What goes on side by side for an element, in one mode."""

    cpu_s: float
    gil_s: float
    stage_s: float
    source_s: float
    cache_s: float
    missed: float = 1.0
    """How much longer a worker takes than its bounds say."""
    got_s: float | None = None
    """How long it was seen to take, with as many workers as there were."""

    def seconds(self, demand: CacheDemand, workers: int, trainer_s: float) -> float:
        if self.got_s is not None:
            return max(self.got_s, trainer_s)
        return max(self._each(demand, workers, trainer_s).values())

    def named(self, demand: CacheDemand, workers: int, trainer_s: float) -> str:
        bounds = self._each(demand, workers, trainer_s)
        return max(bounds, key=lambda name: bounds[name])

    def _each(self, demand: CacheDemand, workers: int, trainer_s: float) -> dict[str, float]:
        return {
            "processor": self.missed * self.cpu_s / (workers * demand.cores),
            "the GIL": self.missed * self.gil_s / workers,
            "a stage": self.missed * self.stage_s / workers,
            "reading the source": self.missed * self.source_s / max(1, demand.workers),
            "reading the cache": self.cache_s,
            "the trainer": trainer_s,
        }


def choose_caching(
    profile: PipelineProfile,
    storage: StorageModel,
    demand: CacheDemand,
    got_s: Mapping[int, float] = MappingProxyType({}),
) -> CacheChoice:
    """Return the mode that ends the job soonest; of those that do, the one whose workers cost least.

    `got_s` has, by point, how long an element was seen to take where it was kept there.

    A function of 20 ms on one core, results of 150 KB, and a disk of 200 MB/s: getting takes 0.75 ms.

    >>> disk = (StorageSpeed(nbytes=1 << 20, parallel=4, latency_s=0.004, bytes_per_s=200e6),)
    >>> storage = StorageModel(reads=disk, writes=disk)
    >>> point = PointProfile(number=1, cpu_s=0.020, gil_s=0.0, nbytes=150e3)
    >>> slow = PipelineProfile(cpu_s=0.0205, gil_s=0.0, source_s=0.0001, points=(point,))
    >>> choose_caching(slow, storage, CacheDemand(epochs_left=90)).reason
    'keep at point 1: 0.971 ms an element instead of 20.5 ms over 90 epochs, bound by reading the cache'

    A trainer that takes 25 ms for it waits for neither:

    >>> from msgspec.structs import replace
    >>> choose_caching(replace(slow, trainer_s=0.025), storage, CacheDemand()).reason
    'compute: the trainer is the bound, and waits for nothing'
    """
    workers, there = max(1, demand.max_workers), max(1, demand.workers)
    trainer_s = profile.trainer_s
    computing = _Bounds(profile.cpu_s, profile.gil_s, profile.stage_s, profile.source_s, 0.0)
    explained_s = computing.seconds(demand, there, 0.0)
    missed = max(1.0, profile.seen_s / there / explained_s) if explained_s > 0 else 1.0
    computing = replace(computing, missed=missed)
    compute_s = computing.seconds(demand, workers, trainer_s)
    epochs = max(1, demand.epochs_left)
    seconds = {"compute": compute_s}
    getting: dict[int, _Bounds] = {}
    for point in profile.points:
        copied_s, read_s = COPY_S_PER_BYTE * point.nbytes, storage.read_s(point.nbytes)
        # The writer has its own thread and leaves what it cannot follow, so that its disk is nobody's bound: what it
        # does not get done in one epoch is computed in the next.
        putting = replace(computing, cpu_s=profile.cpu_s + copied_s)
        getting[point.number] = got = _Bounds(
            max(0.0, profile.cpu_s - point.cpu_s) + copied_s,
            max(0.0, profile.gil_s - point.gil_s),
            max(point.rest_stage_s, 0.0 if point.after_read_s is None else point.after_read_s + there * read_s),
            0.0,
            read_s,
            missed,
            got_s.get(point.number),
        )
        put_s, get_s = (bounds.seconds(demand, workers, trainer_s) for bounds in (putting, got))
        to_write_s = storage.write_s(point.nbytes)
        writing_epochs = max(1.0, to_write_s / put_s) if put_s > 0 else 1.0
        written = min(float(epochs), writing_epochs)
        # While it is written, the share that is there is got: on average half.
        mean_s = (put_s + get_s) / 2 if writing_epochs > 1 else put_s
        seconds[f"keep {point.number}"] = (written * mean_s + (epochs - written) * get_s) / epochs
    if compute_s <= TIE * trainer_s:
        reason = "compute: the trainer is the bound, and waits for nothing"
        return CacheChoice(
            mode="compute",
            point=0,
            workers=_least(computing, demand, trainer_s),
            seconds_by_mode=seconds,
            reason=reason,
        )
    best = min(profile.points, key=lambda point: seconds[f"keep {point.number}"], default=None)
    if best is None or seconds[f"keep {best.number}"] * TIE >= compute_s:
        bound = computing.named(demand, workers, trainer_s)
        best_s = compute_s if best is None else seconds[f"keep {best.number}"]
        reason = f"compute: {_ms(compute_s)} an element, bound by {bound}; kept it would be {_ms(best_s)}"
        return CacheChoice(
            mode="compute",
            point=0,
            workers=_least(computing, demand, trainer_s),
            seconds_by_mode=seconds,
            reason=reason,
        )
    chosen = min(
        (point for point in profile.points if seconds[f"keep {point.number}"] <= TIE * seconds[f"keep {best.number}"]),
        key=lambda point: (
            _cost(seconds[f"keep {point.number}"], _least(getting[point.number], demand, trainer_s), demand),
            _least(getting[point.number], demand, trainer_s),  # which cost something, though nobody says how much
            point.nbytes,
        ),
    )
    bounds = getting[chosen.number]
    reason = (
        f"keep at point {chosen.number}: {_ms(seconds[f'keep {chosen.number}'])} an element instead of "
        f"{_ms(compute_s)} over {epochs} epochs, bound by {bounds.named(demand, workers, trainer_s)}"
    )
    return CacheChoice(
        mode="keep",
        point=chosen.number,
        workers=_least(bounds, demand, trainer_s),
        seconds_by_mode=seconds,
        reason=reason,
    )


def _least(bounds: _Bounds, demand: CacheDemand, trainer_s: float) -> int:
    """Return the smallest number of workers that is as fast as all that there may be."""
    best_s = bounds.seconds(demand, max(1, demand.max_workers), trainer_s)
    return next(
        workers
        for workers in range(1, max(1, demand.max_workers) + 1)
        if bounds.seconds(demand, workers, trainer_s) <= TIE * best_s
    )


def _cost(seconds: float, workers: int, demand: CacheDemand) -> float:
    return seconds * (workers * demand.worker_per_h + demand.trainer_per_h)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


# Cachew's own rule


GLUSTER_S = ((5e6, 5e6 / 0.94e9), (10e6, 0.0119), (100e6, 0.155), (400e6, 0.625))
"""Seconds by bytes of a row, as its code has them: of one set-up, from which every storage is judged."""


def gluster_s(nbytes: float) -> float:
    """Return the table's seconds for an element.

    >>> round(gluster_s(150e3) * 1e3, 3), round(gluster_s(10e6) * 1e3, 1)
    (0.16, 11.9)
    """
    size, seconds = next(((size, each) for size, each in GLUSTER_S if nbytes <= size), GLUSTER_S[-1])
    return seconds * nbytes / size


def cachew_choice(profile: PipelineProfile) -> CacheChoice:
    """Return what Cachew's rule chooses (ATC 2022, section 4.2): sums of times, a table for the storage.

    Points are the source (1) and the end (2), or what there is of them; the smallest sum wins, ties compute.

    >>> point = PointProfile(number=1, cpu_s=0.020, gil_s=0.0, nbytes=150e3)
    >>> cachew_choice(PipelineProfile(cpu_s=0.0205, gil_s=0.0, source_s=0.0001, points=(point,))).point
    1
    """
    compute_s = profile.cpu_s + profile.source_s
    seconds = {"compute": compute_s}
    for point in profile.points:
        seconds[f"keep {point.number}"] = max(0.0, profile.cpu_s - point.cpu_s) + gluster_s(point.nbytes)
    name = min(seconds, key=lambda each: (seconds[each], each != "compute"))
    point_number = 0 if name == "compute" else int(name.removeprefix("keep "))
    return CacheChoice(
        mode="compute" if not point_number else "keep",
        point=point_number,
        workers=1,
        seconds_by_mode=seconds,
        reason=f"{name}: {_ms(seconds[name])} an element by the table",
    )
