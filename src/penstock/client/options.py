"""What `distribute` was asked for, checked at once: an argument that cannot work is refused before anything is sent."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

from penstock.client.sampling import DEFAULT_AHEAD, Feed, check_feed
from penstock.client.sharing import SharingOptions, check_sharing
from penstock.core.errors import InvalidArgumentError, choice
from penstock.core.ids import JobName
from penstock.runtime.budget import check_memory
from penstock.wire.jobs import Guarantee, Order, Sharding, Target, Uneven

Compression: TypeAlias = Literal["none", "lz4", "zstd"]
ShardingFunction: TypeAlias = Callable[[Sequence[Any], int], Sequence[Sequence[int]]]
"""`f(splits, workers)`: for each worker the numbers of the splits it reads."""

SHARDINGS = ("dynamic", "off", "file", "data", "file_or_data", "hint")
STATIC_SHARDINGS = frozenset({"file", "data", "file_or_data", "hint", "custom"})
GUARANTEES = get_args(Guarantee)
ORDERS = get_args(Order)
UNEVENS = get_args(Uneven)
TARGETS = get_args(Target)
COMPRESSIONS = get_args(Compression)
STREAMS_PER_CONSUMER = 16
"""In deterministic order: enough to spread over many workers, few enough to be read in turn."""
COORDINATED_STREAMS = 8
"""In deterministic order with coordinated reads: each stream fills windows for all consumers, so fewer are enough."""
LAUNCHER_IDS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
NO_RUN_ID = frozenset({"", "none"})  # torchrun without --rdzv-id says "none"

_default_names: Counter[str] = Counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Checked arguments of `distribute`. `sharding` is "custom" where the user gave a function."""

    job: str | None
    consumers: int
    consumer: int
    replica: int
    sharding: Sharding
    shard: ShardingFunction | None
    guarantee: Guarantee
    order: Order
    uneven: Uneven
    coordinated: bool
    streams: int
    target: Target
    requires: tuple[str, ...]
    owner: str
    weight: float
    max_workers: int
    max_bytes: int
    compression: Compression
    collect_after_s: float
    timeout_s: float | None
    memory_bytes: int | None
    sharing: SharingOptions | None = None
    feed: Feed | None = None
    """The consumer's own sampler says what is read: see `client.fed`."""

    @property
    def dealt_streams(self) -> int:
        """How many streams there are where splits are dealt to them, as in deterministic order."""
        return self.streams or (COORDINATED_STREAMS if self.coordinated else STREAMS_PER_CONSUMER * self.consumers)

    @property
    def static(self) -> bool:
        """Splits are assigned up front."""
        return self.sharding in STATIC_SHARDINGS


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
    weight: float = 1.0,
    max_workers: int | None = None,
    max_bytes: int | None = None,
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
    if job is not None and (not isinstance(job, str) or not job.strip()):
        raise InvalidArgumentError(f"job={job!r} must be a name; leave it out to have one made")
    _whole("consumers", consumers, 1)
    _whole("replica", replica, 0)
    own = _consumer(consumers, consumer)
    kind, function = _sharding(sharding)
    _one_of("order", order, ORDERS)
    _one_of("uneven", uneven, UNEVENS)
    _one_of("target", target, TARGETS)
    _one_of("compression", compression, COMPRESSIONS)
    promised = _guarantee(guarantee, kind)
    _whole("streams", streams, 1)
    _whole("max_workers", max_workers, 1)
    _whole("max_bytes", max_bytes, 1)
    _whole("memory_bytes", memory_bytes, 1)
    if memory_bytes is not None:
        check_memory(memory_bytes)
    _positive("weight", weight)
    _positive("timeout", timeout)
    _positive("collect_after", collect_after)
    if owner is not None and not isinstance(owner, str):
        raise InvalidArgumentError(f"owner={owner!r} must be a name")
    tags = tuple(requires) if isinstance(requires, Iterable) and not isinstance(requires, str) else (requires,)
    if not all(isinstance(tag, str) and tag for tag in tags):
        raise InvalidArgumentError(f"requires={requires!r} must be tags of workers: names")
    if coordinated:
        _check_coordinated(consumer, kind, uneven)
    fed = None if feed is None else check_feed(feed, feed_ahead)
    if fed is not None:
        _check_fed(kind, promised, uneven, replica, coordinated=bool(coordinated), sharing=bool(sharing))
        order = "deterministic"  # the sampler's
        count = streams or 0
    else:
        count = _streams(streams, order, kind, consumers, coordinated=bool(coordinated))
    if count == 1:
        order = "deterministic"  # a single stream has but one order, and as many as the job says are made only there
    if replica and order != "deterministic":
        raise InvalidArgumentError(
            f"replica={replica} with order={order!r}: what comes first differs between two readers, so replicas would "
            "not read identical batches; use order='deterministic' (or streams=1)"
        )
    if uneven == "allow" and order == "deterministic":
        raise InvalidArgumentError(
            "uneven='allow' gives each stream to whichever consumer has room, so it has no fixed order; "
            "use uneven='drop' or 'pad' with order='deterministic'"
        )
    shared = check_sharing(
        sharing,
        trainer=trainer,
        window_bytes=window_bytes,
        trainer_timeout=trainer_timeout,
        trainers=trainers,
        writable=writable,
        coordinated=bool(coordinated),
        uneven=uneven,
        replica=replica,
        order=order,
    )
    return JobOptions(
        job=job,
        consumers=consumers,
        consumer=own,
        replica=replica,
        sharding=kind,
        shard=function,
        guarantee=promised,
        order=cast(Order, order),
        uneven=cast(Uneven, uneven),
        coordinated=bool(coordinated),
        streams=count,
        target=cast(Target, target),
        requires=tags,
        owner=owner or "",
        weight=float(weight),
        max_workers=max_workers or 0,
        max_bytes=max_bytes or 0,
        compression=cast(Compression, compression),
        collect_after_s=float(collect_after),
        timeout_s=timeout,
        memory_bytes=memory_bytes,
        sharing=shared,
        feed=fed,
    )


