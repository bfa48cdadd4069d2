"""Requests of consumers that have opened an epoch."""

from __future__ import annotations

from collections.abc import Callable

from penstock.control import events as e
from penstock.control.draft import Asker, Decision, Draft
from penstock.control.opening import drop_left_behind, superseded
from penstock.control.placing import take_away
from penstock.control.records import Iteration, Stream
from penstock.control.runners import settle
from penstock.control.sharing import newest_life
from penstock.control.state import ClusterState
from penstock.control.views import change_since, view_of
from penstock.core.ids import ClientId
from penstock.wire.jobs import Slot
from penstock.wire.messages import Answer, Beat, Changes, CloseClient, Done, NotKnown, Rebind, Refused, View


def beat(state: ClusterState, request: Beat, asker: Asker, *, now: float, draw: Callable[[], str]) -> Decision:
    """Keep a lease. A client the journal knows gets one again after a restart, as if nothing had happened."""
    iteration = state.iteration(request.job, request.attempt)
    if iteration is None:
        return Decision((), NotKnown(what=f"attempt {request.attempt!r} of job {request.job!r}"))
    slot = _slot_of(iteration, request.client, request.consumer)
    if slot is None:
        now_there = [held.reader for slot, held in iteration.opened.items() if slot.consumer == request.consumer]
        reason = superseded(request.consumer, now_there[0] if len(now_there) == 1 else "")
        return Decision((), Refused(reason=reason, kind="superseded"))
    held = iteration.opened[slot]
    if held.life < newest_life(iteration, slot.trainer):
        reason = f"the trainer of consumer {request.consumer} has begun anew, without its states; restart all its ranks"
        return Decision((), Refused(reason=reason, kind="superseded"))
    if held.closed:
        return Decision((), Done())
    seen = e.ClientSeen(request.job, request.attempt, slot, request.client, asker.peer, now, request, asker.key)
    if state.reads(request.job, request.client):
        answer: Answer = Done()
        if request.version != state.view_version(request.attempt):
            change = change_since(state, request.job, request.attempt, request.version)
            if change is None:
                answer = View(view=view_of(state, request.job, request.attempt))
            else:
                answer = Changes(change=change)
        return Decision((seen,), answer)
    draft = Draft(state, now=now, draw=draw)
    draft.emit(seen)
    settle(draft, request.job)
    draft.publish()
    return draft.decision(View(view=view_of(draft.state, request.job, request.attempt)))


def _slot_of(iteration: Iteration, client: ClientId, consumer: int) -> Slot | None:
    return next(
        (slot for slot, held in iteration.opened.items() if slot.consumer == consumer and held.client == client), None
    )


def rebind_stream(draft: Draft, request: Rebind) -> Answer:
    iteration = draft.state.iteration(request.job, request.attempt)
    if iteration is None:
        return NotKnown(what=f"attempt {request.attempt!r} of job {request.job!r}")
    stream = iteration.streams.get(request.stream)
    if stream is None:
        return NotKnown(what=f"stream {request.stream!r} of attempt {request.attempt!r}")
    if stream.binding == request.binding and not stream.lost:
        _doubt(draft, stream)
        if stream.ended and not stream.reopened:
            draft.emit(e.StreamReopened(request.job, request.attempt, request.stream))
        present = draft.job(request.job).iterations[request.attempt].streams[request.stream]
        take_away(draft, request.job, request.attempt, [present], request.reason)
        settle(draft, request.job)
        draft.publish()
    return Done()


def _doubt(draft: Draft, stream: Stream) -> None:
    """Hold it against the agent of the process that a stream could not be read from, until it beats again."""
    worker = draft.state.workers.get(stream.bound.worker) if stream.bound is not None else None
    agent = draft.state.agents.get(worker.agent) if worker is not None else None
    if agent is not None and not agent.doubted:
        draft.emit(e.AgentDoubted(agent.agent))


def close_client(draft: Draft, request: CloseClient) -> Answer:
    iteration = draft.state.iteration(request.job, request.attempt)
    if iteration is not None:
        slot = _slot_of(iteration, request.client, request.consumer)
        if slot is not None and not iteration.opened[slot].closed:
            draft.emit(e.ConsumerClosed(request.job, request.attempt, slot, request.client, request.finished))
            if iteration.opened[slot].ahead and len(iteration.opened) == 1:
                draft.emit(e.IterationDropped(request.job, request.attempt, "opened ahead, and not read after all"))
            drop_left_behind(draft, request.job)
    if draft.state.reads(request.job, request.client):
        draft.emit(e.ClientGone(request.job, request.client, draft.now))
    if draft.events:
        settle(draft, request.job)
        draft.publish()
    return Done()
