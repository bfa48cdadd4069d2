"""map + batch in one: threads write their results straight into the batch's buffer.

A large array is copied once, by the thread that made it, into its row; small leaves are kept and collated at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.core.element import Array, Element, element_bytes, opened, rebuild_like
from penstock.core.errors import BatchShapeError
from penstock.graph import ops
from penstock.graph.parameters import short_label
from penstock.runtime.blame import RowOrigins, blame, wrong_row
from penstock.runtime.buffers import BufferPool
from penstock.runtime.building import Site, Step, builds, make_step
from penstock.runtime.collate import collate, different_arrays, different_structure, stack_leaves
from penstock.runtime.contract import Chunk, Idents, Marks, Points, RegroupingStage, Stage, State
from penstock.runtime.flight import Flight
from penstock.runtime.ops.batch import Collate, stacking
from penstock.runtime.ops.steps import run_steps
from penstock.runtime.ordered import Buffering, Ordered, Outcome
from penstock.runtime.pool import ThreadPool
from penstock.runtime.stats import StageMeter
from penstock.runtime.streaming.units import Sizes
from penstock.runtime.tuning import Tuner

IN_PLACE_BYTES = 4096  # smaller arrays are cheaper to collate together


class BatchUnderWay:
    """One batch that several threads fill."""

    def __init__(self, size: int, buffers: BufferPool) -> None:
        self._size = size
        self._buffers = buffers
        self._lock = threading.Lock()
        self._structure: Element = None
        self._sample_row = 0
        self._first_row: Element = None
        self._arrays: list[Array | None] | None = None
        self._in_place = False
        self._rows: list[Any] = [None] * size

    def write(self, first: int, rows: Sequence[Element]) -> None:
        with self._lock:
            if self._arrays is None:
                self._lay_out(rows[0], first)
            if first == 0:
                self._first_row = _structure_of(rows[0])
        if not self._in_place:
            self._rows[first : first + len(rows)] = rows
            return
        for row, element in enumerate(rows, first):
            leaves = _leaves_like(self._structure, element, (self._sample_row, row), "")
            assert self._arrays is not None
            for i, (array, leaf) in enumerate(zip(self._arrays, leaves)):
                if array is not None:
                    if type(leaf) is not np.ndarray or leaf.shape != array.shape[1:] or leaf.dtype != array.dtype:
                        raise different_arrays(array[0], leaf, row, self._paths[i])
                    array[row] = leaf
                    leaves[i] = None
            self._rows[row] = leaves

    def _lay_out(self, sample: Element, row: int) -> None:
        self._structure, self._sample_row = _structure_of(sample), row
        self._arrays = [
            self._buffers.take((self._size, *leaf.shape), leaf.dtype)
            if type(leaf) is np.ndarray and leaf.nbytes >= IN_PLACE_BYTES and leaf.dtype != object
            else None
            for leaf in _leaves_like(self._structure, sample, (row, row), "")
        ]
        self._paths = _leaf_paths(self._structure, "")
        self._in_place = any(array is not None for array in self._arrays)

    def finish(self, count: int) -> Element:
        assert self._arrays is not None
        if not self._in_place:
            return collate(self._rows[:count])
        columns: list[Any] = []
        for i, array in enumerate(self._arrays):
            if array is not None:
                columns.append(array if count == self._size else array[:count].copy())
            else:
                columns.append(stack_leaves([row[i] for row in self._rows[:count]], self._paths[i]))
        # Whichever thread came first laid the buffers out; the order of keys is that of the first row.
        by_path = dict(zip(self._paths, columns))
        return _fill_like(self._first_row, iter([by_path[path] for path in _leaf_paths(self._first_row, "")]))


class _Closed:
    """The structure of a container that is no dict, list or tuple: of what it is made of, and what makes one of it."""

    __slots__ = ("content", "kind", "make")

    def __init__(self, kind: type[Any], content: Element, make: Callable[[Element], Element]) -> None:
        self.kind, self.content, self.make = kind, content, make


def _structure_of(element: Element) -> Element:
    """Return an element's containers, with None for each leaf."""
    if isinstance(element, dict):
        return rebuild_like(element, map(_structure_of, element.values()))
    if isinstance(element, (tuple, list)):
        return rebuild_like(element, map(_structure_of, element))
    if (inside := opened(element)) is not None:
        return _Closed(type(element), _structure_of(inside[0]), inside[1])
    return None


