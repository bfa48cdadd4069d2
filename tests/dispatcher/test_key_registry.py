"""The registry of keys, allowances, the audit log: what stands before every decision."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.control.draft import Decision
from penstock.core.errors import InvalidArgumentError
from penstock.core.ids import BlobHash, JobName
from penstock.dispatcher.allowances import BURST_S, Allowance, Meter
from penstock.dispatcher.audit import AuditLog
from penstock.dispatcher.key_registry import KeyRecord, KeyRegistry, changed_keys
from penstock.wire.credentials import KnownKey
from penstock.wire.messages import ListJobs, PutBlob, Refused, SteerJob, TryAgain
from penstock.wire.principals import Principal
from tests.control.cluster import JOB, started

ALICE, BOB, RUNNER = Principal("trainer", "alice"), Principal("trainer", "bob"), Principal("runner", "r1")


def add(path: Path, verifier: str, name: str = "alice", revoked: float | None = None) -> None:
    with changed_keys(path) as records:
        records.append(KeyRecord(name=name, role="trainer", verifier=verifier, made=time.time(), revoked=revoked))


def revoke(path: Path, verifier: str, at: float | None = None) -> None:
    with changed_keys(path) as records:
        for place, record in enumerate(records):
            if record.verifier == verifier:
                records[place] = replace(record, revoked=time.time() if at is None else at)


def test_keys_are_made_and_revoked_while_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "registry.json"
    registry = KeyRegistry(path)
    add(path, "old")
    assert registry.principal_of("old") is None
    changes = registry.look(1.0)
    assert changes.made == (KnownKey("old", ALICE),) and registry.principal_of("old") == ALICE
    add(path, "new")
    registry.look(2.0)
    revoke(path, "old")
    changes = registry.look(3.0)
    assert changes.revoked == (KnownKey("old", ALICE),) and changes.gone == frozenset(), "it has another key"
    assert registry.principal_of("old") is None and registry.valid(ALICE)
    revoke(path, "new")
    assert registry.look(4.0).gone == {ALICE}
    assert not registry.valid(ALICE)


def test_it_looks_twice_a_second_at_most(tmp_path: Path) -> None:
    path = tmp_path / "registry.json"
    registry = KeyRegistry(path)
    registry.look(1.0)
    add(path, "k")
    assert not registry.look(1.4)
    assert registry.look(1.6)


def test_a_key_that_ends_later_is_valid_until_then(tmp_path: Path) -> None:
    path = tmp_path / "registry.json"
    add(path, "k", revoked=time.time() + 0.3)
    registry = KeyRegistry(path)
    assert registry.principal_of("k") == ALICE
    time.sleep(0.35)
    assert registry.look(1.0).revoked == (KnownKey("k", ALICE),), "though the file is as it was"


def test_a_record_takes_back_a_key_that_the_service_was_started_with(tmp_path: Path) -> None:
    path = tmp_path / "registry.json"
    registry = KeyRegistry(path, [KnownKey("given", ALICE)])
    assert registry.principal_of("given") == ALICE
    add(path, "given", revoked=time.time())
    assert registry.look(1.0).gone == {ALICE}


def test_the_file_is_its_owners_and_a_damaged_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "registry.json"
    add(path, "k")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    registry = KeyRegistry(path)
    path.write_text("no JSON")
    assert not registry.look(1.0)
    assert registry.principal_of("k") == ALICE and "registry of keys" in registry.problem
    with pytest.raises(InvalidArgumentError, match="registry of keys"):
        KeyRegistry(path)


def test_a_runner_is_known_by_its_last_key_as_long_as_it_is_there() -> None:
    registry = KeyRegistry()
    registry.expect("one", RUNNER)
    registry.expect("two", RUNNER)
    assert (registry.principal_of("one"), registry.principal_of("two")) == (None, RUNNER)
    registry.forget(RUNNER)
    assert registry.principal_of("two") is None
    registry.forget(RUNNER)


# Allowances


def test_who_sends_too_much_is_told_to_try_again_and_others_are_not() -> None:
    meter = Meter(Allowance(requests_per_s=10))
    answers = [meter.over(ALICE, 0.0) for _ in range(int(10 * BURST_S) + 1)]
    assert answers[:-1] == [None] * (len(answers) - 1)
    assert answers[-1] == TryAgain(reason="trainer/alice sends more than 10 requests a second; send fewer")
    assert meter.over(BOB, 0.0) is None
    assert all(meter.over(RUNNER, 0.0) is None for _ in range(100)), "what a cluster asks for grows with it"
    assert meter.over(ALICE, 0.11) is None


def test_jobs_and_blobs_of_one_principal_are_bounded() -> None:
    cluster = started()
    meter = Meter(Allowance(jobs=1, blob_bytes=10))
    another = cluster.opening(job=JobName("another"))
    refused = meter.refusal(ALICE, another, cluster.state, lambda: 0)
    assert refused is not None and refused.kind == "limit_reached"
    assert refused.reason == ("trainer/alice has 1 jobs and pipelines, and may have 1; cancel some, or let them end")
    assert meter.refusal(BOB, another, cluster.state, lambda: 0) is None
    assert meter.refusal(ALICE, cluster.opening(), cluster.state, lambda: 0) is None, "it is there"
    blob = PutBlob(hash=BlobHash("x"), offset=0, size=6, piece=b"")
    assert meter.refusal(ALICE, blob, cluster.state, lambda: 4) is None
    refused = meter.refusal(ALICE, blob, cluster.state, lambda: 5)
    assert refused is not None and "would have 11 bytes of blobs here, and may have 10" in refused.reason


# The audit


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_log_says_who_did_what_and_who_was_refused(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log, cluster = AuditLog(path), started(share_with=("bob",))
    joining = cluster.opening(replica=1, trust=("alice",))
    for principal, request in (
        (BOB, joining),
        (ALICE, cluster.opening(job=JobName("other"))),
        (BOB, SteerJob(job=JOB, action="cancel")),
        (Principal("trainer", "eve"), SteerJob(job=JOB, action="pause")),
        (Principal("trainer", "eve"), SteerJob(job=JOB, action="pause")),
        (ALICE, ListJobs()),
    ):
        decision = cluster.decide(request, principal=principal)
        cluster.take(decision)
        log.decided(principal, request, decision, 0.0)
    assert lines(path) == [], "before the commit it has not happened"
    log.write()
    assert [(line["who"], line["did"], line.get("job")) for line in lines(path)] == [
        ("trainer/bob", "joined", "resnet"),
        ("trainer/alice", "opened", "other"),
        ("trainer/bob", "cancelled", "resnet"),
        ("trainer/eve", "refused", None),
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    log.close()


def test_the_log_is_bounded_and_refusals_do_not_push_others_out(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, most_bytes=4096)
    refused = Decision((), Refused(reason="no " * 20, kind="not_permitted"))
    for second in range(200):
        for _ in range(50):
            log.decided(BOB, ListJobs(), refused, float(second))
        log.write()
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= 2 * 4096
    assert lines(path)[-1]["before"] == 49
    assert {each.name for each in tmp_path.iterdir()} == {"audit.jsonl", "audit.jsonl.1"}
    log.close()


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    os.close(log._descriptor)
    log._descriptor = os.open("/dev/full", os.O_WRONLY)
    log.note(ALICE, "opened", job="j")
    log.write()
    log.close()


def test_without_a_path_nothing_is_noted() -> None:
    log = AuditLog(None)
    log.decided(ALICE, ListJobs(), Decision((), Refused(reason="no", kind="not_permitted")), 0.0)
    log.write()
