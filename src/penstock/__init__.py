"""Penstock: describe an input pipeline once, read ready batches anywhere."""

from typing import TYPE_CHECKING

from penstock import image
from penstock.api.dataset import Dataset, mix
from penstock.api.iteration import DatasetIterator
from penstock.api.readers import (
    from_generator,
    from_huggingface,
    from_items,
    from_torch,
    range,
    read_arrow,
    read_csv,
    read_files,
    read_images,
    read_jsonl,
    read_numpy,
    read_parquet,
    read_saved,
    read_text,
    read_tfrecord,
    read_webdataset,
)
from penstock.core.element import Ragged
from penstock.core.errors import InvalidArgumentError, InvalidPipelineError, PenstockError, StateMismatchError
from penstock.graph.expressions import Expression, col
from penstock.graph.ops import SkipErrors
from penstock.runtime.stats import StageStatistics, Statistics
from penstock.sources.example_proto import decode_example, encode_example

if TYPE_CHECKING:
    from penstock.api.registered import read_registered, register
    from penstock.api.saving import SavedDataset
    from penstock.api.services import LocalService

__version__ = "0.1.0"

__all__ = [
    "Dataset",
    "DatasetIterator",
    "Expression",
    "InvalidArgumentError",
    "InvalidPipelineError",
    "Loader",
    "LoaderStatistics",
    "LocalService",
    "PenstockError",
    "Ragged",
    "SavedDataset",
    "SkipErrors",
    "StageStatistics",
    "StateMismatchError",
    "Statistics",
    "StreamStatistics",
    "col",
    "decode_example",
    "encode_example",
    "from_generator",
    "from_huggingface",
    "from_items",
    "from_torch",
    "image",
    "mix",
    "range",
    "read_arrow",
    "read_csv",
    "read_files",
    "read_images",
    "read_jsonl",
    "read_numpy",
    "read_parquet",
    "read_registered",
    "read_saved",
    "read_text",
    "read_tfrecord",
    "read_webdataset",
    "register",
]

if not TYPE_CHECKING:
    _OF_SERVICES = {
        "Loader": "penstock.api.loader",
        "LoaderStatistics": "penstock.client.statistics",
        "LocalService": "penstock.api.services",
        "SavedDataset": "penstock.api.saving",
        "StreamStatistics": "penstock.client.statistics",
        "read_registered": "penstock.api.registered",
        "register": "penstock.api.registered",
    }

    def __getattr__(name: str) -> object:
        if name in _OF_SERVICES:  # a pipeline that is read here needs no sockets
            from importlib import import_module

            return getattr(import_module(_OF_SERVICES[name]), name)
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
