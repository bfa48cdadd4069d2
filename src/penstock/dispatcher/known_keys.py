"""Whose keys the dispatcher knows at this moment: those it was given, and those that agents made for their runners.

The guard asks at each handshake, in its own thread, and the dispatcher's loop at each message: the key of a process
that is gone is refused from the next message on, whatever connections it has.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.control import events as e
from penstock.core.ids import RunnerId
from penstock.wire.principals import Principal
from penstock.wire.service_keys import KnownKey


class KnownKeys:
    """Changed by the dispatcher's loop alone; any thread may ask."""

    def __init__(self, given: Iterable[KnownKey]) -> None:
        self._known = {each.verifier: each.principal for each in given}
        self._of_runners: dict[RunnerId, str] = {}

    def principal_of(self, verifier: str) -> Principal | None:
        return self._known.get(verifier)

    def note(self, events: Iterable[e.AnyEvent]) -> None:
        """Take over what events say of runners."""
        for event in events:
            match event:
                case e.RunnerExpected() | e.RunnerServes() if event.verifier:
                    self._forget(event.runner)
                    self._of_runners[event.runner] = event.verifier
                    self._known[event.verifier] = Principal("runner", event.runner)
                case e.RunnerRemoved():
                    self._forget(event.runner)

    def _forget(self, runner: RunnerId) -> None:
        self._known.pop(self._of_runners.pop(runner, ""), None)
