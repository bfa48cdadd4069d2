from __future__ import annotations

from typing import Any

import pytest

from penstock.control.records import KEPT_RAISES
from penstock.control.runners import RESTART_GRACE_S
from penstock.control.views import view_of
from penstock.core.ids import BlobHash
from penstock.wire.jobs import Cut, FeedSpec, HeldView, Position, Ranges, Resume, Slot
from penstock.wire.messages import (
    Beat,
    Changes,
    CloseClient,
    Done,
    EpochOpened,
    NotKnown,
    NotYet,
    Refused,
    SteerJob,
    StopRunner,
    Superseded,
    View,
)
from tests.control.cluster import BOB, JOB, Cluster, rebind, spec, started


def beat(client: str, attempt: str = "a0-r0", *, consumer: int = 0, version: int = 0) -> Beat:
    return Beat(job=JOB, client=client, consumer=consumer, attempt=attempt, version=version)


def close(client: str, attempt: str, *, consumer: int = 0, finished: bool = True) -> CloseClient:
    return CloseClient(job=JOB, client=client, consumer=consumer, attempt=attempt, finished=finished)


def resume(digest: str = "d", **changes: Any) -> Resume:
    held = Position(number=0, cut=Cut(engine=[1]), round=4, marks=(4,))
    fields: dict[str, Any] = {"epoch": 0, "consumers": 1, "streams": (held,), "digest": digest}
    return Resume(**{**fields, "done": (Ranges(0, 0, ((0, 3),)),), **changes})


def test_a_job_waits_for_its_blobs_and_names_them() -> None:
    cluster = Cluster()
    cluster.blobs = frozenset({"graph"})
    answer = cluster.ask(cluster.opening())
    assert isinstance(answer, NotYet)
    assert answer.missing_blobs == ("splits",)
    assert cluster.state.jobs == {}


def test_an_opening_sent_twice_opens_once() -> None:
    cluster = started()
    request = cluster.opening(epoch=1)
    first = cluster.ask(request)
    before = len(cluster.journal)
    assert cluster.ask(request) == first
    assert len(cluster.journal) == before


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"fingerprint": "f2"}, "fingerprint: 'f2' here, 'f1' in the job"),
        ({"policy": "file"}, "sharding.policy: 'file' here, 'dynamic' in the job"),
        ({"guarantee": "at_most_once"}, "sharding.guarantee: 'at_most_once' here, 'exactly_once' in the job"),
        ({"order": "deterministic"}, "order: 'deterministic' here, 'relaxed' in the job"),
        ({"max_workers": 3}, "placement.max_workers: 3 here, None in the job"),
        ({"consumers": 2}, "ranks.count: 2 here, 1 in the job"),
        ({"sharing": "skip"}, "sharing: Share(kind='skip'"),
    ],
)
def test_another_job_of_the_same_name_is_refused_and_the_difference_shown(changes: dict[str, Any], shown: str) -> None:
    cluster = started()
    refused = cluster.ask(cluster.opening(epoch=1, spec=spec(**changes)))
    assert isinstance(refused, Refused)
    assert refused.kind == "job_mismatch"
    assert shown in refused.reason


def test_a_job_that_all_its_readers_gave_up_may_be_another_one() -> None:
    cluster = started()
    cluster.ask(close("c0", "a0-r0", finished=False))
    other = cluster.open(spec=spec(fingerprint="f2"))
    assert other.spec.fingerprint == "f2" and other.view.attempt != "a0-r0"


def two_ranks_left(workers: int = 2) -> Cluster:
    """Return a cluster whose job was read by two ranks, which have saved and gone."""
    cluster = started(workers, consumers=2)
    for consumer in range(2):
        cluster.ask(close(f"c{consumer}", "a0-r0", consumer=consumer, finished=False))
    cluster.pushed.clear()
    return cluster


@pytest.mark.parametrize("changes", [{"consumers": 1}, {"graph": "other"}, {"sharing": "skip"}, {"max_workers": 1}])
def test_processes_are_replaced_where_the_job_is_made_anew(changes: dict[str, Any]) -> None:
    cluster = two_ranks_left()
    before = set(cluster.state.runners[JOB])
    cluster.blobs |= {BlobHash("other")}
    cluster.open(spec=spec(**changes), resume=resume(consumers=2))
    assert {push.runner for push in cluster.pushes(StopRunner)} == before


