from __future__ import annotations

from collections import Counter
from itertools import permutations
from typing import Any

import pytest

from penstock.wire.jobs import Cut, FeedSpec, JobSpec, JobView, Named, Position, Resume
from penstock.wire.messages import (
    AgentBeat,
    AgentLeaving,
    CloseClient,
    Done,
    DrainWorker,
    GetSpec,
    NotKnown,
    Refused,
    RunnerGone,
    RunnerPlace,
    RunnerReady,
    StartRunner,
    SteerJob,
    StopRunner,
    ViewMoved,
)
from tests.control.cluster import JOB, Cluster, rebind, spec, started
from tests.control.test_opening import beat


def loads(view: JobView) -> Counter[str]:
    return Counter(str(stream.worker) for stream in view.streams if not stream.ended)


def test_every_worker_gets_a_process_and_every_process_a_stream() -> None:
    cluster = started(workers=3)
    view = cluster.view()
    assert [stream.number for stream in view.streams] == [0, 1, 2]
    assert {stream.worker for stream in view.streams} == {"w0", "w1", "w2"}
    assert all(stream.share == 3 and stream.binding == 1 and stream.address for stream in view.streams)
    assert view.waiting_for == view.failure == ""


def test_a_worker_that_joins_in_the_middle_gets_a_stream_of_its_own() -> None:
    cluster = started(workers=1)
    cluster.register("w9", agent="B")
    cluster.ready()
    view = cluster.view()
    assert [stream.worker for stream in view.streams] == ["w0", "w9"]


def test_clients_are_pushed_each_change_once() -> None:
    cluster = started(workers=1, consumers=2)
    cluster.pushed.clear()
    cluster.register("w9", agent="B")
    cluster.ready()
    peers = [peer for peer, push in cluster.pushed if isinstance(push, ViewMoved)]
    assert sorted(peers) == ["peer of c0", "peer of c1"]
    change = next(push.change for _, push in cluster.pushed if isinstance(push, ViewMoved))
    assert [stream.worker for stream in change.made] == ["w9"]
    assert change.moved == ()
    assert (change.since + 1, change.version) == (cluster.view().version, cluster.view().version)


def test_streams_with_owners_come_one_a_consumer() -> None:
    cluster = started(workers=2, consumers=2, uneven="allow")
    assert [(s.number, s.owner) for s in cluster.view().streams] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert {s.share for s in cluster.view().streams} == {4}


def test_above_its_reach_a_consumer_reads_from_a_part_of_the_workers() -> None:
    cluster = started(workers=6, consumers=3, uneven="allow", reach=2)
    streams = cluster.view().streams
    assert [(s.number, s.owner) for s in streams] == [(n, n % 3) for n in range(6)]
    assert len({s.runner for s in streams}) == 6
    assert {s.share for s in streams} == {6}


def test_parts_stay_even_as_workers_come_and_go() -> None:
    cluster = started(workers=6, consumers=3, uneven="allow", reach=2)
    for gone in cluster.view().streams[:2]:
        cluster.die(gone.runner)
    cluster.register("more", agent="B")
    cluster.ready()
    owned = Counter(s.owner for s in cluster.view().streams)
    assert max(owned.values()) - min(owned.values()) <= 1
    assert all(s.runner for s in cluster.view().streams)


def test_each_consumer_has_a_stream_though_fewer_workers_came_than_were_expected() -> None:
    cluster = Cluster()
    for number in range(3):
        cluster.register(f"w{number}", agent=f"A{number}")
    described = spec(consumers=3, uneven="allow", reach=1)
    for consumer in range(3):
        cluster.open(consumer, spec=described)
    first, *others = cluster.pushes(StartRunner)
    place = RunnerPlace(first.runner, first.worker, first.job, "tcp://first")
    cluster.ask(RunnerReady(agent=cluster.state.workers[first.worker].agent, place=place))
    assert [s.owner for s in cluster.view().streams] == [0], "of three processes each would serve one consumer"
    for other in others:
        agent = cluster.state.workers[other.worker].agent
        cluster.ask(AgentLeaving(agent=agent, workers=(other.worker,)))
    assert {s.owner for s in cluster.view().streams} == {0, 1, 2}
    assert {s.runner for s in cluster.view().streams} == {first.runner}


