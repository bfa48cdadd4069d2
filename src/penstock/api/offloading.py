"""`offload`: read a pipeline with this host's processors, and with those of a service where they help."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self, get_args

from penstock.api.cut_ways import CutWay, CutWays
from penstock.api.dataset import Dataset
from penstock.api.epochs import FromService, WayOfReading
from penstock.api.loader import Loader, make_loader
from penstock.api.offload_memory import ServiceMemory
from penstock.api.offloaded import OffloadCourse, Offloaded
from penstock.api.services import OwnedService
from penstock.client.backend import LAUNCHER_IDS
from penstock.core.checks import check_choice, check_positive, check_whole
from penstock.core.element import Element
from penstock.core.errors import InvalidArgumentError
from penstock.core.records import UserRecord
from penstock.graph.cutting import ALL_THERE, Cuts, cuts_of
from penstock.graph.node import Node
from penstock.graph.traverse import rewrite
from penstock.passes.shuffles import merge_shuffles, move_shuffles
from penstock.policies.offloading import Offload, OffloadLimits, OffloadProfile, ReadingPlace
from penstock.processes.guests import GuestWorkers, new_guest_name
from penstock.runtime.budget import available_cores
from penstock.submission.options import JobOptions, Limits, check_options
from penstock.wire.addresses import host_id
from penstock.wire.credentials import SERVICE_VARIABLE, Credentials, ServiceFile, find_service
from penstock.wire.modes import Access, Order, Placement, Policy, Ranks, Sharding, Transport

LOCAL_RANKS_VARIABLE = "LOCAL_WORLD_SIZE"
OffloadTo = OwnedService | str | os.PathLike[str] | None


def offload(
    dataset: Dataset,
    service: OffloadTo = None,
    *,
    job: str | None = None,
    ranks: Ranks | None = None,
    order: Order = "relaxed",
    seed: int | None = None,
    sharding: Policy | Callable[[Sequence[Any], int], Sequence[Sequence[int]]] | Sharding = "dynamic",
    placement: Placement | None = None,
    transport: Transport = "auto",
    limits: Limits | None = None,
    access: Access | None = None,
    offloading: Offloading | None = None,
) -> OffloadLoader:
    """Read a dataset with the processors of this host first, and with a service's where they help; return the loader.

    Real batches are read in one way after the other for a while, and the training goes on meanwhile: whether the step
    waits at all, and what each part of the pipeline gains elsewhere. Then the fastest way is kept, and remembered by
    the service for the next run; `decision` says which and why. Elements, batches, random numbers and states are those
    of `distribute`, and most arguments are too:

    - `service` is an address or a service file, a `LocalService`, or None: what $PENSTOCK_SERVICE names.
    - `placement` limits the workers elsewhere: `Placement(max_workers=4)`.
    - `offloading` says what this host lends, and how it is measured.
    """
    options = check_options(
        job=job,
        ranks=ranks,
        order=order,
        seed=seed,
        sharding=sharding,
        placement=placement,
        transport=transport,
        limits=limits,
        access=access,
    )
    if not isinstance(dataset, Dataset):
        raise InvalidArgumentError(f"offload() takes a dataset, not {type(dataset).__name__}")
    if isinstance(service, bool) or not isinstance(service, (OwnedService, str, os.PathLike, type(None))):
        raise InvalidArgumentError(f"service={service!r} must be an address, a service file or a LocalService")
    if service is None and not os.environ.get(SERVICE_VARIABLE):
        raise InvalidArgumentError(
            f"offload() needs a service to offload to: give its address, or set ${SERVICE_VARIABLE}; "
            "distribute() reads with the processors of this host alone"
        )
    if options.sharding.off or options.sharding.static:
        raise InvalidArgumentError(
            f"offload() with sharding={options.sharding.policy!r}: places pull from the same splits, so that none may "
            "be another's; use sharding='dynamic'"
        )
    if options.placement.workers is not None or options.placement.target != "any":
        raise InvalidArgumentError(
            "offload() decides itself how many workers are used, and where: limit those elsewhere with "
            "placement=ps.Placement(max_workers=)"
        )
    if offloading is not None and not isinstance(offloading, Offloading):
        raise InvalidArgumentError(
            f"offloading={offloading!r} must be a ps.Offloading, such as ps.Offloading(guests=4)"
        )
    return OffloadLoader(dataset, service, options, offloading or Offloading())


class Offloading(UserRecord, frozen=True, kw_only=True):
    """What this host lends to its training, and how ways of reading are measured.

    >>> Offloading(guests=4, model="resnet50, batch 256").window_s
    1.0
    """

    guests: int | None = None
    """How many worker processes of this host join the service for the job, at most; None: one a core. They are fewer
    where the training step needs the processors."""
    keys: str | os.PathLike[str] | None = None
    """A file with the key they join with, an agent's; None: the service file has one."""
    model: str = ""
    """A name of the model and its batch: what was measured with another is not taken for it. Empty: the pipeline has
    one model."""
    window_s: float = 1.0
    """How long each way is measured."""
    cut: str | None = None
    """The name of the cut to read at (`OffloadLoader.cuts`), so that nothing is measured; None: the fastest."""
    place: ReadingPlace = "both"
    """Who works on what stands before a cut that is given: the guests here, the workers there, or both."""

    def __post_init__(self) -> None:
        check_positive("window_s", self.window_s)
        check_choice("place", self.place, get_args(ReadingPlace))
        if self.cut is None and self.place != "both":
            raise InvalidArgumentError(
                f"place={self.place!r} without a cut: it says who works on what stands before one; give cut='all there'"
            )
        if self.guests is not None:
            check_whole("guests", self.guests, 1)


