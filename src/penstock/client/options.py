"""What `distribute` was asked for, checked at once: an argument that cannot work is refused before anything is sent.

Each record of `wire.modes` has checked itself; `check_together` has the rules about several of them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast, get_args

from msgspec.structs import replace

from penstock.client.limits import Limits
from penstock.client.sampling import DEFAULT_AHEAD, Feed, check_feed
from penstock.core.checks import check_choice
from penstock.core.errors import InvalidArgumentError, choice
from penstock.core.ids import JobName
from penstock.wire.modes import Guarantee, Order, Placement, Policy, Ranks, Sharding, Share, Target, Transport, Uneven

ShardingFunction: TypeAlias = Callable[[Sequence[Any], int], Sequence[Sequence[int]]]
"""`f(splits, workers)`: for each worker the numbers of the splits it reads."""

STREAMS_PER_RANK = 16
"""In deterministic order: enough to spread over many workers, few enough to be read in turn."""
COORDINATED_STREAMS = 8
"""In deterministic order with coordinated reads: each stream fills windows for all ranks, so fewer are enough."""
LAUNCHER_IDS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
NO_RUN_ID = frozenset({"", "none"})  # torchrun without --rdzv-id says "none"

_default_names: Counter[str] = Counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Checked arguments of `distribute`: what the whole job agrees on, and what is this process's own."""

    job: str | None
    ranks: Ranks
    order: Order
    sharding: Sharding
    sharing: Share | None
    placement: Placement
    transport: Transport
    limits: Limits
    owner: str
    rank: int
    """Which of the ranks this process is."""
    replica: int
    trainer: str | None
    """Which of the trainers that share the job this process is of."""
    writable: bool
    """What trainers share is copied, so that it may be written to."""
    shard: ShardingFunction | None
    """The user's own sharding."""
    feed: Feed | None
    """The process's own sampler says what is read: see `client.fed`."""

    @property
    def dealt_streams(self) -> int:
        """How many streams there are where splits are dealt to them, as in deterministic order."""
        return self.sharding.streams or _dealt_streams(self.ranks)


def check_options(
    *,
    job: str | None = None,
    consumers: int = 1,
    consumer: int | None = None,
    replica: int = 0,
    sharding: str | ShardingFunction = "dynamic",
    guarantee: str | None = None,
    order: str = "relaxed",
    uneven: str = "drop",
    coordinated: bool = False,
    streams: int | None = None,
    target: str = "any",
    requires: str | Iterable[str] = (),
    owner: str | None = None,
    max_workers: int | None = None,
    compression: str = "none",
    collect_after: float = 600.0,
    timeout: float | None = None,
    memory_bytes: int | None = None,
    sharing: str | None = None,
    trainer: str | None = None,
    window_bytes: int | None = None,
    trainer_timeout: float | None = None,
    trainers: int | None = None,
    writable: bool = False,
    feed: Any = None,
    feed_ahead: int = DEFAULT_AHEAD,
) -> JobOptions:
    """Return the options, or raise `InvalidArgumentError` naming the argument and the choices."""
    check_choice("compression", compression, ("none", "lz4", "zstd"))
    share = None
    if sharing is not None:
        more = {} if trainer_timeout is None else {"trainer_timeout_s": trainer_timeout}
        share = Share(cast(Any, sharing), trainer, window_bytes, trainers=trainers, writable=writable, **more)
    else:
        given = {"trainer": trainer, "window_bytes": window_bytes, "trainer_timeout": trainer_timeout}
        for name, value in {**given, "trainers": trainers, "writable": writable or None}.items():
            if value is not None:
                raise InvalidArgumentError(f"{name}={value!r} is for trainers that share a job: give sharing= too")
    function = sharding if callable(sharding) else None
    return job_options(
        job=job,
        ranks=Ranks(consumers, consumer, cast(Uneven, uneven), coordinated, replica),
        order=order,
        sharding=Sharding(
            "custom" if function is not None else cast(Policy, sharding),
            cast("Guarantee | None", guarantee),
            streams,
            function,
        ),
        sharing=share,
        placement=Placement(
            cast(Target, target), (requires,) if isinstance(requires, str) else tuple(requires), max_workers
        ),
        transport=cast(Transport, "auto" if compression == "none" else compression),
        limits=Limits(timeout_s=timeout, memory_bytes=memory_bytes, collect_after_s=collect_after),
        owner=owner or "",
        feed=None if feed is None else check_feed(feed, feed_ahead),
    )


