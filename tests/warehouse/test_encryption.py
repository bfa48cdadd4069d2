"""Keys of the table and of columns: who has them reads, who has not is told the column, and nobody else sees them."""

from __future__ import annotations

import base64

import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.sources.table_keys import KEYED
from penstock.warehouse.column_sizes import column_bytes
from penstock.warehouse.layout import compact, reorder, tier
from tests.warehouse.tables import DAYS, FEATURES, expected_rows, rows_by_key, some_rows

TABLE, ADS, OTHER = (bytes([number]) * 32 for number in (1, 2, 3))
KEYED_FEATURES = {3: "ads", 12: "ads", 20: "ads"}


def ring(path, **keys):
    path.write_text("\n".join(f"{name} {base64.b64encode(key).decode()}" for name, key in keys.items()))
    return f"file:{path}"


@pytest.fixture
def table(tmp_path):
    features = [
        ps.Feature(id=f.id, name=f.name, kind=f.kind, key=KEYED_FEATURES.get(f.id, ""), lifecycle=f.lifecycle)
        for f in FEATURES
    ]
    made = ps.Table.create(tmp_path / "t", features, key=ring(tmp_path / "both", table=TABLE, ads=ADS))
    for number, day in enumerate(DAYS):
        made.append(some_rows(10, first_key=10 * number), date=day)
    return made


EXPECTED = expected_rows([some_rows(10, first_key=10 * number) for number in range(3)])


def test_who_has_all_keys_reads_every_column_however_files_are_laid_out(table, tmp_path):
    assert all(file.path.endswith(KEYED) for file in table.snapshot().files)
    assert rows_by_key(ps.read_features(table, columns=["key", "label"])) == EXPECTED
    reorder(table, order=[12, 3], stripe=ps.StripeSize(rows=4))
    tier(table, tmp_path / "fast", [3, 11])
    compact(table)
    assert rows_by_key(ps.read_features(table, columns=["key", "label"])) == EXPECTED
    where = ps.read_features(table, features=[3], where=ps.col("f3") > 1e9, columns=["key"])
    assert not list(where)
    assert column_bytes(table)[3] > 0


def test_who_lacks_the_key_of_a_column_reads_the_others_and_is_told_which_it_is(table, tmp_path):
    for keys, told in (
        ({"table": TABLE}, "'ads', which is not among those"),
        ({"table": TABLE, "ads": OTHER}, "another key 'ads'"),
    ):
        other = ps.Table(table.url, key=ring(tmp_path / "fewer", **keys))
        plain = [f.id for f in FEATURES if f.id not in KEYED_FEATURES]
        assert len(rows_by_key(ps.read_features(other, features=plain, columns=["key", "label"]))) == 30
        for number in KEYED_FEATURES:
            with pytest.raises(ps.CorruptRecordError, match=rf"part-.*: column 'f{number}' is encrypted with .*{told}"):
                list(ps.read_features(other, features=[number]))
        with pytest.raises(ps.CorruptRecordError, match="column 'f3' is encrypted"):
            list(ps.read_features(other, features=[1], where=ps.col("f3") > 0))
        with pytest.raises(ps.CorruptRecordError, match=r"column 'f\d+' is encrypted"):
            column_bytes(other)
        with pytest.raises(ps.CorruptRecordError, match=r"column 'f\d+' is encrypted"):
            reorder(other, order=[3])


def test_a_wrong_key_of_the_table_names_the_file(table, tmp_path):
    other = ps.Table(table.url, key=ring(tmp_path / "wrong", table=OTHER, ads=ADS))
    with pytest.raises(ps.CorruptRecordError, match=r"part-.*parquet at byte \d+: the footer cannot be read.*key"):
        list(ps.read_features(other, features=[1]))


@pytest.mark.parametrize("number", [1, 3, 12, 20])
def test_a_byte_that_was_changed_is_told_with_file_and_column(table, number):
    path = table.folder / table.snapshot().files[1].path
    metadata = pq.ParquetFile(path, decryption_properties=table.decryption(str(path))).metadata
    leaf = next(n for n in range(metadata.num_columns) if metadata.schema.column(n).path.split(".")[0] == f"f{number}")
    column = metadata.row_group(0).column(leaf)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ps.CorruptRecordError, match=rf"{path.name}: column 'f{number}' of stripe 0 cannot be read"):
        list(ps.read_features(table, features=[0, number, 11]))
    assert len(rows_by_key(ps.read_features(table, features=[0, 11], columns=["key"]))) == 30


def test_keys_are_in_no_plan_journal_log_or_file(table, tmp_path, caplog):
    dataset = ps.read_features(table, columns=["key", "label"], batch=7)
    caplog.set_level(0)
    with ps.LocalService(workers=1, journal=tmp_path / "journal") as service, dataset.distribute(service) as loader:
        assert rows_by_key(loader) == EXPECTED
        state = repr(loader.state_dict())
    for key in (TABLE, ADS):
        secrets = (base64.b64encode(key).decode(), key.hex(), repr(key))
        told = (dataset.explain(), repr(dataset.node), repr(table), state, caplog.text)
        assert not any(secret in text for secret in secrets for text in told)
        for folder in (tmp_path / "journal", tmp_path / "t"):
            for path in filter(lambda each: each.is_file(), folder.rglob("*")):
                content = path.read_bytes()
                assert key not in content and base64.b64encode(key) not in content, path


def test_what_cannot_be_encrypted_is_refused(tmp_path, table):
    with pytest.raises(ps.InvalidArgumentError, match="features name the key 'ads', which is not among those"):
        ps.Table(table.url, key=ring(tmp_path / "fewer", table=TABLE)).append(some_rows(2), date=DAYS[0])
    with pytest.raises(ps.InvalidArgumentError, match="f3 is encrypted with the key 'ads'; name where the keys are"):
        ps.Table(table.url).append(some_rows(2), date=DAYS[0])
    with pytest.raises(ps.InvalidArgumentError, match="no key of the name 'table' is there"):
        ps.Table(table.url, key=ring(tmp_path / "none", ads=ADS))
