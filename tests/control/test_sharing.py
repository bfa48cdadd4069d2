"""Which epoch a trainer of a shared job reads."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.control.snapshot import restore, snapshot
from penstock.core.ids import AttemptId
from penstock.wire.messages import (
    Beat,
    CloseClient,
    EpochOpened,
    Jobs,
    ListJobs,
    NotKnown,
    NotYet,
    OpenEpoch,
    Refused,
    Superseded,
)
from tests.control.cluster import JOB, Cluster, spec


def opening(trainer: int, client: str, *, attempt: str = "", epoch: int = 0, **changes: Any) -> OpenEpoch:
    return OpenEpoch(
        job=JOB,
        client=client,
        consumer=0,
        replica=0,
        epoch=epoch,
        spec=spec(**{"sharing": "skip", **changes}),
        attempt=attempt or f"of {client}",
        host="h",
        trainer=f"t{trainer}",
    )


def opened(cluster: Cluster, request: OpenEpoch) -> tuple[AttemptId, int]:
    answer = cluster.ask(request)
    assert isinstance(answer, EpochOpened), answer
    return answer.view.attempt, answer.view.epoch


def leave(cluster: Cluster, client: str, attempt: str, *, finished: bool = True) -> None:
    cluster.ask(CloseClient(job=JOB, client=client, consumer=0, attempt=attempt, finished=finished))


def serving() -> Cluster:
    """A cluster with a worker, whose process serves the job that trainer 0 opened."""
    cluster = Cluster()
    cluster.register("w1")
    opened(cluster, opening(0, "c0"))
    cluster.ready()
    return cluster


def test_whoever_comes_reads_the_present_epoch_whatever_it_asks_for() -> None:
    cluster = serving()
    assert opened(cluster, opening(1, "c1", epoch=5)) == ("of c0-r0", 0)
    assert opened(cluster, opening(1, "c1", epoch=5)) == ("of c0-r0", 0)


def test_a_trainer_that_returns_goes_on_and_one_that_finished_starts_the_next() -> None:
    cluster = serving()
    opened(cluster, opening(1, "c1"))
    leave(cluster, "c1", "of c0-r0", finished=False)
    assert opened(cluster, opening(1, "c1 again")) == ("of c0-r0", 0)
    leave(cluster, "c1 again", "of c0-r0")
    assert opened(cluster, opening(1, "c1 next")) == ("of c1 next-r2", 1)
    assert opened(cluster, opening(1, "c1 next")) == ("of c1 next-r2", 1)
    leave(cluster, "c0", "of c0-r0")
    assert opened(cluster, opening(0, "c0 next")) == ("of c1 next-r2", 1)


def test_nobody_waits_for_a_trainer_two_epochs_behind_unless_asked_to() -> None:
    for sharing in ("skip", "wait"):
        cluster = Cluster()
        cluster.register("w1")
        opened(cluster, opening(0, "slow", sharing=sharing))
        for epoch in range(3):
            answer = cluster.ask(opening(1, f"fast {epoch}", sharing=sharing))
            if sharing == "wait" and epoch == 2:
                assert isinstance(answer, NotYet) and "trainers to be through with epoch 0" in answer.waiting_for
                break
            assert isinstance(answer, EpochOpened) and answer.view.epoch == epoch
            leave(cluster, f"fast {epoch}", answer.view.attempt)
        else:
            assert "of slow" not in cluster.state.jobs[JOB].iterations


def test_a_trainer_whose_epoch_was_dropped_is_told_so_and_not_that_its_place_was_taken() -> None:
    """It then skips the rest of its epoch and reads what the others do."""
    cluster = serving()
    for epoch in range(3):
        attempt, _ = opened(cluster, opening(1, f"fast {epoch}"))
        leave(cluster, f"fast {epoch}", attempt)
    assert "of c0-r0" not in cluster.state.jobs[JOB].iterations
    assert cluster.pushes(Superseded) == []
    behind = Beat(job=JOB, client="c0", consumer=0, attempt="of c0-r0", version=0)
    assert isinstance(cluster.ask(behind), NotKnown)
    assert isinstance(cluster.ask(msgspec.structs.replace(opening(0, "c0"), rejoin="of c0-r0")), NotKnown)


def test_with_a_number_of_trainers_each_reads_every_epoch_and_no_other_is_let_in() -> None:
    cluster = Cluster()
    cluster.register("w1")
    options = {"sharing": "wait", "trainers": 2, "trainer_timeout_s": 10.0}
    attempt, _ = opened(cluster, opening(0, "c0", **options))
    leave(cluster, "c0", attempt)
    following, epoch = opened(cluster, opening(0, "c0 next", **options))
    assert epoch == 1
    assert opened(cluster, opening(1, "late", **options)) == (attempt, 0)
    refused = cluster.ask(opening(2, "third", **options))
    assert isinstance(refused, Refused) and "trainers=2" in refused.reason
    leave(cluster, "late", attempt)
    assert opened(cluster, opening(1, "late next", **options)) == (following, 1)


def test_a_trainer_that_never_comes_is_waited_for_as_long_as_a_silent_one() -> None:
    cluster = Cluster()
    cluster.register("w1")
    options = {"sharing": "wait", "trainers": 2, "trainer_timeout_s": 10.0}
    for client in ("c0", "c1"):
        attempt, _ = opened(cluster, opening(0, client, **options))
        leave(cluster, client, attempt)
    third = opening(0, "c2", **options)
    answer = cluster.ask(third)
    assert isinstance(answer, NotYet) and "1 have" in answer.waiting_for
    for _ in range(11):
        cluster.tick(1.0)
        answer = cluster.ask(third)
    assert isinstance(answer, EpochOpened) and answer.view.epoch == 2


def test_an_epoch_without_readers_and_processes_is_over() -> None:
    cluster = serving()
    leave(cluster, "c0", "of c0-r0", finished=False)
    cluster.tick(15.0)
    assert opened(cluster, opening(0, "again")) == ("of again-r2", 1)


def test_the_service_tells_how_trainers_fare_and_a_snapshot_keeps_who_they_are() -> None:
    cluster = serving()
    opened(cluster, opening(1, "c1"))
    cluster.ask(
        Beat(
            job=JOB,
            client="c1",
            consumer=0,
            attempt="of c0-r0",
            version=0,
            batches=9,
            trainer="t1",
            skipped=2,
            shared=8,
        )
    )
    lines = cluster.ask(ListJobs())
    assert isinstance(lines, Jobs)
    (line,) = lines.jobs[0].trainers
    assert (line.trainer, line.epoch, line.read, line.skipped, line.shared) == ("t1", 0, 9, 2, 8)
    assert snapshot(restore(snapshot(cluster.state))) == snapshot(cluster.state)


# Trainers of several ranks


def rank(consumer: int, client: str, **changes: Any) -> OpenEpoch:
    """A rank of trainer 0, of two."""
    request = {key: changes.pop(key) for key in ("rejoin", "after") if key in changes}
    asked = opening(0, client, consumers=2, **changes)
    return msgspec.structs.replace(asked, consumer=consumer, **request)


def let_in(cluster: Cluster, request: OpenEpoch) -> tuple[AttemptId, int]:
    """Return the attempt and the life."""
    answer = cluster.ask(request)
    assert isinstance(answer, EpochOpened), answer
    return answer.view.attempt, answer.life


def leave_rank(cluster: Cluster, consumer: int, client: str, attempt: str) -> None:
    cluster.ask(CloseClient(job=JOB, client=client, consumer=consumer, attempt=attempt, finished=True))


def pair() -> tuple[Cluster, AttemptId]:
    cluster = Cluster()
    cluster.register("w1")
    attempt, life = let_in(cluster, rank(0, "a"))
    assert let_in(cluster, rank(1, "b")) == (attempt, life) == (attempt, 0)
    cluster.ready()
    return cluster, attempt


def test_a_trainer_that_comes_without_its_state_begins_another_life() -> None:
    cluster = serving()
    assert let_in(cluster, opening(0, "c0")) == ("of c0-r0", 0)
    assert let_in(cluster, opening(0, "again")) == ("of c0-r0", 1)
    with_state = msgspec.structs.replace(opening(0, "with state"), rejoin="of c0-r0")
    assert let_in(cluster, with_state) == ("of c0-r0", 1)
    assert let_in(cluster, opening(1, "other")) == ("of c0-r0", 0)
    leave(cluster, "with state", "of c0-r0", finished=False)
    assert let_in(cluster, opening(0, "third")) == ("of c0-r0", 2)


def test_the_late_opening_of_a_killed_trainer_begins_no_life() -> None:
    """Else the trainer's streams begin after all that it was sent, and it never gets that."""
    cluster = serving()
    killed = msgspec.structs.replace(opening(1, "killed"), began_ns=1)
    successor = msgspec.structs.replace(opening(1, "successor"), began_ns=2)
    assert let_in(cluster, successor) == ("of c0-r0", 0)
    late = cluster.ask(killed)
    assert isinstance(late, Refused) and late.kind == "superseded"
    assert let_in(cluster, successor) == ("of c0-r0", 0)


