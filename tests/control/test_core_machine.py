"""Any sequence of requests, duplicates and restarts keeps the core's invariants."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.control.draft import Draft
from penstock.control.records import Streams
from penstock.control.runners import settle_all
from penstock.control.snapshot import restore, snapshot
from penstock.control.views import view_of
from penstock.wire.jobs import Cut, HeldView, JobView, Named, Position, Ranges, Resume, StreamView
from penstock.wire.messages import (
    AgentLeaving,
    Beat,
    Changes,
    CloseClient,
    Done,
    DrainWorker,
    EndStream,
    EpochOpened,
    Granted,
    GrantSplits,
    Rebind,
    RegisterAgent,
    Request,
    RunnerGone,
    RunnerPlace,
    RunnerReady,
    SteerJob,
    View,
    ViewMoved,
    WorkerPlace,
)
from penstock.wire.scaling import ScaleJob
from tests.control.cluster import JOB, Cluster, spec

HOW = ("fresh", "rejoin", "resume", "ahead")
CHOICE = st.integers(min_value=0, max_value=1_000_000)


def by_number(view: JobView) -> tuple[list[StreamView], tuple[Any, ...]]:
    """Return all that a view says, streams by their numbers: in which order they came does not matter."""
    streams = sorted(view.streams, key=lambda stream: stream.number)
    return streams, (view.version, view.finished, view.failure, view.waiting_for, view.dropped)


class CoreMachine(RuleBasedStateMachine):
    """Drives the core with requests as peers would send them, some of them twice, some of them stale."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()
        self.spec = spec()
        self.bindings: dict[str, int] = {}
        self.granted: dict[tuple[str, int], tuple[int, ...]] = {}
        self.clients: list[Any] = []
        self.sent: list[Request] = []
        self.versions: dict[str, int] = {}
        self.serving: dict[str, RunnerPlace] = {}
        self.held: dict[str, HeldView] = {}
        """What a client holds that hears some of the changes, by its peer's name."""

    @initialize(
        consumers=st.integers(1, 3),
        kind=st.sampled_from(["relaxed", "allow", "deterministic", "at_most_once", "off"]),
        splits=st.integers(1, 12),
    )
    def begin(self, consumers: int, kind: str, splits: int) -> None:
        changes: dict[str, Any] = {
            "relaxed": {},
            "allow": {"uneven": "allow"},
            "deterministic": {"order": "deterministic", "streams": 5},
            "at_most_once": {"guarantee": "at_most_once"},
            "off": {"policy": "off"},
        }[kind]
        self.spec = spec(consumers=consumers, split_counts=(splits,), **changes)

    def ask(self, request: Request, peer: str = "p") -> Any:
        self.sent.append(request)
        return self.cluster.ask(request, peer)

    @rule(agent=st.sampled_from("AB"))
    def register(self, agent: str) -> None:
        workers = tuple(WorkerPlace(f"{agent}{i}") for i in range(2))
        runners = tuple(place for place in self.serving.values() if place.worker[0] == agent)
        self.ask(RegisterAgent(agent=agent, host="h", workers=workers, runners=runners), peer=agent)

    @rule()
    def get_ready(self) -> None:
        for job, runners in list(self.cluster.state.runners.items()):
            for runner in list(runners.values()):
                if not runner.ready and runner.worker in self.cluster.state.workers:
                    place = RunnerPlace(runner.runner, runner.worker, job, f"tcp://{runner.runner}")
                    self.serving[runner.runner] = place
                    self.ask(RunnerReady(agent=runner.worker[0], place=place), peer=runner.worker[0])

    @rule(choice=CHOICE, exact=st.booleans())
    def kill_runner(self, choice: int, exact: bool) -> None:
        if self.serving:
            runner = sorted(self.serving)[choice % len(self.serving)]
            place = self.serving.pop(runner)
            in_flight = (("s", 0, 0, 3, 1 if exact else 8),)
            self.ask(
                RunnerGone(
                    agent=place.worker[0],
                    runner=runner,
                    worker=place.worker,
                    job=place.job,
                    reason="killed",
                    in_flight=in_flight,
                )
            )

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.cluster.tick(seconds)

    @rule(agent=st.sampled_from("AB"), worker=st.integers(0, 1), gone=st.booleans())
    def leave(self, agent: str, worker: int, gone: bool) -> None:
        self.ask(AgentLeaving(agent=agent, workers=(f"{agent}{worker}",), gone=gone))

    @rule(agent=st.sampled_from("AB"))
    def drain(self, agent: str) -> None:
        self.ask(DrainWorker(worker=f"{agent}1"))

    @rule(action=st.sampled_from(["pause", "resume"]))
    def steer(self, action: Any) -> None:
        self.ask(SteerJob(job=JOB, action=action))

    @rule(workers=st.sampled_from([1, 2, (1, 3), "auto", None]))
    def scale(self, workers: Any) -> None:
        self.ask(ScaleJob(job=JOB, workers=workers))

    @rule(consumer=st.integers(0, 2), epoch=st.integers(0, 2), how=st.sampled_from(HOW))
    def open(self, consumer: int, epoch: int, how: str) -> None:
        changes: dict[str, Any] = {}
        job = self.cluster.state.jobs.get(JOB)
        if how == "rejoin" and job is not None and job.iterations:
            changes["rejoin"] = sorted(job.iterations)[0]
        if how == "ahead":
            changes["ahead"] = True
        if how == "resume":
            count = self.spec.split_counts[0]
            held = Position(
                number=0,
                cut=Cut(engine=[0], named=(Named(0, 0, (count // 2,)),)),
                round=1,
                marks=(1,) * self.spec.ranks.count,
            )
            done = (Ranges(0, 0, ((0, count // 2),)),)
            changes["resume"] = Resume(
                epoch=epoch, consumers=self.spec.ranks.count, streams=(held,), done=done, digest="d"
            )
            if self.spec.order == "deterministic" or self.spec.sharding.off:
                changes.pop("resume")
        request = self.cluster.opening(consumer % self.spec.ranks.count, epoch=epoch, spec=self.spec, **changes)
        answer = self.ask(request, peer=request.client)
        if isinstance(answer, EpochOpened):
            assert answer.view.job == JOB
            self.clients.append((request.client, request.consumer, answer.view.attempt))
            self.held[request.client] = HeldView(answer.view)

    @rule(choice=CHOICE, finished=st.booleans())
    def close(self, choice: int, finished: bool) -> None:
        if self.clients:
            client, consumer, attempt = self.clients[choice % len(self.clients)]
            self.ask(CloseClient(job=JOB, client=client, consumer=consumer, attempt=attempt, finished=finished))

    @rule(choice=CHOICE, knows=st.booleans())
    def beat(self, choice: int, knows: bool) -> None:
        """Whatever a client held, after the answer it holds what there is."""
        if not self.clients:
            return
        client, consumer, attempt = self.clients[choice % len(self.clients)]
        held = self.held[client]
        version = held.version if knows else 0
        answer = self.ask(Beat(job=JOB, client=client, consumer=consumer, attempt=attempt, version=version), client)
        match answer:
            case View():
                held.take_view(answer.view)
            case Changes():
                assert held.take_change(answer.change) != "missed"
        reading = self.cluster.state.reads(JOB, client)
        if isinstance(answer, View | Changes) or (isinstance(answer, Done) and knows and reading):
            assert by_number(held.view) == by_number(view_of(self.cluster.state, JOB, attempt))

    @rule(choice=CHOICE)
    def hear_changes(self, choice: int) -> None:
        """Some of what is pushed arrives: all of it, or what came after something that got lost."""
        pushed = [(peer, push) for peer, push in self.cluster.pushed if isinstance(push, ViewMoved)]
        for peer, push in pushed[choice % 3 :]:
            if peer in self.held:
                self.held[peer].take_change(push.change)
        self.cluster.pushed.clear()

    def streams(self) -> list[tuple[str, Any]]:
        job = self.cluster.state.jobs.get(JOB)
        found = [] if job is None else list(job.iterations.values())
        return [(i.attempt, stream) for i in found for stream in i.streams.values()]

    @precondition(lambda self: self.streams())
    @rule(choice=CHOICE, pass_=st.integers(0, 1), quick=st.booleans(), stale=st.booleans())
    def grant(self, choice: int, pass_: int, quick: bool, stale: bool) -> None:
        attempt, stream = self.streams()[choice % len(self.streams())]
        held = self.granted.get((stream.stream, pass_), ())
        request = GrantSplits(
            job=JOB,
            attempt=attempt,
            stream=stream.stream,
            binding=stream.binding - stale,
            source=0,
            pass_=pass_,
            after=held[-1] if held else None,
            seconds_per_split=0.01 if quick else 0.0,
        )
        answer = self.ask(request)
        if isinstance(answer, Granted):
            assert not stale
            assert self.cluster.ask(request) == answer
            self.granted[stream.stream, pass_] = held + answer.ordinals
        else:
            assert stale or stream.feed.kind != "granted" or stream.lost or stream.bound is None

    @precondition(lambda self: self.streams())
    @rule(choice=CHOICE)
    def rebind(self, choice: int) -> None:
        attempt, stream = self.streams()[choice % len(self.streams())]
        self.ask(Rebind(job=JOB, attempt=attempt, stream=stream.stream, binding=stream.binding, reason="gap"))

    @precondition(lambda self: self.streams())
    @rule(choice=CHOICE, consumer=st.integers(0, 2), leftover=st.booleans())
    def end(self, choice: int, consumer: int, leftover: bool) -> None:
        attempt, stream = self.streams()[choice % len(self.streams())]
        self.ask(
            EndStream(
                job=JOB,
                attempt=attempt,
                stream=stream.stream,
                consumer=consumer % self.spec.ranks.count,
                rounds=2,
                leftover=Cut(engine=[1]) if leftover else None,
            )
        )

    @precondition(lambda self: self.sent)
    @rule(choice=CHOICE)
    def duplicate(self, choice: int) -> None:
        """A message that was sent before arrives once more."""
        self.cluster.ask(self.sent[choice % len(self.sent)])

    @precondition(lambda self: self.sent)
    @rule()
    def repeat_the_last(self) -> None:
        """Right away, it changes nothing that is journaled."""
        request = self.sent[-1]
        hard = [event for event in self.cluster.decide(request).events if event.JOURNALED]
        if isinstance(
            request, GrantSplits | Rebind | EndStream | RunnerReady | DrainWorker | SteerJob | ScaleJob | AgentLeaving
        ):
            self.cluster.ask(request)
            hard = [event for event in self.cluster.decide(request).events if event.JOURNALED]
            assert hard == [], hard

    @rule(from_snapshot=st.booleans())
    def restart(self, from_snapshot: bool) -> None:
        if from_snapshot:
            self.cluster.state = restore(snapshot(self.cluster.state))
        else:
            self.cluster.restart()

    # What must hold

    @invariant()
    def every_ordinal_is_granted_to_one_stream(self) -> None:
        job = self.cluster.state.jobs.get(JOB)
        for iteration in job.iterations.values() if job else ():
            seen: dict[tuple[int, int, int], str] = {}
            for (stream, source, pass_), ordinals in iteration.ledger.lists.items():
                assert len(set(ordinals)) == len(ordinals)
                for ordinal in ordinals:
                    assert 0 <= ordinal < self.spec.split_counts[source]
                    assert seen.setdefault((source, pass_, ordinal), stream) == stream
            for (source, pass_), cursor in iteration.ledger.cursors.items():
                held = sum(1 for s, p, _ in seen if (s, p) == (source, pass_))
                assert 0 <= cursor.left == len(cursor.peek(10_000)) <= cursor.count - held

    @invariant()
    def what_was_granted_stays_granted(self) -> None:
        job = self.cluster.state.jobs.get(JOB)
        for iteration in job.iterations.values() if job else ():
            for (stream, _, pass_), ordinals in iteration.ledger.lists.items():
                told = self.granted.get((stream, pass_), ())
                assert tuple(ordinals[: len(told)]) == told

    @invariant()
    def bindings_never_go_back(self) -> None:
        for _, stream in self.streams():
            assert stream.binding >= self.bindings.get(stream.stream, 0)
            self.bindings[stream.stream] = stream.binding

    @invariant()
    def streams_end_when_their_readers_say_so(self) -> None:
        for _, stream in self.streams():
            needed = 1 if stream.owner is not None else self.spec.ranks.count
            assert stream.ended == (len(stream.ended_by) >= needed)
            assert not (stream.lost and stream.bound)

    @invariant()
    def an_epoch_is_finished_only_when_its_streams_are(self) -> None:
        job = self.cluster.state.jobs.get(JOB)
        for iteration in job.iterations.values() if job else ():
            tails = [s for s in iteration.streams.values() if s.feed.kind == "tail"]
            assert len(tails) <= 1
            if iteration.finished or tails:
                assert all(
                    s.ended or s.lost for s in iteration.streams.values() if iteration.finished or s not in tails
                )
            numbers = [s.number for s in iteration.streams.values()]
            assert len(set(numbers)) == len(numbers)

    @invariant()
    def streams_run_where_somebody_is(self) -> None:
        if self.cluster.state.began_at is None:
            return  # just restarted: nobody has registered again
        for attempt, stream in self.streams():
            view = view_of(self.cluster.state, JOB, attempt)
            shown = next(s for s in view.streams if s.stream == stream.stream)
            assert (shown.binding, shown.ended, shown.lost) == (stream.binding, stream.ended, stream.lost)
            assert (shown.runner is None) == (shown.address == "") == (shown.worker is None)

    @invariant()
    def views_only_get_newer(self) -> None:
        state = self.cluster.state
        for attempt, _ in self.streams():
            version = view_of(state, JOB, attempt).version
            if state.began_at is not None:
                assert version >= self.versions.get(attempt, 0)
                self.versions[attempt] = version

    @invariant()
    def everything_is_settled(self) -> None:
        """Whatever shortcut a decision took, bringing all in line once more changes nothing."""
        state = self.cluster.state
        if state.began_at is None:
            return
        draft = Draft(state, now=self.cluster.now, draw=self.cluster.draw)
        settle_all(draft)
        assert draft.events == []

    @invariant()
    def indexes_say_what_the_streams_say(self) -> None:
        job = self.cluster.state.jobs.get(JOB)
        for iteration in job.iterations.values() if job else ():
            streams = iteration.streams
            anew = Streams(dict(streams))
            assert streams.waiting == anew.waiting
            assert (streams.unfinished, streams.reopened) == (anew.unfinished, anew.reopened)
            assert streams.highest_number == anew.highest_number
            assert streams.bound_beside(None) == anew.bound_beside(None)
            for stream in streams.values():
                bound = stream.bound
                assert streams.own_runs(stream.home) == anew.own_runs(stream.home)
                if bound is not None:
                    assert streams.on(bound.runner) == anew.on(bound.runner)
                    assert streams.at(bound.worker) == anew.at(bound.worker)
                    assert streams.load(bound.runner) == anew.load(bound.runner)
            assert streams.busiest(lambda _: True)[0] == anew.busiest(lambda _: True)[0]

    @invariant()
    def at_most_two_iterations_are_kept(self) -> None:
        job = self.cluster.state.jobs.get(JOB)
        assert job is None or len(job.iterations) <= 2

    @invariant()
    def the_journal_gives_the_same_state(self) -> None:
        state = self.cluster.state
        assert snapshot(restore(snapshot(state))) == snapshot(state)


CoreMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestCore = CoreMachine.TestCase
