"""What is known of a dataset before it is read: its length, its columns, its classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock as ps
from penstock.wire.credentials import Credentials


@pytest.fixture
def tables(tmp_path: Path) -> str:
    for year, count in ((2023, 10), (2024, 7)):
        folder = tmp_path / "tables" / f"year={year}"
        folder.mkdir(parents=True)
        rows = {"id": list(range(count)), "text": ["x"] * count, "clicks": [[1]] * count}
        pq.write_table(pa.table(rows), folder / "part.parquet", row_group_size=4)
    return str(tmp_path / "tables")


def test_the_length_of_parquet_files_is_what_is_read_of_them(tables: str) -> None:
    for dataset in (
        ps.read_parquet(tables),
        ps.read_parquet(tables, batch=4),
        ps.read_parquet(tables, columns=["id"]).shuffle(4, seed=0).map(lambda row: row).batch(5),
    ):
        assert len(dataset) == len(list(dataset))
    assert len(ps.read_parquet(tables)) == 17


@pytest.mark.parametrize("unknown", [{"filter": ps.col("id") > 3}, {"on_error": "skip"}], ids=str)
def test_a_length_that_the_data_decides_is_not_known(tables: str, unknown: dict) -> None:
    with pytest.raises(TypeError, match="with_length"):
        len(ps.read_parquet(tables, **unknown))


def test_a_loader_knows_it_too_unless_batches_are_cut_elsewhere(tables: str) -> None:
    assert len(ps.read_parquet(tables).distribute("tcp://127.0.0.1:9", sharding="file")) == 17
    assert len(ps.read_parquet(tables, batch=4).distribute("tcp://127.0.0.1:9")) == 5
    with pytest.raises(TypeError, match="with_length"):
        len(ps.read_parquet(tables, batch=4).distribute("tcp://127.0.0.1:9", sharding="file"))


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("key") / "of no service.json"
    Credentials.new(server="0" * 40).write(path)
    monkeypatch.setenv("PENSTOCK_KEYS", str(path))


def test_the_length_of_a_saved_dataset_is_that_of_its_manifest(tmp_path: Path) -> None:
    ps.range(25).map(lambda i: {"id": i}).save(None, tmp_path / "saved", rows_per_file=10)
    assert len(ps.read_saved(tmp_path / "saved")) == 25
    assert len(ps.read_saved([tmp_path / "saved", tmp_path / "saved"]).batch(10)) == 5


def test_the_length_of_what_is_still_being_saved_is_not_known(tmp_path: Path) -> None:
    ps.range(25).save(None, tmp_path / "saved", rows_per_file=10)
    manifest = (tmp_path / "saved" / "_manifest.json").read_bytes()
    (tmp_path / "saved" / "_progress.json").write_bytes(manifest.replace(b'"complete":true', b'"complete":false'))
    (tmp_path / "saved" / "_manifest.json").unlink()
    with pytest.raises(TypeError, match="with_length"):
        len(ps.read_saved(tmp_path / "saved"))


def test_the_schema_of_columnar_files_goes_along_with_their_columns(tables: str, tmp_path: Path) -> None:
    rows = ps.read_parquet(tables)
    assert rows.schema == {"id": "int64", "text": "string", "clicks": "list<element: int64>", "year": "int64"}
    assert list(next(iter(rows))) == list(rows.schema)
    assert rows.filter(ps.col("id") > 3).drop("clicks", "year").rename({"id": "n"}).batch(4).schema == {
        "n": "int64",
        "text": "string",
    }
    assert rows.select("text", "id").shuffle(4).repeat(2).schema == {"text": "string", "id": "int64"}
    masked = ps.read_parquet(tables, columns=["id"], nulls="mask")
    assert masked.schema == {"id": "int64", "id__mask": "bool"} and list(next(iter(masked))) == list(masked.schema)
    table = pa.table({"x": pa.array([1.5], pa.float32())})
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert ps.read_arrow(tmp_path / "x.arrow").schema == {"x": "float"}


def test_a_schema_that_a_function_decides_is_not_known(tables: str) -> None:
    assert ps.read_parquet(tables).map(lambda row: row).schema is None
    assert ps.range(3).schema is None


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("dog/1.jpg", "cat/1.jpg", "cat/2.jpg"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(b"an image")
    return tmp_path / "photos"


def test_the_classes_of_images_are_the_names_of_their_labels(photos: Path) -> None:
    assert ps.read_images(photos).classes == ("cat", "dog")
    assert ps.read_images(photos).shuffle(seed=1).map(lambda x: x["label"]).classes == ("cat", "dog")
    assert ps.read_images(photos, classes=["dog", "bird", "cat"]).classes == ("dog", "bird", "cat")
    assert ps.range(3).classes is None
    assert ps.mix([ps.read_images(photos), ps.read_images(photos)]).classes is None, "whose?"


def test_images_without_a_class_folder_are_warned_of(photos: Path) -> None:
    with pytest.warns(UserWarning, match=r"2 of 2 images lie in no class folder.*photos/cat/1.jpg.*label -1.*classes="):
        assert [x["label"] for x in ps.read_images(photos / "cat")] == [-1, -1]
    (photos / "3.jpg").write_bytes(b"an image")
    with pytest.warns(UserWarning, match=r"1 of 4 images"):
        assert [x["label"] for x in ps.read_images(photos)] == [-1, 0, 0, 1]


@pytest.mark.filterwarnings("error")
def test_images_whose_classes_are_given_are_not_warned_of(photos: Path) -> None:
    assert [x["label"] for x in ps.read_images(photos / "cat", classes=["dog", "cat"])] == [1, 1]
    assert [x["label"] for x in ps.read_images(photos / "cat", classes=())] == [-1, -1]
    assert np.unique([x["label"] for x in ps.read_images(photos)]).tolist() == [0, 1]