def test_without_sharding_every_worker_runs_over_everything_once() -> None:
    cluster = started(workers=3, policy="off")
    view = cluster.view()
    assert [(s.number, s.feed) for s in view.streams] == [(n, FeedSpec(kind="dealt", number=0, of=1)) for n in range(3)]
    cluster.die(view.streams[0].runner)
    cluster.ready()
    assert len(cluster.view().streams) == 3
    for stream in cluster.view().streams:
        cluster.end(stream)
    assert cluster.view().finished


def test_runs_over_everything_that_a_checkpoint_holds_are_not_begun_again() -> None:
    cluster = Cluster()
    cluster.register("w0", "w1", "w2")
    feed = FeedSpec(kind="dealt", number=0, of=1)
    held = tuple(Position(number=n, cut=Cut(engine=[n]), round=1, marks=(1,), feed=feed) for n in range(2))
    resume = Resume(epoch=0, consumers=1, streams=held, digest="d")
    cluster.open(resume=resume, spec=spec(policy="off"))
    cluster.ready()
    cluster.live(3)
    view = cluster.view()
    assert [(s.number, s.start.engine) for s in view.streams] == [(0, [0]), (1, [1]), (2, None)]
    assert loads(view) == {"w0": 1, "w1": 1, "w2": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"order": "deterministic", "streams": 6},
        {"policy": "file", "feeds": tuple(FeedSpec(kind="listed", listed=((n,),)) for n in range(6))},
    ],
)
def test_streams_that_are_the_jobs_are_spread_evenly_and_move_to_newcomers(changes: dict[str, Any]) -> None:
    cluster = started(workers=2, **changes)
    assert loads(cluster.view()) == {"w0": 3, "w1": 3}
    before = {stream.stream: stream.binding for stream in cluster.view().streams}
    cluster.register("w2", agent="B")
    cluster.ready()
    view = cluster.view()
    assert loads(view) == {"w0": 2, "w1": 2, "w2": 2}
    assert len(view.streams) == 6
    moved = [stream for stream in view.streams if stream.binding > before[stream.stream]]
    assert [stream.worker for stream in moved] == ["w2", "w2"]


@pytest.mark.parametrize(("pace", "expected"), [(1.0, (4, 4)), (3.0, (6, 2)), (1 / 3, (2, 6))])
def test_streams_are_spread_by_the_pace_of_guests(pace: float, expected: tuple[int, int]) -> None:
    asked = spec(order="deterministic", streams=8, guests="mine", guest_pace=pace)
    for first, second in ((("guest:mine",), ()), ((), ("guest:mine",))):
        cluster = Cluster()
        cluster.register("w0", tags=first)
        cluster.open(spec=asked)
        cluster.ready()
        assert loads(cluster.view()) == {"w0": 8}
        cluster.register("w1", agent="B", tags=second)
        cluster.ready()
        guest, other = ("w0", "w1") if first else ("w1", "w0")
        assert loads(cluster.view()) == {guest: expected[0], other: expected[1]}
        cluster.die(next(each.runner for each in cluster.view().streams if each.worker == "w1" and each.runner))
        cluster.ready()
        assert loads(cluster.view()).total() == 8


@pytest.mark.parametrize("pace", [1.2, 0.8, 8.0])
@pytest.mark.parametrize("arrival", list(permutations(range(4))))
def test_in_relaxed_order_no_pace_takes_a_process_its_only_stream(pace: float, arrival: tuple[int, ...]) -> None:
    cluster = Cluster()
    cluster.register("w0", "w1")
    cluster.register("g0", "g1", agent="B", tags=("guest:mine",))
    held = tuple(
        Position(number=n, cut=Cut(engine=[n], named=(Named(0, 0, (n,)),)), round=3, marks=(3,)) for n in range(2)
    )
    resume = Resume(epoch=0, consumers=1, streams=held, digest="d")
    cluster.open(resume=resume, spec=spec(guests="mine", guest_pace=pace))
    starts = cluster.pushes(StartRunner)
    for number in arrival:
        serve(cluster, starts[number])
    assert loads(cluster.view()) == {"w0": 1, "w1": 1, "g0": 1, "g1": 1}


def by_file(files: int) -> JobSpec:
    return spec(policy="file", feeds=tuple(FeedSpec(kind="listed", listed=((n,),)) for n in range(files)))


