"""Penstock: describe an input pipeline once, read ready batches anywhere."""

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
    read_text,
    read_tfrecord,
    read_webdataset,
)
from penstock.core.element import Ragged
from penstock.core.errors import PenstockError
from penstock.graph.expressions import Expression, col
from penstock.graph.ops import SkipErrors
from penstock.runtime.stats import StageStatistics, Statistics
from penstock.sources.example_proto import decode_example, encode_example

__version__ = "0.1.0"

__all__ = [
    "Dataset",
    "DatasetIterator",
    "Expression",
    "PenstockError",
    "Ragged",
    "SkipErrors",
    "StageStatistics",
    "Statistics",
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
    "read_text",
    "read_tfrecord",
    "read_webdataset",
]
