"""Numbers of passes: they fit in 64 bits, no two passes share one, and later passes have higher ones."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

import penstock as ps
from penstock.core.errors import InvalidPipelineError
from penstock.runtime.pass_numbers import PassesOver
from penstock.runtime.streams import StreamPart
from tests.runtime.streams_kit import FakeFeed, Job

NESTED: dict[str, Callable[[], ps.Dataset]] = {
    "a repeat of a mix that never stops": lambda: ps.mix([ps.range(3), ps.range(5)], stop="never").repeat(),
    "a mix that never stops of repeats": lambda: ps.mix([ps.range(3).repeat(), ps.range(5)], stop="never"),
    "a repeat of a mix of a repeat": lambda: ps.mix([ps.range(3).repeat(), ps.range(5)]).repeat(),
    "a mix of repeats": lambda: ps.mix([ps.range(3).repeat(), ps.range(5).repeat()]),
    "a repeat of a repeat": lambda: ps.range(3).repeat().map(str).repeat(7).repeat(),
    "a repeat of a part of a repeat": lambda: ps.range(3).repeat().take(10).repeat(),
    "three of them": lambda: ps.range(3).repeat().take(10).repeat().take(25).repeat(),
    "an epoch of a part of a repeat": lambda: ps.range(3).repeat().take(10).with_epoch(40),
    "as many as there are": lambda: ps.range(3).repeat(sys.maxsize).take(10).repeat(sys.maxsize),
}


def passes_of(job: Job, epoch: int) -> list[int]:
    feed = FakeFeed(lambda source, pass_: list(range(job.counts[source])))
    read = job.run(StreamPart(feed=feed), epoch=epoch, most=60)
    assert len(read.elements) in (40, 60)
    return [pass_ for source, pass_ in feed.asked if source == 0]


@pytest.mark.parametrize("name", NESTED)
def test_numbers_of_nested_passes_fit_and_rise(name: str) -> None:
    job = Job(NESTED[name](), sharding="off")
    for epoch in (0, 1, 1000):
        passes = passes_of(job, epoch)
        assert len(passes) > 5 and passes == sorted(set(passes)) and passes[-1] < 1 << 64


@pytest.mark.parametrize("name", [name for name in NESTED if "epoch" not in name])
def test_epochs_share_no_numbers(name: str) -> None:
    job = Job(NESTED[name](), sharding="off")
    assert not set(passes_of(job, 1)) & set(passes_of(job, 2))


def test_one_endless_operator_has_32_bits() -> None:
    assert passes_of(Job(ps.range(3).repeat()), 2)[:2] == [2 << 32, (2 << 32) + 1]


def test_a_repeat_of_what_is_empty_in_part_goes_on() -> None:
    empty = ps.range(0).repeat()
    assert list(ps.range(2).concatenate(empty).repeat().take(5)) == [0, 1, 0, 1, 0]
    assert list(ps.mix([ps.range(2), empty], stop="all").repeat().take(5)) == [0, 1, 0, 1, 0]
    assert list(ps.mix([ps.range(2), empty], stop="never").take(5)) == [0, 1, 0, 1, 0]


def test_passes_without_a_number_are_refused() -> None:
    passes = PassesOver(label="repeat()", count=-1, most=1 << 21)
    assert passes.number(outer=1, own=(1 << 21) - 1) == (1 << 22) - 1
    with pytest.raises(InvalidPipelineError, match=r"repeat\(\): its input was gone over 2097152 times"):
        passes.number(outer=1, own=1 << 21)
