from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from penstock.core.errors import InvalidArgumentError, NoFilesError
from penstock.sources.cutting import SplitStep
from penstock.sources.listing import FileInfo, common_folder, group_small_files, list_files
from penstock.sources.patterns import expand_braces, has_magic, matches_parts
from penstock.sources.storage import FoundFile, drop_folder_marks, is_remote

BRACES = [
    ("plain.tar", ["plain.tar"]),
    ("{a,b}.tar", ["a.tar", "b.tar"]),
    ("{b,a}", ["b", "a"]),
    ("{0..3}", ["0", "1", "2", "3"]),
    ("{3..0}", ["3", "2", "1", "0"]),
    ("{0008..0011}.tar", ["0008.tar", "0009.tar", "0010.tar", "0011.tar"]),
    ("{8..11}", ["8", "9", "10", "11"]),
    ("{08..11}", ["08", "09", "10", "11"]),
    ("{-1..1}", ["-1", "0", "1"]),
    ("{0..10..5}", ["0", "5", "10"]),
    ("{0..2..0}", ["0", "1", "2"]),
    ("{a..c}", ["a", "b", "c"]),
    ("{c..a}", ["c", "b", "a"]),
    ("{x,y}-{1..2}", ["x-1", "x-2", "y-1", "y-2"]),
    ("{a,b{1,2},{c,d}e}", ["a", "b1", "b2", "ce", "de"]),
    ("{,.gz}", ["", ".gz"]),
    ("{one}", ["{one}"]),
    ("{one{1,2}}", ["{one1}", "{one2}"]),
    ("{}", ["{}"]),
    ("open{a,b", ["open{a,b"]),
    ("shut}a,b", ["shut}a,b"]),
    ("{{a,b}", ["{a", "{b"]),
    ("{1..x}", ["{1..x}"]),
]


@pytest.mark.parametrize(("pattern", "expected"), BRACES)
def test_braces_expand_as_a_shell_does(pattern: str, expected: list[str]) -> None:
    assert expand_braces(pattern) == expected


def test_a_thousand_shards_keep_their_zeros() -> None:
    shards = expand_braces("s3://bucket/train-{0000..1023}.tar")
    assert len(shards) == 1024
    assert (shards[0], shards[1023]) == ("s3://bucket/train-0000.tar", "s3://bucket/train-1023.tar")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/data/x.tar", False),
        ("/data/*.tar", True),
        ("/data/x?.tar", True),
        ("/data/[ab].tar", True),
        ("s3://bucket/x?.tar", True),
        ("http://host/x.tar?version=1", False),
        ("https://host/x.tar?names=*", False),
        ("http://[::1]:80/x.tar", False),
        ("http://host/*.tar", True),
    ],
)
def test_a_question_mark_is_a_pattern_except_in_http(path: str, expected: bool) -> None:
    assert has_magic(path) is expected


@pytest.mark.parametrize(
    ("path", "pattern", "expected"),
    [
        ("a/b/x.tar", "**/*.tar", True),
        ("x.tar", "**/*.tar", True),
        ("a/x.txt", "**/*.tar", False),
        ("a/b/c/x", "a/**/x", True),
        ("a/x", "a/**/x", True),
        ("b/x", "a/**/x", False),
        ("a/b", "**", True),
        ("a/b/c", "**/b/**", True),
        ("a/b", "**/b/**", False),
    ],
)
def test_two_stars_stand_for_any_number_of_folders(path: str, pattern: str, expected: bool) -> None:
    assert matches_parts(path.split("/"), pattern.split("/")) is expected


FILES = [
    "a/1.txt",
    "a/2.txt",
    "a/10.txt",
    "a/notes.md",
    "a/deep/3.txt",
    "a/deep/er/4.txt",
    "b/1.txt",
    "b/.hidden.txt",
    ".cache/5.txt",
    "c/_SUCCESS",
    "c/part-0",
    "c/part-1",
    "top.txt",
]

