"""The order of columns by a read log: a permutation, in which what is read together lies in one piece."""

from __future__ import annotations

from itertools import pairwise
from time import process_time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.warehouse.read_log import LoggedRead
from penstock.warehouse.read_together import order_by_readers

MOST_S = 20.0  # where groups were looked for between any two features, it would be minutes


def log_of(sessions):
    return [LoggedRead(at_s=number, features=tuple(features)) for number, features in enumerate(sessions)]


def runs(order, features):
    """Return in how many pieces features lie in an order."""
    places = sorted(order.index(feature) for feature in features)
    return 1 + sum(after - before > 1 for before, after in pairwise(places))


@given(
    st.lists(st.lists(st.integers(0, 30), unique=True), max_size=12),
    st.sets(st.integers(0, 30)),
)
def test_no_feature_is_lost_and_those_of_the_same_readers_lie_in_one_piece(sessions, numbers):
    order = order_by_readers(log_of(sessions), numbers)
    assert sorted(order) == sorted({feature for features in sessions for feature in features})
    readers = {feature: tuple(feature in features for features in sessions) for feature in order}
    for same in set(readers.values()):
        assert runs(order, [feature for feature in order if readers[feature] == same]) == 1


def test_a_proposal_from_which_a_session_left_features_out_stays_in_one_piece():
    rng = np.random.default_rng(3)
    ids = rng.permutation(1000)
    production, proposals = ids[:100], np.split(ids[100:400], 10)
    sessions = []
    for _ in range(40):
        taken = [proposal for proposal in proposals if rng.random() < 0.5]
        sessions.append([number for number in np.concatenate([production, *taken]) if rng.random() > 0.01])
    order = order_by_readers(log_of(sessions), set(range(1000)))
    for group in (production, *proposals):
        assert runs(order, group.tolist()) == 1
    assert set(order[:100]) == set(production.tolist())


def test_features_of_the_same_readers_lie_together_within_a_group_too():
    sessions = [[2, 4], [1, 3], *[[1, 2, 3, 4]] * 9]
    assert order_by_readers(log_of(sessions)) in ([1, 3, 2, 4], [2, 4, 1, 3])


def test_groups_of_numbers_come_before_groups_that_have_lists():
    sessions = [[1, 2, 30], [1, 2, 30, 4], [1, 2, 30, 50], [1, 2, 30, 4]]
    assert order_by_readers(log_of(sessions), {1, 2, 4}) == [4, 1, 2, 30, 50]


def test_the_most_popular_group_comes_first():
    sessions = [[1, 2, 7]] * 6 + [[1, 3, 4, 5]] * 4
    assert order_by_readers(log_of(sessions)) == [1, 2, 7, 3, 4, 5]


def test_an_empty_log_has_no_order():
    assert order_by_readers([]) == [] and order_by_readers(log_of([[]])) == []


@pytest.mark.alone
def test_a_wide_table_is_ordered_in_time_also_if_its_sessions_have_nothing_in_common():
    rng = np.random.default_rng(0)
    log = log_of(rng.choice(13_878, 1_519, replace=False).tolist() for _ in range(300))
    began = process_time()
    order = order_by_readers(log, set(range(12_115)))
    assert process_time() - began < MOST_S
    assert len(order) == len({feature for read in log for feature in read.features})
