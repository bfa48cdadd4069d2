"""The cluster's state together with the journal that backs it.

Rules. A decision's events are applied at once, so that the next request is decided on them; nothing that follows from
them is said before `commit()` returned. When a write fails, memory is thrown away and read again from disk. Until a
write has worked, decisions that would need one are not applied, and those that need none are.

`decide` is pure: when it fails, our code has a bug and the state is whole, so that one request is refused. When
applying its events fails, memory is read again (`StateBrokenError`).

A peer that has seen a higher position than ours proves that the journal lost its end: see `reconcile`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from penstock.control.decide import decide, tick
from penstock.control.draft import Decision
from penstock.control.events import (
    AnyEvent,
    DispatcherBegan,
    ElementsBlamed,
    JobCollected,
    JobCreated,
    JobRescaled,
    JobSteered,
    LeasesBegan,
    decode,
    encode,
)
from penstock.control.permissions import may_use_blob, refusal
from penstock.control.records import Job
from penstock.control.revoking import revoke
from penstock.control.scaling_rules import DEFAULT_RULES, ScalingRules
from penstock.control.snapshot import restore, snapshot
from penstock.control.state import ClusterState
from penstock.core.errors import JournalCorruptError, JournalError, JournalWriteError, PenstockError
from penstock.core.ids import BlobHash, RunnerId
from penstock.dispatcher.blobs import BlobStore
from penstock.dispatcher.journal import Journal
from penstock.dispatcher.key_registry import KeyChanges
from penstock.wire.messages import Answer, GetBlob, PutBlob, Refused, Request, TryAgain
from penstock.wire.principals import Principal

# Others have seen a little more or less of the lost end than the first who shows up: one step takes us past them all.
POSITION_LEAP = 1_000_000
RETRY_WRITE_S = 0.5
COMPLAIN_S = 10.0

_log = logging.getLogger(__name__)


class StateBrokenError(PenstockError):
    """A decision did not fit the state. Memory has been read again from disk: what was not committed is undone."""


class JournaledState:
    """See the module. Raises `JournalWriteError` where a write failed; memory is then right again, answers are not."""

    def __init__(
        self,
        journal: Journal,
        blobs: BlobStore,
        *,
        draw: Callable[[], str],
        now: float,
        rules: ScalingRules = DEFAULT_RULES,
    ) -> None:
        self._journal, self._blobs, self._draw, self._rules = journal, blobs, draw, rules
        self._pending: list[AnyEvent] = []
        self.state = ClusterState()
        self.broken = ""
        """Why nothing can be written at the moment; empty: it can."""
        self._retry_at = 0.0
        self._complain_at = float("-inf")
        self.write_failures = self.tails_lost = self.events = self.commits = 0
        self.failures = 0
        """How many requests and ticks made our own code fail."""
        self._load()
        self._begin(now)

    @property
    def position(self) -> int:
        return self._journal.position

    @property
    def blobs(self) -> int:
        return len(self._blobs.whole)

    def _load(self) -> None:
        recovered = self._journal.load()
        if recovered.torn:
            _log.warning("the journal's end was torn and has been dropped", extra={"position": self.position})
        self._pending.clear()
        try:
            self.state = ClusterState() if recovered.snapshot is None else restore(recovered.snapshot)
            for row in recovered.rows:
                for event in decode(row):
                    self.state.apply(event)
        except (msgspec.MsgspecError, PenstockError) as error:
            where = str(self._journal.directory)
            remedy = "start the release that wrote it, or move it away"
            raise JournalCorruptError(where, self.position, f"an event cannot be applied: {error}", remedy) from error

    def _begin(self, now: float) -> None:
        """All leases begin anew, and versions of views with a new generation."""
        try:
            self._keep(DispatcherBegan(self.state.generation + 1), LeasesBegan(now))
            self.commit(now)
        except JournalWriteError:
            pass  # `recover` has begun them; the generation is written as soon as anything can be

    def _keep(self, *events: AnyEvent) -> None:
        for event in events:
            self.state.apply(event)
            if event.JOURNALED:
                self._pending.append(event)

    def answer(self, request: Request, *, principal: Principal, key: str = "", peer: str, now: float) -> Decision:
        """Decide and apply. What is returned may be sent after `commit()`."""
        if isinstance(request, PutBlob | GetBlob):
            return _only(self._blob(request, principal, now))
        try:
            decision = decide(
                self.state,
                request,
                principal=principal,
                key=key,
                now=now,
                peer=peer,
                draw=self._draw,
                blobs=UsableBlobs(self._blobs, self.state, principal),
                rules=self._rules,
            )
        except Exception as error:
            self.failures += 1
            kind = type(request).__name__
            _log.exception("a request made the dispatcher fail and is refused", extra={"request": kind})
            return _only(refusal_of(error))
        return self._take(decision, now)

    def tick(self, now: float) -> Decision:
        """Let time pass."""
        if self.broken and now >= self._retry_at:
            self._try_writing(now)
        try:
            decision = tick(self.state, now=now, draw=self._draw, rules=self._rules)
        except Exception:
            self.failures += 1
            if now >= self._complain_at:
                self._complain_at = now + COMPLAIN_S
                _log.exception("the dispatcher failed over a tick")
            return _only(None)
        return self._take(decision, now)

    def _take(self, decision: Decision, now: float) -> Decision:
        if self.broken and any(event.JOURNALED for event in decision.events):
            return _only(TryAgain(reason=self.broken))
        try:
            self._keep(*decision.events)
        except Exception as error:
            self.failures += 1
            _log.exception("a decision does not fit the state; memory is read again from disk")
            self._load()
            self._begin(now)
            raise StateBrokenError(f"{type(error).__name__}: {error}; see the dispatcher's log") from error
        return decision

    def revoke(self, changes: KeyChanges, now: float) -> Decision:
        """Have keys that were taken back open nothing any more."""
        keys = frozenset(key.verifier for key in changes.revoked)
        return self._take(revoke(self.state, keys=keys, gone=changes.gone, now=now, draw=self._draw), now)

    def blob_bytes(self, owner: str) -> int:
        return self._blobs.bytes_of(owner)

    def _blob(self, request: PutBlob | GetBlob, principal: Principal, now: float) -> Answer:
        refused = refusal(self.state, principal, request)
        if refused is not None and not self._sent_it(request, principal):
            return refused
        if isinstance(request, PutBlob) and self.broken:
            return TryAgain(reason=self.broken)
        try:
            if isinstance(request, PutBlob):
                return self._blobs.put(request, by=principal.name, now=now)
            return self._blobs.get(request, now=now)
        except JournalWriteError as error:
            self.recover(error, now)
            raise
        except JournalError as error:
            if isinstance(request, PutBlob):
                self._blobs.reopen()  # what was written of it is undone; a file that cannot be read at all ends us
            return refusal_of(error)

    def _sent_it(self, request: PutBlob | GetBlob, principal: Principal) -> bool:
        return principal.role in ("operator", "trainer") and self._blobs.has(request.hash, principal.name)

    def commit(self, now: float) -> None:
        """Return once everything decided so far is on disk."""
        if self.broken:
            return  # then nothing is pending
        try:
            self._blobs.commit()  # before the events that refer to them
            if self._pending:
                self._journal.append(encode(self._pending), to=self.position + len(self._pending))
                self.events += len(self._pending)
                self.commits += 1
                self._pending.clear()
        except JournalWriteError as error:
            self.recover(error, now)
            raise

    def recover(self, error: PenstockError, now: float) -> None:
        """Throw memory away and read it from disk; until a write has worked again, only what needs none is done."""
        self.write_failures += 1
        self.broken = str(error)
        self._retry_at = now + RETRY_WRITE_S
        _log.error("the journal cannot be written; memory is read again from disk", extra={"reason": self.broken})
        self._journal.reopen()
        self._blobs.reopen()
        self._load()
        self.state.apply(LeasesBegan(now))

    def _try_writing(self, now: float) -> None:
        reason, self.broken = self.broken, ""
        try:
            self._keep(DispatcherBegan(self.state.generation + 1))
            self.commit(now)
        except JournalWriteError:
            return
        _log.warning("the journal can be written again", extra={"was": reason})

    def reconcile(self, seen: int, now: float) -> None:
        """Go on after a peer showed a position that our journal no longer has.

        What it lost cannot be told from here: splits were granted, bindings raised, attempts begun. Clients hold states
        that say. So every attempt is forgotten at once, not only that of the peer: clients hear `NotKnown` and come
        back with what they have received, and nothing is granted out of the forgotten. See docs/design/0003-journal.md.
        """
        if self.broken:
            raise JournalWriteError(str(self._journal.directory), self.broken)
        self.tails_lost += 1
        _log.error("the journal has lost its end", extra={"position": self.position, "seen_by_a_peer": seen})
        for job in list(self.state.jobs.values()):
            self._keep(*_without_attempts(job))
        self._keep(LeasesBegan(now))
        try:
            self._journal.append(encode(self._pending), to=seen + POSITION_LEAP)
        except JournalWriteError as error:
            self.recover(error, now)
            raise
        self._pending.clear()

    def snapshot_if_due(self, now: float) -> None:
        if not self._journal.snapshot_is_due or self.broken:
            return
        try:
            self._journal.snapshot(snapshot(self.state))
        except JournalWriteError as error:
            self.recover(error, now)

    def drop_unused_blobs(self, now: float) -> int:
        if self.broken:
            return 0
        in_use: set[BlobHash] = set()
        for spec in [job.spec for job in self.state.jobs.values()] + list(self.state.pipelines.values()):
            in_use |= {spec.graph, spec.splits}
        try:
            dropped = self._blobs.drop_unused(in_use, now=now)
            self._blobs.commit()
        except JournalWriteError as error:
            self.recover(error, now)
            return 0
        return dropped


class UsableBlobs:
    """The blobs that are there and that a principal may refer to: those it sent, and those of what it may read.

    Else who knows a blob's name could make a job of it, and be sent its content.
    """

    def __init__(self, blobs: BlobStore, state: ClusterState, principal: Principal) -> None:
        self._blobs, self._state, self._principal = blobs, state, principal

    def __contains__(self, blob: object) -> bool:
        if blob not in self._blobs.whole:
            return False
        name = BlobHash(str(blob))
        return self._blobs.has(name, self._principal.name) or may_use_blob(self._state, self._principal, name)


def _without_attempts(job: Job) -> list[AnyEvent]:
    """Return what makes a job anew with none of its attempts, nor of the clients that must be free to return."""
    events: list[AnyEvent] = [JobCollected(job.name, "the dispatcher's journal lost its end")]
    events.append(JobCreated(job.name, job.spec))
    if job.suspects or job.dropped:
        events.append(ElementsBlamed(job.name, RunnerId(""), (), job.suspects, job.dropped))
    if job.paused or job.failure:
        events.append(JobSteered(job.name, job.paused, job.failure))
    if job.scaling.asked is not None:
        events.append(JobRescaled(job.name, job.scaling.asked))
    return events


def _only(answer: Answer | None) -> Decision:
    return Decision(events=(), answer=answer, pushes=())


def refusal_of(error: Exception) -> Refused:
    reason = f"the dispatcher failed over this request ({type(error).__name__}: {error}); see its log"
    return Refused(reason=reason, kind="RefusedError")