LISTINGS = [
    (["top.txt"], ["top.txt"]),
    (["a"], ["1.txt", "10.txt", "2.txt", "deep/3.txt", "deep/er/4.txt", "notes.md"]),
    (["a/"], ["1.txt", "10.txt", "2.txt", "deep/3.txt", "deep/er/4.txt", "notes.md"]),
    (["a/*.txt"], ["1.txt", "10.txt", "2.txt"]),
    (["a/?.txt"], ["1.txt", "2.txt"]),
    (["a/[12].txt"], ["1.txt", "2.txt"]),
    (["a/[!1].txt"], ["2.txt"]),
    (["*/1.txt"], ["a/1.txt", "b/1.txt"]),
    (["**/[34].txt"], ["a/deep/3.txt", "a/deep/er/4.txt"]),
    (["a/**"], ["1.txt", "10.txt", "2.txt", "deep/3.txt", "deep/er/4.txt", "notes.md"]),
    (["a/**/4.txt"], ["deep/er/4.txt"]),
    (["b"], ["1.txt"]),
    (["b/*"], ["1.txt"]),
    (["b/.*"], [".hidden.txt"]),
    (["b/.hidden.txt"], [".hidden.txt"]),
    (["c"], ["part-0", "part-1"]),
    (["c/*"], ["part-0", "part-1"]),
    (["c/_SUCCESS"], ["_SUCCESS"]),
    (["{b,a}/1.txt"], ["b/1.txt", "a/1.txt"]),
    (["a/{1..2}.txt"], ["1.txt", "2.txt"]),
    (["{a,b}/?.txt"], ["a/1.txt", "a/2.txt", "b/1.txt"]),
    (["top.txt", "a/1.txt"], ["top.txt", "a/1.txt"]),
    (["a/2.txt", "a/*.txt"], ["2.txt", "1.txt", "10.txt"]),
    (["[ab]"], ["a/1.txt", "a/10.txt", "a/2.txt", "a/deep/3.txt", "a/deep/er/4.txt", "a/notes.md", "b/1.txt"]),
    (["*/deep/*.txt"], ["a/deep/3.txt"]),
]