class OffloadLoader(Loader):
    """What `offload` returns. It is read, saved and loaded as any loader; `decision` says where it runs, and why."""

    def __init__(self, dataset: Dataset, service: OffloadTo, options: JobOptions, offloading: Offloading) -> None:
        """Use `offload`, which checks what it is given."""
        plan = dataset._plan
        self._dataset, self._service, self._options, self._offloading = dataset, service, options, offloading
        self._cuts = cuts_of(move_shuffles(merge_shuffles(plan.node)), coordinated=options.ranks.coordinated)
        cores = available_cores()
        fixed = _as_asked(offloading, self._cuts, cores)
        guests = new_guest_name()
        if options.ranks.count > 1:
            guests = _guests_of_ranks(options)
            fixed = _for_ranks(options, fixed, guests)
        remote_only = fixed is not None and fixed.place == "there" and options.ranks.count > 1
        starts = not remote_only and options.rank == 0
        self._guests = Guests(service, offloading, cores, guests) if starts else None
        self._ways = CutWays(dataset, options, partial(_make_source, service), "" if remote_only else guests)
        first = self._ways.source(CutWay(cut=self._cuts.legal[0], place="there" if remote_only else "here"))
        self._course = OffloadCourse(
            self._cuts,
            cores=cores,
            limits=OffloadLimits(most_here=offloading.guests, most_there=options.placement.max_workers),
            window_s=offloading.window_s,
            memory=ServiceMemory(first.backend, plan.fingerprint, model=offloading.model),
            resize=self._resize,
            fixed=fixed,
        )
        self._offloaded = Offloaded(plan, options, self._ways, self._course)
        super().__init__(first, memory_bytes=options.limits.memory_bytes, seed=options.seed)

    def _choose_kind(self) -> WayOfReading:
        return self._offloaded

    def __iter__(self) -> Iterator[Element]:
        if self._guests is not None and self._course.way.place != "there":
            self._guests.start()
        return super().__iter__()

    def _resize(self, guests: int) -> None:
        if self._guests is not None:
            self._guests.at_most(guests)

    @property
    def decision(self) -> Offload | None:
        """Where it is read, and why; None: that is still being measured."""
        return self._course.decision

    @property
    def profile(self) -> OffloadProfile | None:
        """What was measured so far; None: nothing."""
        return self._course.profile

    @property
    def cuts(self) -> Cuts:
        """Where the pipeline may be cut in two, and where not, and why."""
        return self._cuts

    def close(self) -> None:
        """Let go of everything at once, the guests of this host too; what is on its way is dropped."""
        super().close()
        self._ways.close()
        if self._guests is not None:
            self._guests.close()

    def _over(self, node: Node) -> Self:
        """Return a loader of the longer pipeline: what follows `offload` may go elsewhere, too."""
        first, dataset = self._node, self._dataset
        whole = Dataset(rewrite(node, lambda each: dataset.node if each is first else each))
        return type(self)(whole, self._service, self._options, self._offloading)