def opened_by_file(files: int, workers: int) -> tuple[Cluster, list[StartRunner]]:
    cluster = Cluster()
    cluster.register(*(f"w{n}" for n in range(workers)))
    cluster.open(spec=by_file(files))
    return cluster, cluster.pushes(StartRunner)


def running(cluster: Cluster) -> dict[str, int]:
    return {worker: load for worker, load in loads(cluster.view()).items() if worker != "None"}


def serve(cluster: Cluster, start: StartRunner) -> None:
    cluster.pushed.append(("peer of A", start))
    cluster.ready()


def test_what_was_dealt_to_workers_waits_for_their_processes() -> None:
    cluster, starts = opened_by_file(files=6, workers=3)
    for served, start in enumerate(starts, 1):
        serve(cluster, start)
        assert set(running(cluster).values()) == {2} and len(running(cluster)) == served
    assert {stream.binding for stream in cluster.view().streams} == {1}, "a stream was moved"


def test_what_was_dealt_to_workers_does_not_wait_for_long() -> None:
    cluster, starts = opened_by_file(files=2, workers=2)
    serve(cluster, starts[0])
    cluster.live(2, [beat("c0")])
    assert running(cluster) == {"w0": 1}
    cluster.live(2, [beat("c0")])
    assert running(cluster) == {"w0": 2}
    serve(cluster, starts[1])
    assert running(cluster) == {"w0": 1, "w1": 1}


def test_what_was_dealt_to_workers_does_not_wait_for_a_process_that_died() -> None:
    cluster, starts = opened_by_file(files=2, workers=2)
    serve(cluster, starts[0])
    cluster.die(starts[1].runner)
    assert running(cluster) == {"w0": 2}


def test_no_more_processes_start_than_there_are_streams() -> None:
    cluster = started(workers=4, order="deterministic", streams=2)
    assert sum(loads(cluster.view()).values()) == 2
    assert len(cluster.state.runners[JOB]) == 2


def test_a_process_that_died_gives_its_streams_to_others_at_once() -> None:
    cluster = started(workers=2)
    victim = cluster.view().streams[0]
    cluster.die(victim.runner)
    view = cluster.view()
    assert view.streams[0].binding == victim.binding + 1
    assert loads(view) == {"w1": 2}
    cluster.ready()
    assert loads(cluster.view()) == {"w1": 1, "w0": 1}


def test_streams_do_not_grow_in_number_however_often_processes_die() -> None:
    cluster = started(workers=3)
    for _ in range(10):
        for stream in cluster.view().streams:
            if stream.runner in cluster.state.runners[JOB]:
                cluster.die(stream.runner)
        cluster.ready()
    assert loads(cluster.view()) == {"w0": 1, "w1": 1, "w2": 1}


def test_a_stream_waits_for_the_only_worker_to_have_a_process_again() -> None:
    cluster = started(workers=1)
    cluster.die(cluster.view().streams[0].runner)
    view = cluster.view()
    assert view.streams[0].runner is None
    assert view.waiting_for == "a worker's process is starting"
    cluster.ready()
    assert len(cluster.view().streams) == 1
    assert cluster.view().streams[0].runner is not None


def test_a_rebind_goes_to_another_worker_if_there_is_one_and_counts_once() -> None:
    cluster = started(workers=2)
    request = rebind(cluster.view())
    cluster.pushed.clear()
    assert cluster.ask(request) == Done()
    moved = cluster.view().streams[0]
    assert (moved.worker, moved.binding) == ("w1", 2)
    (push,) = cluster.pushes(ViewMoved)
    assert [(move.number, move.worker, move.binding) for move in push.change.moved] == [(0, "w1", 2)]
    assert cluster.decide(request).events == ()
    alone = started(workers=1)
    alone.ask(rebind(alone.view()))
    assert (alone.view().streams[0].worker, alone.view().streams[0].binding) == ("w0", 2)


def test_streams_of_a_host_that_may_be_gone_do_not_go_to_its_other_processes() -> None:
    """Until its agent is heard again: then what was wrong was one process."""
    cluster = started(workers=3, order="deterministic", streams=8)
    cluster.register("w9", agent="B")
    cluster.ready()
    on_the_host = [s for s in cluster.view().streams if s.worker != "w9"]
    for stream in on_the_host:
        cluster.ask(rebind(cluster.view(), stream.number))
        assert cluster.view().streams[stream.number].worker == "w9"
    cluster.beat("A")
    cluster.ask(rebind(cluster.view()))
    assert cluster.view().streams[0].worker != "w9"


