"""What trainers keep in the metric store, and guests among the workers."""

from __future__ import annotations

import math

import pytest

from penstock.control.draft import Draft
from penstock.control.learning import MOST_KEYS, learn_metric, recall_metric
from penstock.control.state import ClusterState
from penstock.wire.messages import Done, Refused
from penstock.wire.modes import Placement
from penstock.wire.principals import Principal
from penstock.wire.scaling import LearnMetric, RecallMetric

ALICE, BOB = Principal("trainer", "alice"), Principal("trainer", "bob")


def test_a_trainer_recalls_what_it_learned_and_nobody_elses() -> None:
    draft = Draft(ClusterState(), now=0.0, draw=lambda: "drawn")
    assert isinstance(learn_metric(draft, LearnMetric(key="a/b", values={"pace": 3.0}), ALICE), Done)
    assert recall_metric(draft.state, RecallMetric(key="a/b"), ALICE).values == {"pace": 3.0}
    assert recall_metric(draft.state, RecallMetric(key="a/b"), BOB).values is None


def test_one_trainer_does_not_fill_the_store() -> None:
    draft = Draft(ClusterState(), now=0.0, draw=lambda: "drawn")
    for number in range(MOST_KEYS):
        learn_metric(draft, LearnMetric(key=str(number), values={}), ALICE)
    assert isinstance(learn_metric(draft, LearnMetric(key="more", values={}), ALICE), Refused)
    assert isinstance(learn_metric(draft, LearnMetric(key="0", values={"again": 1.0}), ALICE), Done)
    assert isinstance(learn_metric(draft, LearnMetric(key="more", values={}), BOB), Done)


@pytest.mark.parametrize("values", [{"x" * 300: 1.0}, {str(n): 1.0 for n in range(300)}, {"pace": math.nan}])
def test_what_is_no_small_record_of_numbers_is_refused(values: dict[str, float]) -> None:
    draft = Draft(ClusterState(), now=0.0, draw=lambda: "drawn")
    assert isinstance(learn_metric(draft, LearnMetric(key="a", values=values), ALICE), Refused)


@pytest.mark.parametrize(
    ("placement", "guest", "other_guest", "worker"),
    [
        (Placement(), False, False, True),
        (Placement(guests="mine"), True, False, True),
        (Placement(guests="mine", target="local"), True, False, False),
        (Placement(guests="mine", target="remote"), False, False, True),
    ],
)
def test_guests_serve_jobs_that_name_them(placement: Placement, guest: bool, other_guest: bool, worker: bool) -> None:
    takes = [placement.takes("host", creator="host", tags=tags) for tags in (("guest:mine",), ("guest:other",), ())]
    assert takes == [guest, other_guest, worker]
