"""PyTorch's DataLoader. `processes=0` runs in the caller's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import layout
import tasks
import tokens
from side import Workload
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

PACKAGES = ("torch", "numpy")


class Mapped(Dataset[Any]):
    """`function(0)` to `function(n - 1)`."""

    def __init__(self, function: Callable[[int], Any], n: int) -> None:
        self.function, self.n = function, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.function(index)


def trivial(task: str, processes: int) -> Workload:
    """Default collation: with `__getitems__` the user's own loop would be measured instead of the loader's."""
    function = getattr(tasks, task)

    def open_pipeline(n: int) -> Iterator[int]:
        loader = DataLoader(Mapped(function, n), batch_size=tasks.BATCH, num_workers=processes)
        return (tasks.BATCH for _ in loader)

    return Workload(open=open_pipeline, first=100_000, packages=PACKAGES)


def images(folder: str, processes: int) -> Workload:
    files = layout.image_files(folder)

    def open_pipeline(n: int) -> Iterator[int]:
        dataset = Mapped(tasks.ReadAndAugment(files), tasks.passes(n, len(files)) * len(files))
        loader = DataLoader(dataset, batch_size=tasks.IMAGE_BATCH, shuffle=True, num_workers=processes)
        return (tasks.IMAGE_BATCH for _ in loader)

    return Workload(open=open_pipeline, first=len(files), packages=(*PACKAGES, "opencv-python-headless"))


def crops(folder: str, processes: int) -> Workload:
    """A script as it is before it is moved: random crops from the global generators."""
    return crops_with(DataLoader, folder, processes)


def crops_with(loader: Any, folder: str, processes: int) -> Workload:
    files = layout.image_files(folder)

    def open_pipeline(n: int) -> Iterator[int]:
        dataset = Mapped(tasks.CropFromGlobals(files), tasks.passes(n, len(files)) * len(files))
        batches = loader(dataset, batch_size=tasks.IMAGE_BATCH, shuffle=True, num_workers=processes)
        return (tasks.IMAGE_BATCH for _ in batches)

    return Workload(open=open_pipeline, first=len(files), packages=PACKAGES, weighed=True)


class ParquetRows(IterableDataset[Any]):
    """The usual recipe: each process scans its share of the files and yields dicts."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import pyarrow.dataset

        for block in pyarrow.dataset.dataset(_my_share(self.files)).scanner(batch_size=8192).to_batches():
            yield from block.to_pylist()


def _my_share(files: list[str]) -> list[str]:
    worker = get_worker_info()
    return files if worker is None else files[worker.id :: worker.num_workers]


def parquet_rows(folder: str, processes: int) -> Workload:
    """Lists of 1,024 rows travel, which is far faster than a row a message; the consumer then takes row by row."""
    files = layout.parquet_files(folder)

    def open_pipeline(n: int) -> Iterator[int]:
        dataset = ParquetRows(files * tasks.passes(n, layout.PARQUET_ROWS))
        loader = DataLoader(dataset, batch_size=1024, collate_fn=list, num_workers=processes)
        return (tasks.look_at(rows) for rows in loader)

    return Workload(open=open_pipeline, first=layout.PARQUET_ROWS, packages=(*PACKAGES, "pyarrow"))


class PackedTokens(IterableDataset[Any]):
    """What a user writes today: read lines, tokenize, pack, in each process over its share of the files."""

    def __init__(self, files: list[str], tokenizer: Callable[[str], Any]) -> None:
        self.files, self.tokenizer = files, tokenizer

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return tokens.pack(map(self.tokenizer, tokens.documents(_my_share(self.files))))


def packed_tokens(folder: str, tokenizer: str, processes: int) -> Workload:
    files = layout.text_files(folder)
    encode = tokens.TOKENIZERS[tokenizer](folder)

    def open_pipeline(n: int) -> Iterator[int]:
        dataset = PackedTokens(files * tasks.passes(n, layout.TOKENS[tokenizer]), encode)
        loader = DataLoader(dataset, batch_size=tasks.PACKED_BATCH, num_workers=processes)
        return (tokens.count_tokens(batch) for batch in loader)

    return Workload(open=open_pipeline, first=layout.TOKENS[tokenizer], packages=(*PACKAGES, "tiktoken"))
