"""A running pipeline, as its reader sees it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Self, TypedDict

import msgspec

from penstock.core.element import Element
from penstock.core.errors import InterruptedReadError
from penstock.graph.node import Node
from penstock.graph.readers import SourceNode
from penstock.runtime.blame import users_part
from penstock.runtime.budget import Budget
from penstock.runtime.contract import Chunk, Fixed, Stage, State
from penstock.runtime.lower import Lowering, MakeStage
from penstock.runtime.pool import ThreadPool
from penstock.runtime.stats import ReaderClock, StageMeter, Statistics
from penstock.runtime.streams import StreamPart, StreamStopped
from penstock.runtime.tuning import CHUNK_LIMIT, ChunkSizer
from penstock.sources.base import Source

if TYPE_CHECKING:
    from penstock.caching.elsewhere import OtherHosts
    from penstock.runtime.cache_choice import CacheJudge

CLOSE_WAIT_S = 0.3  # user functions that take longer are left to end by themselves


class PipelineArguments(TypedDict):
    """What all runs of one pipeline have in common, as the arguments they take it by."""

    graph: Node
    seed: int
    epoch: int
    source_of: Callable[[SourceNode], Source]
    cache_scope: str
    cache_judge: CacheJudge | None
    cache_hosts: OtherHosts | None


class ReaderCounts(msgspec.Struct):
    """Counts the reader's side."""

    clock: ReaderClock
    elements: int = 0
    """Of the chunks before the present one."""