def offloaded(pipeline: Any, service: OffloadTo) -> Any:
    """Return what a framework's `offload=` makes of a pipeline: None leaves it as it is, a service offloads a dataset.

    A framework has a batch or two in its hands when it saves: in deterministic order it resumes bit for bit.
    """
    if service is None:
        return pipeline
    if not isinstance(pipeline, Dataset):
        raise InvalidArgumentError(
            f"offload= takes a dataset, not {type(pipeline).__name__}: it makes the loader; leave distribute() out"
        )
    return offload(pipeline, service, order="deterministic")


class Guests:
    """This host's guest workers, started when something is read."""

    def __init__(self, service: OffloadTo, offloading: Offloading, cores: int, name: str) -> None:
        self._joining = _joining(service, offloading.keys)
        self._count = min(offloading.guests or cores, cores)
        self.name = name
        self._started: GuestWorkers | None = None

    def start(self) -> None:
        if self._started is None:
            self._started = GuestWorkers(self._joining, self.name, self._count)

    def at_most(self, count: int) -> None:
        """Have no more of them than that; a training that was slower before may have had fewer."""
        if self._started is not None:
            self._started.resize(min(count, self._count))

    def pids(self) -> list[int]:
        return [] if self._started is None else self._started.pids()

    def close(self) -> None:
        if self._started is not None:
            self._started.close()


def _guests_of_ranks(options: JobOptions, environment: Mapping[str, str] = os.environ) -> str:
    """Return the name of the guests of all ranks, where they are all on this host; empty: they are not, or may not be.

    Launchers say how many ranks a host has, and a job of several ranks has one name on all of them.
    """
    if environment.get(LOCAL_RANKS_VARIABLE) != str(options.ranks.count):
        return ""
    run = options.job or next((environment[name] for name in LAUNCHER_IDS if name in environment), "")
    return hashlib.blake2b(f"{run} {host_id()}".encode(), digest_size=8).hexdigest() if run else ""


def _for_ranks(options: JobOptions, asked: Offload | None, guests: str) -> Offload:
    """Return how several ranks read: as asked for, or all there. To measure, they would have to change in one step."""
    if asked is not None and (asked.place == "there" or guests):
        return asked
    return Offload(
        cut=ALL_THERE if asked is None or asked.cut is None else asked.cut,
        here=0,
        there=0,
        reason=f"{options.ranks.count} ranks read every stream, and guests serve the ranks of their own host alone: "
        "workers elsewhere do everything",
    )


def _as_asked(offloading: Offloading, cuts: Cuts, cores: int) -> Offload | None:
    """Return the way that was asked for; None: the fastest is to be found."""
    name, place = offloading.cut, offloading.place
    if name is None:
        return None
    if cuts.named(name) is None:
        why = next((f": {cut.why}" for cut in cuts.illegal if cut.name == name), "")
        raise InvalidArgumentError(f"cut={name!r} is none of {', '.join(map(repr, cuts.names))}{why}")
    if place == "here" and name != ALL_THERE:
        raise InvalidArgumentError(f"place='here' with cut={name!r}: here everything is done; use cut={ALL_THERE!r}")
    return Offload(
        cut=None if place == "here" else name,
        here=0 if place == "there" else min(offloading.guests or cores, cores),
        there=0,
        reason="as asked",
    )


def _joining(service: OffloadTo, keys: str | os.PathLike[str] | None) -> ServiceFile:
    """Return how guests reach a service: with the key of an agent."""
    found = (
        ServiceFile.read(service.service_file).for_role("agent")
        if isinstance(service, OwnedService)
        else find_service(None if service is None else os.fspath(service), "agent")
    )
    if keys is not None:
        found = ServiceFile(address=found.address, credentials=Credentials.read(os.fspath(keys)))
    if found.credentials.role != "agent":
        raise InvalidArgumentError(
            "offload() lets processes of this host join the service as workers, and there is no key for that here: "
            "give keys= the file of an agent's key, as `penstock keys` writes it"
        )
    return found


def _make_source(service: OffloadTo, dataset: Dataset, options: JobOptions) -> FromService:
    return make_loader(dataset, service, options)._sources[0]
