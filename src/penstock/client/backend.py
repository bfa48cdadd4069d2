"""A job as a loader uses it: made ready once, opened epoch by epoch, closed with the loader."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from penstock.client.ahead import NextEpoch
from penstock.client.link import Patience, ServiceLink, find_when_there
from penstock.client.reader import EpochReader
from penstock.client.session import Beginning, EpochSession
from penstock.core.errors import ForkedLoaderError, InvalidArgumentError, StateMismatchError
from penstock.core.host_memory import HostMemory
from penstock.core.ids import Fingerprint, JobName
from penstock.graph.value_digest import arrays_unchanged
from penstock.relays.trainer_sources import TrainerSources
from penstock.relays.uplink import Uplink
from penstock.runtime.budget import default_budget
from penstock.runtime.distributable import for_workers
from penstock.runtime.placement import check_weights_midway, mix_weights
from penstock.runtime.stats import ReaderClock
from penstock.samplers.drawing import Drawing, Feed, SamplerPlace
from penstock.samplers.feeder import Feeder
from penstock.samplers.pipelines import grouping_of
from penstock.stream.checkpoint import Checkpoint, Weights
from penstock.submission.jobs import Pipeline, Prepared, Submission, fed_source, identified, prepare, submission
from penstock.submission.options import JobOptions
from penstock.wire.credentials import ServiceFile
from penstock.wire.figures import JobFigures
from penstock.wire.messages import Answer, FiguresAnswer, GetFigures, Request
from penstock.wire.modes import Ranks

MOST_DEFAULT_BYTES = 512 << 20  # of windows: more in flight than this hides nothing more
UPLINK_SHARE = 1 / 8  # of that, for what is read for runners and not sent
LAUNCHER_IDS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
NO_RUN_ID = frozenset({"", "none"})  # torchrun without --rdzv-id says "none"

_default_names: Counter[str] = Counter()


class ServiceBackend:
    """Nothing is sent, or even encoded, before the first epoch is opened."""

    def __init__(
        self,
        pipeline: Pipeline,
        options: JobOptions,
        find: Callable[[], ServiceFile],
        on_close: Callable[[], None] | None = None,
        expected_workers: Callable[[], int] = lambda: 1,
        memory: HostMemory | None = None,
    ) -> None:
        """`expected_workers` is how many the service will have, as far as is known here. `memory`: its workers are on
        this host, end with this process, and map large arrays from there.
        """
        self.options, self._memory = options, memory
        self._pipeline, self._find = pipeline, find
        self._expected_workers = expected_workers
        self._prepared: Prepared | None = None
        self._identified: dict[int, Prepared] = {}
        self._submissions: dict[tuple[Fingerprint, int, int], Submission] = {}
        self._workers: int | None = None
        self.seed: int | None = None
        """The job's, which whoever made it drew where none is given; None: it was not opened yet."""
        self._jobs: dict[Fingerprint, JobName] = {}
        self._fed_lists: bool | None = None
        """Whether the sampler gives lists, once it has given something."""
        self._links: list[ServiceLink] = []
        self._uplinks: dict[Fingerprint, Uplink] = {}
        self._pid = os.getpid()
        self._closed = False
        self._refusal: Exception | None = None
        goes_ahead = options.feed is None and options.sharing is None and not options.sharding.off
        exactly = options.sharding.guarantee != "at_most_once"  # what is opened and left would count as given
        self._next_epoch = NextEpoch(weakref.ref(self)) if goes_ahead and exactly else None
        self._finalizer = weakref.finalize(self, _close, self._pid, self._links, self._uplinks, on_close)

    @property
    def prepared(self) -> Prepared:
        """The pipeline, checked and encoded; refused here if it cannot be shipped."""
        if self._prepared is None:
            with arrays_unchanged():
                self._prepared = prepare(
                    self._pipeline, self.options, fed_lists=bool(self._fed_lists), memory=self._memory
                )
        return self._prepared

    def _prepared_with(self, identities: int | None) -> Prepared:
        """Return the pipeline whose outputs carry identities, those of its first source by that number."""
        if identities is None:
            return self.prepared
        if identities not in self._identified:
            self._identified[identities] = identified(self.prepared, identities, self._memory)
        return self._identified[identities]

    def _job_of(self, prepared: Prepared) -> JobName:
        if prepared.fingerprint not in self._jobs:
            name, options = job_name(self.options, prepared.fingerprint), self.options
            own = options.feed is not None and options.ranks.count > 1
            self._jobs[prepared.fingerprint] = JobName(f"{name}.{options.rank}") if own else name
        return self._jobs[prepared.fingerprint]

    def check(self, checkpoint: Checkpoint) -> None:
        """Refuse a state of a job that was dealt or cut otherwise."""
        state, options = checkpoint.first, self.options
        if (state.sampler is not None) != (options.feed is not None):
            was, is_ = ("with", "without") if state.sampler is not None else ("without", "with")
            raise StateMismatchError(
                f"the state was saved by a loader {was} feed=, and this one is {is_} it; what follows depends on it"
            )
        if options.feed is not None:
            if checkpoint.own is None:
                raise StateMismatchError(
                    f"the state was saved by {state.consumers} consumers and there are {options.ranks.count} now: "
                    "where each one's sampler stood says nothing about other samplers. Load it with as many consumers, "
                    "or start the epoch anew"
                )
            return
        if state.splits != self.prepared.splits_digest:
            raise StateMismatchError(
                "the state was saved with the data cut into other splits (another sharding, or another release); "
                "load it with the sharding it was saved with, or start the epoch anew"
            )
        ranks = options.ranks
        rules: tuple[tuple[str, object, object, str], ...] = (
            ("order", state.order, options.order, "; which elements follow depends on it"),
            ("coordinated", state.coordinated, ranks.coordinated, "; rounds are grouped in another way"),
        )
        if "allow" in (state.uneven, ranks.uneven):
            rules = (*rules, ("uneven", state.uneven, ranks.uneven, ""))
        for name, saved, given, why in rules:
            if saved != given:
                raise StateMismatchError(
                    f"the state was saved with {name}={saved!r} and this loader has {name}={given!r}{why}"
                )

    def open(
        self, beginning: Beginning, *, identities: int | None = None, clock: ReaderClock | None = None
    ) -> EpochReader:
        """Open an epoch and return its reader; waits for the service.

        With `identities` its outputs are pairs of an element and its identity (`runtime.ops.identified`); it is the
        number by which they name the pipeline's first source. `clock`: the trainer's, if operators here read instead.
        """
        self._check_open()
        successor = self._next_epoch
        ahead = None if successor is None else successor.take(beginning, identities)
        if ahead is not None and successor is not None:
            ahead.arrive(clock, owner=self, successor=successor)
            reader = ahead
        else:
            reader = self.reader_of(self.open_session(beginning, identities, clock), owner=self, successor=successor)
        if successor is not None:
            successor.begun(beginning, identities)
        return reader

    def open_session(
        self,
        beginning: Beginning,
        identities: int | None,
        clock: ReaderClock | None = None,
        *,
        patience: Patience | None = None,
    ) -> EpochSession:
        """Open an epoch at the dispatcher; `patience`: see `EpochSession`."""
        options, checkpoint, feeder = self.options, beginning.checkpoint, None
        streams = checkpoint.first.width if checkpoint is not None else 0
        if options.feed is not None:
            feeder = self._feeder(options.feed, beginning)
            options = replace(options, ranks=Ranks(), rank=0)  # a job of this consumer's own
        prepared, link = self._prepared_with(identities), self._link()
        job = self._job_of(prepared)
        submitted = self._submission(prepared, options, link, beginning.seed, streams)
        met = {"met": self._uplink(prepared, link).reach} if options.placement.read_by == "trainer" else {}
        session = EpochSession(link, job, options, submitted, beginning, feeder, clock, patience, **met)
        self.seed = session.opened.spec.seed
        return session

    def _uplink(self, prepared: Prepared, link: ServiceLink) -> Uplink:
        """Return what reads for the runners of a job."""
        if prepared.fingerprint not in self._uplinks:
            sources = TrainerSources(prepared.root, prepared.listings, self.options.placement.cache)
            memory_bytes = int(self._memory_bytes * UPLINK_SHARE)
            self._uplinks[prepared.fingerprint] = Uplink(link.reading_key, sources, memory_bytes)
        return self._uplinks[prepared.fingerprint]

    @property
    def _memory_bytes(self) -> int:
        """What windows may have."""
        return self.options.limits.memory_bytes or min(MOST_DEFAULT_BYTES, default_budget(None, None).memory_bytes)

    def reader_of(self, session: EpochSession, owner: object = None, successor: NextEpoch | None = None) -> EpochReader:
        """Return the reader of an epoch. Without an owner it does not keep the loader."""
        timeout_s = self.options.limits.timeout_s
        try:
            return EpochReader(
                session, memory_bytes=self._memory_bytes, timeout_s=timeout_s, owner=owner, successor=successor
            )
        except BaseException:
            session.close(finished=False)
            raise

    def check_weights(self, weights: Sequence[float]) -> Weights:
        """Return weights that a mix of this pipeline can go by, as its operator takes them."""
        if self.options.sharing is not None or self.options.feed is not None:
            argument = "feed=" if self.options.sharing is None else "sharing="
            raise InvalidArgumentError(
                f"set_weights() with {argument}: what is read there is not this loader's alone to say, or not mixed"
            )
        return mix_weights(for_workers(self._pipeline.node, self.options.sharding.policy), tuple(weights))

    def check_weights_midway(self) -> None:
        """Refuse other weights in the middle of an epoch where something read by the old ones goes on to count."""
        check_weights_midway(self.prepared.root, hinted=self.options.sharding.policy == "hint")

    def _feeder(self, feed: Feed, beginning: Beginning) -> Feeder:
        """Return what feeds an epoch: it begins where the sampler stood, and nothing else is resumed."""
        checkpoint, options = beginning.checkpoint, self.options
        if checkpoint is not None:
            self.check(checkpoint)
        own = None if checkpoint is None else checkpoint.own
        drawing = Drawing(
            feed,
            epoch=beginning.epoch,
            grouping=grouping_of(self._pipeline.node),
            count=len(fed_source(self._pipeline)),
            at=None if own is None else SamplerPlace.read(own.sampler),
        )
        if self._fed_lists is None:
            self._fed_lists = drawing.lists
            self._prepared = None
            self._identified.clear()
        if drawing.lists not in (None, self._fed_lists):
            raise InvalidArgumentError(
                "the sampler gave lists of indices in one epoch and single ones in another; it must give one kind"
            )
        return Feeder(drawing, ahead=feed.ahead, consumer=options.rank, consumers=options.ranks.count)

    def fed_length(self) -> int | None:
        """Return how many outputs an epoch of the consumer's own sampler has, where it says."""
        assert self.options.feed is not None
        return self.options.feed.length(grouping_of(self._pipeline.node), self._fed_lists)

    def _submission(
        self, prepared: Prepared, options: JobOptions, link: ServiceLink, seed: int | None, streams: int
    ) -> Submission:
        chosen = (self._pipeline.seed if self.seed is None else self.seed) if seed is None else seed
        key = (prepared.fingerprint, chosen, streams)
        made = self._submissions.get(key)
        if made is None:
            made = self._submissions[key] = submission(
                prepared, options, seed=chosen, workers=lambda: self._count_workers(link), streams=streams or None
            )
        return made

    def _count_workers(self, link: ServiceLink) -> int:
        if self._workers is None:
            patience = Patience(self.options.limits.timeout_s, "the first worker")
            self._workers = link.count_workers(patience, self._expected_workers())
        return self._workers

    def _link(self) -> ServiceLink:
        if not self._links:
            service = find_when_there(self._find, Patience(self.options.limits.timeout_s, "the service"))
            self._links.append(ServiceLink(service, name=f"loader-{self.options.rank}"))
        return self._links[0]

    def figures(self, timeout_s: float) -> JobFigures:
        """Return what the service knows of the job in numbers; of one that it does not know, none."""
        self._check_open()
        job = next(reversed(self._jobs.values()), None) or self._job_of(self.prepared)  # what was opened last
        answer = self._link().control.ask(GetFigures(job=job), timeout_s=timeout_s, what=f"figures of job {job!r}")
        return answer.figures if isinstance(answer, FiguresAnswer) else JobFigures(job=job)

    def ask(self, request: Request, *, timeout_s: float, what: str) -> Answer:
        """Ask the dispatcher something that is about no epoch."""
        return self._link().control.ask(request, timeout_s=timeout_s, what=what)

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise ForkedLoaderError
        if self._closed:
            raise InvalidArgumentError("this loader is closed; make a new one with distribute()")
        if self._refusal is not None:
            raise self._refusal

    def refuse(self, error: Exception) -> None:
        """Have what is being read, and whatever is opened from now on, end with this error. From any thread."""
        self._refusal = error
        for link in self._links:
            for board in list(link.boards.values()):
                board.put_refusal(error)

    def close(self) -> None:
        self._closed = True
        if self._next_epoch is not None:
            self._next_epoch.close()
        self._finalizer()


def _close(
    pid: int,
    links: list[ServiceLink],
    uplinks: Mapping[Fingerprint, Uplink],
    on_close: Callable[[], None] | None,
) -> None:
    if os.getpid() != pid:
        return
    for uplink in uplinks.values():
        uplink.close()
    for link in links:
        link.close()
    if on_close is not None:
        on_close()


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
