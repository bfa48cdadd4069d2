"""How a job is read, as values: each record is one decision, and refuses at once what cannot work.

All processes of a job agree on these records but for what is a process's own: which rank it is, of which trainer, and
the like. `agreed()` is a record without that, as it stands in the job's spec. Rules about several records together are
in `submission.options`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from msgspec.structs import force_setattr, replace

from penstock.core.checks import (
    MOST_COUNTED,
    check_choice,
    check_count,
    check_flag,
    check_names,
    check_positive,
    check_whole,
)
from penstock.core.errors import InvalidArgumentError
from penstock.core.records import UserRecord

Order: TypeAlias = Literal["relaxed", "deterministic"]
Uneven: TypeAlias = Literal["drop", "pad", "allow"]
Policy: TypeAlias = Literal["dynamic", "off", "file", "data", "file_or_data", "hint", "custom"]
Guarantee: TypeAlias = Literal["exactly_once", "at_most_once", "zero_or_more"]
ShareKind: TypeAlias = Literal["skip", "wait"]
Target: TypeAlias = Literal["local", "remote", "any"]
ReadBy: TypeAlias = Literal["workers", "trainer"]
"""workers: they open files and storage themselves. trainer: it reads for them, and they compute."""
WorkersAsked: TypeAlias = Literal["auto"] | int | tuple[int, int] | None
"""auto: as many as the trainer needs. A number: so many. (least, most): as auto, within these. None: all that fit."""
Transport: TypeAlias = Literal["auto", "sockets", "lz4", "zstd"]
"""auto: shared memory where a worker and its reader are on one host, sockets elsewhere. sockets: always. lz4, zstd: as
auto, with what goes through sockets compressed."""

GUEST = "guest:"
"""A worker whose tag begins so is a trainer's guest: it serves the jobs that name it, and no others."""
LAUNCHERS = {"torchrun": ("RANK", "WORLD_SIZE"), "Slurm": ("SLURM_PROCID", "SLURM_NTASKS")}
"""Where launchers say which process this is, and of how many. The first that does is believed."""
STATIC_POLICIES = frozenset({"file", "data", "file_or_data", "hint", "custom"})
SMALLEST_WINDOW_BYTES = 4096
REACH = 32
"""So many workers keep a rank supplied, though some of them are slow or lost, and are few connections."""
MOST_PRIORITY = 1000
MOST_WEIGHT = 1000.0


class Mode(UserRecord, frozen=True, omit_defaults=True):
    """Base of the records."""


