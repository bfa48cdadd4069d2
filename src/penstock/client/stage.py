"""A job as the source of a pipeline in this process: what stands after `distribute` runs here.

In relaxed order, which stream comes next is not given. So a state inside a run of elements also says which stream the
next element comes from: an operator that is in the middle of one element (unbatch, flat_map) gets the same one again.

Of a stage from which nothing has come, operators know the state it was opened at, which is of another attempt, or none
at all. `opened` and `attempt` say what the service knows it by: a rank that returns so must not look like a new one.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.client.reader import EpochReader
from penstock.client.session import Beginning
from penstock.core.ids import AttemptId
from penstock.runtime.contract import Chunk, Fixed, Origin, Stage, State
from penstock.runtime.stats import StageMeter
from penstock.stream.checkpoint import ConsumerState, read_states

OpenReader = Callable[[Beginning], EpochReader]


class ServiceStage(Stage):
    def __init__(
        self,
        meter: StageMeter,
        open_reader: OpenReader,
        *,
        seed: int | None,
        may_rejoin: bool,
        consumer: int,
        consumers: int,
        in_order: bool,
        attempt: tuple[int, str] | None = None,
    ) -> None:
        """`attempt`: of a stage that a loaded state had opened, and from which nothing had come."""
        super().__init__(meter)
        self._in_order = in_order
        self._open_reader = open_reader
        self._seed, self._may_rejoin = seed, may_rejoin
        self._consumer, self._consumers = consumer, consumers
        self.reader: EpochReader | None = None
        self.attempt = attempt
        """The pass it was last opened in and the attempt there; None: not opened yet."""
        self.opened: tuple[State, State] | None = None
        """The state it was last opened at, and the same place in the attempt that began there."""

    def open(self, pass_: int, state: State) -> None:
        self.stop()
        if state is None:
            known = self.attempt[1] if self.attempt is not None and self.attempt[0] == pass_ else None
            rejoin = AttemptId(known) if known is not None and self._may_rejoin else None
            beginning = Beginning(epoch=pass_, seed=self._seed, rejoin=rejoin)
        else:
            checkpoint = read_states(state, consumer=self._consumer, consumers=self._consumers)
            beginning = Beginning(epoch=pass_, seed=self._seed, checkpoint=checkpoint, may_rejoin=self._may_rejoin)
        self.reader = self._open_reader(beginning)
        self.attempt = (pass_, self.reader.session.attempt)
        self.opened = None if state is None else (state, self.reader.state().plain())

    @property
    def repeatable(self) -> bool:
        return self._in_order

    def _pull(self, want: int) -> Chunk:
        reader = self.reader
        assert reader is not None
        elements, after = reader.take(want)
        if not len(elements):
            return Chunk((), Fixed(after(0).plain()))
        return Chunk(elements, _Marks(after))

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