def _leaves_like(structure: Element, element: Element, rows: tuple[int, int], path: str) -> list[Any]:
    """Return the leaves of `element` in the order of a structure, or say how the two differ."""
    if structure is None:
        return [element]
    if isinstance(structure, dict):
        if not isinstance(element, dict) or element.keys() != structure.keys():
            raise different_structure([structure, element], path, rows)
        parts = structure.items()
        return [leaf for key, part in parts for leaf in _leaves_like(part, element[key], rows, f"{path}[{key!r}]")]
    if isinstance(structure, _Closed):
        inside = opened(element) if type(element) is structure.kind else None
        if inside is None:
            raise BatchShapeError(
                f"{path or 'the element'} has another structure in row {rows[1]} than in row {rows[0]}: "
                f"{type(element).__name__} against {structure.kind.__name__}",
                rows[1],
            )
        return _leaves_like(structure.content, inside[0], rows, path)
    if type(element) is not type(structure) or len(element) != len(structure):
        raise different_structure([structure, element], path, rows)
    pairs = enumerate(zip(structure, element))
    return [leaf for i, (a, b) in pairs for leaf in _leaves_like(a, b, rows, f"{path}[{i}]")]


def _leaf_paths(structure: Element, path: str) -> list[str]:
    if isinstance(structure, dict):
        return [leaf for key, value in structure.items() for leaf in _leaf_paths(value, f"{path}[{key!r}]")]
    if isinstance(structure, (tuple, list)):
        return [leaf for i, value in enumerate(structure) for leaf in _leaf_paths(value, f"{path}[{i}]")]
    return _leaf_paths(structure.content, path) if isinstance(structure, _Closed) else [path]


def _fill_like(structure: Element, columns: Any) -> Element:
    if isinstance(structure, dict):
        return rebuild_like(structure, [_fill_like(value, columns) for value in structure.values()])
    if isinstance(structure, (tuple, list)):
        return rebuild_like(structure, [_fill_like(value, columns) for value in structure])
    if isinstance(structure, _Closed):
        return structure.make(_fill_like(structure.content, columns))
    return next(columns)


class _Segment(msgspec.Struct):
    """Rows of one task that belong to one batch."""

    batch: BatchUnderWay | None
    row: int
    start: int
    stop: int
    ends: bool
    """With these rows the batch is full."""
    whole: Element = None
    """The finished batch, where the task has all of its rows."""


class _Task(msgspec.Struct):
    chunk: Chunk
    segments: list[_Segment]
    nbytes: int = 0


