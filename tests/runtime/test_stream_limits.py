"""Into how many streams a pipeline may be cut."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.runtime.stream_limits import StreamLimit, ends_with_an_input, stream_limit

pytestmark = pytest.mark.usefixtures("many_splits")

A, B, C = ps.range(10), ps.range(20), ps.range(30)


@pytest.mark.parametrize(
    ("dataset", "counts", "most"),
    [
        (A.map(abs).batch(2), [3], None),
        (A.repeat(5), [3], None),
        (A.repeat(), [3], 3),
        (A.shuffle(4).repeat().batch(2), [3], 3),
        (A.concatenate(B), [3, 5], None),
        (A.concatenate(B).repeat(), [3, 5], 5),
        (ps.mix([A, B]), [3, 5], 3),
        (ps.mix([A, B], stop="all"), [3, 5], 3),
        (ps.mix([A, B], stop="never"), [3, 5], 3),
        (ps.mix([A, B.concatenate(C)]), [9, 5, 7], 7),
        (ps.mix([A, ps.mix([B, C])]), [9, 5, 7], 5),
        (ps.mix([A.repeat(), B]), [2, 5], 2),
        (A.concatenate(B.repeat()), [1, 5], 5),
        (ps.mix([A, B]), [None, 5], 5),
        (ps.mix([A, B]), [None, None], None),
    ],
)
def test_every_stream_gets_something_of_what_its_operators_need(dataset, counts, most):
    limit = stream_limit(dataset.node, counts)
    assert (None if limit is None else limit.most) == most


def test_a_limit_names_the_source_and_the_operator():
    assert stream_limit(ps.mix([A, B], [0.5, 0.5]).node, [3, 1]) == StreamLimit(1, "range", "mix")


def test_only_a_mix_that_ends_must_be_dealt():
    assert ends_with_an_input(ps.mix([A, B]).batch(2).node)
    assert ends_with_an_input(ps.mix([A, B], stop="all").node)
    assert not ends_with_an_input(ps.mix([A, B], stop="never").node)
    assert not ends_with_an_input(A.repeat().node)