def test_who_may_read_a_job_does_not_end_it_by_describing_another() -> None:
    cluster = started(share_with=("bob",))
    cluster.ask(close("c0", "a0-r0", finished=False))
    asked = cluster.opening(spec=spec(fingerprint="f2"), trust=("alice",))
    refused = cluster.ask(asked, principal=BOB)
    assert isinstance(refused, Refused)
    assert "only 'alice'" in refused.reason
    assert cluster.state.jobs[JOB].spec.fingerprint == "f1"
    assert cluster.state.runners[JOB]


def test_a_job_that_a_reader_finished_or_still_reads_keeps_its_name() -> None:
    cluster = started(consumers=2)
    cluster.ask(close("c0", "a0-r0", finished=False))
    assert isinstance(cluster.ask(cluster.opening(spec=spec(consumers=2, fingerprint="f2"))), Refused)
    cluster.ask(close("c1", "a0-r0", consumer=1))
    assert isinstance(cluster.ask(cluster.opening(spec=spec(consumers=2, fingerprint="f2"))), Refused)


def test_the_creators_seed_and_host_win_and_the_owner_is_who_the_key_says() -> None:
    cluster = started(consumers=2, seed=5, owner="ann")
    answer = cluster.open(1, spec=spec(consumers=2, seed=6, host="elsewhere", owner="bob"), replica=1)
    assert (answer.spec.seed, answer.spec.owner, answer.spec.host) == (5, "alice", "")


@pytest.mark.parametrize("changes", [{"consumer": 1}, {"consumer": -1}, {"replica": -1}, {"job": ""}])
def test_arguments_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    cluster = Cluster()
    refused = cluster.ask(cluster.opening(**changes))
    assert isinstance(refused, Refused)
    assert refused.kind == "invalid_argument"


def test_the_newest_reader_of_a_slot_wins() -> None:
    cluster = started()
    joined = cluster.open(rejoin="a0-r0")
    assert joined.view.attempt == "a0-r0"
    refused = cluster.ask(beat("c0"))
    assert isinstance(refused, Refused)
    assert refused.kind == "superseded"
    assert isinstance(cluster.ask(beat("c1")), View | Done)


@pytest.mark.parametrize("how", ["rejoin", "anew"])
def test_who_is_superseded_is_told_at_once_and_by_whom(how: str) -> None:
    cluster = started(consumers=2)
    cluster.pushed.clear()
    rejoin = {"rejoin": "a0-r0"} if how == "rejoin" else {}
    if how == "anew":
        cluster.ask(cluster.opening(0, spec=spec(consumers=2), reader="process 6 on node1"))
    cluster.open(1, spec=spec(consumers=2), reader="process 7 on node2", **rejoin)
    told = {push.client: push.reason for peer, push in cluster.pushed if isinstance(push, Superseded)}
    assert {peer for peer, push in cluster.pushed if isinstance(push, Superseded)} == {f"peer of {c}" for c in told}
    assert "process 7 on node2 has taken consumer 1's place" in told.pop("c1")
    if how == "anew":
        assert "start all consumers again" in told.pop("c0")
    assert told == {}
    if how == "rejoin":
        refused = cluster.ask(beat("c1", consumer=1))
        assert isinstance(refused, Refused)
        assert "process 7 on node2" in refused.reason


def test_who_begins_anew_itself_is_not_told_that_its_place_was_taken() -> None:
    cluster = started()
    cluster.pushed.clear()
    anew = cluster.opening(resume=resume(), client="c0")
    assert isinstance(cluster.ask(anew), EpochOpened)
    assert cluster.pushes(Superseded) == []


@pytest.mark.parametrize("width", [-1, 2**63 - 1])
def test_a_checkpoint_with_a_number_of_streams_that_cannot_be_is_refused(width: int) -> None:
    cluster = started()
    refused = cluster.ask(cluster.opening(resume=resume(width=width), client="c0"))
    assert isinstance(refused, Refused) and f"streams={width}" in refused.reason


