"""What `distribute` was asked for, checked at once: an argument that cannot work is refused before anything is sent.

Each record of `wire.modes` has checked itself; `check_together` has the rules about several of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast, get_args

import msgspec
from msgspec.structs import replace

from penstock.core.checks import check_choice, check_positive, check_whole
from penstock.core.errors import InvalidArgumentError, choice
from penstock.core.records import UserRecord
from penstock.runtime.budget import check_memory
from penstock.samplers.drawing import Feed
from penstock.wire.modes import Access, Order, Placement, Policy, Ranks, Sharding, Share, Transport

ShardingFunction: TypeAlias = Callable[[Sequence[Any], int], Sequence[Sequence[int]]]
"""`f(splits, workers)`: for each worker the numbers of the splits it reads."""

STREAMS_PER_RANK = 16
"""How many streams a rank has in deterministic order: enough to spread over many workers, few enough to be read in
turn."""
COORDINATED_STREAMS = 8
"""How many streams there are in deterministic order with coordinated reads: each fills windows for all ranks, so fewer
are enough."""

_Record = TypeVar("_Record")


class Limits(UserRecord, frozen=True, kw_only=True):
    """Times and sizes that a loader keeps to.

    >>> Limits(timeout_s=60).collect_after_s
    600.0
    """

    timeout_s: float | None = None
    """Waiting longer than this for a batch is an error; None: it waits."""
    memory_bytes: int | None = None
    """What may be received ahead; None: a tenth of the memory this process may use."""
    lost_workers: int | None = None
    """Of a stream: more processes than that, lost in a row before they gave anything, are an error; None: never."""
    collect_after_s: float = 600.0
    """A job that no process has held for so long is forgotten."""

    def __post_init__(self) -> None:
        if self.timeout_s is not None:
            check_positive("timeout_s", self.timeout_s)
        if self.lost_workers is not None:
            check_whole("lost_workers", self.lost_workers, 0)
        if self.memory_bytes is not None:
            check_whole("memory_bytes", self.memory_bytes, 1)
            check_memory(self.memory_bytes)
        check_positive("collect_after_s", self.collect_after_s)


class JobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Checked arguments of `distribute`: what the whole job agrees on, and what is this process's own."""

    job: str | None
    ranks: Ranks
    order: Order
    seed: int | None
    """All random numbers follow from it; None: the dataset's seed counts."""
    sharding: Sharding
    sharing: Share | None
    placement: Placement
    transport: Transport
    limits: Limits
    access: Access
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
    """The process's own sampler says what is read: see `penstock.samplers`."""

    @property
    def dealt_streams(self) -> int:
        """How many streams there are where splits are dealt to them, as in deterministic order."""
        return self.sharding.streams or _dealt_streams(self.ranks)


def check_options(
    *,
    job: str | None = None,
    ranks: Ranks | None = None,
    order: Order = "relaxed",
    seed: int | None = None,
    sharding: Policy | ShardingFunction | Sharding = "dynamic",
    sharing: Share | None = None,
    feed: Any = None,
    placement: Placement | None = None,
    transport: Transport = "auto",
    limits: Limits | None = None,
    access: Access | None = None,
) -> JobOptions:
    """Return the options, with what follows from several of them: the order, and how many streams there are."""
    if job is not None and (not isinstance(job, str) or not job.strip()):
        raise InvalidArgumentError(f"job={job!r} must be a name; leave it out to have one made")
    if seed is not None:
        check_whole("seed", seed, 0)
    check_choice("order", order, get_args(Order))
    check_choice("transport", transport, get_args(Transport))
    ranks = _record("ranks", ranks, Ranks, "Ranks(8, rank)") or Ranks()
    sharing = _record("sharing", sharing, Share, "Share('wait', trainer='lr-0.01')")
    placement = _record("placement", placement, Placement, "Placement(max_workers=4)") or Placement()
    limits = _record("limits", limits, Limits, "Limits(timeout_s=60)") or Limits()
    access = _record("access", access, Access, "Access(share_with='bob')") or Access()
    sharding = _sharding(sharding)
    fed = feed if feed is None or isinstance(feed, Feed) else Feed(feed)
    if fed is not None or sharding.streams == 1:
        order = "deterministic"  # the sampler's; or a single stream's, which has but one
    check_together(ranks, order, sharding, sharing, fed)
    if sharding.off and placement.workers is not None:
        raise InvalidArgumentError(
            f"workers={placement.workers!r} with sharding='off': every worker reads everything, so that their number "
            "is what is read; limit it with max_workers=, or use sharding='dynamic'"
        )
    return JobOptions(
        job=job,
        ranks=ranks.agreed(),
        order=order,
        seed=seed,
        sharding=_with_streams(sharding, order, ranks, fed).agreed(),
        sharing=None if sharing is None else sharing.agreed(),
        placement=placement,
        transport=transport,
        limits=limits,
        access=access,
        rank=ranks.rank or 0,
        replica=ranks.replica,
        trainer=None if sharing is None else sharing.trainer,
        writable=sharing is not None and sharing.writable,
        shard=sharding.function,
        feed=fed,
    )


def _record(argument: str, value: _Record | None, kind: type[_Record], example: str) -> _Record | None:
    if value is None or isinstance(value, kind):
        return value
    raise InvalidArgumentError(f"{argument}={value!r} must be a ps.{kind.__name__}, such as ps.{example}")


def _sharding(given: str | ShardingFunction | Sharding) -> Sharding:
    if isinstance(given, Sharding):
        return given
    return Sharding("custom", function=given) if callable(given) else Sharding(cast(Policy, given))


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
            "limit them with placement=ps.Placement(max_workers=), or use order='deterministic'"
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

    Relaxed coordinated reads are left to the dispatcher, which knows the workers; fed ones to `submission.feeds`.
    """
    if sharding.streams or order != "deterministic" or feed is not None or sharding.policy != "dynamic":
        return sharding
    return replace(sharding, streams=_dealt_streams(ranks))


def _dealt_streams(ranks: Ranks) -> int:
    return COORDINATED_STREAMS if ranks.coordinated else STREAMS_PER_RANK * ranks.count
