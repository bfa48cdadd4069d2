"""Failing elements: skipped within a budget, written down, never lost silently."""

from __future__ import annotations

import json

import pytest

import penstock as ps
from penstock.core.errors import CorruptRecordError, ErrorBudgetExceededError, InvalidArgumentError
from penstock.runtime.quarantine import read_quarantine
from penstock.sources.tfrecord import TFRecordWriter


def picky(x):
    if x % 10 == 3:
        raise ValueError(f"no {x}")
    return x


@pytest.fixture
def bad_file(tmp_path):
    return tmp_path / "bad" / "quarantine.jsonl"


@pytest.mark.parametrize("threads", [1, 2])
def test_failing_elements_are_left_out_and_written_down(bad_file, threads):
    ds = ps.range(100).map(picky, on_error=ps.SkipErrors(budget=10, quarantine=str(bad_file)), threads=threads)
    ds = ds.batch(9)
    with ds.iterator(epoch=0) as iterator:
        kept = [x for batch in iterator for x in batch.tolist()]
        statistics = iterator.statistics()
        assert iterator.state_dict()["skipped"] == 10
    assert kept == [x for x in range(100) if x % 10 != 3]
    assert sum(stage.skipped for stage in statistics.stages) == 10
    entries = read_quarantine(bad_file)
    assert sorted(entry.message for entry in entries.values()) == sorted(f"no {x}" for x in range(3, 100, 10))
    one = next(entry for entry in entries.values() if entry.message == "no 43")
    assert one.exception == "builtins.ValueError" and "in picky" in one.traceback
    assert one.operator == "map(picky)" and one.origin.index == 43
    with ds.iterator(epoch=0) as again:
        list(again)
    assert read_quarantine(bad_file).keys() == entries.keys(), "the same element is the same entry"


def test_one_too_many_ends_the_epoch_with_the_file_named(bad_file):
    ds = ps.range(100).map(picky, on_error=ps.SkipErrors(budget=4, quarantine=str(bad_file)))
    seen = []
    with pytest.raises(
        ErrorBudgetExceededError, match=r"5 elements failed, over the budget of 4.*quarantine.jsonl"
    ) as caught:
        seen.extend(ds.iterator(threads=1))
    assert isinstance(caught.value.__cause__, ValueError)
    assert seen == [x for x in range(43) if x % 10 != 3]


def test_a_fraction_counts_against_what_was_seen(bad_file):
    tenth = ps.SkipErrors(budget=0.11, quarantine=str(bad_file))
    assert len(list(ps.range(1000).map(picky, on_error=tenth))) == 900
    with pytest.raises(ErrorBudgetExceededError, match=r"over the budget of 5\.000%"):
        list(ps.range(1000).map(picky, on_error=ps.SkipErrors(budget=0.05, quarantine=str(bad_file))))


def test_filters_skip_too(bad_file):
    def fussy(x):
        return picky(x) % 2 == 0

    kept = list(ps.range(40).filter(fussy, on_error=ps.SkipErrors(budget=9, quarantine=str(bad_file))))
    assert kept == list(range(0, 40, 2))
    assert len(read_quarantine(bad_file)) == 4


def test_a_corrupt_record_is_named_or_skipped(tmp_path, bad_file):
    path = tmp_path / "a.tfrecord"
    with TFRecordWriter(str(path)) as writer:
        for i in range(10):
            writer.write(f"record {i}".encode())
    data = bytearray(path.read_bytes())
    size = len(data) // 10
    data[4 * size + 13] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(CorruptRecordError, match=rf"a.tfrecord at byte {4 * size}"):
        list(ps.read_tfrecord(path))
    skipping = ps.read_tfrecord(path, on_error=ps.SkipErrors(budget=1, quarantine=str(bad_file)))
    assert list(skipping) == [f"record {i}".encode() for i in range(10) if i != 4]
    (entry,) = read_quarantine(bad_file).values()
    assert entry.origin.path.endswith("a.tfrecord") and entry.origin.offset == 4 * size


def test_a_bad_json_line_is_skipped_and_its_neighbours_keep_their_random_numbers(tmp_path, bad_file):
    def draw(row, rng):
        return row["i"], int(rng.integers(1 << 40))

    good, broken = tmp_path / "good.jsonl", tmp_path / "broken.jsonl"
    lines = [json.dumps({"i": i}) for i in range(9)]
    good.write_text("\n".join(lines) + "\n")
    lines[5] = '{"i": '
    broken.write_text("\n".join(lines) + "\n")
    whole = dict(ps.read_jsonl(good).map(draw).iterator(seed=1, epoch=0))
    skipping = ps.read_jsonl(broken, on_error=ps.SkipErrors(budget=1, quarantine=str(bad_file))).map(draw)
    part = dict(skipping.iterator(seed=1, epoch=0))
    assert part == {i: number for i, number in whole.items() if i != 5}


def test_a_file_deleted_in_mid_epoch_is_named_or_skipped(tmp_path, bad_file):
    for i in range(6):
        (tmp_path / f"{i}.bin").write_bytes(bytes([i]) * 10)
    ds = ps.read_files(tmp_path / "*.bin")
    assert len(ds) == 6
    (tmp_path / "3.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"3\.bin"):
        list(ds)
    (tmp_path / "3.bin").write_bytes(bytes([3]) * 10)
    skipping = ps.read_files(tmp_path / "*.bin", on_error=ps.SkipErrors(budget=1, quarantine=str(bad_file)))
    assert len(skipping) == 6
    (tmp_path / "3.bin").unlink()
    assert [row["data"][0] for row in skipping] == [0, 1, 2, 4, 5]


def test_a_file_that_is_not_a_quarantine_file_is_refused(tmp_path):
    (tmp_path / "x").write_text("hello\n")
    with pytest.raises(InvalidArgumentError, match="line 1"):
        read_quarantine(tmp_path / "x")


def test_an_unreadable_row_group_is_skipped(tmp_path, bad_file):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "t.parquet"
    pq.write_table(
        pa.table({"a": list(range(3000))}), path, row_group_size=1000, use_dictionary=False, compression="none"
    )
    data = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[start : start + 40] = b"\xff" * 40
    path.write_bytes(data)
    with pytest.raises(ps.PenstockError, match=r"t\.parquet"):
        list(ps.read_parquet(path))
    skipping = ps.read_parquet(path, on_error=ps.SkipErrors(budget=1, quarantine=str(bad_file)))
    kept = [row["a"] for row in skipping]
    assert kept == [*range(1000), *range(2000, 3000)]
    assert len(read_quarantine(bad_file)) == 1
