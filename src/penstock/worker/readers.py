"""Who reads from a runner: trainers, known by the reading keys that they made and told the dispatcher.

A key that was not met before is asked about while its handshake waits; what the dispatcher says is kept, so that a
reader whose connection was lost is known while the dispatcher is away.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.core.errors import PenstockError
from penstock.core.ids import JobName
from penstock.wire.admissions import KnownReader, WhoReads
from penstock.wire.control import ControlClient
from penstock.wire.messages import Answer, NotKnown
from penstock.wire.principals import Principal

MAX_KNOWN = 10_000  # of readers of one job; the oldest are asked about again
TRIES, AGAIN_S = 10, 0.2  # a dispatcher that has just begun again hears of its readers one by one


class KnownReaders:
    """Answers the guard of a runner. Any thread may ask."""

    def __init__(self, control: ControlClient, job: JobName) -> None:
        self._control, self._job = control, job
        self._known: dict[str, Principal] = {}
        self._lock = threading.Lock()

    def principal_of(self, verifier: str) -> Principal | None:
        return self._known.get(verifier)

    def inquire(self, verifier: str, tell: Callable[[Principal | None], None]) -> None:
        """Ask the dispatcher whose key this is. While it is away the handshake waits, and ends by its own deadline."""

        self._ask(verifier, tell, TRIES)

    def _ask(self, verifier: str, tell: Callable[[Principal | None], None], tries: int) -> None:
        def heard(answer: Answer) -> None:
            if isinstance(answer, KnownReader):
                tell(self._keep(verifier, Principal.parse(answer.principal)))
            elif isinstance(answer, NotKnown) and tries > 1:
                again = threading.Timer(AGAIN_S, self._ask, (verifier, tell, tries - 1))
                again.daemon = True
                again.start()
            else:
                tell(None)

        try:
            self._control.post(WhoReads(job=self._job, verifier=verifier), heard)
        except PenstockError:
            tell(None)  # this runner ends

    def _keep(self, verifier: str, principal: Principal) -> Principal:
        with self._lock:
            self._known[verifier] = principal
            while len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return principal
