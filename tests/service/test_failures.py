"""What a user's function raises in a worker is what the trainer gets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps


def with_a_cause(x: int) -> int:
    try:
        return int("seven")
    except ValueError as error:
        raise KeyError("k") from error


def with_a_group(x: int) -> int:
    raise ExceptionGroup("several", [ValueError("a"), ExceptionGroup("inner", [KeyError("b")])])


def with_an_exit(x: int) -> int:
    sys.exit(3)


def raised(dataset: Any, kind: type[BaseException]) -> Any:
    with pytest.raises(kind) as caught:
        list(dataset)
    return caught.value


@pytest.fixture(params=["here", "worker"])
def run(request: pytest.FixtureRequest, one_worker: ps.LocalService) -> Callable[[Any], Any]:
    def run(function: Any) -> Any:
        mapped = ps.range(3).map(function)
        return mapped if request.param == "here" else mapped.distribute(one_worker, limits=ps.Limits(timeout_s=60))

    return run


def test_a_cause_survives_the_way(run: Callable[[Any], Any]) -> None:
    error = raised(run(with_a_cause), KeyError)
    assert error.args == ("k",)
    assert isinstance(error.__cause__, ValueError) and "seven" in str(error.__cause__)


def test_a_group_of_exceptions_survives_the_way(run: Callable[[Any], Any]) -> None:
    error = raised(run(with_a_group), ExceptionGroup)
    assert error.message == "several"
    assert isinstance(error.exceptions[0], ValueError) and error.exceptions[0].args == ("a",)
    assert isinstance(error.exceptions[1].exceptions[0], KeyError)


def test_an_exit_survives_the_way(run: Callable[[Any], Any]) -> None:
    assert raised(run(with_an_exit), SystemExit).code == 3