class Ranks(Mode, frozen=True):
    """How many processes read one job together, and which of them this one is. All take the same number of steps.

    >>> Ranks(8, 3)
    Ranks(count=8, rank=3, uneven='drop', coordinated=False, replica=0, reach=32)
    >>> Ranks(8, 8)
    Traceback (most recent call last):
        ...
    penstock.core.errors.InvalidArgumentError: rank=8 is not one of 8 ranks: they are 0 to 7
    """

    count: int = 1
    rank: int | None = None
    """Which of them this process is, from 0 on. Its own."""
    uneven: Uneven = "drop"
    """What becomes of a last round that is not enough for all: dropped, filled up with elements of before, or each
    rank reads what there is for it, however many that are."""
    coordinated: bool = False
    """Each round is one group (the batches of one bucket), and ranks take rounds from the streams in turn: in each
    step all of them have batches of one bucket, padded alike."""
    replica: int = 0
    """Processes of one rank and different replicas read the same. Its own."""
    reach: int = REACH
    """With `uneven="allow"`: where there are more workers than this, a rank reads from about so many of them, and not
    from all. Ranks that take equal steps read from all workers."""

    def __post_init__(self) -> None:
        check_count("count", self.count)
        check_whole("replica", self.replica, 0)
        check_choice("uneven", self.uneven, get_args(Uneven))
        check_flag("coordinated", self.coordinated)
        check_count("reach", self.reach)
        if self.rank is not None:
            check_whole("rank", self.rank, 0)
            if self.rank >= self.count:
                raise InvalidArgumentError(
                    f"rank={self.rank} is not one of {self.count} ranks: they are 0 to {self.count - 1}"
                )
        if self.coordinated and self.uneven == "allow":
            raise InvalidArgumentError(
                "coordinated=True with uneven='allow': ranks would end at different steps, and nobody reads in step "
                "with one that has ended; use uneven='drop' or 'pad'"
            )

    @classmethod
    def from_environment(
        cls,
        *,
        uneven: Uneven = "drop",
        coordinated: bool = False,
        replica: int = 0,
        reach: int = REACH,
        environment: Mapping[str, str] | None = None,
    ) -> Ranks:
        """Return the rank that the launcher gave this process: torchrun (RANK, WORLD_SIZE) or Slurm (SLURM_PROCID).

        >>> Ranks.from_environment(environment={"RANK": "3", "WORLD_SIZE": "8"}).rank
        3
        """
        said = os.environ if environment is None else environment
        for launcher, (own, all_) in LAUNCHERS.items():
            rank, count = said.get(own), said.get(all_)
            if rank is None and count is None:
                continue
            if rank is None or count is None or not rank.isdecimal() or not count.isdecimal():
                raise InvalidArgumentError(
                    f"{launcher} sets ${own} and ${all_} to whole numbers, and here they are {rank!r} and {count!r}; "
                    "give ranks=Ranks(count, rank)"
                )
            return cls(int(count), int(rank), uneven, coordinated, replica, reach)
        names = " or ".join(f"${own} and ${all_}" for own, all_ in LAUNCHERS.values())
        raise InvalidArgumentError(
            f"no launcher says which rank this is: {names} are not set; start the process with torchrun or srun, or "
            "give ranks=Ranks(count, rank)"
        )

    def agreed(self) -> Ranks:
        """Return what all processes of the job agree on."""
        return replace(self, rank=None, replica=0)


class Sharding(Mode, frozen=True):
    """Which worker reads what, and what is promised when one of them dies.

    >>> Sharding("file").guarantee
    'exactly_once'
    >>> Sharding("off", "exactly_once")
    Traceback (most recent call last):
        ...
    penstock.core.errors.InvalidArgumentError: guarantee='exactly_once' with sharding='off': every worker reads \
everything, so only guarantee='zero_or_more' can be promised
    """

    policy: Policy = "dynamic"
    """dynamic: splits are granted to workers one after the other. off: every worker reads everything. file, data,
    file_or_data, hint: each worker's part is fixed up front. custom: a function of the user's says each worker's."""
    guarantee: Guarantee | None = None
    """None: the most the policy can promise, and that is what it becomes."""
    streams: int | None = None
    """How many, where that is the job's to say (deterministic order, coordinated reads); None: as workers join, or,
    for coordinated reads, as many as the workers there are when the job is made suggest."""
    function: Any = None
    """`f(splits, workers)`, of policy custom: for each worker the numbers of the splits it reads. Its own."""

    def __post_init__(self) -> None:
        check_choice("sharding", self.policy, get_args(Policy))
        if self.function is not None and (self.policy != "custom" or not callable(self.function)):
            raise InvalidArgumentError(
                f"function={self.function!r} with sharding={self.policy!r}: a function of splits and workers goes with "
                "sharding='custom'"
            )
        force_setattr(self, "guarantee", self._promise())
        if self.streams is None:
            return
        check_count("streams", self.streams)
        if self.off or self.static:
            how = "every worker reads everything" if self.off else "splits are assigned up front"
            raise InvalidArgumentError(
                f"streams={self.streams} with sharding={self.policy!r}: there is one stream a worker where {how}; "
                "leave streams= out"
            )

    def _promise(self) -> Guarantee:
        guarantee, off = self.guarantee, self.policy == "off"
        if guarantee is None:
            return "zero_or_more" if off else "exactly_once"
        check_choice("guarantee", guarantee, get_args(Guarantee))
        if off and guarantee != "zero_or_more":
            raise InvalidArgumentError(
                f"guarantee={guarantee!r} with sharding='off': every worker reads everything, "
                "so only guarantee='zero_or_more' can be promised"
            )
        if self.policy == "dynamic" and guarantee == "zero_or_more":
            raise InvalidArgumentError(
                "guarantee='zero_or_more' is what sharding='off' gives; dynamic sharding promises "
                "'exactly_once' or 'at_most_once'"
            )
        return guarantee

    @property
    def off(self) -> bool:
        """Every worker reads everything."""
        return self.policy == "off"

    @property
    def static(self) -> bool:
        """Splits are assigned up front."""
        return self.policy in STATIC_POLICIES

    def agreed(self) -> Sharding:
        """Return what all processes of the job agree on."""
        return replace(self, function=None)


