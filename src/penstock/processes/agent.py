"""The agent: looks after the workers of one host, in a process without user code.

Rules. The loop's thread owns everything; the control client's thread only puts things into the inbox. What the
dispatcher pushes may come twice and is done once. A runner's death is reported at once, with what it was working on.
Whenever the dispatcher may have forgotten us (it said so, or the connection was lost), everything is registered again.

A worker leaves in peace: it takes no new streams, its runner serves on until the dispatcher stops it or the time is up.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from penstock.core.errors import DispatcherUnavailableError
from penstock.core.ids import RunnerId, WorkerId
from penstock.graph.installed import installed_versions
from penstock.processes.agent_messages import AgentConfig, AgentOrder, JoinWorkers, LeaveWorkers
from penstock.processes.nursery_link import (
    Children,
    Died,
    FromNursery,
    NurseryLink,
    Ready,
    Reported,
    Spawn,
    Spawned,
    Stop,
    Told,
    ToNursery,
    describe_exit,
)
from penstock.processes.runner_config import RUNNER_ENTRY, RunnerConfig
from penstock.processes.supervised_runners import SupervisedRunner, SupervisedWorker
from penstock.runtime.flight_record import read_flight
from penstock.wire.addresses import host_id
from penstock.wire.admissions import ExpectRunner
from penstock.wire.control import ControlClient
from penstock.wire.credentials import Credentials
from penstock.wire.figures import RunnerFigures
from penstock.wire.framing import refusal
from penstock.wire.messages import (
    AgentBeat,
    AgentLeaving,
    Answer,
    NotKnown,
    Push,
    Refused,
    RegisterAgent,
    RunnerGone,
    RunnerReady,
    StartRunner,
    StopRunner,
    Superseded,
    ViewMoved,
)
from penstock.wire.modes import guest_of

_figures = msgspec.json.Decoder(RunnerFigures)

BEAT_S = 1.0
STOP_GRACE_S = 1.0  # one whose reader was locked out may not go on serving him
RUNNER_START_S = 120.0  # importing what user functions need may take long; a runner that never gets there is ended
REGISTER_S = 10.0

_log = logging.getLogger(__name__)


class AnyNursery(Protocol):
    """What starts and ends runners, and tells of them."""

    def fileno(self) -> int: ...

    def send(self, request: ToNursery) -> None: ...

    def receive(self, timeout_s: float) -> FromNursery | None: ...


def run(config: AgentConfig, ready: Callable[[str], None], nursery: NurseryLink) -> None:
    """Serve until SIGTERM, and then until the workers have left in peace."""
    agent = HostAgent(config, nursery)
    signal.signal(signal.SIGTERM, agent.on_sigterm)
    agent.run(ready)


class HostAgent:
    """In a process of its own, or (`inline_workers`) in a thread of the trainer's."""

    def __init__(self, config: AgentConfig, nursery: AnyNursery) -> None:
        self._config = config
        self._nursery = nursery
        self._workers = {each.worker: SupervisedWorker(each) for each in config.workers}
        self._runners: dict[str, SupervisedRunner] = {}
        """The runners by the id that their process has in the nursery."""
        self._inbox: deque[Callable[[], None]] = deque()
        # Where the agent is a process, closed with it: the control client's thread may write to it until then.
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._registered = False
        self._registering = False
        self._changed = False
        self._beating = False
        self._next_beat_s = 0.0
        self._leaving = False
        self._orders: msgspec.msgpack.Decoder[AgentOrder] = msgspec.msgpack.Decoder(AgentOrder)
        self._control = ControlClient(
            config.dispatcher,
            config.credentials,
            name=config.agent,
            on_push=lambda push: self._put(lambda: self._obey(push)),
            on_reconnect=lambda: self._put(self._register),
        )

    def run(self, ready: Callable[[str], None]) -> None:
        """Serve until told to end, and then until the workers have left in peace."""
        try:
            self._register_first()
            ready(self._config.agent)
            with selectors.DefaultSelector() as selector:
                selector.register(self._nursery.fileno(), selectors.EVENT_READ)
                selector.register(self._wake, selectors.EVENT_READ)
                while not (self._leaving and not self._workers):
                    selector.select(self._timeout_s())
                    self._turn()
        finally:
            self._control.close()

    def _turn(self) -> None:
        while (event := self._nursery.receive(0.0)) is not None:
            self._hear(event)
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass
        while self._inbox:
            self._inbox.popleft()()
        if self._leaving:
            self._leave(tuple(self._workers), self._config.drain_s)
        self._act_on_time()

    def _put(self, act: Callable[[], None]) -> None:
        """Have the loop's thread do something."""
        self._inbox.append(act)
        os.eventfd_write(self._wake, 1)

    def on_sigterm(self, number: int, frame: object) -> None:
        if not self._registered and not self._runners:
            raise SystemExit(0)  # there is nothing to leave in peace
        self._leaving = True
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Have `run` end, from another thread. Before it has registered it raises that its connection is closed."""
        self._leaving = True
        os.eventfd_write(self._wake, 1)
        if not self._registered:
            self._control.close()

    def close(self) -> None:
        """Let go of what is left when `run` has ended; for one that is not a process."""
        os.close(self._wake)

    # Registering

    def _registration(self) -> RegisterAgent:
        return RegisterAgent(
            agent=self._config.agent,
            host=host_id(),
            workers=tuple(
                msgspec.structs.replace(each.place, threads=self._config.threads) for each in self._workers.values()
            ),
            runners=tuple(each.place for each in self._runners.values() if each.serves),
            versions=(("python", f"{sys.version_info.major}.{sys.version_info.minor}"), *installed_versions().items()),
            pid=os.getpid(),
        )

    def _register_first(self) -> None:
        """Wait until there is a dispatcher. Wrong credentials and refusals are raised: waiting will not help."""
        waited_s = 0.0
        while not self._registered:
            try:
                answer = self._control.ask(self._registration(), timeout_s=REGISTER_S, what="registering workers")
                self._registered = not isinstance(answer, NotKnown)
            except DispatcherUnavailableError:
                waited_s += REGISTER_S
                _log.warning(
                    "waiting for the dispatcher", extra={"address": self._config.dispatcher, "waited_s": waited_s}
                )

    def _register(self) -> None:
        if not self._registered:
            return  # the first one is under way, and sent again by itself
        if self._registering:
            self._changed = True  # one at a time: an older one must not arrive last
            return
        self._registering, self._changed = True, False
        self._control.post(self._registration(), lambda answer: self._put(lambda: self._on_registered(answer)))

    def _on_registered(self, answer: Answer) -> None:
        self._registering = False
        if isinstance(answer, Refused):
            raise refusal(answer)
        if self._changed:
            self._register()
        for runner in self._runners.values():
            if not runner.serves and not runner.stop_reason:
                self._expect(runner)  # those that serve are part of the registration
        leaving = tuple(key for key, worker in self._workers.items() if worker.leave_by_s is not None)
        if leaving:
            self._control.post(AgentLeaving(agent=self._config.agent, workers=leaving))
        self._next_beat_s = 0.0

    # What the dispatcher says

    def _obey(self, push: Push) -> None:
        match push:
            case StartRunner():
                self._start(push)
            case StopRunner():
                for runner in self._runners.values():
                    if runner.runner == push.runner:
                        self._stop(runner, push.reason)
            case ViewMoved() | Superseded():
                pass  # for clients

    def _start(self, push: StartRunner) -> None:
        runner = SupervisedRunner(
            runner=push.runner,
            worker=push.worker,
            job=push.job,
            started_s=time.monotonic(),
            threads=self._config.threads,
            memory_bytes=self._config.memory_bytes,
            key=Credentials.new("runner", push.runner, server=self._config.credentials.server),
        )
        known = self._runners.get(runner.child)
        if known is not None:
            if known.serves:
                self._control.post(RunnerReady(agent=self._config.agent, place=known.place))
            return
        worker = self._workers.get(push.worker)
        if worker is None or worker.leave_by_s is not None:
            self._report_gone(runner, "its worker leaves")
            return
        config = RunnerConfig(
            runner=push.runner,
            worker=push.worker,
            job=push.job,
            dispatcher=self._config.dispatcher,
            credentials=runner.key,
            listening=self._config.listening,
            sandbox=self._config.sandbox,
            memory_bytes=self._config.memory_bytes,
            threads=self._config.threads,
            host=host_id(),
            guest=bool(guest_of(worker.place.tags)),
        )
        self._runners[runner.child] = runner
        self._expect(runner)
        self._nursery.send(
            Spawn(id=runner.child, entry=RUNNER_ENTRY, config=msgspec.msgpack.encode(config), record=True)
        )

    def _expect(self, runner: SupervisedRunner) -> None:
        """Tell the dispatcher by which key it will know a runner that starts."""
        self._control.post(
            ExpectRunner(agent=self._config.agent, job=runner.job, runner=runner.runner, verifier=runner.key.public)
        )

    def _stop(self, runner: SupervisedRunner, reason: str) -> None:
        if runner.stop(reason):
            self._nursery.send(Stop(id=runner.child, grace_s=STOP_GRACE_S))

    # What the nursery says

    def _hear(self, event: FromNursery) -> None:
        match event:
            case Spawned():
                if (spawned := self._runners.get(event.id)) is not None:
                    spawned.was_spawned(event.pid)
            case Ready():
                runner = self._runners.get(event.id)
                if runner is not None and runner.became_ready(event.text):
                    self._control.post(RunnerReady(agent=self._config.agent, place=runner.place))
            case Reported():
                if (reporting := self._runners.get(event.id)) is not None:
                    reporting.reported(_figures.decode(event.text))
            case Died():
                gone = self._runners.pop(event.id, None)
                if gone is not None:
                    how = describe_exit(event.code, event.failure)
                    self._report_gone(gone, f"{how}: {gone.stop_reason}" if gone.stop_reason else how, event.record)
            case Told():
                self._take_order(self._orders.decode(event.body))
            case Children():
                pass  # never asked for

    def _report_gone(self, runner: SupervisedRunner, reason: str, record: bytes = b"") -> None:
        # Of a runner that was told to stop, what was under way is nobody's fault.
        in_flight = () if runner.stop_reason else tuple(each.plain() for each in read_flight(record))
        self._control.post(
            RunnerGone(
                agent=self._config.agent,
                runner=runner.runner,
                worker=runner.worker,
                job=runner.job,
                reason=reason,
                in_flight=in_flight,
                figures=runner.figures,
            )
        )

    def _take_order(self, order: AgentOrder) -> None:
        match order:
            case JoinWorkers():
                for place in order.workers:
                    self._workers.setdefault(place.worker, SupervisedWorker(place))
                self._register()
            case LeaveWorkers():
                self._leave(order.workers, order.drain_s)

    # Leaving

    def _leave(self, workers: tuple[WorkerId, ...], drain_s: float) -> None:
        """Begin to leave; asked twice, the first deadline stands."""
        by_s = time.monotonic() + drain_s
        fresh = [each for each in workers if each in self._workers and self._workers[each].leave(by_s)]
        if not fresh:
            return
        self._control.post(
            AgentLeaving(agent=self._config.agent, workers=tuple(fresh)),
            lambda answer: self._put(lambda: self._on_leaving_known(fresh)),
        )

    def _on_leaving_known(self, workers: list[WorkerId]) -> None:
        for each in workers:
            if each in self._workers:
                self._workers[each].leave_was_heard()

    def _finish_leaving(self, now_s: float) -> None:
        for key, worker in list(self._workers.items()):
            if worker.leave_by_s is None:
                continue
            late = now_s >= worker.leave_by_s
            runners = [each for each in self._runners.values() if each.worker == key]
            if late:
                for runner in runners:
                    self._stop(runner, "its worker left before its streams were taken over")
            # Nobody is told while there is no dispatcher; one that comes back hears it by the agent's absence.
            if not runners and (worker.is_leave_known or late or not self._control.connected):
                del self._workers[key]
                self._control.post(AgentLeaving(agent=self._config.agent, workers=(key,), gone=True))

    # Time

    def _timeout_s(self) -> float:
        now_s = time.monotonic()
        leaving = (each.leave_by_s for each in self._workers.values() if each.leave_by_s is not None)
        return max(0.0, min([self._next_beat_s, *(at_s for at_s in leaving if at_s > now_s)]) - now_s)

    def _act_on_time(self) -> None:
        now_s = time.monotonic()
        self._finish_leaving(now_s)
        if now_s < self._next_beat_s:
            return
        self._next_beat_s = now_s + BEAT_S
        for runner in self._runners.values():
            if not runner.address and now_s - runner.started_s > RUNNER_START_S:
                self._stop(runner, f"it was not ready after {RUNNER_START_S:.0f} s")
        if not self._beating:
            self._beating = True
            self._control.post(self._beat(), lambda answer: self._put(lambda: self._on_beat(answer)))

    def _beat(self) -> AgentBeat:
        alive: list[RunnerId] = []
        statistics: dict[str, Any] = {}
        now_s = time.monotonic()
        for runner in self._runners.values():
            figures = runner.beat(now_s)
            if figures is not None:
                alive.append(runner.runner)
                statistics[runner.runner] = figures
        return AgentBeat(agent=self._config.agent, runners=tuple(alive), statistics=statistics)

    def _on_beat(self, answer: Answer) -> None:
        self._beating = False
        if isinstance(answer, NotKnown):
            self._register()