def test_the_opening_of_a_dead_reader_that_arrives_after_its_successors_opens_nothing() -> None:
    cluster = started()
    dead = cluster.opening(began_ns=1)
    successor = cluster.ask(cluster.opening(began_ns=2, rejoin="a0-r0"))
    assert isinstance(successor, EpochOpened)
    refused = cluster.ask(dead)
    assert isinstance(refused, Refused)
    assert refused.kind == "superseded"
    elsewhere = cluster.ask(cluster.opening(began_ns=1, host="h2", rejoin="a0-r0"))  # another clock
    assert isinstance(elsewhere, EpochOpened)


def test_a_late_duplicate_of_a_superseded_opening_opens_nothing() -> None:
    cluster = Cluster()
    cluster.register("w0")
    request = cluster.opening()
    answer = cluster.ask(request)
    cluster.open(rejoin=answer.view.attempt)
    refused = cluster.ask(request)
    assert isinstance(refused, Refused)
    assert refused.kind == "superseded"


def test_consumers_that_open_the_same_epoch_share_an_attempt() -> None:
    cluster = started(consumers=3)
    assert {slot: held.client for slot, held in cluster.state.jobs[JOB].iterations["a0-r0"].opened.items()} == {
        Slot(0): "c0",
        Slot(1): "c1",
        Slot(2): "c2",
    }


def test_a_view_says_which_consumers_are_missing() -> None:
    cluster = Cluster()
    cluster.register("w0")
    cluster.open(spec=spec(consumers=3))
    cluster.ready()
    assert cluster.view().waiting_for == "consumers 1, 2 have not opened the epoch"


def test_a_lone_consumer_that_returns_without_state_starts_over() -> None:
    cluster = started()
    answer = cluster.open()
    assert answer.view.attempt != "a0-r0"
    assert list(cluster.state.jobs[JOB].iterations) == [answer.view.attempt]
    assert isinstance(cluster.ask(beat("c0")), NotKnown)


def test_one_of_several_that_returns_without_state_waits_for_the_others() -> None:
    cluster = started(consumers=2)
    described = spec(consumers=2)
    returned = cluster.opening(0, spec=described)
    answer = cluster.ask(returned)
    assert isinstance(answer, NotYet)
    assert "consumers 1 to start over" in answer.waiting_for
    assert "consumer 0 returned without its state while others go on" in answer.waiting_for
    assert "restart all consumers" in answer.waiting_for
    other = cluster.ask(cluster.opening(1, spec=described))
    assert isinstance(other, EpochOpened)
    again = cluster.ask(returned)
    assert isinstance(again, EpochOpened)
    assert again.view.attempt == other.view.attempt != "a0-r0"


def test_one_that_returns_without_state_when_all_streams_have_ended_waits_for_the_others_too() -> None:
    cluster = started(workers=1, consumers=2)
    (stream,) = cluster.view().streams
    for consumer in range(2):
        cluster.end(stream, consumer)
    assert cluster.view().finished
    again = cluster.opening(1, spec=spec(consumers=2))
    waiting = cluster.ask(again)
    assert isinstance(waiting, NotYet)
    assert "consumers 0" in waiting.waiting_for
    first = cluster.ask(cluster.opening(0, spec=spec(consumers=2)))
    assert isinstance(first, EpochOpened)
    assert cluster.ask(again).view.attempt == first.view.attempt


def test_a_wish_to_start_over_lapses() -> None:
    cluster = started(consumers=2)
    described = spec(consumers=2)
    cluster.ask(cluster.opening(0, spec=described))
    cluster.now += 6
    assert isinstance(cluster.ask(cluster.opening(1, spec=described)), NotYet)


def test_an_epoch_that_was_read_to_its_end_starts_anew() -> None:
    cluster = started()
    cluster.ask(close("c0", "a0-r0"))
    assert cluster.open().view.attempt != "a0-r0"


