"""What `read_features` gives, and what it asks of the storage for it."""

from __future__ import annotations

import os

import pyarrow as pa
import pytest

import penstock as ps
from penstock.sources import feature_files
from penstock.sources.features import sample_mask
from penstock.warehouse.layout import reorder, tier
from tests.warehouse.tables import DAYS, expected_rows, keys_of, rows_by_key, small_table, some_rows


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return small_table(tmp_path_factory.mktemp("tables") / "t")


EXPECTED = expected_rows([some_rows(10, first_key=10 * n) for n in range(3)])


@pytest.mark.parametrize("batch", [1, 3, 4, 7, 1000])
def test_every_row_comes_as_it_was_written_whatever_the_batch(table, batch):
    dataset = ps.read_features(table, batch=batch, columns=["key", "label"])
    assert rows_by_key(dataset) == EXPECTED
    sizes = [len(made["key"]) for made in dataset]
    assert len(sizes) == len(dataset) and set(sizes[:-1]) <= {batch, 30 % batch, 10 % batch}


def test_a_batch_is_a_few_arrays_of_all_features(table):
    made = next(iter(ps.read_features(table, features=[3, "f1", 12, 20, "dense 4"], batch=8)))
    assert list(made) == ["dense", "sparse", "scored", "label"]
    assert made["dense"].keys == ("f3", "f1", "f4") and made["dense"].values.shape == (3, 8)
    assert made["dense"].values.flags.c_contiguous and not made["dense"].values[~made["dense"].presence].any()
    assert made["sparse"].keys == ("f12",) and made["sparse"].weights is None
    assert made["scored"].weights is not None and len(made["scored"].offsets) == 9


def test_partitions_and_filters_keep_rows(table):
    some = ps.read_features(table, partitions=DAYS[1:2], columns=["key", "label"])
    assert rows_by_key(some) == {key: row for key, row in EXPECTED.items() if 10 <= key < 20}
    kept = ps.read_features(table, where=(ps.col("f2") > 0) & (ps.col("date") != DAYS[0]), columns=["key", "label"])
    assert rows_by_key(kept) == {k: row for k, row in EXPECTED.items() if k >= 10 and (row["f2"] or 0) > 0}
    assert keys_of(table, where=ps.col("key") > 1000) == []


def test_a_sample_is_the_same_rows_however_they_are_read(table):
    some = keys_of(table, sample=0.5, seed=3)
    assert 5 < len(some) < 25 and some == keys_of(table, sample=0.5, seed=3, batch=2)
    assert some != keys_of(table, sample=0.5, seed=4)
    assert set(keys_of(table, sample=0.2, seed=3)) < set(some)
    assert sample_mask(0.25, 1, "file", 0, 100_000).mean() == pytest.approx(0.25, abs=0.01)


def test_a_file_without_a_feature_has_it_empty_and_that_is_counted(tmp_path):
    table = small_table(tmp_path / "t", days=DAYS[:1])
    table.add_features([ps.Feature(id=7), ps.Feature(id=17, kind="sparse")])
    table.append(some_rows(4, first_key=50, features=[ps.Feature(id=7)]), date=DAYS[1])
    with ps.read_features(table, features=[0, 7, 17], columns=["key"]).iterator() as batches:
        rows = rows_by_key(batches)
        reading = batches.statistics().stages[0].reading
    assert all(rows[key]["f7"] is None and rows[key]["f17"] == [] for key in range(10))
    assert any(rows[key]["f7"] is not None for key in range(50, 54)) and rows[50]["f0"] is None
    assert reading.missing_columns == 4


def test_listing_opens_no_footer(table, monkeypatch):
    def refuse(*_):
        raise AssertionError("a file was opened")

    monkeypatch.setattr(feature_files.FeatureFile, "__init__", refuse)
    assert len(ps.read_features(table, batch=5)) == 6


def test_reads_are_few_when_features_stand_side_by_side(tmp_path):
    features = [ps.Feature(id=number) for number in range(400)]
    table = ps.Table.create(tmp_path / "t", features)
    table.append(some_rows(500, features=features), date=DAYS[0])
    wanted = list(range(0, 400, 10))

    def reading():
        with ps.read_features(table, features=wanted, columns=[]).iterator() as batches:
            assert sum(len(batch["dense"]) for batch in batches) == 500
            return batches.statistics().stages[0].reading

    before = reading()
    assert before.reads == 40 and before.bytes_in_vain == 0, "the gaps are nine of ten parts of a small file"
    reorder(table, order=wanted)
    after = reading()
    assert after.reads == 1 and after.column_chunks == 40 and after.bytes_in_vain == 0


def test_a_tier_serves_what_it_has_and_the_table_the_rest(tmp_path):
    table = small_table(tmp_path / "t")
    tier(table, tmp_path / "fast", [0, 1, 11])
    both = ps.read_features(table, columns=["key", "label"])
    assert rows_by_key(both) == EXPECTED
    with ps.read_features(table, features=[0, 11]).iterator() as batches:
        list(batches)
        reading = batches.statistics().stages[0].reading
    assert reading.tier_bytes == reading.read_bytes > 0
    reorder(table, order=[13, 5])
    assert rows_by_key(both) == EXPECTED, "a session goes on reading its version"
    with ps.read_features(table, features=[0, 11], columns=["key"]).iterator() as batches:
        list(batches)
        assert batches.statistics().stages[0].reading.tier_bytes == 0, "copies are of files that are gone"
    tier(table, tmp_path / "fast", [0, 1, 11])
    assert rows_by_key(ps.read_features(table, columns=["key", "label"])) == EXPECTED
    copies = list((tmp_path / "fast").rglob("*.parquet"))
    assert len(copies) == 3


