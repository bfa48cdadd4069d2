"""A job as the source of a pipeline in this process: what stands after `distribute` runs here.

In relaxed order, which stream comes next is not given. So a state inside a run of elements also says which stream the
next element comes from: an operator that is in the middle of one element (unbatch, flat_map) gets the same one again.

Of a stage from which nothing has come, operators know the state it was opened at, which is of another attempt, or none
at all. `opened` and `attempt` say what the service knows it by: a rank that returns so must not look like a new one.

Where a function here takes `rng`, the job's outputs carry the identities of their elements, and are taken apart.

Where the pipeline was cut before its batch, an output is the elements of one batch. They are given one by one, and the
batch is made here. Only at the end of an epoch there are fewer of them: after such a group no other may follow. The
state inside a group is `["row", rows given, state before the group]`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from msgspec.structs import replace

from penstock.client.backend import ServiceBackend
from penstock.client.reader import EpochReader
from penstock.client.session import Beginning
from penstock.core.errors import ProtocolError
from penstock.core.ids import AttemptId
from penstock.runtime.contract import Chunk, Computed, Fixed, Stage, State
from penstock.runtime.ops.identified import without_identities
from penstock.runtime.stats import ReaderClock, StageMeter
from penstock.stream.checkpoint import ConsumerState, read_states

ROW = "row"


class ServiceStage(Stage):
    def __init__(
        self,
        meter: StageMeter,
        backend: ServiceBackend,
        beginning: Beginning,
        seed: Callable[[], int | None],
        clock: ReaderClock,
        attempt: tuple[int, str] | None = None,
        identities: int | None = None,
        group_rows: int = 0,
    ) -> None:
        """`beginning`: what all passes have in common, but for the `seed`, which is asked for then. `clock`: of the
        trainer, who reads what stands after this. `attempt`: of a stage that a loaded state had opened, and from which
        nothing had come. `identities`: the number that those of the first source go by, where a function draws.
        `group_rows`: an output is the elements of a batch of so many; 0: it is an element.
        """
        super().__init__(meter)
        self._group_rows = group_rows
        self._backend, self._beginning, self._identities, self._seed = backend, beginning, identities, seed
        self._clock = clock
        self.reader: EpochReader | None = None
        self.attempt = attempt
        """The pass it was last opened in and the attempt there; None: not opened yet."""
        self.opened: tuple[State, State] | None = None
        """The state it was last opened at, and the same place in the attempt that began there."""

    def open(self, pass_: int, state: State) -> None:
        self.stop()
        self._short, self._drop = False, 0
        self._held: Chunk | None = None
        if isinstance(state, list) and state[:1] == [ROW]:
            _, self._drop, state = state
        beginning, options = replace(self._beginning, epoch=pass_, seed=self._seed()), self._backend.options
        if state is not None:
            checkpoint = read_states(state, consumer=options.rank, consumers=options.ranks.count)
            beginning = replace(beginning, checkpoint=checkpoint)
        elif self.attempt is not None and self.attempt[0] == pass_ and beginning.may_rejoin:
            beginning = replace(beginning, rejoin=AttemptId(self.attempt[1]))
        # Elements of groups carry their identities already: they were given them before they were put together.
        identities = None if self._group_rows else self._identities
        self.reader = self._backend.open(beginning, identities=identities, clock=self._clock)
        self.attempt = (pass_, self.reader.session.attempt)
        self.opened = None if state is None else (state, self.reader.state().plain())

    @property
    def repeatable(self) -> bool:
        return self._backend.options.order == "deterministic"

    def _pull(self, want: int) -> Chunk:
        reader = self.reader
        assert reader is not None
        if self._group_rows:
            return self._pull_rows(reader, want)
        elements, after = reader.take(want)
        if not len(elements):
            return Chunk((), Fixed(after(0).plain()))
        return self._chunk(elements, Computed(lambda k: after(k).plain()))

    def _pull_rows(self, reader: EpochReader, want: int) -> Chunk:
        if self._held is None:
            groups, after = reader.take(max(1, want // self._group_rows))
            if not len(groups):
                return Chunk((), Fixed(after(0).plain()))
            self._held = self._rows_of(groups, after)
        head, self._held = self._held.head_and_rest(want)
        return head

    def _rows_of(self, groups: Sequence[Any], after: Callable[[int], ConsumerState]) -> Chunk:
        for group in groups:
            if self._short:
                raise ProtocolError("a group of elements that is no whole batch came before the end; report this")
            self._short = len(group) < self._group_rows
        rows = [row for group in groups for row in group]
        first = tuple(accumulate(map(len, groups), initial=0))

        def state_at(k: int) -> State:
            group = bisect_right(first, k) - 1
            before = after(group).plain()
            return before if first[group] == k else [ROW, k - first[group], before]

        drop, self._drop = self._drop, 0
        return self._chunk(rows, Computed(state_at)).part(drop, len(rows))

    def _chunk(self, elements: Sequence[Any], marks: Computed) -> Chunk:
        if self._identities is None:
            return Chunk(elements, marks)
        elements, idents = without_identities(elements)
        return Chunk(elements, marks, idents)

    def stop(self) -> None:
        if self.reader is not None:
            self.reader.close()

    close = stop