def test_a_rank_that_returns_alone_without_its_state_waits_for_the_others() -> None:
    cluster, attempt = pair()
    answer = cluster.ask(rank(1, "b again"))
    assert isinstance(answer, NotYet) and "consumers 0 to start over" in answer.waiting_for
    assert let_in(cluster, rank(1, "b with state", rejoin=attempt)) == (attempt, 0)
    assert isinstance(cluster.ask(rank(0, "a again")), NotYet), "the other one has its state, and does not ask any more"
    assert let_in(cluster, rank(1, "b third")) == (attempt, 1)
    assert let_in(cluster, rank(0, "a again")) == (attempt, 1)
    assert let_in(cluster, rank(0, "a again")) == (attempt, 1)


def test_a_rank_that_has_finished_an_epoch_and_starts_anew_reads_it_with_its_trainer() -> None:
    cluster, attempt = pair()
    leave_rank(cluster, 1, "b", attempt)
    assert isinstance(cluster.ask(rank(1, "b again")), NotYet)
    assert let_in(cluster, rank(0, "a again")) == (attempt, 1)
    assert let_in(cluster, rank(1, "b again")) == (attempt, 1)


def test_a_rank_goes_on_to_the_next_epoch_before_the_others_of_its_trainer() -> None:
    cluster, attempt = pair()
    leave_rank(cluster, 1, "b", attempt)
    following, _ = let_in(cluster, rank(1, "b next", after=attempt))
    assert following != attempt
    assert let_in(cluster, rank(0, "a next", after=attempt)) == (following, 0)