@pytest.mark.parametrize("noticed_by", ["agent", "client"])
@pytest.mark.parametrize("coordinated", [False, True])
def test_at_most_once_gives_up_the_same_streams_whoever_notices(noticed_by: str, coordinated: bool) -> None:
    """A coordinated one goes on: given up, it would end at another step for each consumer."""
    cluster = started(workers=2, guarantee="at_most_once", coordinated=coordinated, streams=2 if coordinated else None)
    stream = cluster.view().streams[0]
    if noticed_by == "agent":
        cluster.die(stream.runner)
    else:
        cluster.ask(rebind(cluster.view()))
    after = cluster.view().streams[0]
    assert after.lost == (not coordinated)
    assert after.binding > stream.binding


def test_a_rebind_of_what_is_not_known_is_said_so() -> None:
    cluster = started()
    assert isinstance(cluster.ask(rebind(cluster.view(), attempt="older")), NotKnown)
    assert isinstance(cluster.ask(rebind(cluster.view(), stream="a0-r0.7")), NotKnown)


def test_a_process_asked_for_of_an_agent_that_died_is_asked_for_of_its_successor() -> None:
    cluster = Cluster()
    cluster.register("w0")
    cluster.open()
    (asked,) = cluster.pushes(StartRunner)
    cluster.register("w0")
    assert cluster.pushes(StartRunner) == [asked]
    cluster.pushed.append(("peer of A", asked))
    cluster.ready()
    assert cluster.view().streams[0].runner == asked.runner
    cluster.register("w0", runners=(RunnerPlace(asked.runner, "w0", JOB, f"tcp://{asked.runner}"),))
    assert cluster.pushes(StartRunner) == []


def test_an_agent_that_is_silent_is_lost_with_all_its_workers() -> None:
    cluster = started(workers=2)
    cluster.register("w9", agent="B")
    cluster.ready()
    for _ in range(7):
        cluster.now += 1.0
        cluster.beat("B")
        cluster.tick()
    assert loads(cluster.view()) == {"w9": 3}
    assert isinstance(cluster.ask(AgentBeat(agent="A", runners=())), NotKnown)


def test_a_process_that_its_agent_does_not_see_alive_is_lost_and_ended() -> None:
    cluster = started(workers=2)
    zombie = cluster.view().streams[0].runner
    for _ in range(7):
        cluster.now += 1.0
        cluster.beat("A", without=(zombie,))
        cluster.tick()
    assert loads(cluster.view()) == {"w1": 2}
    assert zombie in [push.runner for push in cluster.pushes(StopRunner)]


def test_a_late_registration_brings_no_dead_process_back_for_good() -> None:
    cluster = started(workers=2)
    dead = cluster.view().streams[0]
    cluster.die(dead.runner)
    cluster.ready()
    cluster.register("w0", "w1", runners=(RunnerPlace(dead.runner, "w0", JOB, dead.address),))
    for _ in range(7):
        cluster.now += 1.0
        cluster.beat("A", without=(dead.runner,))
        cluster.tick()
    assert dead.runner not in cluster.state.runners[JOB]
    assert dead.runner not in {stream.runner for stream in cluster.view().streams}


def test_a_dispatcher_that_was_stopped_itself_loses_nobody() -> None:
    cluster = started(workers=2)
    cluster.tick()
    cluster.now += 3600.0
    cluster.tick()
    assert set(cluster.state.agents) == {"A"}
    assert set(cluster.state.clients[JOB]) == {"c0"}


@pytest.mark.parametrize("how", ["drain", "leave"])
def test_streams_of_a_drained_worker_go_on_elsewhere(how: str) -> None:
    cluster = started(workers=2)
    runner = cluster.view().streams[0].runner
    request = DrainWorker(worker="w0") if how == "drain" else AgentLeaving(agent="A", workers=("w0",))
    assert cluster.ask(request) == Done()
    assert loads(cluster.view()) == {"w1": 2}
    assert [push.runner for push in cluster.pushes(StopRunner)] == [runner]
    assert cluster.decide(request).events == ()
    cluster.live(3)
    assert cluster.pushes(StartRunner) == []


