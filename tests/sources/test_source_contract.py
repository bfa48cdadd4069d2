"""What `sources/base.py` asks of every source, tried on each of them.

A case makes its data and returns the node; a source without a case fails `test_every_source_has_a_case`.
"""

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from tests.warehouse.tables import small_table

import penstock as ps
from penstock.graph import readers
from penstock.graph.expressions import col
from penstock.graph.functions import Payload, UserFunction
from penstock.graph.readers import SourceNode
from penstock.sources import csv_files, cutting, saved_files, text, tfrecord
from penstock.sources.base import IndexableSource, Source, Split, SplitPosition
from penstock.sources.registry import IMPLEMENTATIONS, open_source, source_digest
from penstock.sources.tfrecord import TFRecordWriter


@dataclass(frozen=True)
class Case:
    make: Callable[[Path], SourceNode]
    elements: int
    skips_bad: bool = False
    indexable: bool = False


def generate(split: int) -> Iterator[dict[str, int]]:
    for number in range(split):
        yield {"split": split, "number": number}


def write_tfrecords(folder: Path, ending: str = "") -> str:
    for number in range(3):
        with TFRecordWriter(folder / f"{number}.tfrecord{ending}") as writer:
            for i in range(9):
                writer.write(bytes([number, i]) * (i * 40))
    return str(folder)


def write_broken_tfrecords(folder: Path) -> str:
    write_tfrecords(folder)
    path = folder / "0.tfrecord"
    content = bytearray(path.read_bytes())
    content[16 + 12] ^= 1  # inside the second record
    path.write_bytes(content)
    (folder / "1.tfrecord").write_bytes((folder / "1.tfrecord").read_bytes()[:-5])
    return str(folder)


def write_lines(folder: Path, *, bad: bool = False) -> str:
    for name, count in [("a", 60), ("b", 3), ("c", 2), ("d", 0), ("e", 40)]:
        rows = [json.dumps({"name": name, "i": i, "pad": "ü" * (i % 7)}, ensure_ascii=False) for i in range(count)]
        if bad and rows:
            rows[1] = "{"
        (folder / name).write_text("\n".join(rows))
    return str(folder)


