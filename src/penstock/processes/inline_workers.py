"""A worker inside this process: the agent and the runners of any other, as threads.

Runners here load and run the jobs' functions in the very process that asks for one: what they do to it they do to
themselves. So it is for a service of this process's own. Functions share the GIL with the trainer, one that kills its
process kills all, and the figures of such a worker are those of the whole process.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias

import msgspec

from penstock.core.errors import PenstockError
from penstock.processes.agent import HostAgent
from penstock.processes.agent_messages import AgentConfig
from penstock.processes.nursery_link import (
    Died,
    FromNursery,
    Ready,
    Reported,
    Spawn,
    Spawned,
    Stop,
    ToNursery,
)
from penstock.processes.runner_config import RunnerConfig

_configs = msgspec.msgpack.Decoder(RunnerConfig)

CLOSE_S = 5.0

_log = logging.getLogger(__name__)


class ThreadRunner(Protocol):
    """A runner that a thread runs; `worker.runner.JobRunner` is one."""

    def serve(self, stop: threading.Event, ready: Callable[[str], None], report: Callable[[str], None]) -> None: ...

    def close(self) -> None: ...


MakeRunner: TypeAlias = Callable[[RunnerConfig], ThreadRunner]


class InlineWorkers:
    """Serves until it is closed. `config.workers` are the places it has, `make_runner` makes what runs in one."""

    def __init__(self, config: AgentConfig, make_runner: MakeRunner) -> None:
        self.workers = config.workers
        self._nursery = ThreadNursery(make_runner)
        self._agent = HostAgent(config, self._nursery)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="penstock-inline-agent", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._agent.run(lambda _: None)
        except PenstockError as error:
            if not self._closing:
                _log.error("the worker in this process has ended", extra={"reason": str(error)})
        finally:
            self._nursery.close()

    def close(self) -> None:
        """Leave at once: what runs here is made again elsewhere, or not at all. To be called once."""
        self._closing = True
        self._agent.stop()
        self._thread.join(2 * CLOSE_S)
        if not self._thread.is_alive():
            self._agent.close()


class ThreadNursery:
    """What an agent starts runners with, where they are threads: it is asked and answers as a nursery does."""

    def __init__(self, make_runner: MakeRunner) -> None:
        self._make_runner = make_runner
        self._stops: dict[str, threading.Event] = {}
        """What ends a runner's thread, by the id that the runner was spawned with."""
        self._threads: list[threading.Thread] = []
        self._events: deque[FromNursery] = deque()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)

    def fileno(self) -> int:
        return self._bell

    def send(self, request: ToNursery) -> None:
        match request:
            case Spawn():
                stop = self._stops[request.id] = threading.Event()
                config = _configs.decode(request.config)
                thread = threading.Thread(
                    target=self._look_after, args=(request.id, config, stop), name=f"penstock-{request.id}", daemon=True
                )
                self._threads = [each for each in self._threads if each.is_alive()] + [thread]
                thread.start()
            case Stop():
                if (stopped := self._stops.pop(request.id, None)) is not None:
                    stopped.set()
            case _:
                raise TypeError(f"threads are not asked for {type(request).__name__}")

    def receive(self, timeout_s: float) -> FromNursery | None:
        select.select([self._bell], [], [], timeout_s)
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return None
        return self._events.popleft()

    def close(self) -> None:
        """Stop all runners. One inside a user's function is left behind."""
        for stop in self._stops.values():
            stop.set()
        for thread in self._threads:
            thread.join(CLOSE_S)
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self._bell)

    def _tell(self, event: FromNursery) -> None:
        self._events.append(event)
        os.eventfd_write(self._bell, 1)

    def _look_after(self, id: str, config: RunnerConfig, stop: threading.Event) -> None:
        self._tell(Spawned(id=id, pid=os.getpid()))
        failure = ""
        try:
            runner = self._make_runner(config)
            try:
                runner.serve(
                    stop,
                    ready=lambda address: self._tell(Ready(id=id, text=address)),
                    report=lambda figures: self._tell(Reported(id=id, text=figures)),
                )
            finally:
                runner.close()
        except Exception as error:
            _log.exception("a runner in this process failed")
            failure = f"{type(error).__name__}: {error}"
        self._tell(Died(id=id, pid=os.getpid(), code=int(not stop.is_set()), failure=failure))