def test_consumers_may_be_one_epoch_apart_but_not_two() -> None:
    cluster = started(consumers=2)
    described = spec(consumers=2)
    cluster.ask(close("c0", "a0-r0"))
    first = cluster.open(0, epoch=1, spec=described).view.attempt
    assert list(cluster.state.jobs[JOB].iterations) == ["a0-r0", first]
    cluster.ask(close("c2", first))
    waiting = cluster.ask(cluster.opening(0, epoch=2, spec=described))
    assert isinstance(waiting, NotYet)
    assert waiting.waiting_for == "consumers 1 to be through with epoch 0"
    assert cluster.open(1, epoch=1, spec=described).view.attempt == first
    assert list(cluster.state.jobs[JOB].iterations) == [first]
    third = cluster.open(0, epoch=2, spec=described).view.attempt
    assert list(cluster.state.jobs[JOB].iterations) == [first, third]


@pytest.mark.parametrize("finished", [False, True])
def test_an_epoch_is_kept_for_who_left_it_and_may_come_back_with_its_state(finished: bool) -> None:
    """All were stopped at its last step, or after it; one is back, sees the end and goes on before the other comes."""
    cluster = started(consumers=2)
    described = spec(consumers=2)
    for consumer in range(2):
        cluster.ask(close(f"c{consumer}", "a0-r0", consumer=consumer, finished=finished))
    cluster.open(1, spec=described, rejoin="a0-r0")
    cluster.ask(close("c2", "a0-r0", consumer=1))
    following = cluster.open(1, epoch=1, spec=described).view.attempt
    assert cluster.open(0, spec=described, rejoin="a0-r0").view.attempt == "a0-r0"
    cluster.ask(close("c4", "a0-r0"))
    assert cluster.open(0, epoch=1, spec=described).view.attempt == following
    assert list(cluster.state.jobs[JOB].iterations) == [following]


def test_an_epoch_is_kept_for_who_has_gone_back_to_it() -> None:
    cluster = started(consumers=2)
    described = spec(consumers=2)
    cluster.ask(close("c0", "a0-r0"))
    following = cluster.open(0, epoch=1, spec=described).view.attempt
    cluster.ask(close("c2", following, finished=False))
    cluster.open(0, spec=described, rejoin="a0-r0")
    cluster.ask(close("c1", "a0-r0", consumer=1))
    cluster.open(1, epoch=1, spec=described)
    assert list(cluster.state.jobs[JOB].iterations) == ["a0-r0", following]
    cluster.ask(close("c3", "a0-r0"))
    assert list(cluster.state.jobs[JOB].iterations) == [following]


def ahead_of(cluster: Cluster, consumer: int = 0, **changes: Any) -> Any:
    """Open the epoch after the first one ahead; return the answer."""
    return cluster.ask(cluster.opening(consumer, epoch=1, ahead=True, **changes), peer="ahead")


def test_an_epoch_opened_ahead_is_served_while_the_one_before_is_read_and_then_taken_over() -> None:
    cluster = started()
    opened = ahead_of(cluster)
    assert isinstance(opened, EpochOpened) and opened.view.streams[0].runner is not None
    following = opened.view.attempt
    assert list(cluster.state.jobs[JOB].iterations) == ["a0-r0", following]
    assert isinstance(cluster.ask(beat("c0")), View), "the one before is read on"
    again = cluster.opening(epoch=1, client="c1", rejoin=following, after="a0-r0")
    assert isinstance(cluster.ask(again), EpochOpened)
    assert list(cluster.state.jobs[JOB].iterations) == [following]
    assert not cluster.state.jobs[JOB].iterations[following].opened[Slot(0)].ahead
    cluster.restart()


def test_an_epoch_opened_ahead_and_not_read_after_all_was_never_there() -> None:
    cluster = started()
    following = ahead_of(cluster).view.attempt
    cluster.ask(close("c1", following, finished=False))
    assert list(cluster.state.jobs[JOB].iterations) == ["a0-r0"]
    assert cluster.open(rejoin="a0-r0").view.attempt == "a0-r0"
    assert cluster.open(epoch=1).view.attempt != following


