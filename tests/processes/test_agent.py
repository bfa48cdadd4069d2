"""The agent, as a real process below a real nursery, against a dispatcher that only writes down what it hears."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import agent_children
import msgspec
import pytest
from fake_dispatcher import FakeDispatcher
from tests.keys import new_key
from tests.waiting import wait_gone, wait_until

from penstock.core.ids import AgentId, JobName, RunnerId, WorkerId
from penstock.processes.agent_messages import AgentConfig, JoinWorkers, LeaveWorkers
from penstock.processes.nursery_link import Died, EndNursery, NurseryLink, Prepare, Ready, Spawn, Stop, TellChild
from penstock.processes.nursery_start import start_nursery
from penstock.wire.figures import RunnerFigures
from penstock.wire.messages import (
    AgentBeat,
    AgentLeaving,
    Done,
    NotKnown,
    Refused,
    RegisterAgent,
    RunnerGone,
    RunnerReady,
    StartRunner,
    StopRunner,
    WorkerPlace,
)

DEADLINE_S = 90.0


class Setup:
    def __init__(self) -> None:
        self.credentials = new_key("agent")
        self.dispatcher = FakeDispatcher(self.credentials)
        self.process: subprocess.Popen[bytes]
        self.process, end = start_nursery()
        self.link = NurseryLink(end)
        self.link.send(Prepare(path=tuple(sys.path)))

    def config(self, **changes: object) -> AgentConfig:
        values: dict[str, object] = {
            "dispatcher": self.dispatcher.address,
            "credentials": self.credentials,
            "agent": AgentId("agent-1"),
            "workers": (WorkerPlace(WorkerId("w1"), ("gpu",)), WorkerPlace(WorkerId("w2"))),
            "memory_bytes": 64 << 20,
            "threads": 1,
        }
        return AgentConfig(**{**values, **changes})  # type: ignore[arg-type]

    def start_agent(self, **changes: object) -> None:
        config = msgspec.msgpack.encode(self.config(**changes))
        entry = f"agent_children:{agent_children.agent_with_small_runners.__name__}"
        self.link.send(Spawn(id="agent", entry=entry, config=config, restart=True, nursery=True))

    def wait_event(self, kind: type, id: str = "agent") -> object:
        deadline = time.monotonic() + DEADLINE_S
        while (left := deadline - time.monotonic()) > 0:
            event = self.link.receive(left)
            if isinstance(event, kind) and event.id == id:  # type: ignore[attr-defined]
                return event
        raise AssertionError(f"no {kind.__name__} of {id}")

    def start_runner(self, job: str = "reads", runner: str = "r1", worker: str = "w1") -> int:
        self.dispatcher.push(StartRunner(worker=WorkerId(worker), job=JobName(job), runner=RunnerId(runner)))
        ready = self.dispatcher.wait_asked(RunnerReady, lambda body: body.place.runner == runner)
        assert (ready.place.worker, ready.place.job) == (worker, job)
        return int(ready.place.address.rpartition("|")[2])

    def tell(self, order: object) -> None:
        self.link.send(TellChild(id="agent", body=msgspec.msgpack.encode(order)))

    def close(self) -> None:
        self.link.send(EndNursery())
        self.process.wait(DEADLINE_S)
        self.link.close()
        self.dispatcher.close()


@pytest.fixture
def setup():
    made = Setup()
    yield made
    made.close()


def test_an_agent_registers_its_workers_and_beats(setup):
    setup.start_agent()
    registered = setup.dispatcher.wait_asked(RegisterAgent)
    assert (registered.agent, [place.worker for place in registered.workers]) == ("agent-1", ["w1", "w2"])
    assert registered.workers[0].tags == ("gpu",)
    versions = dict(registered.versions)
    assert versions["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert versions["pytest"] == pytest.__version__, "every installed distribution is named"
    setup.wait_event(Ready)
    assert setup.dispatcher.wait_asked(AgentBeat).runners == ()


def test_a_runner_is_started_named_in_beats_and_stopped(setup):
    setup.start_agent()
    pid = setup.start_runner()
    beat = setup.dispatcher.wait_asked(AgentBeat, lambda body: body.runners == ("r1",))
    assert beat.statistics["r1"]["rss_bytes"] > 1 << 20
    setup.dispatcher.push(StopRunner(runner=RunnerId("r1"), reason="the job ended"))
    gone = setup.dispatcher.wait_asked(RunnerGone)
    assert (gone.runner, gone.worker, gone.job, gone.in_flight) == ("r1", "w1", "reads", ())
    assert gone.reason == "killed by SIGTERM: the job ended"
    wait_gone(pid)


def test_beats_carry_what_runners_report(setup):
    setup.start_agent()
    setup.start_runner(job="reports")
    beat = setup.dispatcher.wait_asked(AgentBeat, lambda body: body.statistics.get("r1", {}).get("rounds", 0) > 0)
    figures = msgspec.convert(beat.statistics["r1"], RunnerFigures)
    assert figures.rounds >= 10 and figures.stages[0].elements >= 1
    assert figures.rss_bytes > 1 << 20
    assert (figures.kind, figures.threads > 0, figures.memory_bytes > 0) == ("process", True, True)


def test_a_start_that_is_pushed_twice_starts_one_runner(setup):
    setup.start_agent()
    pid = setup.start_runner()
    seen = len(setup.dispatcher.asked)
    setup.dispatcher.push(StartRunner(worker=WorkerId("w1"), job=JobName("reads"), runner=RunnerId("r1")))
    again = setup.dispatcher.wait_asked(RunnerReady, since=seen)
    assert again.place.address.endswith(f"|{pid}")
    assert len([child for child in setup.link.children() if "/" in child.id]) == 1


def test_a_killed_runner_is_reported_at_once(setup):
    setup.start_agent()
    pid = setup.start_runner()
    before = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    gone = setup.dispatcher.wait_asked(RunnerGone)
    assert gone.reason == "killed by SIGKILL"
    assert time.monotonic() - before < 5


def test_a_death_names_what_was_in_flight(setup):
    setup.start_agent()
    setup.start_runner("deadly")
    gone = setup.dispatcher.wait_asked(RunnerGone)
    assert gone.reason == "exited with code 3"
    assert gone.in_flight == (("s.0", 0, 3, 1234, 2),)


def test_a_runner_that_cannot_start_is_reported_with_its_reason(setup):
    setup.start_agent()
    setup.dispatcher.push(StartRunner(worker=WorkerId("w1"), job=JobName("fails"), runner=RunnerId("r1")))
    assert "no such graph" in setup.dispatcher.wait_asked(RunnerGone).reason


def test_a_runner_that_ignores_sigterm_is_killed(setup):
    setup.start_agent()
    setup.start_runner("deaf")
    setup.dispatcher.push(StopRunner(runner=RunnerId("r1"), reason="enough"))
    assert setup.dispatcher.wait_asked(RunnerGone).reason == "killed by SIGKILL: enough"


def test_a_stopped_runner_is_not_called_alive(setup):
    setup.start_agent()
    pid = setup.start_runner()
    setup.dispatcher.wait_asked(AgentBeat, lambda body: body.runners == ("r1",))
    os.kill(pid, signal.SIGSTOP)
    wait_until(
        lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "the runner to be stopped"
    )
    seen = len(setup.dispatcher.asked)
    setup.dispatcher.wait_asked(AgentBeat, lambda body: body.runners == (), since=seen)
    os.kill(pid, signal.SIGCONT)
    setup.dispatcher.wait_asked(AgentBeat, lambda body: body.runners == ("r1",), since=len(setup.dispatcher.asked))


def test_a_forgotten_agent_registers_again_with_what_it_runs(setup):
    setup.start_agent()
    setup.start_runner()
    seen = len(setup.dispatcher.asked)
    setup.dispatcher.answers[AgentBeat] = lambda body: NotKnown(what="this agent")
    again = setup.dispatcher.wait_asked(RegisterAgent, since=seen)
    setup.dispatcher.answers.clear()
    assert [place.runner for place in again.runners] == ["r1"]


def test_a_restarted_dispatcher_hears_of_everything_at_once(setup):
    setup.start_agent()
    setup.start_runner()
    port = int(setup.dispatcher.address.rpartition(":")[2])
    setup.dispatcher.close()
    setup.dispatcher = FakeDispatcher(setup.credentials, port)
    again = setup.dispatcher.wait_asked(RegisterAgent)
    assert [place.runner for place in again.runners] == ["r1"]
    assert [place.worker for place in again.workers] == ["w1", "w2"]


def test_on_sigterm_runners_serve_on_until_the_dispatcher_stops_them(setup):
    setup.start_agent()
    pid = setup.start_runner()
    setup.link.send(Stop(id="agent", grace_s=60))
    leaving = setup.dispatcher.wait_asked(AgentLeaving)
    assert set(leaving.workers) == {"w1", "w2"} and not leaving.gone
    setup.dispatcher.wait_asked(AgentLeaving, lambda body: body.gone and body.workers == ("w2",))
    assert os.path.exists(f"/proc/{pid}")
    setup.dispatcher.push(StopRunner(runner=RunnerId("r1"), reason="its streams have moved"))
    died = setup.wait_event(Died)
    assert (died.code, died.again) == (0, False)
    setup.dispatcher.wait_asked(AgentLeaving, lambda body: body.gone and body.workers == ("w1",))


def test_an_agent_whose_work_nobody_takes_over_leaves_at_its_deadline(setup):
    setup.start_agent(drain_s=0.3)
    setup.start_runner()
    setup.link.send(Stop(id="agent", grace_s=60))
    assert setup.wait_event(Died).code == 0
    assert "left before" in setup.dispatcher.wait_asked(RunnerGone).reason


def test_an_agent_that_never_registered_ends_at_once(setup):
    setup.dispatcher.answers[RegisterAgent] = lambda body: None
    setup.start_agent()
    setup.dispatcher.wait_asked(RegisterAgent)
    setup.link.send(Stop(id="agent", grace_s=60))
    assert setup.wait_event(Died).code == 0


def test_workers_join_and_leave(setup):
    setup.start_agent()
    setup.wait_event(Ready)
    setup.tell(JoinWorkers(workers=(WorkerPlace(WorkerId("w3")),)))
    setup.dispatcher.wait_asked(
        RegisterAgent, lambda body: [each.worker for each in body.workers] == ["w1", "w2", "w3"]
    )
    setup.tell(LeaveWorkers(workers=(WorkerId("w1"),)))
    setup.dispatcher.wait_asked(AgentLeaving, lambda body: body.gone and body.workers == ("w1",))
    setup.dispatcher.push(StartRunner(worker=WorkerId("w1"), job=JobName("reads"), runner=RunnerId("late")))
    assert setup.dispatcher.wait_asked(RunnerGone).reason == "its worker leaves"
    setup.start_runner(worker="w3")


def test_wrong_credentials_and_refusals_end_an_agent_with_the_reason(setup):
    setup.start_agent(credentials=new_key("agent"))
    assert "AuthenticationError" in setup.wait_event(Died).failure
    setup.link.send(Stop(id="agent", grace_s=1))
    wait_until(lambda: not setup.link.children(), "the end of all children")
    setup.dispatcher.answers[RegisterAgent] = lambda body: Refused(reason="numpy 1 is too old here")
    setup.start_agent()
    assert "numpy 1 is too old" in setup.wait_event(Died).failure
    setup.dispatcher.answers[RegisterAgent] = lambda body: Done()