def test_a_drained_worker_stays_so_across_a_restart() -> None:
    cluster = started(workers=2)
    cluster.ask(DrainWorker(worker="w0"))
    cluster.restart()
    cluster.register("w0", "w1")
    cluster.ask(beat("c0"))
    assert {push.worker for push in cluster.pushes(StartRunner)} <= {"w1"}
    cluster.ask(AgentLeaving(agent="A", workers=("w0",), gone=True))
    assert not cluster.state.drained


def test_after_a_restart_processes_that_still_run_go_on_with_their_streams() -> None:
    cluster = started(workers=2)
    before = cluster.view()
    cluster.restart()
    runners = tuple(RunnerPlace(s.runner, s.worker, JOB, s.address) for s in before.streams)
    cluster.ask(beat("c0"))
    cluster.register("w0", "w1", runners=runners)
    cluster.live(10, [beat("c0")])
    after = cluster.view()
    assert [(s.stream, s.binding, s.runner) for s in after.streams] == [
        (s.stream, s.binding, s.runner) for s in before.streams
    ]
    assert cluster.pushes(StartRunner) == []


def test_after_a_restart_streams_of_processes_that_are_gone_go_on_elsewhere() -> None:
    cluster = started(workers=2)
    before = cluster.view()
    cluster.restart()
    kept = before.streams[1]
    cluster.register("w0", "w1", runners=(RunnerPlace(kept.runner, kept.worker, JOB, kept.address),))
    assert loads(cluster.view()) == {"w1": 2}


def test_after_a_restart_streams_of_agents_that_never_return_go_on_elsewhere() -> None:
    cluster = started(workers=1)
    cluster.restart()
    cluster.register("w9", agent="B")
    cluster.ask(beat("c0"))
    cluster.ready()
    cluster.live(6, [beat("c0")])
    assert cluster.view().streams[0].worker == "w9"
    assert cluster.view().streams[0].binding == 2


def test_a_process_that_its_agent_was_asked_for_in_vain_is_asked_for_again() -> None:
    cluster = Cluster()
    cluster.register("w0", "w1")
    cluster.register("w2", agent="B")
    cluster.open()
    _, lost, elsewhere = cluster.pushes(StartRunner)
    for after_s, again in ((0.5, []), (0.6, [lost]), (1.0, [lost])):
        cluster.now += after_s
        cluster.beat("A", without=(lost.runner,))
        assert cluster.pushes(StartRunner) == again
    cluster.beat("B", without=(elsewhere.runner,))
    assert cluster.pushed == [("peer of B", elsewhere)]
    cluster.ready()
    cluster.now += 2.0
    for agent in ("A", "B"):
        cluster.beat(agent, without=(elsewhere.runner,))
    assert cluster.pushes(StartRunner) == [], "one that has served is not started again, whatever a beat says"


def test_a_process_that_is_not_ready_in_time_is_replaced() -> None:
    cluster = Cluster()
    cluster.register("w0")
    cluster.open()
    (first,) = cluster.pushes(StartRunner)
    cluster.live(60, [beat("c0")])
    assert cluster.pushes(StartRunner) == cluster.pushes(StopRunner) == [], "imports may take most of a minute"
    cluster.live(32, [beat("c0")])
    (second,) = cluster.pushes(StartRunner)
    assert second.runner != first.runner
    late = RunnerPlace(first.runner, first.worker, JOB, "tcp://late")
    cluster.ask(RunnerReady(agent="A", place=late), peer="peer of A")
    assert [push.runner for push in cluster.pushes(StopRunner)] == [first.runner]
    assert cluster.view().streams == ()


def test_a_process_that_dies_while_starting_is_started_again_but_not_at_full_speed() -> None:
    cluster = Cluster()
    cluster.register("w0")
    cluster.open()
    starts = 1
    for _ in range(60):
        for push in cluster.pushes(StartRunner):
            starts += 1
            cluster.die(push.runner, reason="exit code 1: ImportError")
        cluster.live(1, [beat("c0")])
    assert 5 <= starts <= 15
    assert "exit code 1: ImportError" in cluster.view().waiting_for


