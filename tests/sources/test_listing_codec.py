"""What was listed travels as bytes: a worker opens every source with it and lists nothing."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import pytest
from tests.cases import SOURCE_NAMES, source_cases

import penstock as ps
from penstock.core.errors import CodecError
from penstock.graph.readers import ReadText, SourceNode
from penstock.graph.traverse import walk
from penstock.sources import listing, listing_codec, registry
from penstock.sources.base import FileRange, Split, SplitPosition
from penstock.sources.listing import FileInfo, FileListing
from penstock.sources.listing_codec import decode_listings, encode_listings, open_source, split_counts
from penstock.sources.raw_files import FileTable
from penstock.testing.conformance import compare_all

PLAIN = [name for name in SOURCE_NAMES if not name.endswith("_shuffled")]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return source_cases(tmp_path_factory.mktemp("sources"))


def everything(source):
    found = []
    for split in source.splits():
        reader = source.open(split, SplitPosition())
        while len(records := reader.read(5).elements):
            found.extend(records)
        reader.close()
    return found


def node_of(dataset):
    return next(node for node in walk(dataset.node) if isinstance(node, SourceNode))


@pytest.mark.parametrize("name", PLAIN)
def test_a_source_opened_with_a_listing_reads_the_same_and_lists_nothing(cases, name, monkeypatch):
    node = node_of(cases[name][1]())
    source = registry.open_source(node)
    expected, splits = everything(source), source.splits()
    data = encode_listings([source])
    assert encode_listings([registry.open_source(node)]) == data

    def refuse(*_, **__):
        raise AssertionError("listed again")

    for place in ("stat", "scan", "walk"):
        monkeypatch.setattr(listing.LocalStorage, place, refuse)
    (decoded,) = decode_listings(data)
    opened = open_source(node, decoded)
    assert list(opened.splits()) == list(splits) and decoded.count == len(splits) == split_counts([opened])[0]
    assert compare_all(expected, everything(opened)) is None


def test_numpy_headers_are_not_read_again(tmp_path, monkeypatch):
    for n in range(3):
        np.save(tmp_path / f"{n}.npy", np.zeros((n + 2, 3), [("a", "<i4"), ("b", ">f8", (2,))]))
    node = node_of(ps.read_numpy(tmp_path / "*.npy"))
    data = encode_listings([registry.open_source(node)])
    monkeypatch.setattr("penstock.sources.numpy_files._parse_header", None)
    opened = open_source(node, decode_listings(data)[0])
    assert len(opened) == 9 and opened.fetch([8])[0].dtype == [("a", "<i4"), ("b", "<f8", (2,))]


def test_strange_names_and_no_files_survive(tmp_path):
    names = ["a b.txt", "ü.txt", "x\udcff.txt", "", "deep/er/y"]
    splits = [
        Split((FileRange(f"/d/{n}", 3, "e", 1, 2), FileRange(n, 9)), 4, 5, f"note {i}") for i, n in enumerate(names)
    ]
    for given in (splits, [], [Split()]):
        source = registry.open_source(ReadText(paths=("unused",)))
        source.use_splits(given)
        opened = open_source(ReadText(paths=("unused",)), decode_listings(encode_listings([source]))[0])
        assert list(opened.splits()) == given and opened.splits()[-1:] == given[-1:]


def test_credentials_are_not_in_it(tmp_path):
    (tmp_path / "a.txt").write_text("x\n")
    for reader in (ps.read_text, ps.read_files):
        node = node_of(reader(tmp_path / "a.txt", storage_options={"secret": "hush-hush"}))
        assert b"hush" not in encode_listings([registry.open_source(node)])


@pytest.mark.parametrize("data", [b"", b"\x00", b"garbage", listing_codec.msgspec.msgpack.encode([99, []])])
def test_what_is_not_a_listing_is_refused(data):
    with pytest.raises(CodecError, match="list of splits"):
        decode_listings(data)


@pytest.mark.alone
def test_a_million_files_take_seconds():
    files = [FileInfo(f"/data/train/class{i // 1000:04d}/{i:08d}.jpg", i, "", f"{i:08d}.jpg") for i in range(1_000_000)]
    node = node_of(ps.read_files("/unused"))
    source = registry.open_source(node)
    source.table = FileTable(FileListing.of(files), ())
    text = registry.open_source(ReadText(paths=("/unused",)))
    text.use_splits(listing.group_small_files(files, listing.step_for(files)))
    began = perf_counter()
    data = encode_listings([source, text])
    encoded = perf_counter()
    opened = [open_source(n, found) for n, found in zip((node, ReadText(paths=("u",))), decode_listings(data))]
    assert opened[0].path_of(999_999) == files[-1].path and opened[1].splits()[-1] == text.splits()[-1]
    assert encoded - began < 20 and perf_counter() - encoded < 10  # about 2 s and 1 s on an idle machine
    print(f"{len(data) >> 20} MB, encoded in {encoded - began:.2f} s, opened in {perf_counter() - encoded:.2f} s")
