"""How many workers a job has: from beats to targets, who gets which, what the journal keeps of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.control.decide import tick
from penstock.control.events import MetricLearned, WorkersDecided
from penstock.control.measuring import count, has_ended, measure
from penstock.control.providing import PROVISIONER_LOST_AFTER_S, SPARE_FOR_S
from penstock.control.scaling_records import JobCounters
from penstock.control.scaling_rules import PrincipalRules, ScalingRules
from penstock.core.ids import AgentId, JobName, RunnerId
from penstock.wire.figures import RunnerFigures, StageFigures
from penstock.wire.messages import AgentBeat, Beat, CloseClient, Refused, RunnerPlace, SteerJob
from penstock.wire.principals import Principal
from penstock.wire.scaling import Decisions, GetDecisions, Provide, Provided, ScaleJob
from tests.control.cluster import JOB, OPERATOR, Cluster, spec

SCALER = Principal("provisioner", "scaler")


class Fluid:
    """A trainer that takes `demand` batches a second if it never waits, and workers that make `rate` each."""

    def __init__(
        self,
        pool: int,
        *,
        demand: float = 40.0,
        rate: float = 10.0,
        storage: float = math.inf,
        silent: int = 0,
        warm_up: int = 0,
        **changes: Any,
    ) -> None:
        """All workers together make no more than `storage`.

        They say nothing of themselves for `silent` seconds, and make nothing for `warm_up` seconds.
        """
        self.cluster = Cluster()
        self.rules = ScalingRules()
        self.demand, self.rate, self.storage = demand, rate, storage
        self.silent, self.warm_up = silent, warm_up
        self.cluster.register(*(f"w{i:02}" for i in range(pool)))
        self.changes = {"workers": "auto", **changes}
        self.opened = self.cluster.opening(spec=spec(**self.changes))
        self.cluster.ask(self.opened)
        self.made: dict[str, RunnerFigures] = {}
        self.taken = self.run_s = self.wait_s = 0.0

    def second(self) -> None:
        cluster = self.cluster
        cluster.now += 1.0
        cluster.ready()
        runners = [runner.runner for runner in cluster.state.runners.get(JOB, {}).values() if runner.ready]
        making = [r for r in runners if self.made.get(r, RunnerFigures()).at_s >= self.warm_up]
        all_made = min(self.rate * len(making), self.storage)
        taken = min(all_made, self.demand)
        use = taken / all_made if all_made else 1.0
        for runner in runners:
            was = self.made.get(runner, RunnerFigures())
            self.made[runner] = RunnerFigures(
                at_s=was.at_s + 1.0,
                streams=1,
                rounds=was.rounds + (round(all_made / len(making) * use) if runner in making else 0),
                busy_s=was.busy_s + use,
                credit_wait_s=was.credit_wait_s + 1.0 - use,
                stages=(StageFigures(1, "map", busy_s=was.busy_s + use, threads=1),),
            )
        told = {runner: self.made[runner] for runner in runners if self.made[runner].at_s > self.silent}
        beat = AgentBeat(agent=AgentId("A"), runners=tuple(runners), statistics=told)
        cluster.ask(beat, peer="peer of A")
        self.read_for_a_second(taken)

    def read_for_a_second(self, taken: float) -> None:
        cluster = self.cluster
        self.taken += taken
        self.run_s += taken / self.demand
        self.wait_s += 1.0 - taken / self.demand
        attempt = next(reversed(cluster.state.jobs[JOB].iterations))
        cluster.ask(
            Beat(
                job=JOB,
                client=self.opened.client,
                consumer=0,
                attempt=attempt,
                version=0,
                batches=round(self.taken),
                run_s=self.run_s,
                wait_s=self.wait_s,
                at_s=cluster.now,
            )
        )
        cluster.take(tick(cluster.state, now=cluster.now, draw=cluster.draw, rules=self.rules))

    def next_epoch(self, epoch: int) -> None:
        """Read this one to its end and begin another: its reader counts from zero on."""
        attempt = next(reversed(self.cluster.state.jobs[JOB].iterations))
        self.cluster.ask(CloseClient(job=JOB, client=self.opened.client, consumer=0, attempt=attempt, finished=True))
        self.opened = self.cluster.opening(spec=spec(**self.changes), epoch=epoch)
        self.cluster.ask(self.opened)
        self.taken = self.run_s = self.wait_s = 0.0

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.second()

    @property
    def targets(self) -> list[int]:
        return [decision.target for decision in self.cluster.state.jobs[JOB].scaling.decisions]

    @property
    def workers(self) -> int:
        return len(self.cluster.state.runners.get(JOB, ()))


def decisions(cluster: Cluster, job: JobName = JOB) -> tuple[Any, ...]:
    answer = cluster.ask(GetDecisions(job=job))
    assert isinstance(answer, Decisions)
    return answer.decisions


def test_a_job_gets_demand_over_rate_workers_in_one_step_and_keeps_them() -> None:
    fluid = Fluid(12)
    fluid.run(60)
    assert fluid.targets == [1, 4] and fluid.workers == 4
    first, last = decisions(fluid.cluster)
    assert (last.target, last.allotted, last.shortage) == (4, 4, "")
    assert last.reason == "the trainer takes 40.0/s, a worker makes 10.0/s"
    assert last.figures["demand_per_s"] == pytest.approx(40.0, rel=0.02) and last.figures["workers"] == 1.0
    assert first.ago_s > last.ago_s > 0


def test_a_window_begins_as_soon_as_all_who_serve_have_said_something_of_themselves() -> None:
    talking, silent = Fluid(12), Fluid(12, silent=1)
    talking.run(60)
    silent.run(60)
    (_, at_once), (_, later) = (
        [decision.at_s for decision in fluid.cluster.state.jobs[JOB].scaling.decisions] for fluid in (talking, silent)
    )
    assert later == at_once + 1


def test_what_a_process_needs_to_begin_is_not_taken_for_its_rate() -> None:
    fluid = Fluid(12, warm_up=3)
    fluid.run(60)
    assert fluid.targets == [1, 4]


def test_workers_that_wait_for_storage_in_a_function_of_one_thread_are_given_back() -> None:
    fluid = Fluid(12, demand=100.0, storage=50.0)
    fluid.run(60)
    assert fluid.targets == [1, 10, 5] and fluid.workers == 5
    fluid.demand = 85.0
    fluid.run(60)
    assert fluid.targets == [1, 10, 5], "what storage gives is known"


def test_a_trainer_that_becomes_slower_gives_workers_back() -> None:
    fluid = Fluid(12, demand=60.0)
    fluid.run(40)
    assert fluid.workers == 6
    fluid.demand = 20.0
    fluid.run(60)
    assert fluid.workers in (2, 3) and fluid.targets[-1] == fluid.workers


def test_a_rank_is_counted_on_from_epoch_to_epoch_and_the_time_between_them_is_left_out() -> None:
    cluster = Cluster()
    cluster.register("w0")

    def read(epoch: int, batches: int, at_s: float) -> None:
        """Read an epoch to its end, each batch in 0.1 s after 0.05 s of waiting, and say so once."""
        opened = cluster.opening(epoch=epoch)
        attempt = cluster.ask(opened).view.attempt
        reading = {"job": JOB, "client": opened.client, "consumer": 0, "attempt": attempt}
        times = {"run_s": 0.1 * batches, "wait_s": 0.05 * batches, "at_s": at_s}
        cluster.ask(Beat(**reading, version=0, batches=batches, **times))
        cluster.ask(CloseClient(**reading, finished=True))

    read(0, 10, 5.0)
    before = count(cluster.state, JOB, 0.0)
    for epoch in (1, 2, 3):
        read(epoch, 20, 10.0 * epoch)
    now = count(cluster.state, JOB, 60.0)
    measured = measure(before, now, width=1)
    assert measured.pace is not None and measured.pace.batches == 60 and measured.seconds == pytest.approx(9.0)
    assert measured.demand_per_s == pytest.approx(10.0) and measured.waiting == pytest.approx(1 / 3)
    assert has_ended(before, now)


def test_a_job_converges_in_epochs_that_are_shorter_than_a_window() -> None:
    fluid = Fluid(12)
    for epoch in range(1, 40):
        fluid.second()
        fluid.next_epoch(epoch)
    assert fluid.targets == [1, 4] and fluid.workers == 4


def test_the_rate_of_a_worker_that_waits_for_credit_is_not_taken() -> None:
    runners = {RunnerId("full"): (1.0, 0.0), RunnerId("held"): (0.4, 0.6)}
    before = JobCounters(0.0, {}, {name: RunnerFigures() for name in runners})
    now = JobCounters(
        2.0,
        {},
        {
            name: RunnerFigures(at_s=2.0, rounds=20, busy_s=2 * busy, credit_wait_s=2 * held)
            for name, (busy, held) in runners.items()
        },
    )
    measured = measure(before, now, width=2)
    assert measured.worker_per_s == 20.0 and measured.workers == 2 and measured.pace is None
    assert measured.buffered == pytest.approx(0.3)
    assert not has_ended(before, now), "nobody has taken anything"


def test_workers_that_have_nothing_left_to_do_say_nothing_of_a_rate() -> None:
    fluid = Fluid(12)
    fluid.run(30)
    cluster, made = fluid.cluster, dict(fluid.made)
    for _ in range(40):  # all is made, and the trainer reads what lies in its memory
        cluster.now += 1.0
        made = {runner: replace(figures, at_s=figures.at_s + 1.0, streams=0) for runner, figures in made.items()}
        beat = AgentBeat(agent=AgentId("A"), runners=tuple(map(RunnerId, made)), statistics=dict(made))
        cluster.ask(beat, peer="peer of A")
        fluid.read_for_a_second(fluid.demand)
    assert fluid.targets == [1, 4] and fluid.workers == 4
    before = JobCounters(0.0, {}, {RunnerId("one"): RunnerFigures(), RunnerId("two"): RunnerFigures()})
    ended = RunnerFigures(at_s=2.0)
    working = RunnerFigures(at_s=2.0, rounds=20, busy_s=2.0)
    nothing = measure(before, JobCounters(2.0, {}, {RunnerId("one"): ended, RunnerId("two"): ended}), width=1)
    assert nothing.worker_per_s is None
    half = measure(before, JobCounters(2.0, {}, {RunnerId("one"): ended, RunnerId("two"): working}), width=1)
    assert half.worker_per_s == 10.0 and half.workers == 2
    slow = replace(ended, streams=1)  # what takes longer than a window is counted when it ends
    both = measure(before, JobCounters(2.0, {}, {RunnerId("one"): slow, RunnerId("two"): working}), width=1)
    assert both.worker_per_s == 5.0


class SizedFluid(Fluid):
    """The same, with workers of several sizes: each makes `rate` for each of its threads."""

    def __init__(self, *sizes: int, demand: float = 40.0) -> None:
        super().__init__(0, demand=demand)
        self.sizes = {f"w{number}": threads for number, threads in enumerate(sizes)}
        for worker, threads in self.sizes.items():
            self.cluster.register(worker, agent=f"of {worker}", threads=threads)

    def second(self) -> None:
        cluster = self.cluster
        cluster.now += 1.0
        cluster.ready()
        serving = {r.runner: r.worker for r in cluster.state.runners.get(JOB, {}).values() if r.ready}
        all_made = sum(self.rate * self.sizes[worker] for worker in serving.values())
        taken = min(all_made, self.demand)
        use = taken / all_made if all_made else 1.0
        for worker in self.sizes:
            told = {}
            for runner in (runner for runner, its in serving.items() if its == worker):
                was = self.made.get(runner, RunnerFigures())
                self.made[runner] = told[runner] = RunnerFigures(
                    at_s=was.at_s + 1.0,
                    streams=1,
                    rounds=was.rounds + round(self.rate * self.sizes[worker] * use),
                    busy_s=was.busy_s + use,
                    credit_wait_s=was.credit_wait_s + 1.0 - use,
                )
            agent = f"of {worker}"
            beat = AgentBeat(agent=AgentId(agent), runners=tuple(told), statistics=dict(told))
            cluster.ask(beat, peer=f"peer of {agent}")
        self.read_for_a_second(taken)

    @property
    def size(self) -> int:
        return sum(self.sizes[runner.worker] for runner in self.cluster.state.runners.get(JOB, {}).values())


def test_a_larger_worker_counts_for_as_many_as_it_has_threads_of_the_smallest() -> None:
    fluid = SizedFluid(2, 2, 8, 2, 2, 2, demand=100.0)
    fluid.run(30)
    assert fluid.size == 10 and fluid.workers in (2, 5), "demand / rate, in threads, of whatever workers they are"
    assert fluid.targets[-1] == 5, "of the smallest, which has two threads"


def test_a_job_keeps_its_size_when_a_smaller_worker_joins() -> None:
    fluid = SizedFluid(4, 4, 4, demand=80.0)
    fluid.run(30)
    assert fluid.targets == [1, 2] and fluid.size == 8
    fluid.sizes["small"] = 1
    fluid.cluster.register("small", agent="of small", threads=1)
    fluid.run(30)
    assert fluid.size == 8 and fluid.targets[-1] == 8, fluid.targets


def test_nobody_said_how_many_so_that_every_worker_serves_and_nothing_is_decided() -> None:
    fluid = Fluid(5, workers=None)
    fluid.run(10)
    assert fluid.workers == 5 and fluid.targets == []
    assert not any(isinstance(event, WorkersDecided) for event in fluid.cluster.events())


def test_an_exhausted_pool_is_a_reason_that_is_journaled_once() -> None:
    fluid = Fluid(3, demand=80.0)
    fluid.run(60)
    assert fluid.workers == 3
    last = decisions(fluid.cluster)[-1]
    assert last.target == 8 and last.shortage == "3 of 8 workers: the pool of 3 is exhausted by 1 job"
    assert fluid.targets == [1, 8]


def test_what_was_learned_is_where_the_next_run_of_the_same_begins_also_after_a_restart() -> None:
    fluid = Fluid(12)
    fluid.run(60)
    assert any(isinstance(event, MetricLearned) for event in fluid.cluster.events())
    fluid.cluster.restart()
    fluid.cluster.register(*(f"w{i:02}" for i in range(12)))
    other = JobName("again")
    fluid.cluster.ask(fluid.cluster.opening(job=other, spec=spec(**fluid.changes)))
    fluid.cluster.tick(1.0)
    (decision,) = decisions(fluid.cluster, other)
    assert decision.target == 4 and "as many as the last run" in decision.reason


def test_a_restarted_dispatcher_stops_no_process_of_a_scaled_job_and_goes_on_at_its_decision() -> None:
    fluid = Fluid(6)
    fluid.run(30)
    cluster = fluid.cluster
    before = set(cluster.state.runners[JOB])
    serving = [(r.runner, r.worker) for r in cluster.state.runners[JOB].values()]
    cluster.restart()
    places = tuple(RunnerPlace(runner, worker, JOB, f"tcp://{runner}") for runner, worker in serving)
    cluster.register(*(f"w{i:02}" for i in range(6)), runners=places)
    fluid.run(5)
    assert set(cluster.state.runners[JOB]) == before and fluid.targets == [1, 4]


def open_jobs(rules: ScalingRules | None = None, **placements: Any) -> Cluster:
    cluster = Cluster()
    cluster.register(*(f"w{i}" for i in range(6)))
    for name, placement in placements.items():
        cluster.ask(cluster.opening(job=JobName(name), spec=spec(**placement)))
    settle(cluster, rules or ScalingRules())
    return cluster


def settle(cluster: Cluster, rules: ScalingRules) -> None:
    for _ in range(3):
        cluster.now += 0.2
        cluster.take(tick(cluster.state, now=cluster.now, draw=cluster.draw, rules=rules))
        cluster.ready()


def shares(cluster: Cluster) -> dict[str, int]:
    return {job: len(runners) for job, runners in cluster.state.runners.items()}


def test_weights_are_shares_of_an_owners_own_part() -> None:
    assert shares(open_jobs(a={"workers": 6, "weight": 2.0}, b={"workers": 6})) == {"a": 4, "b": 2}
    cluster = open_jobs(a={"workers": 6, "weight": 1000.0}, b={"workers": 6, "weight": 1000.0})
    assert shares(cluster) == {"a": 3, "b": 3}


def test_a_principal_gains_nothing_by_large_weights_or_many_jobs() -> None:
    cluster = Cluster()
    cluster.register(*(f"w{i}" for i in range(6)))
    for name, owner, weight in (("a", "alice", 1.0), ("b", "bob", 100.0), ("c", "bob", 100.0)):
        opening = cluster.opening(job=JobName(name), spec=spec(workers=6, weight=weight))
        cluster.ask(opening, principal=Principal("trainer", owner))
    settle(cluster, ScalingRules())
    assert shares(cluster)["a"] == 3 and sum(shares(cluster).values()) == 6


def test_rules_of_the_service_cap_priorities_and_quotas() -> None:
    rules = ScalingRules(principals={"alice": PrincipalRules(quota=4, most_priority=0)})
    cluster = open_jobs(rules, a={"workers": 6, "priority": 5}, b={"workers": 6})
    assert shares(cluster) == {"a": 2, "b": 2}
    assert "the quota of 'alice' is 4" in decisions(cluster, JobName("a"))[-1].shortage


def test_a_higher_priority_takes_workers_over_and_gives_them_back() -> None:
    cluster = open_jobs(low={"workers": 6}, high={"workers": 4, "priority": 1})
    assert shares(cluster) == {"low": 2, "high": 4}
    cluster.ask(SteerJob(job=JobName("high"), action="pause"))
    settle(cluster, ScalingRules())
    assert shares(cluster) == {"low": 6}


def test_a_job_that_nobody_reads_has_no_worker() -> None:
    cluster = open_jobs(one={"workers": 4})
    (lease,) = cluster.state.leases(JobName("one"))
    cluster.ask(CloseClient(job=JobName("one"), client=lease.client, consumer=0, attempt=lease.attempt))
    for _ in range(4):
        cluster.now += 1.0
        cluster.beat("A")
        settle(cluster, ScalingRules())
    assert shares(cluster) == {}
    assert decisions(cluster, JobName("one"))[-1].reason == "nobody reads"


def test_an_operators_word_holds_over_a_restart_until_it_is_taken_back() -> None:
    cluster = open_jobs(one={"workers": 4})
    assert isinstance(cluster.ask(ScaleJob(job=JobName("none"), workers=2), principal=OPERATOR), Refused)
    cluster.ask(ScaleJob(job=JobName("one"), workers=2), principal=OPERATOR)
    settle(cluster, ScalingRules())
    assert shares(cluster) == {"one": 2}
    cluster.restart()
    assert cluster.state.jobs[JobName("one")].scaling.asked == 2
    cluster.ask(ScaleJob(job=JobName("one"), workers=None), principal=OPERATOR)
    assert cluster.state.jobs[JobName("one")].scaling.asked is None


def test_what_reads_everything_on_each_worker_is_not_scaled() -> None:
    cluster = open_jobs(one={"policy": "off"})
    refused = cluster.ask(ScaleJob(job=JobName("one"), workers=2), principal=OPERATOR)
    assert isinstance(refused, Refused) and "it is not scaled" in refused.reason


def test_streams_that_a_shrunk_job_does_not_need_are_retired_and_their_end_vouches_for_nothing() -> None:
    cluster = open_jobs(**{JOB: {"workers": 4, "split_counts": (40,)}})
    streams = cluster.view().streams
    assert len(streams) == 4
    for stream in streams:
        cluster.grant(stream)
    cluster.ask(ScaleJob(job=JOB, workers=1), principal=OPERATOR)
    settle(cluster, ScalingRules())
    kept, *retired = cluster.view().streams
    for stream in retired:
        (last,) = cluster.state.jobs[JOB].iterations[cluster.view().attempt].ledger.lists[stream.stream, 0, 0]
        assert cluster.grant(stream, last) == (), "it ends by itself"
        cluster.end(stream)
    assert not cluster.view().finished
    (last,) = cluster.state.jobs[JOB].iterations[cluster.view().attempt].ledger.lists[kept.stream, 0, 0]
    assert cluster.grant(kept, last) != ()


# Those who bring workers


def provide(cluster: Cluster, have: tuple[str, ...] = (), **changes: Any) -> Provided:
    fields = {"provisioner": "p", "kind": "local", "have": have, "most": 8, **changes}
    answer = cluster.ask(Provide(**fields), principal=SCALER)  # type: ignore[arg-type]
    assert isinstance(answer, Provided)
    return answer


def test_a_provisioner_is_asked_for_what_could_not_be_allotted_and_the_cheapest_first() -> None:
    cluster = open_jobs(one={"workers": 10})
    assert provide(cluster, provisioner="dear", price_per_h=2.0).wanted == 4
    assert provide(cluster, provisioner="cheap", price_per_h=1.0, most=3).wanted == 3
    assert provide(cluster, provisioner="dear", price_per_h=2.0).wanted == 1
    assert provide(cluster, provisioner="other kind", tags=("gpu",), price_per_h=0.5, most=1).wanted == 1


def test_a_job_that_takes_every_worker_wants_all_that_can_be_had_while_it_is_read() -> None:
    assert provide(open_jobs(one={})).wanted == 8
    assert provide(open_jobs()).wanted == 0


def test_workers_that_are_not_wanted_for_a_while_are_let_go_the_idle_ones_first() -> None:
    cluster = open_jobs(one={"workers": 2})
    have = tuple(f"w{i}" for i in range(6))
    assert provide(cluster, have, least=1) == Provided(wanted=6, reason="1 job want 2 workers")
    serving = {runner.worker for runner in cluster.state.runners[JobName("one")].values()}
    cluster.now += SPARE_FOR_S
    answer = provide(cluster, have, least=1)
    assert answer.wanted == 2 and len(answer.release) == 4 and serving.isdisjoint(answer.release)


def test_a_silent_provisioner_is_forgotten_and_its_workers_go_on() -> None:
    cluster = open_jobs(one={"workers": 2})
    provide(cluster, ("w0",))
    for _ in range(int(PROVISIONER_LOST_AFTER_S) + 2):
        cluster.now += 1.0
        cluster.beat("A")
        cluster.take(tick(cluster.state, now=cluster.now, draw=cluster.draw))
    assert cluster.state.provisioners == {} and len(cluster.state.workers) == 6
    assert count(cluster.state, JobName("one"), cluster.now).runners == {}
