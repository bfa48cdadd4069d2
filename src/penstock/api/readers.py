"""Functions that begin a pipeline: readers of files, and makers from what is in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from penstock.api.dataset import Dataset
from penstock.api.operators import OnError, skip_policy
from penstock.core.errors import InvalidArgumentError
from penstock.graph import readers
from penstock.graph.expressions import Expression
from penstock.graph.functions import Payload, UserFunction

Path = str | PathLike[str]
Paths = Path | Sequence[Path]
StorageOptions = Mapping[str, Any] | None


def range(start: int, stop: int | None = None, step: int = 1) -> Dataset:
    """Integers, as Python's own `range`."""
    if stop is None:
        start, stop = 0, start
    return Dataset(readers.Range(start=start, stop=stop, step=step))


def from_items(items: Iterable[Any]) -> Dataset:
    """The elements of a sequence."""
    if not isinstance(items, Iterable):
        raise InvalidArgumentError(f"from_items takes a list or another iterable, not {type(items).__name__}")
    return Dataset(readers.FromItems(items=Payload(items if isinstance(items, (list, tuple)) else list(items))))


def from_generator(function: Callable[..., Iterable[Any]], *, splits: Sequence[Any] | None = None) -> Dataset:
    """What `function(split)` yields for each declared split; without `splits`, what `function()` yields."""
    if not callable(function):
        raise InvalidArgumentError(f"from_generator takes a function, not {type(function).__name__}; pass it uncalled")
    declared = (None,) if splits is None else tuple(splits)
    return Dataset(readers.FromGenerator(function=UserFunction.of(function), splits=declared))


def from_torch(dataset: Any) -> Dataset:
    """A map-style PyTorch dataset: anything with `__len__` and `__getitem__`."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InvalidArgumentError(
            f"from_torch takes a map-style dataset with __len__ and __getitem__, not {type(dataset).__name__}; "
            "use from_generator for an iterable one"
        )
    return Dataset(readers.FromTorch(dataset=Payload(dataset)))


def from_huggingface(dataset: Any) -> Dataset:
    """A Hugging Face `Dataset` or `IterableDataset`."""
    return Dataset(readers.FromHuggingface(dataset=Payload(dataset)))


def read_tfrecord(
    paths: Paths,
    *,
    verify: bool = True,
    compression: readers.FileCompression = "auto",
    on_error: OnError = "raise",
    storage_options: StorageOptions = None,
) -> Dataset:
    """The records of TFRecord files as bytes, checksums verified; `ps.decode_example` decodes them."""
    return _records(readers.ReadTFRecord, paths, storage_options, compression, on_error, verify=verify)


def read_text(
    paths: Paths,
    *,
    compression: readers.FileCompression = "auto",
    on_error: OnError = "raise",
    storage_options: StorageOptions = None,
) -> Dataset:
    """The lines of text files, without their line endings."""
    return _records(readers.ReadText, paths, storage_options, compression, on_error)


def read_jsonl(
    paths: Paths,
    *,
    compression: readers.FileCompression = "auto",
    on_error: OnError = "raise",
    storage_options: StorageOptions = None,
) -> Dataset:
    """The JSON values of JSON lines files."""
    return _records(readers.ReadJsonl, paths, storage_options, compression, on_error)


def read_csv(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    delimiter: str = ",",
    compression: readers.FileCompression = "auto",
    on_error: OnError = "raise",
    storage_options: StorageOptions = None,
) -> Dataset:
    """The rows of CSV files as dicts, typed."""
    chosen = None if columns is None else tuple(columns)
    return _records(readers.ReadCsv, paths, storage_options, compression, on_error, columns=chosen, delimiter=delimiter)


def read_webdataset(
    paths: Paths,
    *,
    compression: readers.FileCompression = "auto",
    on_error: OnError = "raise",
    storage_options: StorageOptions = None,
) -> Dataset:
    """The samples of WebDataset tar shards: `__key__` and a member's bytes per extension."""
    return _records(readers.ReadWebdataset, paths, storage_options, compression, on_error)


