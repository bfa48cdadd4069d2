"""Every operator and every source, restored at every position, with and without threads and passes."""

from __future__ import annotations

import pytest

from penstock.runtime.ordered import Prefetching
from penstock.testing.conformance import check_resumes_everywhere
from tests.cases import OPERATOR_NAMES, SOURCE_NAMES, operator_cases, source_cases

OPTIONS = pytest.mark.parametrize(
    "options", [{"threads": 2}, {"threads": 1, "optimize": False}], ids=["threads", "inline-without-passes"]
)


@pytest.fixture(scope="module")
def operators(tmp_path_factory):
    return operator_cases(tmp_path_factory.mktemp("operators"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return source_cases(tmp_path_factory.mktemp("sources"))


def test_the_names_of_the_cases_are_complete(operators, sources):
    assert (set(OPERATOR_NAMES), set(SOURCE_NAMES)) == (set(operators), set(sources))


@OPTIONS
@pytest.mark.parametrize("name", OPERATOR_NAMES)
def test_operator_resumes_anywhere(operators, name, options):
    _, make = operators[name]
    assert check_resumes_everywhere(make, **options) > 4


@pytest.mark.parametrize("name", OPERATOR_NAMES)
def test_operator_resumes_in_a_later_epoch(operators, name):
    _, make = operators[name]
    assert check_resumes_everywhere(make, epoch=2, every=9, threads=2) > 1


@OPTIONS
@pytest.mark.parametrize("name", SOURCE_NAMES)
def test_source_resumes_anywhere(sources, name, options):
    _, make = sources[name]
    assert check_resumes_everywhere(make, **options) > 4


@OPTIONS
@pytest.mark.parametrize("name", OPERATOR_NAMES)
def test_the_end_stays_the_end(operators, name, options):
    _, make = operators[name]
    with make().iterator(epoch=0, **options) as iterator:
        elements = list(iterator)
        stage = iterator._run._stage
        assert elements and [len(stage.pull(n)) for n in (1, 5, 1)] == [0, 0, 0]


def stages_of(stage):
    yield stage
    for below in stage.inputs:
        yield from stages_of(below)


@OPTIONS
@pytest.mark.parametrize("name", OPERATOR_NAMES)
def test_a_stage_gives_no_more_than_it_is_asked_for(operators, name, options):
    _, make = operators[name]
    with make().iterator(epoch=0, seed=1, **options) as iterator:
        top = next(s for s in stages_of(iterator._run._stage) if not isinstance(s, Prefetching))
        given = 0
        while count := len(top.pull(2)):
            assert count <= 2
            given += count
        assert given == len(list(make().iterator(epoch=0, seed=1, **options)))


def test_a_state_without_the_last_element_is_caught():
    """The kit itself must be able to fail."""
    import penstock as ps
    from penstock.testing.conformance import ConformanceError

    elements = iter(range(1000, 100_000))

    def never_the_same(x):
        return next(elements)

    with pytest.raises(ConformanceError, match="restored after 0"):
        check_resumes_everywhere(lambda: ps.range(5).map(never_the_same))
