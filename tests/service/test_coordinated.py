"""Coordinated reads: in every step all consumers get batches of one group, whatever joins, leaves, dies or resumes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.waiting import wait_until

from .checks import Background, kill
from .sentences import (
    Ranks,
    Step,
    assert_all_but_a_last_round,
    assert_in_step,
    ids_of,
    sentences,
    step_of,
)

ORDERS = ["relaxed", "deterministic"]
WORK_S = 0.0004


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("consumers", [1, 2, 5])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_step_is_one_group(
    one_worker: ps.LocalService, three_workers: ps.LocalService, workers: int, consumers: int, order: str
) -> None:
    service = one_worker if workers == 1 else three_workers
    ranks = Ranks(service, f"groups-{consumers}-{order}", consumers, order=order).done()
    assert_in_step(ranks)
    assert_all_but_a_last_round(ids_of(ranks), consumers)


def test_a_step_is_made_by_one_worker(three_workers: ps.LocalService) -> None:
    def pid(i: int) -> int:
        import os

        return os.getpid()

    dataset = ps.range(2000).map(pid).batch(8)

    def rank(consumer: int) -> list[int]:
        loader = dataset.distribute(
            three_workers,
            job="one-worker",
            ranks=ps.Ranks(2, consumer, coordinated=True),
            limits=ps.Limits(timeout_s=60),
        )
        with loader:
            # While processes start, streams move to them: those of the next epoch stay where they are.
            wait_until(
                lambda: [None for _ in loader] and len(three_workers.worker_pids()) == 3, "all three to serve it"
            )
            return [int(np.unique(batch).item()) for batch in loader]

    one, other = (thread.result() for thread in [Background(lambda c=c: rank(c)) for c in range(2)])
    assert one == other
    assert len(set(one)) > 1


@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_every_rank_ends_at_the_same_step_on_odd_data(one_worker: ps.LocalService, uneven: str) -> None:
    ranks = Ranks(one_worker, f"odd-{uneven}", 5, dataset=sentences(rows=1003), uneven=uneven).done()
    assert_in_step(ranks)
    ids = ids_of(ranks)
    if uneven == "drop":
        assert_all_but_a_last_round(ids, 5, rows=1003)
    else:
        assert set(ids) == set(range(1003))


def test_the_next_epoch_is_in_step_too(three_workers: ps.LocalService) -> None:
    def rank(consumer: int) -> list[list[Step]]:
        loader = sentences().distribute(
            three_workers, job="epochs", ranks=ps.Ranks(2, consumer, coordinated=True), limits=ps.Limits(timeout_s=60)
        )
        with loader:
            return [[step_of(batch) for batch in loader] for _ in range(2)]

    one, other = (thread.result() for thread in [Background(lambda c=c: rank(c)) for c in range(2)])
    for epoch in range(2):
        assert [step.padded for step in one[epoch]] == [step.padded for step in other[epoch]]
        ids = [i for step in (*one[epoch], *other[epoch]) for i in step.ids]
        assert_all_but_a_last_round(ids, 2)
    assert one[0] != one[1]


# Things happen in mid-epoch


@pytest.mark.parametrize(("added", "order"), [(1, "relaxed"), (3, "relaxed"), (3, "deterministic")])
def test_workers_that_join_tear_no_step(added: int, order: str) -> None:
    with ps.LocalService(workers=1) as service:
        join = {20: lambda: [service.add_worker() for _ in range(added)] and None}
        ranks = Ranks(
            service,
            "join",
            2,
            dataset=sentences(WORK_S),
            at_step=join,
            order=order,
            sharding=ps.Sharding(streams=4 + added),
        ).done()
    assert_in_step(ranks)
    assert_all_but_a_last_round(ids_of(ranks), 2)


@pytest.mark.parametrize("order", ORDERS)
def test_no_step_is_torn_whatever_dies(order: str) -> None:
    with ps.LocalService(workers=2) as service:

        def kill_worker() -> None:
            kill(next(iter(service.worker_pids().values())))

        faults = {
            20: kill_worker,
            60: lambda: kill(service.dispatcher_pid),
            100: kill_worker,
            140: service.remove_worker,
        }
        ranks = Ranks(service, "deaths", 3, dataset=sentences(WORK_S), at_step=faults, order=order).done()
    assert_in_step(ranks)
    assert len(ranks.read[0]) > 140
    assert_all_but_a_last_round(ids_of(ranks), 3)


# Saving and loading


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("which", ["own", "list", "all"])
def test_ranks_continue_on_another_service(
    one_worker: ps.LocalService, three_workers: ps.LocalService, which: str, order: str
) -> None:
    before = Ranks(three_workers, f"from-{which}-{order}", 3, steps=70, order=order).done()
    match which:
        case "own":
            states = before.states.__getitem__
        case "list":
            states = before.states
        case _:
            states = lambda _: {**before.states[1], "consumer": None}  # noqa: E731
    after = Ranks(one_worker, f"to-{which}-{order}", 3, states=states, order=order).done()
    assert_in_step(after)
    assert_all_but_a_last_round(ids_of(before, after), 3)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("old", "new"), [(2, 5), (5, 2), (3, 1)])
def test_another_number_of_ranks_continues(
    one_worker: ps.LocalService, three_workers: ps.LocalService, old: int, new: int, order: str
) -> None:
    before = Ranks(three_workers, f"was-{old}-{new}-{order}", old, steps=37, order=order).done()
    with pytest.warns(UserWarning, match=f"{old} consumers"):
        after = Ranks(one_worker, f"is-{old}-{new}-{order}", new, states=before.states, order=order).done()
    assert_in_step(after)
    assert_all_but_a_last_round(ids_of(before, after), new)


def test_a_state_at_the_end_of_the_streams_continues_with_another_number(one_worker: ps.LocalService) -> None:
    """Inside the tail, and where streams have ended at different rounds."""
    whole = Ranks(one_worker, "whole", 2).done()
    last = len(whole.read[0])
    for at in (last - 1, last - 6, last - 12):
        before = Ranks(one_worker, f"cut-{at}", 2, steps=at).done()
        with pytest.warns(UserWarning, match="2 consumers"):
            after = Ranks(one_worker, f"rest-{at}", 3, states=before.states).done()
        assert len({len(read) for read in after.read}) == 1
        assert_all_but_a_last_round(ids_of(before, after), 3)


def process(service: ps.LocalService, **arguments: object) -> subprocess.Popen[str]:
    given = {"service": str(service.service_file), "work_s": WORK_S, **arguments}
    code = "from tests.service.sentences import rank_process; rank_process()"
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(given)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent.parent,
    )


def steps_of(ran: subprocess.Popen[str]) -> Iterator[Step]:
    assert ran.stdout is not None
    for line in ran.stdout:
        if line.strip() != "saved":
            ids, padded = json.loads(line)
            yield Step(tuple(ids), padded)


def test_a_killed_rank_that_resumes_continues_as_it_would_have(three_workers: ps.LocalService, tmp_path: Path) -> None:
    job = {"job": "killed", "consumers": 2, "order": "relaxed"}
    state = tmp_path / "state.json"
    first = process(three_workers, consumer=1, save_at=25, save_to=str(state), **job)
    other = process(three_workers, consumer=0, **job)
    try:
        reading = steps_of(first)
        before = [next(reading) for _ in range(60)]
        first.kill()
        first.wait(10)
        second = process(three_workers, consumer=1, state=str(state), **job)
        try:
            partner = Background(lambda: list(steps_of(other)))
            again = list(steps_of(second))
            assert again[: 60 - 25] == before[25:]
            together = [*before[:25], *again]
            whole = partner.result(90)
            assert [step.padded for step in whole] == [step.padded for step in together]
            assert_all_but_a_last_round([i for step in (*whole, *together) for i in step.ids], 2)
        finally:
            second.kill()
            second.wait(10)
    finally:
        for each in (first, other):
            each.kill()
            each.wait(10)
            each.stdout.close()


# What cannot work


def test_what_cannot_be_coordinated_is_refused_with_the_reason(one_worker: ps.LocalService) -> None:
    def refuse(words: str, dataset: ps.Dataset | None = None, sharding: Any = "dynamic", **options: Any) -> None:
        ranks = {"count": 2, "rank": 0, "coordinated": True, **options}
        with pytest.raises((ps.InvalidArgumentError, ps.InvalidPipelineError), match=words):
            dataset = sentences() if dataset is None else dataset
            next(iter(dataset.distribute(one_worker, job="refused", ranks=ps.Ranks(**ranks), sharding=sharding)))

    refuse("without a rank", count=1, rank=None)
    refuse("2 ranks without a rank", rank=None)
    refuse("uneven='drop' or 'pad'", uneven="allow")
    refuse("sharding='dynamic'", sharding="off")
    refuse("put it before", dataset=sentences().filter(lambda batch: True))


def test_a_state_of_uncoordinated_reads_is_refused(one_worker: ps.LocalService) -> None:
    ranks = Ranks(one_worker, "uncoordinated", 1, steps=3, coordinated=False, order="deterministic").done()
    loader = sentences().distribute(
        one_worker, job="now", ranks=ps.Ranks(1, 0, coordinated=True), order="deterministic"
    )
    with pytest.raises(ps.StateMismatchError, match="coordinated"):
        loader.load_state_dict(ranks.states[0])


def test_consumers_that_disagree_are_refused(one_worker: ps.LocalService) -> None:
    options: dict[str, Any] = {"job": "disagree", "limits": ps.Limits(timeout_s=30)}
    with sentences().distribute(one_worker, ranks=ps.Ranks(2, 0, coordinated=True), **options) as loader:
        next(iter(loader))
        with pytest.raises(ps.PenstockError, match="coordinated"):
            next(iter(sentences().distribute(one_worker, ranks=ps.Ranks(2, 1), **options)))
