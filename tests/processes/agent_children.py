"""The processes of test agents. Nurseries find this module by the `sys.path` they are prepared with."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable

from penstock.processes.agent_messages import AgentConfig
from penstock.processes.nursery_link import NurseryLink
from penstock.processes.runner_config import RunnerConfig


def agent_with_small_runners(config: AgentConfig, ready: Callable[[str], None], nursery: NurseryLink) -> None:
    """The real agent, but its runners are `small_runner`."""
    from penstock.processes import agent

    agent.RUNNER_ENTRY = "agent_children:small_runner"
    agent.run(config, ready, nursery)


def small_runner(
    config: RunnerConfig, ready: Callable[[str], None], record: mmap.mmap, report: Callable[[str], None]
) -> None:
    """Does what its job's name says."""
    from penstock.core.ids import StreamId
    from penstock.runtime.flight_record import FlightRecord
    from penstock.wire.figures import RunnerFigures, StageFigures, lines_of

    if config.job == "fails":
        raise RuntimeError("no such graph")
    if config.job == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready(f"tcp://127.0.0.1:1||{os.getpid()}")
    for seconds in range(120 if config.job == "reports" else 0):
        for line in lines_of(RunnerFigures(rounds=10 * seconds, stages=(StageFigures(1, "map", seconds),))):
            report(line)
        time.sleep(1)
    if config.job == "deadly":
        FlightRecord(record).begin(StreamId("s.0").encode(), 0, 3, 1234, 2)
        os._exit(3)
    time.sleep(120)
