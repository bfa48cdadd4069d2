"""Passes never change results: random pipelines give the same elements, byte for byte, with and without them, also when
resumed from a state that was saved under the other setting."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.graph.explain import explain_text
from penstock.testing.conformance import compare_all
from tests.passes.pipelines import pipelines, write_files

MOST = 300  # elements that are looked at


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    write_files(folder)
    return folder


def read(drawn, folder, *, state=None, most=MOST, **options):
    """Return the elements, and the state before each of them and at the end."""
    elements, states = [], []
    with drawn.build(folder).iterator(epoch=1, seed=77, **options) as iterator:
        if state is not None:
            iterator.load_state_dict(json.loads(state))
        states.append(iterator.state_dict())
        while len(elements) < most:
            try:
                elements.append(next(iterator))
            except StopIteration:
                break
            states.append(iterator.state_dict())
    return elements, states


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(drawn=pipelines(), place=st.floats(0, 1), threads=st.sampled_from([1, 1, 1, 2]))
def test_passes_change_neither_elements_nor_states(folder, drawn, place, threads):
    plain, optimized = {"optimize": False, "threads": 1}, {"optimize": True, "threads": threads}
    expected, plain_states = read(drawn, folder, **plain)
    found, optimized_states = read(drawn, folder, **optimized)
    assert compare_all(expected, found) is None, explain_text(drawn.build(folder).node)
    at = round(place * len(expected))
    for state, options in ((plain_states[at], optimized), (optimized_states[at], plain)):
        rest, _ = read(drawn, folder, state=json.dumps(state), most=MOST - at, **options)
        assert compare_all(expected[at:], rest) is None, f"saved after {at} elements: {state['state']}; read {options}"
