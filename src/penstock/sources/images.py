"""Image folders: the name of the folder an image lies in is its class.

Without `classes` the labels number the folder names in sorted order, and an image right in the root, which has no
class folder, has the label -1 and is warned of. With `classes` the label is the place of the folder's name in it, and
an image of any other folder is an error: a silently shifted mapping ruins a training. With `classes=()` there are none,
and every label is -1.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from penstock.core.element import Element
from penstock.core.errors import InvalidArgumentError
from penstock.graph.readers import ReadImages
from penstock.sources.base import Split
from penstock.sources.raw_files import FilePerElementSource

UNLABELED = -1


class ImagesSource(FilePerElementSource):
    """`{image, label, path}` per image; `image` has the file's bytes, the path is relative to the root."""

    EXTENSIONS: ClassVar[tuple[str, ...] | None] = (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm", ".avif", ".jp2"),
    )

    def __init__(self, node: ReadImages) -> None:
        super().__init__(node)
        self._classes = node.classes
        if node.classes is not None and len(set(node.classes)) != len(node.classes):
            twice = [name for name, count in Counter(node.classes).items() if count > 1]
            raise InvalidArgumentError(f"classes= names {', '.join(map(repr, twice))} more than once")

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """The class of label 0, 1, ..."""
        if self._classes is not None:
            return self._classes
        return tuple(sorted({name for name in self._folder_names if name}))

    @cached_property
    def _folder_names(self) -> list[str]:
        table = self.table
        if self._classes is not None:  # the root may be a class itself: read_images("train/cat", classes=...)
            return [path.rpartition("/")[0].rpartition("/")[2] for path in table.paths]
        return [table.relative(index).rpartition("/")[0].rpartition("/")[2] for index in range(len(table))]

    @cached_property
    def labels(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        if self._classes == ():
            return np.full(len(self.table), UNLABELED, np.int64)
        label_of = {name: label for label, name in enumerate(self.class_names)}
        if self._classes is None:
            label_of[""] = UNLABELED
        unknown = sorted(set(self._folder_names) - set(label_of))
        if unknown:
            index = self._folder_names.index(unknown[0])
            folders = ", ".join(map(repr, unknown[:10])) + (", ..." if len(unknown) > 10 else "")
            raise InvalidArgumentError(
                f"{self.table.paths[index]}: images lie in folders that are not in classes={list(self.class_names)}: "
                f"{folders}; add them, or leave them out of the paths"
            )
        return np.array([label_of[name] for name in self._folder_names], np.int64)

    def splits(self) -> Sequence[Split]:
        labels = self.labels  # an image without a class is an error of the listing, not of the first batch
        unlabeled = np.flatnonzero(labels == UNLABELED)
        if len(unlabeled) and self._classes is None:
            warnings.warn(
                f"read_images: {len(unlabeled)} of {len(labels)} images lie in no class folder below what was named, "
                f"as {self.table.paths[int(unlabeled[0])]}, and have the label -1: name the folder above, "
                "or give classes= (none: classes=())",
                stacklevel=2,
            )
        return super().splits()

    def about(self, index: int) -> str:
        return f"{super().about(index)} {self.labels[index]}"  # a label depends on which other folders there are

    def make_element(self, index: int, content: bytes) -> Element:
        return {"image": content, "label": int(self.labels[index]), "path": self.table.relative(index)}