def test_a_process_of_an_unknown_job_is_stopped() -> None:
    cluster = started()
    cluster.pushed.clear()
    stray = RunnerPlace("stray", "w0", "another", "tcp://stray")
    assert cluster.ask(RunnerReady(agent="A", place=stray), peer="peer of A") == Done()
    assert [push.runner for push in cluster.pushes(StopRunner)] == ["stray"]
    cluster.ask(AgentBeat(agent="A", runners=("stray",)), peer="peer of A")
    assert [push.runner for push in cluster.pushes(StopRunner)] == ["stray"]


def test_processes_linger_between_epochs_and_end_when_nobody_comes_back() -> None:
    cluster = started()
    cluster.live(31, [beat("c0")])  # nothing is stopped soon after a dispatcher's start
    runner = cluster.view().streams[0].runner
    cluster.end(cluster.view().streams[0])
    cluster.ask(CloseClient(job=JOB, client="c0", consumer=0, attempt="a0-r0", finished=True))
    cluster.live(2)
    cluster.open(epoch=1)
    assert cluster.view().streams[0].runner == runner
    cluster.ask(CloseClient(job=JOB, client="c1", consumer=0, attempt="a1", finished=True))
    cluster.pushed.clear()
    cluster.live(12)
    assert [push.runner for push in cluster.pushes(StopRunner)] == [runner]


def test_a_paused_job_has_no_process_until_it_goes_on() -> None:
    cluster = started(workers=2)
    cluster.ask(SteerJob(job=JOB, action="pause"))
    assert "paused" in cluster.view().waiting_for
    assert all(stream.runner is None for stream in cluster.view().streams)
    assert len(cluster.pushes(StopRunner)) == 2
    cluster.ask(SteerJob(job=JOB, action="resume"))
    cluster.ready()
    assert loads(cluster.view()) == {"w0": 1, "w1": 1}
    assert isinstance(cluster.ask(SteerJob(job="nobody", action="pause")), Refused)


@pytest.mark.parametrize(
    ("job", "worker", "waiting"),
    [
        ({}, None, "no worker is connected"),
        ({"requires": ("gpu", "big")}, {"tags": ("gpu",)}, "no worker has the tags gpu, big"),
        ({"target": "local", "host": "h1"}, {"host": "h2"}, "no worker runs on the trainer's host"),
        ({"target": "remote", "host": "h1"}, {"host": "h1"}, "no worker runs on another host than the trainer's"),
        ({"requires": ("gpu",)}, {"tags": ("gpu", "x")}, "a worker's process is starting"),
        ({"target": "local", "host": "h1"}, {"host": "h1"}, "a worker's process is starting"),
    ],
)
def test_a_job_without_a_process_says_what_it_waits_for(
    job: dict[str, Any], worker: dict[str, Any] | None, waiting: str
) -> None:
    cluster = Cluster()
    if worker is not None:
        cluster.register("w0", **worker)
    answer = cluster.open(spec=spec(**job))
    assert answer.view.waiting_for == waiting
    assert bool(cluster.pushes(StartRunner)) == ("starting" in waiting)


@pytest.mark.parametrize(
    ("there", "fits"),
    [
        ((("python", "3.11.2"), ("numpy", "2.3.1"), ("tiktoken", "0.7.0")), True),
        ((("python", "3.12.0"), ("numpy", "2.3.1")), False),
        ((("python", "3.11.2"), ("numpy", "1.26.4")), False),
        ((("python", "3.11.2"), ("numpy", "2.3.1"), ("tiktoken", "0.8.0")), False),
        ((("python", "3.11.2"),), True),
    ],
)
def test_workers_with_other_versions_are_not_used_and_named(there: Any, fits: bool) -> None:
    cluster = Cluster()
    cluster.register("w0", versions=there)
    versions = (("python", "3.11.9"), ("numpy", "2.0.0"), ("tiktoken", "0.7.0"))
    view = cluster.open(spec=spec(versions=versions)).view
    assert bool(cluster.pushes(StartRunner)) == fits
    assert (view.failure == "") == fits
    if not fits:
        assert "worker 'w0' has" in view.failure
        assert "instead of" in view.failure
        cluster.register("w1", agent="B", versions=versions)
        assert cluster.view().failure == ""