def test_injected_features_are_joined_by_key_and_day(tmp_path):
    table = small_table(tmp_path / "t")
    side = ps.Table.create(tmp_path / "side", [ps.Feature(id=4), ps.Feature(id=10, kind="sparse")])
    keys = [19, 12, 12, 1]
    rows = {
        "key": keys,
        "time": [0, 1, 0, 0],
        "label": [0.0] * 4,
        "f4": [19.0, 12.0, -1.0, 1.0],
        "f10": [[k] for k in keys],
    }
    side.append(pa.table(rows), date=DAYS[1])
    found = rows_by_key(ps.read_features(table, features=[4, 5, 10], columns=["key", "label"], inject=[side]))
    assert (found[19]["f4"], found[12]["f4"], found[1]["f4"]) == (19.0, 12.0, None), "by day too, and the newest counts"
    assert found[19]["f10"] == [19] and found[13] == {
        **{k: EXPECTED[13][k] for k in ("label", "f5")},
        "f4": None,
        "f10": [],
    }


def test_exactly_once_through_the_service_and_over_a_resume(table):
    dataset = ps.read_features(table, batch=3, columns=["key", "label"]).shuffle(4, seed=1)
    with ps.LocalService(workers=1) as service:
        loader = dataset.distribute(service, job="features")
        first = [batch for _, batch in zip(range(4), loader)]
        state = loader.state_dict()
        rest = dataset.distribute(service, job="features again")
        rest.load_state_dict(state)
        assert rows_by_key([*first, *rest]) == EXPECTED


def test_what_cannot_be_asked_for_is_refused_with_what_there_is(table, tmp_path):
    for wrong, told in (
        ({"features": [99]}, "99 is no feature of .*; Table.features has them"),
        ({"partitions": ["yesterday"]}, "'yesterday' is no day; write it as 2026-01-31"),
        ({"columns": ["f1"]}, "'f1' is no column of the rows; there are key, time, label"),
        ({"sample": 0}, "above 0, at most 1"),
        ({"features": [], "columns": []}, "nothing would be read"),
    ):
        with pytest.raises(ps.InvalidArgumentError, match=told):
            ps.read_features(table, **wrong)
    with pytest.raises(ps.DataError, match="has no partition among 2020-01-01"):
        list(ps.read_features(table, partitions=["2020-01-01"]))


def test_a_flipped_byte_is_told_with_file_and_column(tmp_path):
    table = small_table(tmp_path / "t", days=DAYS[:1], rows=200, stripe=200)
    path = tmp_path / "t" / table.snapshot().files[0].path
    import pyarrow.parquet as pq

    group = pq.read_metadata(path).row_group(0)
    chunk = next(group.column(n) for n in range(group.num_columns) if group.column(n).path_in_schema == "f3")
    with open(path, "r+b") as file:
        at = chunk.data_page_offset + chunk.total_compressed_size - 5
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    assert list(ps.read_features(table, features=[1, 2]))
    with pytest.raises(
        ps.CorruptRecordError, match=f"{os.path.basename(path)}: column 'f3' of stripe 0 cannot be read"
    ):
        list(ps.read_features(table))


def test_an_encrypted_table_is_read_with_its_key_alone(tmp_path):
    import base64

    key, other = tmp_path / "key", tmp_path / "other"
    key.write_text(base64.b64encode(bytes(range(32))).decode())
    other.write_text(base64.b64encode(bytes(32)).decode())
    table = small_table(tmp_path / "t", key=f"file:{key}")
    assert rows_by_key(ps.read_features(table, columns=["key", "label"])) == EXPECTED
    reorder(table, order=[3, 12])
    tier(table, tmp_path / "fast", [3])
    by_command = ps.Table(tmp_path / "t", key=f"command:cat {key}")
    dataset = ps.read_features(by_command, columns=["key", "label"])
    assert rows_by_key(dataset) == EXPECTED
    secret = base64.b64encode(bytes(range(32))).decode()
    assert secret not in dataset.explain() and secret not in repr(dataset.node)
    assert not any(secret.encode() in path.read_bytes() for path in (tmp_path / "t").rglob("*") if path.is_file())
    for wrong in (ps.Table(tmp_path / "t"), ps.Table(tmp_path / "t", key=f"file:{other}")):
        with pytest.raises(ps.CorruptRecordError, match=r"part-.*parquet at byte \d+: the footer cannot be read.*key"):
            list(ps.read_features(wrong, features=[3]))
    with pytest.raises(ps.InvalidArgumentError, match="not 32 bytes in base64; `penstock table key` makes one"):
        ps.Table(tmp_path / "t", key="command:echo hello")
