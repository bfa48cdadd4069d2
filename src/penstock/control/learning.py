"""What trainers keep in the metric store: each principal under keys of its own, so many of so many numbers at most."""

from __future__ import annotations

import math

from penstock.control import events as e
from penstock.control.draft import Draft
from penstock.control.state import ClusterState
from penstock.wire.messages import Answer, Done, Refused
from penstock.wire.principals import Principal
from penstock.wire.scaling import LearnMetric, RecalledMetric, RecallMetric

MOST_KEYS = 64  # of a principal: the store is everybody's, and lets go of what was written longest ago
MOST_NUMBERS = 256
LONGEST_NAME = 256


def learn_metric(draft: Draft, request: LearnMetric, principal: Principal) -> Answer:
    own = _prefix(principal)
    key = f"{own}{request.key}"
    known = [each for each, _ in draft.state.metrics.items() if each.startswith(own)]
    if key not in known and len(known) >= MOST_KEYS:
        return _refused(f"{principal} keeps figures under {MOST_KEYS} keys already")
    names = (request.key, *request.values)
    if len(request.values) > MOST_NUMBERS or any(len(name) > LONGEST_NAME for name in names):
        return _refused(f"a record has up to {MOST_NUMBERS} numbers, and names of up to {LONGEST_NAME} characters")
    if not all(map(math.isfinite, request.values.values())):
        return _refused("a record holds finite numbers")
    draft.emit(e.MetricLearned(key, dict(request.values)))
    return Done()


def recall_metric(state: ClusterState, request: RecallMetric, principal: Principal) -> RecalledMetric:
    return RecalledMetric(values=state.metrics.get(f"{_prefix(principal)}{request.key}", dict[str, float]))


def _prefix(principal: Principal) -> str:
    return f"learned/{principal.name}/"


def _refused(why: str) -> Refused:
    return Refused(reason=f"{why}; nothing was kept", kind="limit_reached")
