"""From a node to the source that reads it. Implementations are imported when first needed: some are heavy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast, runtime_checkable

from penstock.core.errors import InvalidPipelineError
from penstock.graph import readers
from penstock.graph.readers import SourceNode
from penstock.sources.base import Source
from penstock.sources.listing import FileInfo, common_folder, relative_path
from penstock.sources.storage import folder_of

IMPLEMENTATIONS: dict[type[SourceNode], str] = {
    readers.Range: "memory.RangeSource",
    readers.FromItems: "memory.ItemsSource",
    readers.FromGenerator: "memory.GeneratorSource",
    readers.FromTorch: "memory.TorchSource",
    readers.FromHuggingface: "huggingface.huggingface_source",
    readers.ReadTFRecord: "tfrecord.TFRecordSource",
    readers.ReadText: "text.TextSource",
    readers.ReadJsonl: "text.JsonlSource",
    readers.ReadCsv: "csv_files.CsvSource",
    readers.ReadWebdataset: "webdataset.WebdatasetSource",
    readers.ReadFiles: "raw_files.RawFilesSource",
    readers.ReadImages: "images.ImagesSource",
    readers.ReadNumpy: "numpy_files.NumpySource",
    readers.ReadParquet: "parquet.ParquetSource",
    readers.ReadArrow: "arrow.ArrowSource",
    readers.ReadSaved: "saved.SavedSource",
    readers.ReadFeatures: "features.FeaturesSource",
}


def open_source(node: SourceNode) -> Source:
    """Return the source of a node. It lists nothing until its splits are asked for."""
    where = IMPLEMENTATIONS.get(type(node))
    if where is None:
        raise InvalidPipelineError(f"{node.name}: no source reads a {type(node).__name__}")
    module, _, name = where.partition(".")
    return cast(Source, getattr(import_module(f"penstock.sources.{module}"), name)(node))


@runtime_checkable
class ListsFiles(Protocol):
    """A source whose splits are index ranges over files: the files are part of its identity too."""

    def files(self) -> Sequence[FileInfo]: ...


def source_digest(source: Source) -> str:
    """Return a hash of all there is to read: files by relative path, size and etag, and the ranges of the splits.

    It is the same on another machine, under another root, and after the files were touched without a change.
    """
    digest = hashlib.sha256()
    splits = source.splits()
    root = common_folder(sorted({folder_of(file.path) for split in splits for file in split.files}))
    for split in splits:
        digest.update(f"split {split.start} {split.stop}\n".encode())
        for file in split.files:
            name = relative_path(file.path, root)
            digest.update(f"{name!r} {file.size} {file.etag} {file.start} {file.stop}\n".encode())
    if isinstance(source, ListsFiles):
        for info in source.files():
            digest.update(f"{info.relative!r} {info.size} {info.etag}\n".encode())
    return digest.hexdigest()[:32]
