from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import InvalidArgumentError, NoFilesError
from penstock.graph.readers import ReadImages
from penstock.sources.base import IndexableSource
from penstock.sources.images import ImagesSource
from penstock.sources.registry import open_source


def make(root: Path, *names: str) -> str:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return str(root)


def source_of(*paths: str, classes: tuple[str, ...] | None = None) -> ImagesSource:
    source = open_source(ReadImages(paths=paths, classes=classes))
    assert isinstance(source, ImagesSource)
    assert isinstance(source, IndexableSource)
    return source


def labels(source: ImagesSource) -> dict[str, int]:
    elements: list[Any] = list(source.fetch(range(len(source))))
    return {element["path"]: element["label"] for element in elements}


def test_folders_are_classes_in_sorted_order(tmp_path: Path) -> None:
    source = source_of(make(tmp_path, "dog/1.jpg", "cat/2.PNG", "cat/1.jpeg", "ant/x.webp", "cat/notes.txt"))
    assert labels(source) == {"ant/x.webp": 0, "cat/1.jpeg": 1, "cat/2.PNG": 1, "dog/1.jpg": 2}
    assert source.class_names == ("ant", "cat", "dog")
    assert source.fetch([0])[0] == {"image": b"ant/x.webp", "label": 0, "path": "ant/x.webp"}
    assert type(source.fetch([0])[0]["label"]) is int


def test_given_classes_fix_the_mapping(tmp_path: Path) -> None:
    root = make(tmp_path, "dog/1.jpg", "cat/1.jpg")
    assert labels(source_of(root, classes=("dog", "bird", "cat"))) == {"cat/1.jpg": 2, "dog/1.jpg": 0}
    assert labels(source_of(f"{root}/cat", classes=("dog", "cat"))) == {"1.jpg": 1}


def test_a_folder_outside_of_the_given_classes_is_named(tmp_path: Path) -> None:
    root = make(tmp_path, "dog/1.jpg", "cat/1.jpg", "bird/1.jpg")
    with pytest.raises(InvalidArgumentError, match=r"bird/1.jpg: .*not in classes=\['dog'\]: 'bird', 'cat'"):
        source_of(root, classes=("dog",)).splits()
    with pytest.raises(InvalidArgumentError, match="'dog' more than once"):
        source_of(root, classes=("dog", "dog"))


def test_images_of_a_flat_folder_have_no_label(tmp_path: Path) -> None:
    assert labels(source_of(make(tmp_path, "1.jpg", "2.jpg"))) == {"1.jpg": -1, "2.jpg": -1}
    assert labels(source_of(make(tmp_path, "cat/1.jpg"))) == {"1.jpg": -1, "2.jpg": -1, "cat/1.jpg": 0}


def test_the_innermost_folder_is_the_class(tmp_path: Path) -> None:
    root = make(tmp_path, "a/cat/1.jpg", "b/cat/2.jpg", "b/dog/3.jpg")
    expected = {"a/cat/1.jpg": 0, "b/cat/2.jpg": 0, "b/dog/3.jpg": 1}
    assert labels(source_of(root)) == expected
    assert labels(source_of(f"{root}/**/*.jpg")) == expected
    assert labels(source_of(f"{root}/a", f"{root}/b")) == expected


def test_one_class_folder_each_makes_the_same_classes(tmp_path: Path) -> None:
    root = make(tmp_path, "cat/1.jpg", "dog/1.jpg")
    assert labels(source_of(f"{root}/dog", f"{root}/cat")) == {"dog/1.jpg": 1, "cat/1.jpg": 0}
    assert labels(source_of(f"{root}/*")) == {"cat/1.jpg": 0, "dog/1.jpg": 1}


def test_a_folder_without_images_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(NoFilesError, match=r"has 1 files, but none that is meant \(\.jpg, \.jpeg"):
        source_of(make(tmp_path, "cat/notes.txt")).splits()