class Run:
    """The stages of one graph with the threads they use: opened at any pass and state, pulled, closed.

    It is read element by element (`next`) or chunk by chunk (`pull`), not both. With a `part` it is a stream of a job.
    """

    def __init__(
        self,
        graph: Node,
        *,
        seed: int,
        epoch: int,
        budget: Budget,
        source_of: Callable[[SourceNode], Source],
        part: StreamPart | None = None,
        stages: Mapping[SourceNode, MakeStage] | None = None,
        clock: ReaderClock | None = None,
        cache_scope: str = "user",
        cache_judge: CacheJudge | None = None,
        cache_hosts: OtherHosts | None = None,
    ) -> None:
        """`clock`: of a reader that others tell of; None: one of its own. `cache_scope`: whose entries are found, and
        `cache_judge`: who decides what is kept; None: this process. `cache_hosts`: who else may have an entry."""
        self.budget = budget
        self._pool = ThreadPool() if budget.threads > 1 else None
        turned = clock or ReaderClock()
        self._lowering = Lowering(
            seed=seed,
            epoch=epoch,
            budget=budget,
            pool=self._pool,
            source_of=source_of,
            part=part,
            stages=stages or {},
            cache_scope=cache_scope,
            cache_judge=cache_judge,
            cache_hosts=cache_hosts,
            reader_times=lambda: turned.times(perf_counter()),
        )
        self._stage: Stage = self._lowering.lower(graph)
        self._sizer = ChunkSizer(CHUNK_LIMIT)
        self._progress = ReaderCounts(turned)
        self._chunk = Chunk((), Fixed(None))
        self._next = self._size = 0
        self._error: BaseException | None = None
        self._ended = False
        self.closed = False
        # A reader that is dropped in mid-flight must not leave threads behind.
        self._finalizer = weakref.finalize(self, _close, self._stage, self._pool)

    def open(self, pass_: int, state: State) -> None:
        self._chunk, self._next, self._size = Chunk((), Fixed(state)), 0, 0
        self._error, self._ended = None, False
        self._stage.open(pass_, state)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Element:
        """Return the next element; a user function's error comes out as it was raised, without our frames."""
        at = self._next
        if at < self._size:
            element = self._chunk.elements[at]
            self._next = at + 1  # last: an interrupt before it loses nothing, and after it comes no call
            return element
        clock = self._progress.clock
        clock.enter(perf_counter())
        failure: BaseException | None = None
        refilled = False
        try:
            refilled = self._refill()
        except BaseException as error:
            failure = self._failed(error)
        finally:
            clock.leave(perf_counter(), ended=not refilled)
        if failure is not None:
            raise failure
        if not refilled:
            raise StopIteration
        element = self._chunk.elements[0]
        self._next = 1
        return element

    def pull(self, want: int) -> Chunk:
        """Return the next 1 to `want` elements with their marks; an empty chunk is the end, and stays the end.

        A user function's error comes out as from `next`. Closed by another thread meanwhile, it is `StreamStopped`.
        """
        if self._error is not None:
            raise self._error
        if self._ended:
            return self._chunk
        if self.closed:
            raise StreamStopped
        failure: BaseException | None = None
        clock = self._progress.clock
        clock.enter(perf_counter())
        try:
            chunk = self._stage.pull(want)
            self._progress.elements += len(chunk.elements)
        except BaseException as error:
            failure = self._failed(error)
        finally:
            clock.leave(perf_counter())
        if failure is not None:
            raise failure
        if self.closed:
            raise StreamStopped
        if not chunk.elements:
            self._chunk, self._ended = chunk, True
        return chunk

    def _failed(self, error: BaseException) -> BaseException:
        """Close, remember the error for whoever asks again, and return it as its reader shall see it."""
        self._error = error if isinstance(error, Exception) else InterruptedReadError()
        self.close()
        return error.with_traceback(users_part(error.__traceback__))

    def _refill(self) -> bool:
        if self._error is not None:
            raise self._error
        if self._ended or self.closed:
            return False
        began = perf_counter()
        chunk = self._stage.pull(self._sizer.chunk_size)
        if self.closed:  # by another thread meanwhile: the state stays that of the last element
            if self._error is not None:
                raise self._error
            return False
        self._progress.elements += self._size
        self._chunk, self._next, self._size = chunk, 0, len(chunk.elements)
        if chunk.elements:
            self._sizer.sized(len(chunk.elements), perf_counter() - began)
            return True
        self._ended = True
        return False

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def has_rest(self) -> bool:
        """Whether, at the end, something was kept back that opening at the last state gives."""
        regrouping = self._lowering.regrouping
        return regrouping is not None and regrouping.has_rest

    def state(self) -> State:
        """Return the state just after the last element that was returned."""
        return self._chunk.marks.at(self._next)

    def note(self) -> Callable[[], State]:
        """Note the same down at little cost: the function that is returned gives it, whatever was read since."""
        return partial(self._chunk.marks.at, self._next)

    def statistics(self) -> Statistics:
        read_s, idle_s = self._progress.clock.times(perf_counter())
        return Statistics(
            stages=tuple(meter.snapshot() for meter in self.meters),
            elements=self._progress.elements + self._next,
            read_s=read_s,
            idle_s=idle_s,
            buffered_elements=self._size - self._next + (self.meters[-1].buffered_elements if self.meters else 0),
            buffered_bytes=sum(meter.buffered_bytes for meter in self.meters),
            memory_budget_bytes=self.budget.memory_bytes,
            threads=self.budget.threads,
            caching=self._lowering.caching(),
        )

    @property
    def meters(self) -> list[StageMeter]:
        return self._lowering.meters

    @property
    def skipped(self) -> int:
        quarantines = self._lowering.quarantines
        return sum(quarantine.skipped for quarantine in quarantines) if quarantines else 0

    def close(self, why: Exception | None = None) -> None:
        """Stop and give everything back; may be called twice. Interrupted, it is done again, at the latest at exit.

        `why` is raised to whoever reads on before the end, also within what was pulled already; None: it is the end.
        """
        if why is not None and not self._ended and self._error is None:
            self._error, self._size = why, self._next
        if self._finalizer.alive:
            self.closed = True
            self._progress.clock.leave(perf_counter(), ended=True)
            _close(self._stage, self._pool)
            self._finalizer.detach()


def _close(stage: Stage, pool: ThreadPool | None) -> None:
    stage.stop()
    stage.close()
    if pool is not None:
        stuck = pool.close(CLOSE_WAIT_S)
        if stuck:
            warnings.warn(
                f"closed while {len(stuck)} thread(s) were still in a user function: {', '.join(stuck)}; "
                "they end when it returns",
                ResourceWarning,
                stacklevel=2,
            )