def write_packed_lines(folder: Path) -> str:
    for number in range(2):
        rows = "".join(f'{{"i": {i}}}\n\n' for i in range(30))
        (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    return str(folder)


def write_csv(folder: Path, *, bad: bool = False) -> str:
    for number in range(3):
        rows = [f'{i},"a\n{i}",{i / 2}' for i in range(20)]
        if bad:
            rows[5] = rows[6] = "only one"
        (folder / f"{number}.csv").write_text("i,text,x\n" + "\n".join(rows))
    return str(folder)


def write_shards(folder: Path) -> str:
    for number in range(2):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for i in range(6):
                for ending in ("txt", "cls"):
                    member = tarfile.TarInfo(f"{i:03}.{ending}")
                    member.size = i
                    tar.addfile(member, io.BytesIO(b"x" * i))
    return str(folder)


def write_images(folder: Path) -> str:
    for label in ("cat", "dog"):
        (folder / label).mkdir()
        for i in range(5):
            (folder / label / f"{i}.jpg").write_bytes(bytes([i]) * i)
    return str(folder)


def write_arrays(folder: Path, *shape: int) -> str:
    for number in range(3):
        np.save(folder / f"{number}.npy", np.random.default_rng(number).integers(0, 1000, shape))
    return str(folder)


def make_table(number: int) -> pa.Table:
    ids = list(range(number * 25, number * 25 + 25))
    return pa.table({"i": ids, "text": [f"row {i}" for i in ids], "tokens": [list(range(i % 4)) for i in ids]})


def write_parquet(folder: Path) -> str:
    for number in range(2):
        pa.parquet.write_table(make_table(number), folder / f"{number}.parquet", row_group_size=7)
    return str(folder)


def write_arrow(folder: Path) -> str:
    for number in range(2):
        table = make_table(number)
        with pa.ipc.new_file(folder / f"{number}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return str(folder)


def write_saved(folder: Path) -> str:
    parts = []
    for number in range(4):
        rows = [{"i": i, "tokens": np.arange(i % 4), "name": f"row {i}"} for i in range(number * 9, number * 9 + 9)]
        parts.append(saved_files.part_of(saved_files.write_part(str(folder), rows)))
    manifest = saved_files.Manifest(parts=parts, complete=True)
    saved_files.publish_manifest(str(folder), saved_files.encode_manifest(manifest))
    return str(folder)


def in_memory(write: Callable[[Path], str]) -> Callable[[Path], str]:
    """Put what `write` writes on fsspec's file system in memory, which counts as remote."""

    def copy(folder: Path) -> str:
        files = fsspec.filesystem("memory")
        for path in Path(write(folder)).rglob("*"):
            if path.is_file():
                files.pipe_file(f"/contract/{path.relative_to(folder)}", path.read_bytes())
        return "memory://contract"

    return copy


def files(node: type[readers.FileSource], write: Callable[[Path], str], **options: Any) -> Callable[[Path], SourceNode]:
    return lambda folder: node(paths=(write(folder),), **options)


def a_dataset() -> Any:
    import datasets

    return datasets.Dataset.from_dict({"i": list(range(40)), "text": [str(i) for i in range(40)]})


KEPT = col("i").isin([1, 2, 6, 7, 13, 30, 49])

CASES = {
    "range": Case(lambda _: readers.Range(start=5, stop=-115, step=-3), 40, indexable=True),
    "items": Case(lambda _: readers.FromItems(items=Payload([{"i": i} for i in range(70)])), 70, indexable=True),
    "generator": Case(lambda _: readers.FromGenerator(function=UserFunction.of(generate), splits=(3, 0, 5)), 8),
    "torch": Case(lambda _: readers.FromTorch(dataset=Payload([(i, str(i)) for i in range(70)])), 70, indexable=True),
    "huggingface": Case(lambda _: readers.FromHuggingface(dataset=Payload(a_dataset())), 40, indexable=True),
    "huggingface iterable": Case(
        lambda _: readers.FromHuggingface(dataset=Payload(a_dataset().to_iterable_dataset(num_shards=3))), 40
    ),
    "tfrecord": Case(files(readers.ReadTFRecord, write_tfrecords), 27),
    "tfrecord gzip": Case(files(readers.ReadTFRecord, lambda folder: write_tfrecords(folder, ".gz")), 27),
    "tfrecord remote": Case(files(readers.ReadTFRecord, in_memory(write_tfrecords)), 27),
    "tfrecord bad": Case(files(readers.ReadTFRecord, write_broken_tfrecords), 25, skips_bad=True),
    "text": Case(files(readers.ReadText, write_lines), 105),
    "text remote": Case(files(readers.ReadText, in_memory(write_lines)), 105),
    "jsonl": Case(files(readers.ReadJsonl, write_lines), 105),
    "jsonl bad": Case(files(readers.ReadJsonl, lambda folder: write_lines(folder, bad=True)), 101, skips_bad=True),
    "jsonl gzip": Case(files(readers.ReadJsonl, write_packed_lines), 60),
    "csv": Case(files(readers.ReadCsv, write_csv), 60),
    "csv bad": Case(files(readers.ReadCsv, lambda folder: write_csv(folder, bad=True)), 54, skips_bad=True),
    "csv remote": Case(files(readers.ReadCsv, in_memory(write_csv), columns=("x", "i")), 60),
    "webdataset": Case(files(readers.ReadWebdataset, write_shards), 12),
    "webdataset remote": Case(files(readers.ReadWebdataset, in_memory(write_shards)), 12),
    "files": Case(files(readers.ReadFiles, write_images), 10, indexable=True),
    "files remote": Case(files(readers.ReadFiles, in_memory(write_images)), 10, indexable=True),
    "images": Case(files(readers.ReadImages, write_images), 10, indexable=True),
    "numpy rows": Case(files(readers.ReadNumpy, lambda folder: write_arrays(folder, 20, 3)), 60, indexable=True),
    "numpy windows": Case(
        files(readers.ReadNumpy, lambda folder: write_arrays(folder, 50), window=8, stride=3), 45, indexable=True
    ),
    "numpy remote": Case(
        files(readers.ReadNumpy, in_memory(lambda folder: write_arrays(folder, 50)), window=8, stride=3),
        45,
        indexable=True,
    ),
    "parquet rows": Case(files(readers.ReadParquet, write_parquet), 50),
    "parquet batches": Case(files(readers.ReadParquet, write_parquet, batch=4), 14),
    "parquet predicate": Case(files(readers.ReadParquet, write_parquet, predicate=KEPT), 7),
    "parquet remote": Case(files(readers.ReadParquet, in_memory(write_parquet)), 50),
    "arrow rows": Case(files(readers.ReadArrow, write_arrow), 50),
    "arrow batches": Case(files(readers.ReadArrow, write_arrow, batch=4), 14),
    "arrow predicate": Case(files(readers.ReadArrow, write_arrow, predicate=KEPT), 7),
    "arrow remote": Case(files(readers.ReadArrow, in_memory(write_arrow)), 50),
    "features": Case(lambda folder: ps.read_features(small_table(folder / "table"), batch=3).node, 12),
    "saved": Case(files(readers.ReadSaved, write_saved), 36),
    "saved remote": Case(files(readers.ReadSaved, in_memory(write_saved)), 36),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make blocks and byte ranges so small that a few rows cross many of their edges."""
    monkeypatch.setattr(tfrecord, "BLOCK_BYTES", 500)
    monkeypatch.setattr(text, "BLOCK_BYTES", 64)
    monkeypatch.setattr(cutting, "MOST_BYTES", 400)
    monkeypatch.setattr(text, "SLACK_BYTES", 8)
    monkeypatch.setattr(csv_files, "BLOCK_BYTES", 100)
    monkeypatch.setattr(csv_files, "ROWS_AT_ONCE", 3)
    monkeypatch.setattr(saved_files, "RUN_ELEMENTS", 4)
    store = fsspec.filesystem("memory")
    store.store.clear()
    yield
    store.store.clear()


@dataclass
class Made:
    node: SourceNode
    case: Case

    def source(self) -> Source:
        """A source of its own, as another process would make it."""
        source = open_source(self.node)
        if self.case.skips_bad:
            source.on_bad = lambda error, index: None  # type: ignore[attr-defined]
        return source


@pytest.fixture(params=CASES)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    case = CASES[request.param]
    return Made(case.make(tmp_path), case)


def drain(source: Source, split: Split, at: SplitPosition, want: int) -> list[tuple[int, Any, int | None]]:
    """Return (index, element, hint) of all that is left in a split, checking each answer of the reader."""
    rest: list[tuple[int, Any, int | None]] = []
    reader = source.open(split, at)
    expected = at.index
    while len((records := reader.read(want)).elements):
        count = len(records.elements)
        assert count <= want
        indices = records.indices if records.indices is not None else range(expected, expected + count)
        offsets = records.offsets if records.offsets is not None else [None] * count
        assert len(indices) == len(offsets) == count
        assert expected <= indices[0] and all(a < b for a, b in pairwise(indices))
        expected = indices[-1] + 1
        rest.extend(zip(indices, records.elements, offsets))
    assert not len(reader.read(want).elements), "the end of a split stays its end"
    reader.close()
    reader.close()
    return rest


def contents(rest: list[tuple[int, Any, int | None]]) -> list[tuple[int, Any]]:
    return [(index, element) for index, element, _ in rest]


def test_every_source_has_a_case(tmp_path: Path) -> None:
    nodes = set()
    for number, case in enumerate(CASES.values()):
        (tmp_path / str(number)).mkdir()
        nodes.add(type(case.make(tmp_path / str(number))))
    assert nodes == set(IMPLEMENTATIONS)


def test_splits_are_the_same_from_a_fresh_source_and_as_bytes(made: Made) -> None:
    splits = list(made.source().splits())
    assert splits and list(made.source().splits()) == splits
    assert source_digest(made.source()) == source_digest(made.source())
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(splits), type=list[Split])
    assert travelled == splits
    found = [drain(made.source(), split, SplitPosition(), 100) for split in travelled]
    assert sum(map(len, found)) == made.case.elements


def test_the_size_of_reads_does_not_matter(made: Made) -> None:
    source = made.source()
    for split in source.splits():
        whole = drain(source, split, SplitPosition(), 1_000)
        for want in (1, 2, 7):
            np.testing.assert_equal(contents(drain(source, split, SplitPosition(), want)), contents(whole))


def test_every_split_resumes_at_every_position(made: Made) -> None:
    source = made.source()
    for split in source.splits():
        whole = drain(source, split, SplitPosition(), 4)
        for done, (index, _, offset) in enumerate(whole, start=1):
            for at in (SplitPosition(index + 1, offset), SplitPosition(index + 1)):
                rest = drain(source, split, at, 5)
                np.testing.assert_equal(contents(rest), contents(whole[done:]), err_msg=f"{split} at {at}")


def test_an_element_s_hint_is_the_same_wherever_reading_began(made: Made) -> None:
    source = made.source()
    for split in source.splits():
        whole = drain(source, split, SplitPosition(), 3)
        for done in {1, len(whole) // 3, len(whole) // 2} - {0} if whole else ():
            index, _, offset = whole[done - 1]
            resumed = drain(source, split, SplitPosition(index + 1, offset), 2)
            assert [hint for _, _, hint in resumed] == [hint for _, _, hint in whole[done:]]


def test_several_readers_of_a_split_do_not_disturb_each_other(made: Made) -> None:
    source = made.source()
    for split in source.splits():
        whole = [element for _, element in contents(drain(source, split, SplitPosition(), 100))]
        first, second = source.open(split, SplitPosition()), source.open(split, SplitPosition())
        found: tuple[list[Any], list[Any]] = ([], [])
        for _ in range(len(whole) + 1):
            for reader, elements in zip((first, second), found):
                elements.extend(reader.read(1).elements)
        np.testing.assert_equal(found[0], whole)
        np.testing.assert_equal(found[1], whole)
        first.close()
        second.close()


def test_a_source_is_indexable_or_not_whatever_its_data(made: Made) -> None:
    assert isinstance(made.source(), IndexableSource) == made.case.indexable


@pytest.mark.parametrize("made", [name for name, case in CASES.items() if case.indexable], indirect=True)
def test_elements_fetched_by_index_are_those_read_in_order(made: Made) -> None:
    source = made.source()
    assert isinstance(source, IndexableSource)
    splits = source.splits()
    assert [split.start for split in splits] == [0, *(split.stop for split in splits[:-1])]
    assert splits[-1].stop == len(source) == made.case.elements
    in_order = [element for split in splits for _, element, _ in drain(source, split, SplitPosition(), 3)]
    shuffled = np.random.default_rng(0).permutation(len(source))
    np.testing.assert_equal(list(source.fetch(shuffled)), [in_order[i] for i in shuffled])
    np.testing.assert_equal(list(source.fetch([2, 2, 0])), [in_order[i] for i in (2, 2, 0)])
    np.testing.assert_equal(list(source.fetch(range(1, 8, 2))), in_order[1:8:2])
