"""Granting splits: the one hot request, so it makes no draft and looks at nothing it does not need.

The n-th split of a stream's list is always the same: asked again, with the same `after`, the same is answered. A list
only grows, and only by splits that nobody else has: in the order of the pass, but for those that a runner asks for
because its host keeps what they give. The list of a retired stream grows no more (`placing`). One that had ended for a
stream when a checkpoint was saved has ended for it there as well: see `resuming`.
"""

from __future__ import annotations

from penstock.control.draft import Decision
from penstock.control.events import SplitsGranted
from penstock.control.state import ClusterState
from penstock.wire.messages import Granted, GrantSplits, NotKnown, Refused

WORTH_OF_WORK_S = 0.5  # a grant lasts about that long, so that asking is hidden and little is held back at the end
LEAST_WORTH_S = 0.02  # nobody notices who has to wait so long for the last ones; each grant is a commit
MOST_AT_ONCE = 128  # and a part of what is left, so that several hundred short splits are a dozen grants
PLENTY_A_STREAM = 4  # with fewer left than this, one held in advance may be what the epoch's end waits for
MOST_AGAIN = 4096  # of a list that is read again


def grant_splits(state: ClusterState, request: GrantSplits) -> Decision:
    iteration = state.iteration(request.job, request.attempt)
    if iteration is None:
        return Decision((), NotKnown(what=f"attempt {request.attempt!r} of job {request.job!r}"))
    stream = iteration.streams.get(request.stream)
    ledger = iteration.ledger
    if stream is None or stream.feed.kind != "granted":
        return _refuse(f"no splits are granted to stream {request.stream!r}", "unknown_stream")
    if stream.binding != request.binding or stream.lost:
        return _refuse(f"stream {request.stream!r} is at binding {stream.binding}, not {request.binding}", "stale")
    if not 0 <= request.source < len(ledger.counts):
        return _refuse(f"the job has no source {request.source}", "unknown_source")
    granted = ledger.lists.get((request.stream, request.source, request.pass_), ())
    cursor = ledger.cursor(request.source, request.pass_)
    few = PLENTY_A_STREAM * len(iteration.streams)
    after = request.after
    if after is None:
        if granted:
            return Decision((), Granted(ordinals=tuple(granted[:MOST_AGAIN]), plenty=cursor.left > few))
    elif not granted or granted[-1] != after:
        if after not in granted:
            return _refuse(f"split {after} was never granted to stream {request.stream!r}", "unknown_split")
        # `granted` holds an ordinal once, so its place is that of the first equal one.
        place = granted.index(after) + 1
        return Decision((), Granted(ordinals=tuple(granted[place : place + MOST_AGAIN]), plenty=cursor.left > few))
    retired = any(source == request.source and request.pass_ <= last for source, last in stream.retired)
    if retired or not cursor.left or not ledger.may_grow(request.stream, request.source, request.pass_):
        return Decision((), Granted(ordinals=()))
    many = grant_size(request.seconds_per_split, cursor.left, len(iteration.streams))
    ordinals = cursor.choose(many, request.preferred[:MOST_AT_ONCE])
    event = SplitsGranted(request.job, request.attempt, request.stream, request.source, request.pass_, ordinals)
    return Decision((event,), Granted(ordinals=ordinals, plenty=cursor.left - len(ordinals) > few))


def grant_size(seconds_per_split: float, left: int, streams: int) -> int:
    """Return how many splits to grant: more of short ones, fewer toward the end.

    >>> grant_size(0.0, 1000, 2), grant_size(0.1, 1000, 2), grant_size(0.001, 1000, 2), grant_size(0.005, 9, 2)
    (1, 5, 128, 4)
    """
    if seconds_per_split <= 0 or seconds_per_split >= WORTH_OF_WORK_S:
        return 1
    most = min(MOST_AT_ONCE, int(WORTH_OF_WORK_S / seconds_per_split))
    least = min(most, int(LEAST_WORTH_S / seconds_per_split))
    return max(1, least, min(most, left // (2 * streams)))


def _refuse(reason: str, kind: str) -> Decision:
    return Decision((), Refused(reason=reason, kind=kind))
