from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from penstock.control.figures import job_figures, reading_clients, serving_runners
from penstock.control.records import KEPT_BEATS
from penstock.control.snapshot import snapshot
from penstock.core.ids import AgentId
from penstock.wire.figures import JobFigures, RunnerFigures, StageFigures
from penstock.wire.jobs import Slot
from penstock.wire.messages import (
    AgentBeat,
    CloseClient,
    FiguresAnswer,
    GetFigures,
    ListWorkers,
    NotKnown,
    RunnerGone,
)
from tests.control.cluster import JOB, Cluster, started
from tests.control.test_opening import beat


def say(cluster: Cluster, **said: object) -> None:
    cluster.ask(AgentBeat(agent=AgentId("A"), runners=tuple(said), statistics=said), peer="peer of A")  # type: ignore[arg-type]


def plain(at_s: float, rounds: int, **more: Any) -> dict[str, Any]:
    """What a runner says, as it comes off the wire: maps and lists."""
    return {
        "at_s": at_s,
        "rounds": rounds,
        "streams": 1,
        "stages": [[1, "map", 10 * rounds], [2, "map", rounds]],
        **more,
    }


def figures_of(cluster: Cluster) -> JobFigures:
    answer = cluster.ask(GetFigures(job=JOB))
    assert isinstance(answer, FiguresAnswer)
    return answer.figures


def test_what_runners_said_last_is_kept_by_job_and_worker() -> None:
    cluster = started(workers=2)
    first, second = cluster.state.runners[JOB].values()
    before = snapshot(cluster.state)
    for at_s, rounds in ((1.0, 0), (3.0, 7)):
        said = plain(at_s, rounds, cores=0.5, rss_bytes=100)
        say(cluster, **{first.runner: said, second.runner: "of another release", "gone": said})
    (known,) = serving_runners(cluster.state)
    stages = (StageFigures(1, "map", 70), StageFigures(2, "map", 7))
    figures = RunnerFigures(at_s=3.0, streams=1, rounds=7, cores=0.5, rss_bytes=100, stages=stages)
    assert (known.job, known.worker, known.figures) == (JOB, first.worker, figures)
    lines = {line.worker: line for line in cluster.ask(ListWorkers()).workers}
    line = lines[first.worker]
    assert (line.rounds_per_s, line.cores, line.rss_bytes) == (3.5, 0.5, 100)
    assert lines[second.worker].rounds_per_s == 0.0
    assert snapshot(cluster.state) == before, "it is not journaled"


def test_a_few_samples_are_kept_and_a_rate_is_taken_over_them() -> None:
    cluster = started(workers=1)
    (runner,) = cluster.state.runners[JOB].values()
    for second in range(50):
        say(cluster, **{runner.runner: plain(float(second), 4 * second, nbytes=100 * second)})
        cluster.ask(
            replace(beat("c0"), at_s=float(second), batches=3 * second, wait_s=second / 4, run_s=second * 3 / 4)
        )
    assert len(cluster.state.agents[AgentId("A")].told) == KEPT_BEATS
    figures = figures_of(cluster)
    assert (figures.outputs_per_s, figures.sent_bytes_per_s) == (4.0, 100.0)
    (trainer,) = figures.trainers
    assert (trainer.batches_per_s, trainer.wait_fraction) == (3.0, 0.25)


def test_sums_survive_processes_that_are_gone() -> None:
    cluster = started(workers=1)
    (first,) = cluster.state.runners[JOB].values()
    say(cluster, **{first.runner: plain(1.0, 5, cpu_s=2.0)})
    last = RunnerFigures(at_s=2.0, rounds=6, cpu_s=3.0, stages=(StageFigures(1, "map", 60), StageFigures(2, "map", 6)))
    gone = RunnerGone(
        agent=AgentId("A"), runner=first.runner, worker=first.worker, job=JOB, reason="killed", figures=last
    )
    for _ in range(2):
        cluster.ask(gone, peer="peer of A")
    assert figures_of(cluster).outputs == 6, "the last word counts, and it counts once"
    cluster.live(2.0)
    cluster.ready()
    (second,) = cluster.state.runners[JOB].values()
    assert second.runner != first.runner
    say(cluster, **{second.runner: plain(0.5, 4, cpu_s=1.0)})
    figures = figures_of(cluster)
    assert (figures.outputs, figures.cpu_s) == (10, 4.0)
    assert [(stage.node, stage.elements) for stage in figures.stages] == [(1, 100), (2, 10)]
    assert [worker.outputs for worker in figures.workers] == [4]


def test_sums_survive_an_agent_that_is_lost() -> None:
    cluster = started(workers=1)
    (runner,) = cluster.state.runners[JOB].values()
    say(cluster, **{runner.runner: plain(1.0, 5)})
    cluster.tick(20.0)
    assert not cluster.state.agents
    assert job_figures(cluster.state, JOB).outputs == 5


def test_sums_survive_epochs() -> None:
    cluster = started(workers=1)
    first = beat("c0")
    cluster.ask(replace(first, batches=12, wait_s=1.5))
    cluster.ask(replace(first, batches=20, wait_s=2.0))
    cluster.ask(CloseClient(job=JOB, client=first.client, consumer=0, attempt=first.attempt))
    (trainer,) = figures_of(cluster).trainers
    assert (trainer.batches, trainer.wait_s, trainer.batches_per_s) == (20, 2.0, 0.0)
    later = cluster.opening(epoch=1)
    view = cluster.ask(later).view
    cluster.ask(replace(first, client=later.client, attempt=view.attempt, batches=3, wait_s=1.0))
    (trainer,) = figures_of(cluster).trainers
    assert (trainer.batches, trainer.wait_s) == (23, 3.0)


def test_who_opened_an_epoch_ahead_is_told_of_by_what_it_reads() -> None:
    cluster = started(workers=1)
    for at_s, batches in ((1.0, 10), (3.0, 30)):
        cluster.ask(replace(beat("c0"), batches=batches, at_s=at_s))
    early = cluster.opening(epoch=1, ahead=True)
    attempt = cluster.ask(early).view.attempt
    cluster.ask(replace(beat(early.client, attempt), at_s=4.0))
    (trainer,) = figures_of(cluster).trainers
    assert (trainer.batches, trainer.batches_per_s) == (30, 10.0)
    (known,) = reading_clients(cluster.state)
    assert known.beat.batches == 30


def test_of_a_job_that_is_not_there_no_figures_are_known() -> None:
    assert isinstance(Cluster().ask(GetFigures(job=JOB)), NotKnown)


def test_what_clients_said_last_is_kept_by_consumer() -> None:
    cluster = started(workers=1)
    assert reading_clients(cluster.state) == ()
    cluster.ask(replace(beat("c0"), batches=12, wait_s=1.5))
    (known,) = reading_clients(cluster.state)
    assert (known.job, known.slot) == (JOB, Slot(0))
    assert (known.beat.batches, known.beat.wait_s) == (12, 1.5)