def test_max_workers_is_kept() -> None:
    cluster = started(workers=5, max_workers=2)
    assert len(cluster.view().streams) == 2
    cluster.die(cluster.view().streams[0].runner)
    assert len(cluster.state.runners[JOB]) == 2


def test_at_most_once_gives_up_what_a_lost_process_had() -> None:
    cluster = started(workers=2, guarantee="at_most_once")
    victim = cluster.view().streams[0]
    cluster.die(victim.runner)
    cluster.ready()
    view = cluster.view()
    assert [(s.number, s.lost) for s in view.streams] == [(0, True), (1, False), (2, False)]
    assert isinstance(cluster.ask(cluster.granting(victim)), Refused)
    cluster.end(view.streams[1])
    cluster.end(view.streams[2])
    assert cluster.view().finished


def test_elements_that_kill_are_suspected_then_dropped_at_the_third_death() -> None:
    cluster = started(workers=1)
    stream = cluster.view().streams[0].stream
    for in_flight in (((stream, 0, 4, 0, 64),), ((stream, 0, 4, 17, 1),)):
        cluster.die(cluster.view().streams[0].runner, in_flight=in_flight)
        cluster.ready()
        assert cluster.view().dropped == ()
    assert cluster.ask(GetSpec(job=JOB)).suspects == ((0, 4, 0, 64),)
    cluster.die(cluster.view().streams[0].runner, in_flight=((stream, 0, 4, 17, 1),))
    assert cluster.view().dropped == ("element 17 of split 4 of source 0",)
    assert cluster.ask(GetSpec(job=JOB)).dropped == ((0, 4, 17),)
    cluster.restart()


def test_deaths_of_an_earlier_epoch_prove_nothing() -> None:
    """Whatever ends processes from outside hits the same elements now and then, in one epoch or another."""
    cluster = started(workers=1)
    for epoch in range(3):
        if epoch:
            cluster.open(epoch=epoch)
            cluster.ready()
        stream = cluster.view().streams[0]
        cluster.die(stream.runner, in_flight=((stream.stream, 0, 4, 16, 4),))
        cluster.ready()
    stream = cluster.view().streams[0]
    cluster.die(stream.runner, in_flight=((stream.stream, 0, 4, 17, 1),))
    assert cluster.view().dropped == ()
    assert cluster.ask(GetSpec(job=JOB)).suspects == ((0, 4, 16, 4),), "those of this epoch are known"
    cluster.restart()


def test_deaths_count_on_in_an_epoch_that_goes_on_from_a_state() -> None:
    cluster = started(workers=1)
    stream = cluster.view().streams[0]
    cluster.die(stream.runner, in_flight=((stream.stream, 0, 1, 2, 1),))
    cluster.open(resume=Resume(epoch=0, consumers=1, streams=(), digest="d"))
    assert cluster.state.jobs[JOB].deaths == {(0, 1, 2): 1}


def test_a_death_that_is_reported_twice_or_was_meant_does_not_count() -> None:
    cluster = started(workers=1)
    runner = cluster.view().streams[0].runner
    report = {"agent": "A", "runner": runner, "worker": "w0", "job": JOB, "in_flight": (("a0-r0.0", 0, 1, 2, 1),)}
    for _ in range(3):
        cluster.ask(RunnerGone(reason="killed by signal 11", **report))
    assert cluster.state.jobs[JOB].deaths == {(0, 1, 2): 1}
    cluster.ask(RunnerGone(reason="stopped: drained", **{**report, "runner": "r9"}))
    assert cluster.state.jobs[JOB].deaths == {(0, 1, 2): 1}


def test_a_worker_that_comes_back_with_another_agent_is_taken_over() -> None:
    cluster = started(workers=1)
    before = cluster.view().streams[0]
    cluster.register("w0", agent="B")
    cluster.ready()
    after = cluster.view().streams[0]
    assert after.runner not in (None, before.runner)
    assert after.binding > before.binding


def test_an_agent_whose_worker_went_down_with_another_registers_again() -> None:
    cluster = started(workers=1)
    cluster.register("w0", agent="B")
    cluster.register("w0", agent="A")  # a late duplicate, of a machine that is no more
    for _ in range(7):
        cluster.now += 1.0
        if isinstance(cluster.beat("B"), NotKnown):
            cluster.register("w0", agent="B")
        cluster.tick()
    assert cluster.state.workers["w0"].agent == "B"
