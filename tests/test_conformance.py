"""Every operator and every source, restored at every position, with and without threads and passes."""

from __future__ import annotations

import pytest

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


def test_a_state_without_the_last_element_is_caught():
    """The kit itself must be able to fail."""
    import penstock as ps
    from penstock.testing.conformance import ConformanceError

    elements = iter(range(1000, 100_000))

    def never_the_same(x):
        return next(elements)

    with pytest.raises(ConformanceError, match="restored after 0"):
        check_resumes_everywhere(lambda: ps.range(5).map(never_the_same))
