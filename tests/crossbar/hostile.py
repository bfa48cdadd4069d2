"""A friend of the service that asks for what is others', while cases run: all of it is refused."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import penstock as ps
from penstock.core.ids import AttemptId, JobName, StreamId
from penstock.dispatcher.key_registry import KeyRecord, changed_keys
from penstock.wire.blobs import blob_hash
from penstock.wire.control import ControlClient
from penstock.wire.credentials import Credentials
from penstock.wire.messages import (
    EndStream,
    GetBlob,
    GetFigures,
    GetSpec,
    ListJobs,
    ListWorkers,
    NotKnown,
    Rebind,
    SteerJob,
)

EVERY_S = 0.02
ASK_S = 30.0


class HostileFriend:
    """Has a trainer's key of its own. `breaches` is what it was given."""

    def __init__(self, service: ps.LocalService) -> None:
        self.breaches: list[str] = []
        self.refused = 0
        self._rng = random.Random(0)
        self._over = threading.Event()
        self._service = service
        self._key = Credentials.new("trainer", "mallory")
        record = KeyRecord(name="mallory", role="trainer", verifier=self._key.public, made=time.time())
        with changed_keys(service.service_file.with_name("registry.json")) as records:
            records.append(record)
        self._thread = threading.Thread(target=self._attack, name="hostile friend", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(ASK_S)

    def _attack(self) -> None:
        while not self._over.wait(EVERY_S):
            try:
                with ControlClient(self._service.address, self._key, name="mallory") as control:
                    while not self._over.wait(EVERY_S):
                        self._ask(control)
            except ps.AuthenticationError:
                continue  # the registry has not been looked at yet
            except ps.PenstockError:
                continue

    def _ask(self, control: ControlClient) -> None:
        names = [JobName(line.job) for line in self._service.jobs()]
        if control.ask(ListJobs(), timeout_s=ASK_S, what="jobs").jobs:  # type: ignore[union-attr]
            self.breaches.append("others' jobs were listed")
        workers = control.ask(ListWorkers(), timeout_s=ASK_S, what="workers").workers  # type: ignore[union-attr]
        if any(line.jobs for line in workers):
            self.breaches.append("others' jobs were listed with the workers")
        for job in names:
            request = self._request(job)
            try:
                answer = control.ask(request, timeout_s=ASK_S, what="what is others'")
            except ps.NotPermittedError:
                self.refused += 1
            else:
                if not isinstance(answer, NotKnown) and job in [line.job for line in self._service.jobs()]:
                    self.breaches.append(f"{request} was answered {answer}")

    def _request(self, job: JobName) -> Any:
        attempt, stream = AttemptId("guessed"), StreamId("guessed.0")
        return self._rng.choice(
            (
                SteerJob(job=job, action="cancel"),
                SteerJob(job=job, action="pause"),
                GetFigures(job=job),
                GetSpec(job=job),
                GetBlob(hash=blob_hash(b"a blob that somebody has")),
                Rebind(job=job, attempt=attempt, stream=stream, binding=1, reason="gap"),
                EndStream(job=job, attempt=attempt, stream=stream, consumer=0, rounds=0),
            )
        )
