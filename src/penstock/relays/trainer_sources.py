"""What a trainer reads for runners: a job's sources, opened here, and the answer to an ask.

A source tells one reader of bad records, so that each reading has a source for itself while it lasts. A reader of a
split that has given some stays open where it stands, for whoever asks for what follows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from functools import cached_property
from time import perf_counter
from typing import Any, TypeAlias, cast

import msgspec

from penstock.core.element import Element, element_bytes
from penstock.core.errors import DataError, ProtocolError, RefusedError
from penstock.graph.fingerprint import fingerprint
from penstock.graph.node import Node
from penstock.graph.readers import SourceNode
from penstock.graph.traverse import walk
from penstock.runtime.auto_points import worker_plan
from penstock.sources.base import IndexableSource, Reader, Records, Source, SplitPosition, tell_of_bad
from penstock.sources.listing_codec import decode_listings, open_source
from penstock.wire.failures import describe_failure
from penstock.wire.frames import AskRows, BadRow, RelayRows
from penstock.wire.framing import MAX_REQUEST_BYTES, pack
from penstock.wire.runs import encode_run

ANSWER_S = 0.05  # that reading an answer may take, once it has something: the first of its rows wait for the last
FIRST_ROWS = 4  # read to see how large they are
MOST_ROWS = 4_096
HEADER_BYTES = 256 << 10  # of a message, beside its rows
MOST_STANDING = 64  # readers that nobody reads from: a file and a buffer each

_encoder = msgspec.msgpack.Encoder()
_Place: TypeAlias = tuple[int, int, int, int | None]
"""Source, split, index and offset."""


class TrainerSources:
    """A job's sources as runners have them in their plan. Any thread may ask."""

    def __init__(self, graph: Node, listings: bytes, cache: str | None) -> None:
        """`graph` and `listings` as the job has them; `cache`: where it keeps what workers make (`Placement.cache`)."""
        self._graph, self._encoded_listings, self._cache = graph, listings, cache
        self._lock = threading.Lock()
        self._idle: defaultdict[int, list[Source]] = defaultdict(list)
        self._standing: OrderedDict[_Place, tuple[Source, Reader]] = OrderedDict()

    @cached_property
    def _nodes(self) -> list[SourceNode]:
        return [node for node in walk(worker_plan(self._graph, self._cache)) if isinstance(node, SourceNode)]

    @cached_property
    def _keys(self) -> list[str]:
        return [fingerprint(node) for node in self._nodes]

    @cached_property
    def _listings(self) -> list[Any]:
        return decode_listings(self._encoded_listings)

    def answer(self, ask: AskRows) -> bytes:
        """Read what is asked for; return the message."""
        place = (ask.source, ask.split, ask.index, ask.offset)
        with self._lock:
            if not 0 <= ask.source < len(self._nodes) or self._keys[ask.source] != ask.key:
                raise ProtocolError(
                    f"a worker asks for source {ask.source}, and what it means by that is not what this process reads: "
                    "use one release of Penstock in the whole service"
                )
            standing = self._standing.pop(place, None)
            idle = self._idle[ask.source]
            source = standing[0] if standing is not None else idle.pop() if idle else self._opened(ask.source)
        reading = _Reading(source, ask, skips_bad=self._nodes[ask.source].policy is not None)
        message = reading.fetch() if ask.split < 0 else reading.read(None if standing is None else standing[1])
        self._keep(ask, reading)
        return message

    def _opened(self, number: int) -> Source:
        return open_source(self._nodes[number], self._listings[number])

    def _keep(self, ask: AskRows, reading: _Reading) -> None:
        """Let the reader stand where it is, or, if it is through, have the source read something else."""
        dropped = None
        with self._lock:
            if reading.reader is None:
                self._idle[ask.source].append(reading.source)
            else:
                self._standing[ask.source, ask.split, *reading.after] = (reading.source, reading.reader)
            if len(self._standing) > MOST_STANDING:
                _, (_, dropped) = self._standing.popitem(last=False)
        if dropped is not None:
            dropped.close()

    def close(self) -> None:
        with self._lock:
            standing, self._standing = self._standing, OrderedDict()
        for _, reader in standing.values():
            reader.close()


