"""A job as the source of a pipeline in this process: what stands after `distribute` runs here.

In relaxed order, which stream comes next is not given. So a state inside a run of elements also says which stream the
next element comes from: an operator that is in the middle of one element (unbatch, flat_map) gets the same one again.

Of a stage from which nothing has come, operators know the state it was opened at, which is of another attempt, or none
at all. `opened` and `attempt` say what the service knows it by: a rank that returns so must not look like a new one.

Where a function here takes `rng`, the job's outputs carry the identities of their elements, and are taken apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.client.backend import ServiceBackend
from penstock.client.reader import EpochReader
from penstock.client.session import Beginning
from penstock.core.ids import AttemptId
from penstock.runtime.contract import Chunk, Fixed, Origin, Stage, State
from penstock.runtime.ops.identified import without_identities
from penstock.runtime.stats import ReaderClock, StageMeter
from penstock.stream.checkpoint import ConsumerState, read_states


class ServiceStage(Stage):
    def __init__(
        self,
        meter: StageMeter,
        backend: ServiceBackend,
        beginning: Beginning,
        clock: ReaderClock,
        attempt: tuple[int, str] | None = None,
        identities: int | None = None,
    ) -> None:
        """`beginning`: what all passes have in common. `clock`: of the trainer, who reads what stands after this.
        `attempt`: of a stage that a loaded state had opened, and from which nothing had come. `identities`: the number
        that those of the first source go by, where a function draws.
        """
        super().__init__(meter)
        self._backend, self._beginning, self._identities = backend, beginning, identities
        self._clock = clock
        self.reader: EpochReader | None = None
        self.attempt = attempt
        """The pass it was last opened in and the attempt there; None: not opened yet."""
        self.opened: tuple[State, State] | None = None
        """The state it was last opened at, and the same place in the attempt that began there."""

    def open(self, pass_: int, state: State) -> None:
        self.stop()
        beginning, options = replace(self._beginning, epoch=pass_), self._backend.options
        if state is not None:
            checkpoint = read_states(state, consumer=options.rank, consumers=options.ranks.count)
            beginning = replace(beginning, checkpoint=checkpoint)
        elif self.attempt is not None and self.attempt[0] == pass_ and beginning.may_rejoin:
            beginning = replace(beginning, rejoin=AttemptId(self.attempt[1]))
        self.reader = self._backend.open(beginning, identities=self._identities, clock=self._clock)
        self.attempt = (pass_, self.reader.session.attempt)
        self.opened = None if state is None else (state, self.reader.state().plain())

    @property
    def repeatable(self) -> bool:
        return self._backend.options.order == "deterministic"

    def _pull(self, want: int) -> Chunk:
        reader = self.reader
        assert reader is not None
        elements, after = reader.take(want)
        if not len(elements):
            return Chunk((), Fixed(after(0).plain()))
        if self._identities is None:
            return Chunk(elements, _Marks(after))
        elements, idents = without_identities(elements)
        return Chunk(elements, _Marks(after), idents)

    def stop(self) -> None:
        if self.reader is not None:
            self.reader.close()

    def close(self) -> None:
        self.stop()


class _Marks:
    def __init__(self, after: Callable[[int], ConsumerState]) -> None:
        self._after = after

    def at(self, k: int) -> State:
        return self._after(k).plain()

    def origin(self, k: int) -> Origin | None:
        return None
