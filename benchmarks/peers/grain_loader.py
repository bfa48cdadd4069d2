"""Google Grain: in the process, or with its own worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import grain
import layout
import tasks
import tokens
from side import Workload

PACKAGES = ("grain", "numpy")


def trivial(task: str, processes: int, threads: int = 1) -> Workload:
    function = getattr(tasks, task)

    def open_pipeline(n: int) -> Iterator[int]:
        # One reading thread was the fastest of 0, 1, 2 and 16: the function holds the GIL.
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=16 * threads)
        dataset = grain.MapDataset.range(n).map(function).batch(tasks.BATCH).to_iter_dataset(options)
        if processes:
            workers = grain.MultiprocessingOptions(num_workers=processes, per_worker_buffer_size=32)
            dataset = dataset.mp_prefetch(workers)
        return (tasks.BATCH for _ in dataset)

    return Workload(open=open_pipeline, first=50_000, packages=PACKAGES)


def parquet_rows(folder: str, processes: int) -> Workload:
    files = layout.parquet_files(folder)

    def open_pipeline(n: int) -> Iterator[int]:
        sources = grain.MapDataset.source(files).repeat(tasks.passes(n, layout.PARQUET_ROWS))
        readers = sources.map(grain.experimental.ParquetIterDataset)
        rows = grain.experimental.InterleaveIterDataset(readers, cycle_length=1)
        if processes:
            rows = rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=processes, per_worker_buffer_size=512))
        return _in_groups(islice(rows, n))

    return Workload(open=open_pipeline, first=20_000, packages=(*PACKAGES, "pyarrow"))


def _in_groups(rows: Iterator[object]) -> Iterator[int]:
    while count := tasks.look_at(islice(rows, 1024)):
        yield count


class Documents(grain.IterDataset):
    """Grain has no reader of JSON lines: its own base class, around the same generator the others use."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def __iter__(self) -> grain.DatasetIterator:
        return _DocumentIterator(self.path)


class _DocumentIterator(grain.DatasetIterator):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.seen = path, 0
        self.documents = tokens.documents([path])

    def __next__(self) -> str:
        document = next(self.documents)
        self.seen += 1
        return document

    def get_state(self) -> int:
        return self.seen

    def set_state(self, state: int) -> None:
        self.documents = tokens.documents([self.path])
        self.seen = tasks.look_at(islice(self.documents, state))


def packed_tokens(folder: str, tokenizer: str, processes: int) -> Workload:
    """Its concat-then-split packing, which took less time than its first-fit."""
    files = layout.text_files(folder)
    encode = tokens.TOKENIZERS[tokenizer](folder)

    def open_pipeline(n: int) -> Iterator[int]:
        readers = grain.MapDataset.source(files).repeat(tasks.passes(n, layout.TOKENS[tokenizer])).map(Documents)
        texts = grain.experimental.InterleaveIterDataset(readers, cycle_length=1)
        sequences = texts.map(lambda text: {"tokens": encode(text)})
        rows = grain.experimental.ConcatThenSplitIterDataset(sequences, length_struct={"tokens": tasks.PACKED})
        batches = rows.batch(tasks.PACKED_BATCH)
        if processes:
            batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=processes, per_worker_buffer_size=8))
        return (tokens.count_tokens(batch, "tokens_segment_ids") for batch in batches)

    return Workload(open=open_pipeline, first=layout.TOKENS[tokenizer], packages=(*PACKAGES, "tiktoken"))
