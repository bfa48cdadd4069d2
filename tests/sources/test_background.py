import threading
from collections.abc import Iterator

import pytest

from penstock.sources.background import made_ahead

DEADLINE_S = 30


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-making")]


def test_what_is_made_ahead_comes_in_order() -> None:
    second_is_made = threading.Event()

    def make(number: int) -> int:
        if number == 0:
            assert second_is_made.wait(DEADLINE_S), "the second was not made beside the first"
        if number == 1:
            second_is_made.set()
        return number * 10

    assert list(made_ahead(make, range(5), at_once=2)) == [0, 10, 20, 30, 40]


def test_no_more_is_made_ahead_than_asked_for() -> None:
    begun: list[int] = []

    def make(number: int) -> int:
        begun.append(number)
        return number

    made = made_ahead(make, range(100), at_once=3)
    assert next(made) == 0
    made.close()
    assert sorted(begun) == list(range(len(begun))) and len(begun) <= 3


def test_an_error_is_raised_in_its_place() -> None:
    def make(number: int) -> int:
        if number == 2:
            raise KeyError(number)
        return number

    made = made_ahead(make, range(5), at_once=4)
    assert [next(made), next(made)] == [0, 1]
    with pytest.raises(KeyError):
        next(made)