def job_options(
    *,
    job: str | None,
    ranks: Ranks,
    order: str,
    sharding: Sharding,
    sharing: Share | None,
    placement: Placement,
    transport: Transport,
    limits: Limits,
    owner: str,
    feed: Feed | None,
) -> JobOptions:
    """Return the options, with what follows from several of them: the order, and how many streams there are."""
    if job is not None and (not isinstance(job, str) or not job.strip()):
        raise InvalidArgumentError(f"job={job!r} must be a name; leave it out to have one made")
    check_choice("order", order, get_args(Order))
    check_choice("transport", transport, get_args(Transport))
    if feed is not None or sharding.streams == 1:
        order = "deterministic"  # the sampler's; or a single stream's, which has but one
    check_together(ranks, cast(Order, order), sharding, sharing, feed)
    return JobOptions(
        job=job,
        ranks=ranks.agreed(),
        order=cast(Order, order),
        sharding=_with_streams(sharding, cast(Order, order), ranks, feed).agreed(),
        sharing=None if sharing is None else sharing.agreed(),
        placement=placement,
        transport=transport,
        limits=limits,
        owner=owner,
        rank=ranks.rank or 0,
        replica=ranks.replica,
        trainer=None if sharing is None else sharing.trainer,
        writable=sharing is not None and sharing.writable,
        shard=sharding.function,
        feed=feed,
    )


def check_together(ranks: Ranks, order: Order, sharding: Sharding, sharing: Share | None, feed: Feed | None) -> None:
    """Refuse records that do not go together; each has been checked by itself."""
    in_order = order == "deterministic"
    if ranks.rank is None and (ranks.count > 1 or ranks.coordinated):
        raise InvalidArgumentError(
            f"{ranks.count} ranks without a rank: say which of them this process is, 0 to {ranks.count - 1}"
            if ranks.count > 1
            else "coordinated=True without a rank: say how many processes read in step, and which of them this is"
        )
    if sharding.policy == "custom" and sharding.function is None:
        raise choice("sharding", "custom", (*get_args(Policy)[:-1], "a function of splits and workers"))
    if feed is not None:
        _check_fed(ranks, sharding, sharing)
    if ranks.coordinated and sharding.off:
        raise InvalidArgumentError(
            "coordinated=True with sharding='off': every worker runs over everything, so a round has no one group; "
            "use sharding='dynamic'"
        )
    if in_order and sharding.off:
        raise InvalidArgumentError(
            "order='deterministic' with sharding='off': every worker runs over everything in its own order; "
            "use sharding='dynamic'"
        )
    if not in_order and not ranks.coordinated and sharding.streams is not None:
        raise InvalidArgumentError(
            f"streams={sharding.streams} with order='relaxed': there every worker opens a stream as it joins; "
            "limit them with max_workers=, or use order='deterministic'"
        )
    if ranks.replica and not in_order:
        raise InvalidArgumentError(
            f"replica={ranks.replica} with order={order!r}: what comes first differs between two readers, so replicas "
            "would not read identical batches; use order='deterministic' (or streams=1)"
        )
    if ranks.uneven == "allow" and in_order:
        raise InvalidArgumentError(
            "uneven='allow' gives each stream to whichever rank has room, so it has no fixed order; "
            "use uneven='drop' or 'pad' with order='deterministic'"
        )
    if sharing is not None:
        _check_shared(sharing, ranks, in_order=in_order)