def test_a_trainer_that_has_finished_an_epoch_starts_the_next_though_it_does_not_say_so() -> None:
    cluster, attempt = pair()
    for consumer, client in enumerate("ab"):
        leave_rank(cluster, consumer, client, attempt)
    following, life = let_in(cluster, rank(1, "b next"))
    assert following != attempt and let_in(cluster, rank(0, "a next")) == (following, life) == (following, 0)


def test_lives_survive_a_restart_of_the_dispatcher() -> None:
    cluster, attempt = pair()
    cluster.ask(rank(1, "b again"))
    assert let_in(cluster, rank(0, "a again")) == (attempt, 1)
    restored = restore(snapshot(cluster.state)).jobs[JOB].iterations[attempt].opened
    assert [held.life for held in restored.values()] == [1, 0]


def test_a_rank_whose_trainer_has_begun_anew_without_it_is_told_so() -> None:
    cluster, attempt = pair()
    beat = Beat(job=JOB, client="b", consumer=1, attempt=attempt, version=0)
    assert not isinstance(cluster.ask(beat), Refused)
    cluster.ask(rank(1, "a late message of b's"))
    assert let_in(cluster, rank(0, "a again")) == (attempt, 1)
    answer = cluster.ask(beat)
    assert isinstance(answer, Refused) and answer.kind == "superseded" and "restart all its ranks" in answer.reason