def test_a_reader_ahead_keeps_nobody_from_the_epoch_it_is_in() -> None:
    """One rank is ahead in the next epoch, and is killed: it comes back to where it was, and later to the next one."""
    cluster = started(consumers=2)
    described = spec(consumers=2)
    following = ahead_of(cluster, spec=described).view.attempt
    cluster.ask(close("c1", "a0-r0", consumer=1))
    assert cluster.open(1, epoch=1, spec=described).view.attempt == following
    assert list(cluster.state.jobs[JOB].iterations) == ["a0-r0", following], "rank 0 is still in the first"
    assert cluster.open(0, spec=described, rejoin="a0-r0").view.attempt == "a0-r0"
    assert cluster.open(0, epoch=1, spec=described).view.attempt == following
    assert list(cluster.state.jobs[JOB].iterations) == [following]


def test_the_reader_of_an_epoch_is_not_late_because_it_opened_the_next_one_ahead() -> None:
    cluster = Cluster()
    cluster.register("w0")
    first = cluster.opening(began_ns=5)
    attempt = cluster.ask(first).view.attempt
    assert isinstance(ahead_of(cluster, began_ns=9), EpochOpened)
    again = cluster.opening(client=first.client, began_ns=5, rejoin=attempt)
    assert isinstance(cluster.ask(again), EpochOpened)
    dead = cluster.opening(epoch=1, ahead=True, began_ns=7)
    assert isinstance(cluster.ask(dead), Refused), "a dead reader's opening, which was ahead too"


def test_an_opening_ahead_waits_while_splits_of_the_epoch_are_left() -> None:
    cluster = started()
    (stream,) = cluster.view().streams
    cluster.grant(stream)
    waiting = ahead_of(cluster)
    assert isinstance(waiting, NotYet) and "last splits of epoch 0" in waiting.waiting_for
    assert isinstance(cluster.ask(cluster.opening(epoch=5, ahead=True)), NotYet)


@pytest.mark.parametrize("first", [0, 1])
def test_who_said_what_only_a_reader_can_say_had_come_though_its_arrival_was_lost(first: int) -> None:
    """All ranks read an empty epoch to its end, and begin anew without states: in one reading, whoever is first."""
    cluster = started(consumers=2)
    described = spec(consumers=2)
    early = [cluster.opening(consumer, epoch=1, ahead=True, spec=described) for consumer in range(2)]
    following, _ = [cluster.ask(each).view for each in early]
    for consumer in range(2):
        cluster.ask(close(f"c{consumer}", "a0-r0", consumer=consumer))
    cluster.ask(cluster.opening(epoch=1, spec=described, client=early[0].client, rejoin=following.attempt))
    for stream in following.streams:
        for consumer in range(2):
            cluster.end(stream, consumer, rounds=0)
    cluster.ask(close(early[0].client, following.attempt))
    anew = {cluster.open(consumer, epoch=1, spec=described).view.attempt for consumer in (first, 1 - first)}
    assert len(anew) == 1 and following.attempt not in anew


def test_what_was_said_ahead_and_comes_late_changes_nothing() -> None:
    cluster = started()
    early = cluster.opening(epoch=1, ahead=True)
    following = cluster.ask(early).view.attempt
    cluster.ask(cluster.opening(epoch=1, client=early.client, rejoin=following, after="a0-r0"))
    cluster.ask(early)
    assert not cluster.state.jobs[JOB].iterations[following].opened[Slot(0)].ahead


def test_the_dead_hold_nobody_back() -> None:
    cluster = started(consumers=2)
    described = spec(consumers=2)
    cluster.ask(close("c0", "a0-r0"))
    cluster.open(0, epoch=1, spec=described)
    request = cluster.opening(0, epoch=2, spec=described)
    assert isinstance(cluster.ask(request), NotYet)
    cluster.live(31, [beat("c2", "a2")])
    assert isinstance(cluster.ask(request), EpochOpened)


def test_a_state_of_the_present_attempt_rejoins_it() -> None:
    cluster = started(consumers=2)
    answer = cluster.open(1, rejoin="a0-r0", spec=spec(consumers=2))
    assert answer.view.attempt == "a0-r0"
    assert isinstance(cluster.ask(cluster.opening(1, rejoin="gone", spec=spec(consumers=2))), NotKnown)