class _Rows(Ordered):
    """Computes rows and writes them where they belong."""

    def __init__(
        self,
        meter: StageMeter,
        upstream: Stage,
        pool: ThreadPool | None,
        tuner: Tuner,
        room: Buffering,
        *,
        steps: Sequence[Step],
        size: int,
        collate: Collate,
        buffers: BufferPool,
        flight: Flight | None,
        sizes: Sizes | None,
    ) -> None:
        super().__init__(meter, upstream, pool, tuner, room, flight)
        self._steps = steps
        self._size = size
        self._collate = collate
        self._buffers = buffers
        self._sizes_from = sizes

    def _open_upstream(self, pass_: int, state: State) -> None:
        self._sizes = None if self._sizes_from is None else self._sizes_from(state)
        self._batch: BatchUnderWay | None = None
        self._row = 0
        self.upstream.open(pass_, state)

    def _gather(self, want: int) -> Chunk:
        # Nobody waits for a row by itself: fewer and longer tasks, as long as a batch is still many of them.
        want = max(want, min(4 * want, self._size // 8))
        left = self._size - self._row
        if want < left <= 2 * want:
            want = left  # one task and no hand-over rather than two
        whole = (want - left) // self._size if want > left else 0
        return super()._gather(min(want, left + whole * self._size))

    def _admit(self, chunk: Chunk) -> _Task:
        segments: list[_Segment] = []
        start, count = 0, len(chunk.elements)
        while start < count:
            if self._row == 0 and self._sizes is not None:
                self._size = next(self._sizes)
            stop = min(start + self._size - self._row, count)
            if self._row == 0 and stop - start == self._size:
                segments.append(_Segment(None, 0, start, stop, ends=True))
            else:
                self._batch = self._batch or BatchUnderWay(self._size, self._buffers)
                full = self._row + stop - start == self._size
                segments.append(_Segment(self._batch, self._row, start, stop, ends=full))
                self._row += stop - start
                if self._row == self._size:
                    self._batch, self._row = None, 0
            start = stop
        return _Task(chunk, segments)

    def _work(self, task: _Task) -> Outcome:
        if self._flight is None:
            return self._make(task)
        return self._flight.record(task.chunk.marks.origin(0), len(task.chunk.elements), lambda: self._make(task))

    def _make(self, task: _Task) -> Outcome:
        """Batch by batch, not step by step over the whole chunk: a batch's rows are still in the processor's cache."""
        chunk = task.chunk
        done: list[_Segment] = []
        error: BaseException | None = None
        for segment in task.segments:
            outcome = run_steps(self._steps, chunk.part(segment.start, segment.stop))
            rows, error = outcome.chunk.elements, outcome.error
            if error is not None:
                break  # what comes before is given, then the error
            try:
                if segment.batch is None:
                    segment.whole = self._collate(rows)
                else:
                    segment.batch.write(segment.row, rows)
            except Exception as raised:
                row = max(wrong_row(raised) - segment.row, 0)
                error = blame(raised, "batch", chunk.marks.origin(segment.start + row))
                break
            if not done:  # one row is weighed for all
                task.nbytes = element_bytes(rows[0]) * len(chunk.elements)
            done.append(segment)
            del rows, outcome  # two batches of rows at a time would wake the garbage collector again and again
        task.segments = done
        return Outcome(Chunk([task], chunk.marks) if done else Chunk((), chunk.marks), error)

    def _count_of(self, made: Sequence[Any]) -> int:
        """Rows are counted, not the tasks they are made in."""
        return sum(segment.stop - segment.start for task in made for segment in task.segments)

    def _bytes_of(self, made: Sequence[Any]) -> int:
        return sum(task.nbytes for task in made)

    def _slot_limit(self) -> int:
        # About two batches ahead, however small the chunks are that they are made of.
        return max(super()._slot_limit(), 2 * self._size // max(self._tuner.chunk_size, 1))


class FusedBatching(RegroupingStage):
    """Puts finished rows together into batches, in order."""

    def __init__(
        self,
        meter: StageMeter,
        upstream: Stage,
        pool: ThreadPool | None,
        tuner: Tuner,
        room: Buffering,
        *,
        steps: Sequence[Step],
        size: int,
        drop_last: bool,
        rows_meter: StageMeter,
        buffers: BufferPool,
        collate: Collate = collate,
        keep_rest: bool = False,
        flight: Flight | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        self._rows = _Rows(
            rows_meter,
            upstream,
            pool,
            tuner,
            room,
            steps=steps,
            size=size,
            collate=collate,
            buffers=buffers,
            flight=flight,
            sizes=sizes,
        )
        super().__init__(meter, self._rows)
        self._size = size
        self._drop_last = drop_last
        self._keep_rest = keep_rest

    def open(self, pass_: int, state: State) -> None:
        self._rows.open(pass_, state)
        self._partial: BatchUnderWay | None = None
        self._rest: Chunk | None = None
        self._origins = RowOrigins()
        self._filled = 0
        self._start: tuple[Marks, int] | None = None
        self._ident: Idents | None = None

    def _pull(self, want: int) -> Chunk:
        chunk = self._rest or self._next_batches(want)
        head, self._rest = chunk.head_and_rest(want)  # a task of several batches was sized by their cost, not by want
        return head

    def _next_batches(self, want: int) -> Chunk:
        while True:
            tasks = self._rows.pull(want * self._size)
            if not tasks.elements:
                return self._last((tasks.marks, 0))
            batches: list[Element] = []
            ends: list[tuple[Marks, int]] = []
            idents: list[Idents] = []
            start: tuple[Marks, int] | None = None
            for task in tasks.elements:
                for segment in task.segments:
                    if not self._filled:
                        self._start = (task.chunk.marks, segment.start)
                        self._origins.clear()
                        found = task.chunk.idents
                        self._ident = None if found is None else found[segment.start : segment.start + 1]
                    start = start or self._start
                    self._origins.add(self._filled, task.chunk.marks, segment.start)
                    self._filled += segment.stop - segment.start
                    self._partial = segment.batch
                    if segment.ends:
                        batches.append(
                            segment.whole if segment.batch is None else self._finished(segment.batch, self._filled)
                        )
                        ends.append((task.chunk.marks, segment.stop))
                        if self._ident is not None:
                            idents.append(self._ident)
                        self._filled, self._partial = 0, None
            if batches:
                assert start is not None
                return Chunk(batches, Points(start, ends), np.concatenate(idents) if idents else None)

    @property
    def has_rest(self) -> bool:
        return self._filled > 0

    def _last(self, end: tuple[Marks, int]) -> Chunk:
        batch, count, start = self._partial, self._filled, self._start
        if self._keep_rest:
            return Chunk((), Points(start if count and start else end, ()))
        self._partial, self._filled = None, 0
        if batch is None or not count or self._drop_last:
            return Chunk((), Points(end, ()))
        assert start is not None
        return Chunk([self._finished(batch, count)], Points(start, [end]), self._ident)

    def _finished(self, batch: BatchUnderWay, count: int) -> Element:
        try:
            return batch.finish(count)
        except Exception as error:
            raise self._origins.blame(error, "batch") from error.__cause__


@builds(ops.FusedBatch)
def _fused_batching(node: ops.FusedBatch, at: Site, upstream: Stage) -> Stage:
    at.meter.label = f"batch({node.size})"
    rows_meter = at.meter_before(" + ".join(map(short_label, node.steps)))
    buffers = BufferPool(at.placement.allocate)
    return FusedBatching(
        at.meter,
        upstream,
        at.pool,
        at.resources.tuner(node.traits.threads, rows_meter),
        at.resources.room(),
        steps=[make_step(step, at.calling, rows_meter) for step in node.steps],
        size=node.size,
        drop_last=node.drop_last,
        rows_meter=rows_meter,
        collate=stacking(buffers.empty),
        buffers=buffers,
        keep_rest=at.keep_rest,
        flight=at.placement.flight(),
        sizes=at.placement.sizes,
    )
