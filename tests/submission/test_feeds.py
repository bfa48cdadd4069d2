"""Splits assigned up front."""

from __future__ import annotations

import pytest

from penstock.core.intervals import Intervals
from penstock.sources.base import FileRange, Split
from penstock.submission.feeds import NamedSplits, feeds_for, one_file_a_split


def files(count: int, pieces: int = 1) -> NamedSplits:
    splits = [Split(files=(FileRange(f"/d/{i:02}", 10, "", p, p + 1),)) for i in range(count) for p in range(pieces)]
    return NamedSplits("read_text('/d')", splits)


def test_worker_three_of_five_reads_files_three_and_eight() -> None:
    feeds = feeds_for("file", [files(10)], 5)
    assert [feed.listed for feed in feeds][3] == ((3, 8),)
    assert all(feed.kind == "listed" for feed in feeds)


def test_all_pieces_of_a_file_go_to_one_worker() -> None:
    feeds = feeds_for("file", [files(3, pieces=2)], 2)
    assert [feed.listed for feed in feeds] == [((0, 1, 4, 5),), ((2, 3),)]


def test_fewer_files_than_workers_says_so() -> None:
    with pytest.raises(ValueError, match="has 3 files for 5 workers"):
        feeds_for("file", [files(3)], 5)
    with pytest.raises(ValueError, match="has no files"):
        feeds_for("file", [NamedSplits("range(9)", [Split(stop=9)])], 2)


def test_file_or_data_takes_files_where_there_are_enough() -> None:
    assert feeds_for("file_or_data", [files(5)], 5)[0].kind == "listed"
    by_data = feeds_for("file_or_data", [files(4)], 5)
    assert [feed.keep for feed in by_data] == [(w, 5) for w in range(5)]
    assert {(feed.kind, feed.number, feed.of) for feed in by_data} == {("dealt", 0, 1)}


def test_a_function_of_the_users_decides() -> None:
    seen: list[tuple[int, int]] = []

    def shard(splits: list[Split], workers: int) -> list[list[int]]:
        seen.append((len(splits), workers))
        return [[4, 0], [1, 2, 3]]

    feeds = feeds_for("custom", [files(5)], 2, shard)
    assert [feed.listed for feed in feeds] == [((4, 0),), ((1, 2, 3),)]
    assert seen == [(5, 2)]


@pytest.mark.parametrize(("dealt", "words"), [([[0]], "1 lists for 2"), ([[0], [9]], "split 9"), ([[0], [0]], "twice")])
def test_a_function_that_deals_wrongly_is_refused(dealt: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        feeds_for("custom", [files(5)], 2, lambda splits, workers: dealt)


def test_grouped_files_are_cut_apart() -> None:
    grouped = [Split(files=tuple(FileRange(f"/d/{i}", 1) for i in range(3)), note="n"), Split(stop=4)]
    cut = one_file_a_split(grouped)
    assert [len(split.files) for split in cut] == [1, 1, 1, 0]
    assert [split.note for split in cut] == ["n", "n", "n", ""]


def test_a_range_set_joins_what_touches() -> None:
    ranges = Intervals()
    for ordinal in (5, 1, 2, 0, 4, 9, 3):
        ranges.add(ordinal)
    assert list(ranges.ranges()) == [(0, 6), (9, 10)]
    assert len(ranges) == 7 and 4 in ranges and 6 not in ranges
    assert list(ranges.intersection(Intervals([(4, 10)])).ranges()) == [(4, 6), (9, 10)]
