from __future__ import annotations

from msgspec.structs import replace

from penstock.control.figures import client_figures, worker_figures
from penstock.control.snapshot import snapshot
from penstock.core.ids import AgentId
from penstock.wire.jobs import Slot
from penstock.wire.messages import AgentBeat, ListWorkers, RunnerFigures, StageFigures
from tests.control.cluster import JOB, Cluster, started
from tests.control.test_opening import beat


def say(cluster: Cluster, **said: object) -> None:
    cluster.ask(AgentBeat(agent=AgentId("A"), runners=tuple(said), statistics=said), peer="peer of A")  # type: ignore[arg-type]


def test_what_runners_said_last_is_kept_by_job_and_worker() -> None:
    cluster = started(workers=2)
    first, second = cluster.state.runners[JOB].values()
    before = snapshot(cluster.state)
    figures = RunnerFigures(rounds=7, rounds_per_s=3.5, cores=0.5, rss_bytes=100, stages={"map": StageFigures(70)})
    # As it comes off the wire: maps and lists.
    plain = {"rounds": 7, "rounds_per_s": 3.5, "cores": 0.5, "rss_bytes": 100, "stages": {"map": [70]}}
    say(cluster, **{first.runner: plain, second.runner: "of another release", "gone": plain})
    (known,) = worker_figures(cluster.state)
    assert (known.job, known.worker, known.figures) == (JOB, first.worker, figures)
    lines = {line.worker: line for line in cluster.ask(ListWorkers()).workers}
    line = lines[first.worker]
    assert (line.rounds_per_s, line.cores, line.rss_bytes) == (3.5, 0.5, 100)
    assert lines[second.worker].rounds_per_s == 0.0
    assert snapshot(cluster.state) == before, "it is not journaled"


def test_what_clients_said_last_is_kept_by_consumer() -> None:
    cluster = started(workers=1)
    assert client_figures(cluster.state) == ()
    cluster.ask(replace(beat("c0"), batches=12, wait_s=1.5))
    (known,) = client_figures(cluster.state)
    assert (known.job, known.slot) == (JOB, Slot(0))
    assert (known.beat.batches, known.beat.wait_s) == (12, 1.5)