def read_files(paths: Paths, *, on_error: OnError = "raise", storage_options: StorageOptions = None) -> Dataset:
    """Whole files: `{path, data}`."""
    return _files(readers.ReadFiles, paths, storage_options, on_error=skip_policy(on_error))


def read_images(
    paths: Paths,
    *,
    classes: Sequence[str] | None = None,
    on_error: OnError = "raise",
    storage_options: StorageOptions = None,
) -> Dataset:
    """Image files: `{image: bytes, label, path}`; the label is the place of the folder's name in `classes`."""
    chosen = None if classes is None else tuple(classes)
    return _files(readers.ReadImages, paths, storage_options, classes=chosen, on_error=skip_policy(on_error))


def read_numpy(
    paths: Paths,
    *,
    window: int | None = None,
    stride: int | None = None,
    dtype: Any = None,
    storage_options: StorageOptions = None,
) -> Dataset:
    """Rows of `.npy` files; with `window`, windows of flat files (`.npy`, or raw files of `dtype`)."""
    name = None if dtype is None else _dtype_name(dtype)
    return _files(readers.ReadNumpy, paths, storage_options, window=window, stride=stride, dtype=name)


def read_parquet(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    filter: Expression | None = None,
    batch: int | None = None,
    nulls: Any = "error",
    on_error: OnError = "raise",
    storage_options: StorageOptions = None,
) -> Dataset:
    """Rows of Parquet files as dicts; with `batch`, column batches of up to that many rows."""
    return _columnar(readers.ReadParquet, paths, columns, filter, batch, nulls, on_error, storage_options)


def read_arrow(
    paths: Paths,
    *,
    columns: Sequence[str] | None = None,
    filter: Expression | None = None,
    batch: int | None = None,
    nulls: Any = "error",
    on_error: OnError = "raise",
    storage_options: StorageOptions = None,
) -> Dataset:
    """Rows of Arrow IPC files as dicts; with `batch`, column batches of up to that many rows."""
    return _columnar(readers.ReadArrow, paths, columns, filter, batch, nulls, on_error, storage_options)


def _columnar(
    kind: type[readers.ColumnarSource],
    paths: Paths,
    columns: Sequence[str] | None,
    predicate: Expression | None,
    batch: int | None,
    nulls: Any,
    on_error: OnError,
    storage_options: StorageOptions,
) -> Dataset:
    chosen = None if columns is None else tuple(columns)
    return _files(
        kind,
        paths,
        storage_options,
        columns=chosen,
        predicate=predicate,
        batch=batch,
        nulls=nulls,
        on_error=skip_policy(on_error),
    )


def read_saved(paths: Paths, *, wait: float = 60.0, storage_options: StorageOptions = None) -> Dataset:
    """The elements that `Dataset.save` wrote into a folder, also while it is writing.

    Then it waits for more, and raises `WaitTimeoutError` if nothing is added for `wait` seconds.
    """
    return _files(readers.ReadSaved, paths, storage_options, wait_s=wait)


def _records(
    kind: type[readers.RecordFile],
    paths: Paths,
    storage_options: StorageOptions,
    compression: readers.FileCompression,
    on_error: OnError,
    **more: Any,
) -> Dataset:
    return _files(kind, paths, storage_options, compression=compression, on_error=skip_policy(on_error), **more)


def _files(kind: type[readers.FileSource], paths: Paths, storage_options: StorageOptions, **more: Any) -> Dataset:
    given = [paths] if isinstance(paths, (str, PathLike)) else paths
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise InvalidArgumentError(f"paths={paths!r} must be a path or URL, or a list of them")
    given = list(given)
    wrong = [path for path in given if not isinstance(path, (str, PathLike))]
    if wrong:
        raise InvalidArgumentError(
            f"paths= holds {wrong[0]!r}, which is no path or URL: each is a text or an os.PathLike"
        )
    options = tuple(sorted((storage_options or {}).items()))
    return Dataset(kind(paths=tuple(fspath(path) for path in given), storage_options=options, **more))


def _dtype_name(dtype: Any) -> str:
    import numpy as np

    return str(np.dtype(dtype).str)