class _Reading:
    """One answer being read, from a source that nobody else reads from meanwhile."""

    def __init__(self, source: Source, ask: AskRows, *, skips_bad: bool) -> None:
        self.source, self._ask = source, ask
        self.reader: Reader | None = None
        """What can be read on from, afterwards."""
        self.after: tuple[int, int | None] = (ask.index, ask.offset)
        self._bad: list[BadRow] = []
        self._began = perf_counter()
        self._bytes = 0
        if skips_bad:
            tell_of_bad(source, self._note_bad)

    def _note_bad(self, error: DataError, index: int) -> None:
        failure = msgspec.structs.replace(describe_failure(error), traceback="")
        self._bad.append(BadRow(index, error.path, error.offset, failure))

    def _rows_next(self, count: int) -> int:
        """Return how many rows to read next, with so many read; 0: that is enough."""
        if not count:
            return FIRST_ROWS
        room = self._ask.most_bytes - self._bytes
        if room <= 0 or count >= MOST_ROWS or perf_counter() - self._began > ANSWER_S:
            return 0
        return min(MOST_ROWS - count, room * count // max(1, self._bytes), 4 * count)

    def _weigh(self, elements: Sequence[Element]) -> None:
        self._bytes += sum(map(element_bytes, elements))

    def fetch(self) -> bytes:
        """Read the first of the elements that are asked for by index."""
        source, wanted = cast(IndexableSource, self.source), self._ask.indices
        if not wanted or not all(0 <= index < len(source) for index in wanted):
            raise ProtocolError(f"a worker asks for elements that are none of {len(source):,}")
        elements: list[Element] = []
        covered = 0
        while covered < len(wanted) and (count := self._rows_next(covered)):
            found = source.fetch(wanted[covered : covered + count])
            covered = min(len(wanted), covered + count)
            self._weigh(found)
            elements += found
        message = self._message(elements, covers=covered)
        if message is None:
            self._ask, self._bad, self._bytes = (
                msgspec.structs.replace(self._ask, indices=wanted[: covered // 2]),
                [],
                0,
            )
            return self.fetch()
        return message

    def read(self, reader: Reader | None) -> bytes:
        """Read what follows in a split, from where a reader stands that was opened before."""
        ask = self._ask
        if reader is None:
            splits = self.source.splits()
            if ask.split >= len(splits):
                raise ProtocolError(f"a worker asks for split {ask.split} of {len(splits)}")
            reader = self.source.open(splits[ask.split], SplitPosition(ask.index, ask.offset))
        reads_on = False
        try:
            records, ended = self._read_rows(reader)
            count = kept = len(records.elements)
            while (message := self._read_message(records, kept, ended=ended and kept == count)) is None:
                kept //= 2
            # A reader that has gone further than what is sent is of no use to whoever asks for the rest.
            reads_on = not ended and kept == count
        finally:
            if reads_on:
                self.reader = reader
            else:
                reader.close()
        return message

    def _read_rows(self, reader: Reader) -> tuple[Records, bool]:
        """Return the rows of an answer, and whether they are the last."""
        parts: list[Records] = []
        count, ended = 0, False
        while not ended and (want := self._rows_next(count)):
            part = reader.read(want)
            ended = not len(part.elements)
            count += len(part.elements)
            parts.append(part)
            self._weigh(part.elements)
        return _joined(parts, self._ask.index), ended

    def _read_message(self, records: Records, count: int, *, ended: bool) -> bytes | None:
        indices = None if records.indices is None else tuple(map(int, records.indices[:count]))
        offsets = None if records.offsets is None else tuple(map(int, records.offsets[:count]))
        if count:
            index = self._ask.index + count if indices is None else indices[-1] + 1
            self.after = (index, None if offsets is None else offsets[-1])
        return self._message(records.elements[:count], indices=indices or (), offsets=offsets or (), ended=ended)

    def _message(self, elements: Sequence[Element], **what: Any) -> bytes | None:
        """Return the answer; None: it is too large for one message, and fewer rows are to go."""
        layout, buffers = encode_run(elements) if len(elements) else (b"", [])
        nbytes = len(layout) + sum(memoryview(buffer).nbytes + 16 for buffer in buffers)
        if nbytes + HEADER_BYTES > MAX_REQUEST_BYTES:
            if len(elements) > 1:
                return None
            raise RefusedError(
                f"an element of {nbytes:,} bytes is above the {MAX_REQUEST_BYTES:,} that a trainer can send to a "
                "worker at once; let workers read it themselves (read_by='workers'), or cut it into smaller ones"
            )
        rows = RelayRows(ask=self._ask.ask, count=len(elements), layout=layout, bad=tuple(self._bad), **what)
        return pack(_encoder.encode(rows), buffers, whole=True)[0]


def _joined(parts: Sequence[Records], first: int) -> Records:
    """Return what was read part by part, from a first index on."""
    elements: list[Element] = []
    offsets: list[int] | None = []
    indices: list[int] = []
    gaps = False
    for part in parts:
        count = len(part.elements)
        if part.indices is None:
            at = indices[-1] + 1 if indices else first
            indices += range(at, at + count)
        else:
            indices += part.indices
            gaps = True
        elements += part.elements
        if count:
            offsets = None if offsets is None or part.offsets is None else [*offsets, *part.offsets]
    return Records(elements, offsets or None, indices if gaps else None)