class Share(Mode, frozen=True):
    """Trainers read the same outputs out of a window on each worker, which makes them once.

    >>> Share("wait", "lr-0.01", trainers=4).waits
    True
    """

    kind: ShareKind
    """skip: what a slow trainer misses is gone. wait: the others wait for it."""
    trainer: str | None = None
    """An id that this trainer has again when it is restarted. Its own."""
    window_bytes: int | None = None
    """How large each worker's window is; None: the worker decides."""
    trainer_timeout_s: float = 30.0
    """After so long without a word a trainer is gone, and waited for no more."""
    trainers: int | None = None
    """How many will read every epoch from its beginning, where trainers are waited for; None: those who come."""
    writable: bool = False
    """Arrays may be written to: each is a copy of what the window holds. Its own."""

    def __post_init__(self) -> None:
        check_choice("sharing", self.kind, get_args(ShareKind))
        if self.trainer is not None and (not isinstance(self.trainer, str) or not self.trainer.strip()):
            raise InvalidArgumentError(f"trainer={self.trainer!r} must be a name, such as trainer='lr-0.01'")
        if self.window_bytes is not None:
            check_whole("window_bytes", self.window_bytes, SMALLEST_WINDOW_BYTES)
        check_positive("trainer_timeout_s", self.trainer_timeout_s)
        if self.trainers is not None:
            check_count("trainers", self.trainers)
            if not self.waits:
                raise InvalidArgumentError(
                    f"trainers={self.trainers} says who is waited for, and sharing={self.kind!r} waits for none"
                )
        check_flag("writable", self.writable)

    @property
    def waits(self) -> bool:
        """Nothing leaves the window before all trainers have read it."""
        return self.kind == "wait"

    def agreed(self) -> Share:
        """Return what all processes of the job agree on."""
        return replace(self, trainer=None, writable=False)


def check_workers(name: str, asked: object) -> WorkersAsked:
    """Return how many workers are asked for, as records hold it.

    >>> check_workers("workers", [2, 8])
    (2, 8)
    >>> check_workers("workers", (8, 2))
    Traceback (most recent call last):
        ...
    penstock.core.errors.InvalidArgumentError: workers=(8, 2) must be 'auto', a number of workers, or (least, most)
    """
    if asked is None or asked == "auto":
        return "auto" if asked else None
    pair = tuple(asked) if isinstance(asked, (tuple, list)) else (asked, asked)
    whole = all(isinstance(each, int) and not isinstance(each, bool) for each in pair)
    if len(pair) != 2 or not whole or not 1 <= pair[0] <= pair[1] <= MOST_COUNTED:
        raise InvalidArgumentError(f"{name}={asked!r} must be 'auto', a number of workers, or (least, most)")
    return pair if isinstance(asked, (tuple, list)) else pair[0]


def guest_of(tags: tuple[str, ...]) -> str:
    """Return the name that a worker with such tags is a guest by; empty: it is none.

    >>> guest_of(("ssd", "guest:trainer-1")), guest_of(("ssd",))
    ('trainer-1', '')
    """
    return next((tag.removeprefix(GUEST) for tag in tags if tag.startswith(GUEST)), "")


