"""What a job keeps: judged by what runners say, journaled, told to all of them, and a word in how many there are."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.control.events import CachingDecided, MetricLearned
from penstock.control.snapshot import restore, snapshot
from penstock.control.state import ClusterState
from penstock.core.ids import JobName
from penstock.policies.cache_judging import CacheEvidence, CacheVerdict
from penstock.policies.caching import PipelineProfile, PointProfile, StorageModel, StorageSpeed
from penstock.wire.addresses import RunnerAddress
from penstock.wire.caching import CachingJudged, JudgeCaching
from penstock.wire.fetching import FindFellows
from penstock.wire.messages import NotKnown, Refused
from penstock.wire.principals import Principal
from penstock.wire.scaling import Decisions, GetDecisions
from tests.control.cluster import JOB, Cluster, started
from tests.control.test_scaling import Fluid

DISK = (StorageSpeed(nbytes=1 << 20, parallel=1, latency_s=0.001, bytes_per_s=100e6),)
STORAGE = StorageModel(reads=DISK, writes=DISK)
PROFILE = PipelineProfile(
    cpu_s=0.1,
    gil_s=0.0,
    source_s=0.0,
    stage_s=0.1,
    seen_s=0.1,
    points=(PointProfile(number=1, cpu_s=0.1, gil_s=0.0, nbytes=100e3),),
)


def judged(cluster: Cluster, source: int = 0, number: int | None = None, **found: Any) -> CacheVerdict:
    """Hand evidence in, as a runner does; return what holds then."""
    evidence = None
    if found:
        known = cluster.state.jobs[JOB].caching.verdicts.get(source, CacheVerdict())
        made = CacheEvidence(number=known.number if number is None else number, storage=STORAGE, **found)
        evidence = msgspec.to_builtins(made, str_keys=False)
    answer = cluster.ask(JudgeCaching(job=JOB, source=source, evidence=evidence, epochs_left=10))
    assert isinstance(answer, CachingJudged), answer
    return msgspec.convert(answer.verdict, CacheVerdict)


def test_a_runner_is_told_of_one_process_of_each_other_host() -> None:
    cluster = started(workers=5)
    runners = list(cluster.state.runners[JOB].ready())
    for number, runner in enumerate(runners):
        address = RunnerAddress(socket=f"tcp://10.0.0.{number}:1", key="k" * 40, host=f"host{number // 2}")
        changed = msgspec.structs.replace(runner, address=address.text())
        cluster.state.runners[JOB] = cluster.state.runners[JOB].put({runner.runner: changed})
    for number, runner in enumerate(runners):
        found = cluster.ask(FindFellows(job=JOB), principal=Principal("runner", runner.runner))
        hosts = [RunnerAddress.parse(fellow.address).host for fellow in found.fellows]
        assert sorted(hosts) == sorted({"host0", "host1", "host2"} - {f"host{number // 2}"})
    assert isinstance(cluster.ask(FindFellows(job=JobName("nobody's"))), (NotKnown, Refused))


def keep(cluster: Cluster) -> CacheVerdict:
    judged(cluster, profile=PROFILE)
    return judged(cluster, read_back_bytes_per_s=90e6)


def test_one_runner_finds_out_and_all_are_told() -> None:
    cluster = started(workers=3)
    assert judged(cluster).step == "measuring"
    assert judged(cluster, profile=PROFILE).step == "trying"
    assert judged(cluster, number=0, profile=PROFILE).step == "trying", "another runner was a moment later"
    assert (judged(cluster, read_back_bytes_per_s=90e6).step, judged(cluster).point) == ("chosen", 1)
    assert judged(cluster, source=1).step == "measuring", "each source is judged by itself"


def test_a_choice_is_on_disk_before_it_is_told_and_is_there_after_a_restart() -> None:
    cluster = started()
    chosen = keep(cluster)
    decided = [event for event in cluster.events() if isinstance(event, CachingDecided)]
    assert [event.verdict.step for event in decided] == ["trying", "chosen"]
    replayed = ClusterState()
    for event in cluster.events():
        replayed.apply(event)
    assert snapshot(replayed) == snapshot(cluster.state)
    assert restore(snapshot(cluster.state)).jobs[JOB].caching.verdicts == {0: chosen}
    cluster.restart()
    assert cluster.state.jobs[JOB].caching.verdicts == {0: chosen}


def test_why_tells_what_was_chosen_and_from_which_figures() -> None:
    cluster = started()
    keep(cluster)
    answer = cluster.ask(GetDecisions(job=JOB))
    assert isinstance(answer, Decisions)
    trying, chosen = answer.caching
    assert (trying.step, chosen.step, chosen.point) == ("trying", "chosen", 1)
    assert chosen.reason.startswith("keep at point 1: ") and set(chosen.seconds_by_mode) == {"compute", "keep 1"}


def test_what_cannot_be_evidence_is_refused_and_changes_nothing() -> None:
    cluster = started()
    before = snapshot(cluster.state)
    wrong: list[Any] = [
        {"number": "x"},
        {"number": 0, "got_s": {1: float("nan")}},
        {"number": 0, "profile": {"cpu_s": 1}},
        {"number": 0, "storage": {"reads": [], "writes": []}},
    ]
    for evidence in wrong:
        answer = cluster.ask(JudgeCaching(job=JOB, source=0, evidence=evidence))
        assert isinstance(answer, Refused) and answer.kind == "invalid_argument", evidence
    assert isinstance(cluster.ask(JudgeCaching(job=JOB, source=-1, evidence={"number": 0})), Refused)
    assert isinstance(cluster.ask(JudgeCaching(job="other", source=0)), NotKnown)  # type: ignore[arg-type]
    assert snapshot(cluster.state) == before


def test_a_switch_of_mode_moves_the_target_at_once() -> None:
    fluid = Fluid(12, demand=80.0, rate=10.0)
    fluid.run(40)
    assert fluid.workers == 8
    keep(fluid.cluster)
    fluid.run(6)
    assert fluid.workers == 8, "elements are computed until they are there"
    judged(fluid.cluster, got_s={1: 0.025})
    fluid.rate = 40.0
    fluid.run(1)
    assert fluid.targets[-1] == 2, "what a worker makes is known to be four times as much"
    fluid.run(40)
    assert fluid.workers in (2, 3)
    modes = {event.key.split("/")[-1] for event in fluid.cluster.events() if isinstance(event, MetricLearned)}
    assert modes == {"1", "0:1"}, "what was learned is kept for each mode"


def test_a_mode_that_was_known_before_begins_with_the_rate_it_had() -> None:
    fluid = Fluid(12, demand=80.0, rate=10.0)
    fluid.run(40)
    keep(fluid.cluster)
    judged(fluid.cluster, got_s={1: 0.025})
    fluid.rate = 40.0
    fluid.run(60)
    judged(fluid.cluster, got_s={1: 0.2}, several=True)  # the storage has become slow
    fluid.rate = 10.0
    fluid.run(1)
    assert fluid.targets[-1] == 8, "as computing was"