@pytest.fixture(params=["local", "file", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder with FILES in it, each under its own name plus content of its own length."""
    if request.param == "memory":
        memory = fsspec.filesystem("memory")
        memory.store.clear()
        for n, name in enumerate(FILES):
            memory.pipe(f"/root/{name}", b"x" * n)
        yield "memory://root"
        memory.store.clear()
        return
    for n, name in enumerate(FILES):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * n)
    yield str(tmp_path) if request.param == "local" else f"file://{tmp_path}"


@pytest.mark.parametrize(("paths", "expected"), LISTINGS, ids=[" ".join(paths) for paths, _ in LISTINGS])
def test_paths_stand_for_the_same_files_on_every_storage(root: str, paths: list[str], expected: list[str]) -> None:
    listed = list_files([f"{root}/{path}" for path in paths])
    assert [file.relative for file in listed] == expected
    for file in listed:
        name = file.path.removeprefix(root.removeprefix("file://") + "/")
        assert file.size == FILES.index(name)
        assert file.path.endswith(file.relative)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("nothing.txt", "no such file or folder"),
        ("a/{1..3}.txt", "a/3.txt: no such file or folder"),
        ("a/*.tar", "a/*.tar: matches no file; searched the folder"),
        ("nowhere/*.tar", "which is empty or does not exist"),
        ("**/*.tar", "matches no file"),
    ],
)
def test_what_is_missing_is_named(root: str, path: str, told: str) -> None:
    with pytest.raises(NoFilesError) as caught:
        list_files([f"{root}/{path}"])
    assert told in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)


def test_an_empty_folder_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(NoFilesError, match="the folder has no files"):
        list_files([str(tmp_path)])


def test_extensions_choose_among_files_nobody_named(root: str) -> None:
    assert [f.relative for f in list_files([f"{root}/a"], extensions=[".md"])] == ["notes.md"]
    assert [f.relative for f in list_files([f"{root}/a/*"], extensions=[".md"])] == ["notes.md"]
    assert [f.relative for f in list_files([f"{root}/a/1.txt"], extensions=[".md"])] == ["1.txt"]
    with pytest.raises(NoFilesError, match=r"none that is meant \(\.tar\)"):
        list_files([f"{root}/a"], extensions=[".tar"])


@pytest.mark.parametrize("name", ["x{a,b}.txt", "x[1].txt", "what?.txt", "all*.txt"])
def test_a_file_that_has_the_very_name_wins_over_the_pattern(tmp_path: Path, name: str) -> None:
    for other in (name, "xa.txt", "xb.txt", "x1.txt", "whatX.txt", "all1.txt"):
        (tmp_path / other).touch()
    assert [file.relative for file in list_files([str(tmp_path / name)])] == [name]
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pipe({f"/r/{name}": b"1", "/r/xa.txt": b"2", "/r/x1.txt": b"3"})
    assert [file.relative for file in list_files([f"memory://r/{name}"])] == [name]
    memory.store.clear()


def test_a_folder_that_has_the_very_name_wins_over_the_pattern(tmp_path: Path) -> None:
    (tmp_path / "run[1]").mkdir()
    (tmp_path / "run[1]" / "x.txt").touch()
    (tmp_path / "run1").mkdir()
    (tmp_path / "run1" / "y.txt").touch()
    assert [file.relative for file in list_files([str(tmp_path / "run[1]")])] == ["x.txt"]


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert list_files(["x.txt"])[0].path == str(tmp_path / "x.txt")


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "x.txt").touch()
    (tmp_path / "data").mkdir()
    os.symlink(tmp_path / "real", tmp_path / "data" / "linked")
    os.symlink(tmp_path / "data", tmp_path / "data" / "loop")
    os.symlink(tmp_path / "gone", tmp_path / "data" / "dangling")
    assert [file.relative for file in list_files([str(tmp_path / "data")])] == ["linked/x.txt"]


def test_the_list_does_not_depend_on_where_it_lies_or_when_it_was_written(tmp_path: Path) -> None:
    for place in ("here", "there/deeper"):
        for name in ("b/2", "a/1"):
            path = tmp_path / place / name
            path.parent.mkdir(parents=True)
            path.write_text(name)
    os.utime(tmp_path / "here" / "a" / "1", (1, 1))
    here = list_files([str(tmp_path / "here")])
    there = list_files([str(tmp_path / "there/deeper")])
    assert [(f.relative, f.size, f.etag) for f in here] == [(f.relative, f.size, f.etag) for f in there]


def test_storage_nobody_knows_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="nosuch://"):
        list_files(["nosuch://bucket/x"])


def test_only_urls_of_other_machines_are_remote() -> None:
    assert [is_remote(p) for p in ("/a", "a", "file:///a", "s3://b/a", "memory://a")] == [False] * 3 + [True] * 2


def test_the_common_folder_is_by_names_not_by_letters() -> None:
    assert common_folder(["/data/train-a", "/data/train-b"]) == "/data"
    assert common_folder(["s3://bucket/a", "s3://bucket/b"]) == "s3://bucket"
    assert common_folder(["/"]) == ""


def test_marks_of_folders_are_no_files() -> None:
    entries = [FoundFile("s3://b/a", 0), FoundFile("s3://b/a/x", 5), FoundFile("s3://b/empty", 0)]
    assert [entry.path for entry in drop_folder_marks(entries)] == ["s3://b/a/x", "s3://b/empty"]


def files_of(*sizes: int) -> list[FileInfo]:
    return [FileInfo(f"/d/{i}", size, "", str(i)) for i, size in enumerate(sizes)]


def test_small_files_share_a_split_within_both_limits() -> None:
    step = SplitStep(nbytes=100, files=3)
    by_count = group_small_files(files_of(*[1] * 7), step)
    assert [len(split.files) for split in by_count] == [3, 3, 1]
    by_bytes = group_small_files(files_of(50, 50, 1, 300, 1), step)
    assert [[file.path for file in split.files] for split in by_bytes] == [
        ["/d/0", "/d/1"],
        ["/d/2"],
        ["/d/3"],
        ["/d/4"],
    ]
    assert group_small_files([], step) == []
