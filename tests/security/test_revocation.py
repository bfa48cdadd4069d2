"""A key that is taken back while its trainer reads: both planes close to it, and the others read on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

import penstock as ps
from penstock.dispatcher.key_registry import KeyRecord, changed_keys
from penstock.wire.credentials import Credentials, ServiceFile
from tests.waiting import wait_until

REFUSED_WITHIN_S = 2.0


@pytest.fixture
def service() -> Iterator[ps.LocalService]:
    with ps.LocalService(workers=2) as service:
        yield service


def registry(service: ps.LocalService) -> Path:
    return service.service_file.with_name("registry.json")


def new_friend(service: ps.LocalService, folder: Path, name: str) -> Path:
    """Return the service file of a trainer that the service has just been told of."""
    key = Credentials.new("trainer", name)
    with changed_keys(registry(service)) as records:
        records.append(KeyRecord(name=name, role="trainer", verifier=key.public, made=time.time()))
    path = folder / f"{name}.json"
    ServiceFile(address=service.address, credentials=key).write(path)
    return path


def revoke(service: ps.LocalService, name: str) -> None:
    with changed_keys(registry(service)) as records:
        for place, record in enumerate(records):
            if record.name == name:
                records[place] = replace(record, revoked=time.time())


class Reading:
    """A trainer's loop: what it has read, and how it ended."""

    def __init__(
        self,
        to: Path,
        job: str,
        access: ps.Access | None = None,
        sharing: ps.Share | None = None,
        size: int = 2_000_000,
    ) -> None:
        self.read: list[int] = []
        self.error: Exception | None = None
        self.ended_at = 0.0
        self._stop = threading.Event()
        self._dataset, self._to = ps.range(size).batch(10), to
        self._given = {"job": job, "access": access, "sharing": sharing, "limits": ps.Limits(timeout_s=60)}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                loader = self._dataset.distribute(self._to, **self._given)  # type: ignore[arg-type]
                for batch in loader:
                    self.read.extend(batch.tolist())
                    if self._stop.is_set():
                        break
                    time.sleep(0.001)
                loader.close()
                return
            except ps.AuthenticationError as error:
                if self.read:
                    self.error, self.ended_at = error, time.monotonic()
                    return  # else the registry has not been looked at yet
            except Exception as error:
                self.error, self.ended_at = error, time.monotonic()
                return

    def wait(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)


def test_a_key_revoked_while_its_trainer_reads(service: ps.LocalService, tmp_path: Path) -> None:
    alice = Reading(new_friend(service, tmp_path, "alice"), "hers")
    bob = Reading(new_friend(service, tmp_path, "bob"), "his")
    try:
        wait_until(lambda: len(alice.read) > 1_000 and len(bob.read) > 1_000, "both read")
        since = time.monotonic()
        revoke(service, "bob")
        wait_until(lambda: bob.error is not None, "the end of Bob's reading")
        assert bob.ended_at - since < REFUSED_WITHIN_S
        assert "revoked" in str(bob.error) or "refused us" in str(bob.error)
        so_far = len(alice.read)
        wait_until(lambda: len(alice.read) > so_far + 1_000, "Alice to read on")
    finally:
        alice.stop()
        bob.stop()
    assert alice.error is None
    assert len(set(alice.read)) == len(alice.read), "nothing came twice"


def test_who_shares_a_job_with_a_revoked_reader_reads_all_of_it_from_other_processes(
    service: ps.LocalService, tmp_path: Path
) -> None:
    alices, bobs = new_friend(service, tmp_path, "alice"), new_friend(service, tmp_path, "bob")
    alice = Reading(alices, "ours", ps.Access(share_with="bob"), ps.Share("wait", trainer="a"), size=60_000)
    wait_until(lambda: len(alice.read) > 100, "Alice's job")
    before = set(service.pids())
    with pytest.raises(ps.NotPermittedError, match="was made by 'alice'"):
        joined = Reading(bobs, "ours", None, ps.Share("wait", trainer="b"), size=60_000)
        joined.stop()
        raise joined.error or AssertionError("it was let in unasked")
    bob = Reading(bobs, "ours", ps.Access(trust="alice"), ps.Share("wait", trainer="b"), size=60_000)
    try:
        wait_until(lambda: len(bob.read) > 100, "Bob")
        since = time.monotonic()
        revoke(service, "bob")
        wait_until(lambda: bob.error is not None, "the end of Bob's reading")
        assert bob.ended_at - since < REFUSED_WITHIN_S
        wait_until(lambda: len(set(service.pids()) - before) >= 2, "other processes in the place of those he read from")
        alice.wait()
    finally:
        alice.stop()
        bob.stop()
    assert alice.error is None
    assert sorted(alice.read) == list(range(60_000)), "nothing is lost, nothing came twice"
