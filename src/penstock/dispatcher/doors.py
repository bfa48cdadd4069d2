"""What a dispatcher looks at before it decides: keys, how much somebody asks, what was signed; and the audit."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.control.events import AnyEvent, RunnerExpected, RunnerRemoved, RunnerServes
from penstock.control.permissions import KIND as NOT_PERMITTED
from penstock.control.state import ClusterState
from penstock.dispatcher.allowances import Meter
from penstock.dispatcher.audit import AuditLog
from penstock.dispatcher.key_registry import KeyChanges, KeyRegistry
from penstock.wire.messages import Answer, Refused, Request
from penstock.wire.positions import PositionSigner
from penstock.wire.principals import Principal


class Doors:
    """See the module."""

    def __init__(self, registry: KeyRegistry, signer: PositionSigner, meter: Meter, audit: AuditLog) -> None:
        self.registry, self.signer, self.meter, self.audit = registry, signer, meter, audit

    def begin(self, state: ClusterState) -> None:
        """Let in the runners that the journal knows: they ask on before their agents have registered again."""
        for job in state.jobs.values():
            for iteration in job.iterations.values():
                for stream in iteration.streams.values():
                    if stream.bound is not None and stream.bound.verifier:
                        self.registry.expect(stream.bound.verifier, Principal("runner", stream.bound.runner))

    def look(self, now: float) -> KeyChanges:
        """Return which keys have been made and taken back, having noted it."""
        changes = self.registry.look(now)
        for did, keys in (("key made", changes.made), ("key revoked", changes.revoked)):
            for key in keys:
                self.audit.note(key.principal, did, key=key.verifier)
        return changes

    def turned_away(self, principal: Principal, key: str, request: Request, now: float) -> Answer | None:
        """Return the answer to whom a connection is no longer enough, or who asks too often; None: go on."""
        if self.registry.principal_of(key) != principal:
            reason = f"the key of {principal} has been revoked; ask who runs the service for another"
            self.audit.refused(principal, type(request).__name__, reason, now)
            return Refused(reason=reason, kind=NOT_PERMITTED)
        return self.meter.over(principal, now)

    def follow(self, events: Iterable[AnyEvent]) -> None:
        """Let in the runners that agents expect, for as long as they are there."""
        for event in events:
            match event:
                case RunnerExpected() | RunnerServes() if event.verifier:
                    self.registry.expect(event.verifier, Principal("runner", event.runner))
                case RunnerRemoved():
                    self.registry.forget(Principal("runner", event.runner))
                case _:
                    pass
