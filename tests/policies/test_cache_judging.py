"""How a choice about caching comes about, is tried, and is given up when it was wrong: by figures alone."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from penstock.policies.cache_judging import MOST_REVISIONS, CacheEvidence, CacheVerdict, check_evidence, judge
from penstock.policies.caching import CacheDemand, PipelineProfile, PointProfile, StorageModel, StorageSpeed

DEMAND = CacheDemand(epochs_left=20)
DISK = (StorageSpeed(nbytes=1 << 20, parallel=1, latency_s=0.001, bytes_per_s=100e6),)
STORAGE = StorageModel(reads=DISK, writes=DISK)


def profile(function_s: float = 0.02, **changes) -> PipelineProfile:
    """A function whose results of 100 KB take a millisecond of the disk."""
    made = PipelineProfile(
        cpu_s=function_s,
        gil_s=0.0,
        source_s=0.0,
        stage_s=function_s,
        seen_s=function_s,
        points=(PointProfile(number=1, cpu_s=function_s, gil_s=0.0, nbytes=100e3),),
    )
    return replace(made, **changes)


def tell(verdict: CacheVerdict, demand: CacheDemand = DEMAND, **found) -> CacheVerdict:
    return judge(verdict, CacheEvidence(number=verdict.number, storage=STORAGE, **found), demand)


def kept() -> CacheVerdict:
    return tell(tell(CacheVerdict(), profile=profile()), read_back_bytes_per_s=90e6)


def test_keeping_is_tried_on_a_few_splits_before_it_is_chosen():
    trying = tell(CacheVerdict(), profile=profile())
    assert (trying.step, trying.point) == ("trying", 1) and trying.reason.startswith("trying: keep at point 1")
    assert tell(trying) == trying, "nothing was read back yet"
    chosen = tell(trying, read_back_bytes_per_s=90e6)
    assert (chosen.step, chosen.point) == ("chosen", 1)


def test_entries_that_are_read_back_slowly_are_tried_again_and_then_not_kept():
    trying = tell(CacheVerdict(), profile=profile())
    again = tell(trying, read_back_bytes_per_s=3e6)
    assert (again.step, again.point, again.number) == ("trying", 1, trying.number + 1)
    assert tell(again, read_back_bytes_per_s=4e6).reason.startswith("compute: 20 ms an element")
    assert tell(again, read_back_bytes_per_s=80e6).point == 1, "the first time something else was in the way"


def test_computing_needs_no_trial_and_a_trainer_that_never_waits_gets_none():
    assert tell(CacheVerdict(), profile=profile(0.0005)).step == "chosen"
    bound = tell(CacheVerdict(), profile=profile(trainer_s=0.0198))
    assert (bound.step, bound.point) == ("chosen", 0)
    assert bound.reason == "compute: the trainer is the bound, and waits for nothing"


def test_a_choice_to_keep_that_is_seen_to_be_wrong_is_given_up():
    assert tell(kept(), got_s={1: 0.03}) == kept(), "one window may have been disturbed"
    doubting = tell(kept(), got_s={1: 0.03}, several=True)
    assert (doubting.step, doubting.point) == ("doubting", 0), "computing is measured again, as things are now"
    assert "30 ms kept at point 1, and 20 ms computed" in doubting.reason
    computed = tell(doubting, profile=profile(0.021))
    assert (computed.step, computed.point) == ("chosen", 0) and "seen were 30 ms kept" in computed.reason
    assert tell(computed, profile=profile(0.022)) == computed, "and what was seen stays true"


def test_what_is_slower_for_all_modes_gives_up_none():
    doubting = tell(kept(), got_s={1: 0.03}, several=True)
    again = tell(doubting, profile=profile(0.2))
    assert (again.step, again.point) == ("chosen", 1), "the whole machine is slower: computing even more"


def test_a_choice_that_is_right_is_said_to_be_once_and_holds():
    getting = tell(kept(), got_s={1: 0.002})
    assert getting.is_getting and getting.speed_up == pytest.approx(10) and getting.point == 1
    assert tell(getting, got_s={1: 0.0021}) == getting


def test_computing_is_left_only_for_what_is_clearly_better():
    computed = tell(CacheVerdict(), profile=profile(0.001))
    assert computed.point == 0
    assert tell(computed, profile=profile(0.00118)) == computed
    assert tell(computed, profile=profile(0.02)).step == "trying", "the function became slow"


def test_two_modes_do_not_take_turns():
    verdict, changes = kept(), 0
    for _ in range(40):
        found = (
            {"got_s": {1: 0.03}, "several": True}
            if verdict.point
            else {"profile": profile(0.02 if changes % 2 else 0.2)}
        )
        after = tell(verdict, **found)
        changes, verdict = changes + (after.point != verdict.point), after
    assert changes <= 2 * MOST_REVISIONS


def test_what_was_measured_under_another_verdict_says_nothing():
    assert judge(kept(), CacheEvidence(number=0, profile=profile(), storage=STORAGE), DEMAND) == kept()


def test_stages_that_share_a_thread_with_reading_do_not_overlap_with_it():
    ahead = profile(0.003, points=(PointProfile(number=1, cpu_s=0.003, gil_s=0.0, nbytes=250e3, rest_stage_s=0.001),))
    in_line = replace(ahead, points=(replace(ahead.points[0], after_read_s=0.001),))
    one, other = (tell(CacheVerdict(), profile=each).choice for each in (ahead, in_line))
    assert one.seconds_by_mode["keep 1"] == pytest.approx(0.0025, rel=0.05)
    assert other.seconds_by_mode["keep 1"] == pytest.approx(0.0035, rel=0.05)


def test_what_bounds_do_not_explain_counts_as_seen():
    busy = profile(0.001, seen_s=0.010)
    assert tell(CacheVerdict(), profile=busy).choice.seconds_by_mode["compute"] == pytest.approx(0.010)


def test_a_verdict_goes_over_the_wire_and_comes_back_the_same():
    for verdict in (CacheVerdict(), kept(), tell(kept(), got_s={1: 0.03}, several=True)):
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(verdict), type=CacheVerdict)
        assert sent == verdict and sent.reason == verdict.reason


@pytest.mark.parametrize(
    "evidence",
    [
        CacheEvidence(number=0, read_back_bytes_per_s=float("nan")),
        CacheEvidence(number=0, got_s={1: -1.0}),
        CacheEvidence(number=0, got_s={0: 1.0}),
        CacheEvidence(number=0, profile=profile(float("inf"))),
        CacheEvidence(number=0, profile=profile(points=(PointProfile(number=2, cpu_s=0, gil_s=0, nbytes=1),))),
        CacheEvidence(number=0, storage=StorageModel(reads=(), writes=())),
        CacheEvidence(number=0, storage=StorageModel(reads=(replace(DISK[0], bytes_per_s=0.0),), writes=())),
    ],
)
def test_evidence_that_cannot_be_is_refused(evidence):
    with pytest.raises(ValueError):
        check_evidence(evidence)