def test_an_attempt_that_ended_can_be_rejoined() -> None:
    cluster = started()
    cluster.end(cluster.view().streams[0])
    cluster.ask(close("c0", "a0-r0"))
    assert cluster.open(rejoin="a0-r0").view.finished


def test_a_state_of_a_job_that_is_described_otherwise_does_not_rejoin() -> None:
    cluster = started()
    answer = cluster.ask(cluster.opening(rejoin="a0-r0", spec=spec(consumers=2)))
    assert isinstance(answer, NotKnown)


def test_consumers_that_load_the_same_checkpoint_share_an_attempt() -> None:
    cluster = Cluster()
    cluster.register("w0")
    described = spec(consumers=2)
    held = resume(consumers=2)
    one = cluster.open(0, resume=held, spec=described)
    other = cluster.open(1, resume=held, spec=described)
    assert one.view.attempt == other.view.attempt == "a0-r0"
    assert one.view.streams[0].start == Cut(engine=[1])
    assert one.view.streams[0].first_round == 4
    again = cluster.ask(cluster.opening(0, resume=held, spec=described))
    assert isinstance(again, NotYet)
    assert cluster.open(1, resume=held, spec=described).view.attempt != "a0-r0"


def test_a_consumer_without_the_checkpoint_does_not_join_those_who_have_it() -> None:
    cluster = Cluster()
    cluster.register("w0")
    described = spec(consumers=2)
    cluster.open(0, resume=resume(consumers=2), spec=described)
    answer = cluster.ask(cluster.opening(1, spec=described))
    assert isinstance(answer, NotYet)
    assert "consumer 1 returned without its state" in answer.waiting_for
    assert cluster.open(0, spec=described).view.streams == ()


def test_a_checkpoint_fences_the_attempts_at_its_epoch() -> None:
    cluster = started()
    stale = cluster.view().streams[0]
    attempt = cluster.open(resume=resume()).view.attempt
    assert list(cluster.state.jobs[JOB].iterations) == [attempt]
    assert isinstance(cluster.ask(cluster.granting(stale)), NotKnown)
    assert cluster.open(resume=resume("another")).view.attempt != attempt


def test_an_opening_that_is_sent_again_after_a_wiped_journal_starts_another_attempt() -> None:
    """The first one's id lives on in runners and in other consumers' states."""
    first, second = Cluster(), Cluster()
    request = first.opening()
    for _ in range(3):
        second.draw()
    assert first.ask(request).view.attempt != second.ask(request).view.attempt


def test_a_checkpoint_with_another_number_of_consumers_replaces_the_job_once_nobody_holds_it() -> None:
    cluster = started(consumers=2)
    request = cluster.opening(resume=resume(), spec=spec(consumers=1))
    answer = cluster.ask(request)
    assert isinstance(answer, NotYet)
    assert "ranks.count: 1 here, 2 in the job" in answer.waiting_for
    for consumer in (0, 1):
        cluster.ask(close(f"c{consumer}", "a0-r0", consumer=consumer, finished=False))
    opened = cluster.ask(request)
    assert isinstance(opened, EpochOpened)
    assert opened.spec.ranks.count == 1


def test_a_checkpoint_of_another_seed_does_not_go_on_with_the_jobs() -> None:
    cluster = started()
    cluster.ask(close("c0", "a0-r0", finished=False))
    assert cluster.open(resume=resume(), spec=spec(seed=99)).spec.seed == 99


def test_a_view_is_sent_only_when_it_is_newer() -> None:
    cluster = started()
    answer = cluster.ask(beat("c0"))
    assert isinstance(answer, View)
    assert isinstance(cluster.ask(beat("c0", version=answer.view.version)), Done)


def test_a_beat_is_answered_with_what_changed_since_the_version_it_carries() -> None:
    cluster = started()
    held = HeldView(cluster.view())
    known = held.version
    cluster.register("w9", agent="B")
    cluster.ready()
    answer = cluster.ask(beat("c0", version=known))
    assert isinstance(answer, Changes)
    assert (len(answer.change.made), answer.change.moved) == (1, ())
    assert held.take_change(answer.change) == "taken"
    assert held.view == cluster.view()