def _check_fed(ranks: Ranks, sharding: Sharding, sharing: Share | None) -> None:
    found = {
        f"sharding={sharding.policy!r}": sharding.policy != "dynamic",
        f"guarantee={sharding.guarantee!r}": sharding.guarantee != "exactly_once",
        f"uneven={ranks.uneven!r}": ranks.uneven != "drop",
        f"replica={ranks.replica}": bool(ranks.replica),
        "coordinated=True": ranks.coordinated,
        "sharing=": sharing is not None,
    }
    for argument, given in found.items():
        if given:
            raise InvalidArgumentError(
                f"{argument} with feed=: a rank reads what its own sampler says, alone and in its order; leave it out"
            )


def _check_shared(sharing: Share, ranks: Ranks, *, in_order: bool) -> None:
    if sharing.trainer is None:
        raise InvalidArgumentError(
            f"sharing={sharing.kind!r} without trainer=: the window keeps a place for each trainer, so each needs an "
            "id of its own that it has again when it is restarted, such as trainer='lr-0.01'"
        )
    if ranks.replica:
        raise InvalidArgumentError(
            f"sharing={sharing.kind!r} with replica={ranks.replica}: a trainer's place in the window is known by its "
            "trainer= id; give each replica an id of its own, and leave replica= out"
        )
    if ranks.uneven == "allow":
        raise InvalidArgumentError(
            f"sharing={sharing.kind!r} with uneven='allow': the ranks of a trainer take equal steps, whatever it "
            "skips; use uneven='drop' or 'pad'"
        )
    if in_order and not ranks.coordinated:
        raise InvalidArgumentError(
            f"sharing={sharing.kind!r} with order='deterministic' (or streams=1): there streams take turns by rounds "
            "that may be gone from the window; use order='relaxed'"
        )


def _with_streams(sharding: Sharding, order: Order, ranks: Ranks, feed: Feed | None) -> Sharding:
    """Return the sharding with the number of streams of a deterministic order, where none was given.

    Relaxed coordinated reads are left to the dispatcher, which knows the workers; fed ones to `client.fed`.
    """
    if sharding.streams or order != "deterministic" or feed is not None or sharding.policy != "dynamic":
        return sharding
    return replace(sharding, streams=_dealt_streams(ranks))


def _dealt_streams(ranks: Ranks) -> int:
    return COORDINATED_STREAMS if ranks.coordinated else STREAMS_PER_RANK * ranks.count


def job_name(
    options: JobOptions,
    fingerprint: str,
    environment: Mapping[str, str] = os.environ,
    counts: Counter[str] | None = None,
) -> JobName:
    """Return the name given, or one of the launcher's run id and the fingerprint: equal on all ranks of a run.

    A second loader over the same pipeline in one process is another job: its name gets a number, and ranks that make
    their loaders in the same order agree on it.
    """
    if options.job is not None:
        return JobName(options.job)
    short = fingerprint[:8]
    if options.sharing is not None:
        return JobName(f"shared-{short}")  # whoever runs the same pipeline is who to share it with
    for variable in LAUNCHER_IDS:
        run = environment.get(variable, "").strip()
        if run.lower() not in NO_RUN_ID:
            name = f"{run}-{short}"
            counts = _default_names if counts is None else counts
            counts[name] += 1
            return JobName(name if counts[name] == 1 else f"{name}-{counts[name]}")
    if options.ranks.count > 1:
        raise InvalidArgumentError(
            f"{options.ranks.count} ranks need one job name: give job=, or start under a launcher "
            f"that sets {' or '.join('$' + name for name in LAUNCHER_IDS)}"
        )
    # As `secrets` would, without importing it: a loader's own processes are started only when this module is there.
    return JobName(f"{os.urandom(4).hex()}-{short}")
