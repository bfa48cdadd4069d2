"""A provisioner: between the service, which says how many workers it wants, and an engine that can have them.

Every second it says what there is, and does what it is answered: so it holds nothing that would be lost with it. One
that is started again with the same id finds its places by asking the engine. While the dispatcher is away nothing is
started or released.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from penstock.core.errors import PenstockError, ServiceClosedError
from penstock.core.ids import WorkerId
from penstock.provision.engines import Engine
from penstock.wire.control import ControlClient
from penstock.wire.scaling import Provide, Provided

EVERY_S = 1.0
ANSWER_S = 10.0


class WorkerOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What a provisioner could bring."""

    provisioner: str
    """An id that it has again when it is started again."""
    most: int
    least: int = 0
    price_per_h: float = 0.0
    tags: tuple[str, ...] = ()


class Bringer:
    """Brings what is wanted, in a thread of its own, until it is closed. `say` is told of each change, in a sentence.

    `control` gives the connection to the dispatcher, in a provisioner's name; it is asked each time.
    """

    def __init__(
        self, control: Callable[[], ControlClient], engine: Engine, offer: WorkerOffer, say: Callable[[str], None]
    ) -> None:
        self._control, self._engine, self._offer, self._say = control, engine, offer, say
        self._trouble = ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-provisioner", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Bring no more, and have the engine release what nobody else would end."""
        self._end.set()
        self._thread.join(ANSWER_S + EVERY_S)
        self._engine.close()

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                self._step()
            except ServiceClosedError:
                return
            except PenstockError as error:
                self._complain(str(error))
            else:
                self._trouble = ""
            self._end.wait(EVERY_S)

    def _step(self) -> None:
        """Say what there is, and do what is wanted."""
        names = sorted(self._engine.names())
        answer = self._control().ask(self._provide(names), timeout_s=ANSWER_S, what="how many workers are wanted")
        if self._end.is_set() or not isinstance(answer, Provided):
            return
        leaving = sorted({*answer.release} & {*names})[: max(0, len(names) - self._offer.least)]
        missing = min(answer.wanted, self._offer.most) - len(names)
        if leaving:
            self._say(f"{len(leaving)} fewer on {self._engine.kind}: {answer.reason}")
            self._engine.release(leaving)
        elif missing > 0:
            self._say(f"{missing} more on {self._engine.kind}: {answer.reason}")
            self._engine.start(missing)

    def _provide(self, names: list[str]) -> Provide:
        offer = self._offer
        return Provide(
            provisioner=offer.provisioner,
            kind=self._engine.kind,
            have=tuple(map(WorkerId, names)),
            most=offer.most,
            least=offer.least,
            price_per_h=offer.price_per_h,
            tags=offer.tags,
        )

    def _complain(self, trouble: str) -> None:
        """Say it once, until it is over or another."""
        if trouble != self._trouble:
            self._trouble = trouble
            self._say(trouble)