def test_a_beat_with_a_version_from_long_ago_is_answered_with_the_whole_view() -> None:
    cluster = started(workers=2)
    known = cluster.view().version
    for _ in range(2 * KEPT_RAISES + 1):
        cluster.ask(rebind(cluster.view()))
    assert isinstance(cluster.ask(beat("c0", version=cluster.view().version - KEPT_RAISES)), Changes)
    assert cluster.ask(beat("c0", version=known)) == View(view=cluster.view())


def test_leases_begin_anew_after_a_restart_and_versions_never_go_back() -> None:
    cluster = started()
    before = view_of(cluster.state, JOB)
    cluster.restart()
    answer = cluster.ask(beat("c0", version=before.version))
    assert isinstance(answer, View)
    assert answer.view.version > before.version
    assert [stream.stream for stream in answer.view.streams] == [stream.stream for stream in before.streams]
    assert set(cluster.state.clients[JOB]) == {"c0"}


def test_a_job_nobody_holds_is_collected_and_its_name_is_free() -> None:
    cluster = started(collect_after_s=60.0)
    cluster.ask(close("c0", "a0-r0"))
    cluster.live(59)
    assert JOB in cluster.state.jobs
    cluster.live(2)
    assert JOB not in cluster.state.jobs
    assert cluster.open(spec=spec(fingerprint="another")).spec.fingerprint == "another"


def test_a_job_somebody_holds_is_not_collected_even_unread_and_across_restarts() -> None:
    cluster = started(collect_after_s=60.0)
    cluster.live(100, [beat("c0")])
    cluster.restart()
    cluster.live(100, [beat("c0")])
    assert JOB in cluster.state.jobs


def test_a_job_held_when_the_dispatcher_died_is_not_collected_before_its_readers_can_be_back() -> None:
    cluster = started(consumers=2, collect_after_s=0.5)
    cluster.restart()
    cluster.tick(RESTART_GRACE_S - 1.0)
    assert isinstance(cluster.ask(beat("c1", consumer=1)), View)
    cluster.live(5, beats=[beat("c1", consumer=1)])
    assert isinstance(cluster.ask(beat("c0")), View)


@pytest.mark.parametrize("closed", [False, True])
def test_a_job_whose_readers_do_not_come_back_is_collected_then(closed: bool) -> None:
    cluster = started(collect_after_s=0.5)
    if closed:
        cluster.ask(close("c0", "a0-r0"))
    cluster.restart()
    cluster.tick(2.0)
    assert (JOB in cluster.state.jobs) == (not closed)
    cluster.tick(RESTART_GRACE_S)
    assert JOB not in cluster.state.jobs


def test_a_silent_client_loses_its_lease_and_may_come_back() -> None:
    cluster = started()
    cluster.live(31)
    assert cluster.state.clients == {}
    assert isinstance(cluster.ask(beat("c0")), View)
    assert set(cluster.state.clients[JOB]) == {"c0"}


def test_a_cancelled_job_says_so_and_makes_room() -> None:
    cluster = started()
    cluster.ask(SteerJob(job=JOB, action="cancel"))
    assert cluster.view().failure == "the job was cancelled"
    refused = cluster.ask(cluster.opening(rejoin="a0-r0"))
    assert isinstance(refused, Refused)
    assert refused.kind == "job_cancelled"
    cluster.ask(close("c0", "a0-r0", finished=False))
    assert cluster.open().view.failure == ""


def test_an_epoch_from_a_checkpoint_has_the_streams_it_had_there_and_the_next_one_those_of_the_job() -> None:
    cluster = Cluster()
    cluster.register("w1")
    described = spec(order="deterministic", streams=4)
    resumed = cluster.open(spec=described, resume=resume(width=2))
    assert (resumed.spec.sharding.streams, [stream.number for stream in resumed.view.streams]) == (2, [0, 1])
    assert resumed.view.streams[1].feed == FeedSpec(kind="dealt", number=1, of=2)
    cluster.ask(close("c0", resumed.view.attempt))
    after = cluster.open(epoch=1, spec=described)
    assert (after.spec.sharding.streams, len(after.view.streams)) == (4, 4)