class Placement(Mode, frozen=True):
    """Which workers serve the job.

    >>> Placement(requires="gpu").requires
    ('gpu',)
    >>> Placement(workers=(2, 8), priority=1).workers
    (2, 8)
    >>> Placement(cache="auto").cache
    'auto'
    """

    target: Target = "any"
    """Which hosts' workers serve it: the host that made the job, the others, or all."""
    requires: tuple[str, ...] = ()
    """Tags that a worker must have, all of them; one may be given as it is."""
    max_workers: int | None = None
    workers: WorkersAsked = None
    """How many of them: "auto" for as many as the trainer needs, a number, or (least, most) to keep "auto" within; such
    workers are the job's alone while there are enough. None: all that fit, up to `max_workers`, beside other jobs."""
    priority: int = 0
    """Jobs of a higher priority are given workers first, and take them over. Of jobs that say `workers`."""
    weight: float = 1.0
    """How much of its owner's share of the workers the job gets, beside the owner's other jobs of the priority."""
    cache: str | None = None
    """Whether workers keep between epochs what they make, where measurements say that it pays: "auto" in a folder of
    their host's, else the folder or URL to keep it at. None: where `autocache()` stands in the pipeline."""
    guests: str = ""
    """The name of workers that a trainer lets join for its own jobs; for `target` they are local, and all others
    remote. Empty: it has none."""
    guest_pace: float = 1.0
    """How fast a guest works, beside a worker elsewhere: where order is deterministic, streams are dealt so."""
    read_by: ReadBy = "workers"
    """Who opens what the sources name. A trainer reads for all workers but its guests, and sends them what it read: of
    files that only its host has, or has nearer."""

    def __post_init__(self) -> None:
        check_choice("target", self.target, get_args(Target))
        check_choice("read_by", self.read_by, get_args(ReadBy))
        check_positive("guest_pace", self.guest_pace)
        force_setattr(self, "requires", check_names("requires", self.requires, "tags of workers: names"))
        if self.max_workers is not None:
            check_count("max_workers", self.max_workers)
        force_setattr(self, "workers", check_workers("workers", self.workers))
        if (
            self.cache is not None
            and self.cache != "auto"
            and (not isinstance(self.cache, str) or "/" not in self.cache)
        ):
            raise InvalidArgumentError(
                f"cache={self.cache!r} must be 'auto', or the folder or URL where workers keep what they make"
            )
        check_whole("priority", self.priority, -MOST_PRIORITY)
        check_positive("weight", self.weight)
        if self.priority > MOST_PRIORITY or self.weight > MOST_WEIGHT:
            raise InvalidArgumentError(
                f"priority={self.priority} with weight={self.weight}: priorities are {-MOST_PRIORITY} to "
                f"{MOST_PRIORITY}, weights {MOST_WEIGHT} at most"
            )
        if self.workers is None and (self.priority or self.weight != 1.0):
            raise InvalidArgumentError(
                "priority= and weight= say who is given workers first, and a job without workers= takes all that fit; "
                "say workers='auto' too"
            )
        if self.workers is not None and self.max_workers is not None:
            raise InvalidArgumentError(
                f"max_workers={self.max_workers} with workers={self.workers!r}: give the most with "
                f"workers=(1, {self.max_workers}), and leave max_workers= out"
            )

    def takes(self, host: str, *, creator: str, tags: tuple[str, ...] = ()) -> bool:
        """Say whether a worker on `host` may serve a job that was made on the host `creator`.

        >>> mixed, alone = Placement(guests="trainer-1"), Placement(guests="trainer-1", target="local")
        >>> [placement.takes("a", creator="a", tags=("guest:trainer-1",)) for placement in (mixed, alone, Placement())]
        [True, True, False]
        >>> [placement.takes("a", creator="a") for placement in (mixed, alone, Placement(target="local"))]
        [True, False, True]
        """
        guest = guest_of(tags)
        if guest and guest != self.guests:
            return False
        near = bool(guest) if self.guests else host == creator
        return self.target == "any" or (self.target == "local") == near


class Access(Mode, frozen=True):
    """Who else may read the job, and whose job this process reads: principals, by the names of their keys.

    >>> Access(share_with="bob").share_with
    ('bob',)
    """

    share_with: tuple[str, ...] = ()
    """Who may read and steer the job besides its owner; one name may be given as it is. The job's maker says so."""
    trust: tuple[str, ...] = ()
    """Whose job or registered pipeline may be read besides one's own: it gives what that principal's code makes."""

    def __post_init__(self) -> None:
        for name in ("share_with", "trust"):
            meant = "names of principals, as `penstock keys list` shows them"
            force_setattr(self, name, check_names(name, getattr(self, name), meant))