def _check_fed(
    sharding: Sharding, guarantee: Guarantee, uneven: str, replica: int, *, coordinated: bool, sharing: bool
) -> None:
    found = {
        f"sharding={sharding!r}": sharding != "dynamic",
        f"guarantee={guarantee!r}": guarantee != "exactly_once",
        f"uneven={uneven!r}": uneven != "drop",
        f"replica={replica}": bool(replica),
        "coordinated=True": coordinated,
        "sharing=": sharing,
    }
    for argument, given in found.items():
        if given:
            raise InvalidArgumentError(
                f"{argument} with feed=: a consumer reads what its own sampler says, alone and in its order; "
                "leave it out"
            )


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
    if options.consumers > 1:
        raise InvalidArgumentError(
            f"consumers={options.consumers} need one job name on all ranks: give job=, or start under a launcher "
            f"that sets {' or '.join('$' + name for name in LAUNCHER_IDS)}"
        )
    # As `secrets` would, without importing it: a loader's own processes are started only when this module is there.
    return JobName(f"{os.urandom(4).hex()}-{short}")


def _consumer(consumers: int, consumer: int | None) -> int:
    if consumer is None:
        if consumers > 1:
            raise InvalidArgumentError(
                f"consumers={consumers} without consumer=: say which of them this process is, 0 to {consumers - 1}"
            )
        return 0
    _whole("consumer", consumer, 0)
    if consumer >= consumers:
        raise InvalidArgumentError(
            f"consumer={consumer} is not one of consumers={consumers}: they are 0 to {consumers - 1}"
        )
    return consumer


def _sharding(sharding: object) -> tuple[Sharding, ShardingFunction | None]:
    if callable(sharding):
        return "custom", cast(ShardingFunction, sharding)
    if sharding not in SHARDINGS:
        raise choice("sharding", sharding, (*SHARDINGS, "a function of splits and workers"))
    return cast(Sharding, sharding), None


def _guarantee(guarantee: str | None, sharding: Sharding) -> Guarantee:
    if guarantee is not None:
        _one_of("guarantee", guarantee, GUARANTEES)
    if sharding == "off":
        if guarantee not in (None, "zero_or_more"):
            raise InvalidArgumentError(
                f"guarantee={guarantee!r} with sharding='off': every worker reads everything, "
                "so only guarantee='zero_or_more' can be promised"
            )
        return "zero_or_more"
    if sharding == "dynamic" and guarantee == "zero_or_more":
        raise InvalidArgumentError(
            "guarantee='zero_or_more' is what sharding='off' gives; dynamic sharding promises "
            "'exactly_once' or 'at_most_once'"
        )
    return cast(Guarantee, guarantee or "exactly_once")


def _check_coordinated(consumer: int | None, sharding: Sharding, uneven: str) -> None:
    if consumer is None:
        raise InvalidArgumentError(
            "coordinated=True without consumers= and consumer=: say how many processes read in step, and which of "
            "them this is"
        )
    if sharding == "off":
        raise InvalidArgumentError(
            "coordinated=True with sharding='off': every worker runs over everything, so a round has no one group; "
            "use sharding='dynamic'"
        )
    if uneven == "allow":
        raise InvalidArgumentError(
            "coordinated=True with uneven='allow': consumers would end at different steps, and nobody reads in step "
            "with one that has ended; use uneven='drop' or 'pad'"
        )


def _streams(streams: int | None, order: str, sharding: Sharding, consumers: int, *, coordinated: bool = False) -> int:
    if sharding in STATIC_SHARDINGS:
        if streams is not None:
            raise InvalidArgumentError(
                f"streams={streams} with sharding={sharding!r}: there is one stream a worker where splits are assigned "
                "up front; leave streams= out"
            )
        return 0
    if sharding == "off":
        if order == "deterministic":
            raise InvalidArgumentError(
                "order='deterministic' with sharding='off': every worker runs over everything in its own order; "
                "use sharding='dynamic'"
            )
        if streams is not None:
            raise InvalidArgumentError(f"streams={streams} with sharding='off': there is one stream a worker")
        return 0
    if coordinated:
        # In relaxed order the dispatcher, who knows the workers, fills a 0 in.
        return streams or (COORDINATED_STREAMS if order == "deterministic" else 0)
    if order == "deterministic":
        return streams or STREAMS_PER_CONSUMER * consumers
    if streams is not None and streams > 1:
        raise InvalidArgumentError(
            f"streams={streams} with order='relaxed': there every worker opens a stream as it joins; "
            "limit them with max_workers=, or use order='deterministic'"
        )
    return streams or 0


def _one_of(argument: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise choice(argument, value, allowed)


def _whole(argument: str, value: object, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgumentError(f"{argument}={value!r} must be a whole number of at least {least}")


def _positive(argument: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0 or math.isnan(value):
        raise InvalidArgumentError(f"{argument}={value!r} must be a number above 0")
