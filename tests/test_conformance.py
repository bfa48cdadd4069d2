"""Every operator and every source, restored at every position, with and without threads and passes."""

from __future__ import annotations

import pytest

from penstock.testing.conformance import check_resumes_everywhere
from tests.cases import operator_cases, source_cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cases")


@pytest.fixture(scope="module")
def operators(folder):
    return operator_cases(folder)


@pytest.fixture(scope="module")
def sources(folder):
    return source_cases(folder)


@pytest.mark.parametrize("options", [{"threads": 2}, {"threads": 1, "optimize": False}], ids=["threads", "plain"])
@pytest.mark.parametrize("name", operator_cases.__call__(__import__("pathlib").Path("unused")))
def test_operator_resumes_anywhere(operators, name, options):
    _, make = operators[name]
    assert check_resumes_everywhere(make, **options) > 5


@pytest.mark.parametrize("name", operator_cases.__call__(__import__("pathlib").Path("unused")))
def test_operator_resumes_in_a_later_epoch(operators, name):
    _, make = operators[name]
    assert check_resumes_everywhere(make, epoch=2, every=7, threads=2) > 1
