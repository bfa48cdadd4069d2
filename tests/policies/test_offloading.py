"""Offloading as arithmetic: what is tried, what is chosen, and what FastFlow would choose."""

from __future__ import annotations

import msgspec
import pytest

from penstock.policies.fastflow import decide_share, pace_at
from penstock.policies.offloading import (
    CutPace,
    HeldUp,
    OffloadLimits,
    OffloadProfile,
    Trial,
    bounded_there,
    decide,
    next_trial,
    pace_of_both,
    with_bound,
)


def profile(**changed: object) -> OffloadProfile:
    known: dict[str, object] = {"step_per_s": 40.0, "here_per_s": 10.0, "cores": 4.0}
    return OffloadProfile(**{**known, **changed})  # type: ignore[arg-type]


WHOLE = CutPace(cut="all there", per_s=20.0, output_bytes=4e6, workers=4)
RAW = CutPace(cut="before map(decode)", per_s=18.0, output_bytes=5e5, here_cpu_s=0.1, workers=4)


def test_without_a_stall_nothing_is_tried_and_nothing_offloaded() -> None:
    calm = profile(step_per_s=11.0)
    assert next_trial(calm, ["all there"]) is None
    assert decide(calm).cut is None and decide(calm).there == 0


def test_each_cut_is_tried_once() -> None:
    assert next_trial(profile(cuts=(WHOLE,)), ["all there", "before map(decode)"]) is not None
    assert next_trial(profile(cuts=(WHOLE, RAW)), ["all there", "before map(decode)"]) is None


def test_what_cannot_win_is_not_tried() -> None:
    cuts = ["all there", "before map(augment)", "before map(decode)", READ_HERE.cut]
    enough = profile(cuts=(CutPace(cut="all there", per_s=35.0),))
    assert next_trial(enough, cuts, reads_here=READ_HERE.cut) is None, "the step does not wait any more"
    busy = CutPace(cut="before map(augment)", per_s=10.0, here_cpu_s=0.4)
    tried = profile(cuts=(CutPace(cut="all there", per_s=8.0), busy))
    following = next_trial(tried, cuts, reads_here=READ_HERE.cut)
    assert following == Trial(cut=READ_HERE.cut, place="there"), "a deeper cut leaves even more to do here"
    light = profile(cuts=(CutPace(cut="all there", per_s=8.0), msgspec.structs.replace(busy, here_cpu_s=0.1)))
    assert next_trial(light, cuts, reads_here=READ_HERE.cut) == Trial(cut="before map(decode)", place="there")


def test_a_thin_link_picks_the_cut_with_fewer_bytes() -> None:
    free = decide(profile(cuts=(WHOLE, RAW)))
    thin_link = 8e6
    through = tuple(
        msgspec.structs.replace(cut, per_s=min(cut.per_s, thin_link / cut.output_bytes)) for cut in (WHOLE, RAW)
    )
    thin = decide(profile(cuts=through, link_bytes_per_s=thin_link))
    assert (free.cut, thin.cut) == ("all there", "before map(decode)")


def test_a_slow_disk_there_leaves_it_here() -> None:
    slow = profile(cuts=(WHOLE, RAW), read_bytes=1e6, disk_there_bytes_per_s=5e5)
    assert decide(slow).cut is None and "not worth it" in decide(slow).reason


def test_a_slow_disk_here_counts_against_here() -> None:
    assert decide(profile(here_per_s=38.0, cuts=(WHOLE,), read_bytes=1e6, disk_here_bytes_per_s=1e7)).cut == "all there"


def test_of_two_cuts_that_are_as_good_the_one_with_less_work_here_wins() -> None:
    same = CutPace(cut="before batch", per_s=20.1, output_bytes=4e6, workers=4)
    assert decide(profile(cuts=(WHOLE, same))).cut == "all there"


def test_no_more_workers_are_asked_for_than_the_step_needs() -> None:
    plenty = CutPace(cut="all there", per_s=40.0, workers=16)
    assert decide(profile(step_per_s=20.0, cuts=(plenty,))).there == 5
    assert decide(profile(cuts=(WHOLE,)), OffloadLimits(most_there=2)).there == 2


def test_guests_leave_the_processors_that_the_step_needs() -> None:
    assert decide(profile(cuts=(WHOLE,))).here == 4
    assert decide(profile(cuts=(WHOLE,), step_cpu_s=0.05)).here == 3
    assert decide(profile(cuts=(WHOLE,)), OffloadLimits(most_here=1)).here == 1


def test_a_cut_that_failed_is_not_chosen_and_its_failure_is_the_reason() -> None:
    failed = CutPace(cut="all there", per_s=0.0, failure="numpy 1 instead of 2")
    assert "because numpy 1 instead of 2" in decide(profile(cuts=(failed,))).reason


@pytest.mark.parametrize("there", [2.0, 10.0, 30.0, 90.0])
@pytest.mark.parametrize("work_here", [0.0, 0.02, 0.2])
def test_both_places_are_never_slower_than_the_better_one_if_the_cut_leaves_no_work_here(there, work_here) -> None:
    pace = CutPace(cut="all there", per_s=there, here_cpu_s=work_here)
    expected = pace_of_both(pace, profile())
    assert expected <= 40.0
    if not work_here:
        assert expected >= min(40.0, max(there, 10.0))


@pytest.mark.parametrize("there", [5.0, 20.0, 35.0])
def test_pulling_is_never_slower_than_a_fixed_share(there) -> None:
    pace = CutPace(cut="all there", per_s=there)
    share = decide_share(profile(cuts=(pace,)))
    fixed = pace_at(share, step_per_s=40.0, here_per_s=10.0, there_per_s=there)
    assert pace_of_both(pace, profile()) >= fixed - 1e-9


READ_HERE = CutPace(cut="read here, compute there", per_s=12.0, output_bytes=5e5, reads_here=True, workers=4)
THERE, HERE = Trial(cut="all there", place="there"), Trial(cut=None, place="here")


def test_what_was_not_full_bounds_nothing() -> None:
    assert with_bound(profile(), THERE, HeldUp(read_bytes=1e6), WHOLE) == profile()
    assert with_bound(profile(), HERE, HeldUp(by="link"), WHOLE) == profile(), "guests are not behind the link"


def test_a_full_link_is_what_came_through_it_at_its_best() -> None:
    seen = with_bound(profile(), THERE, HeldUp(by="link"), WHOLE)
    assert seen.link_bytes_per_s == 20.0 * 4e6
    assert with_bound(seen, THERE, HeldUp(by="link"), RAW).link_bytes_per_s == 20.0 * 4e6
    assert "seen to be full: the link at 80.0 MB/s" in decide(msgspec.structs.replace(seen, cuts=(WHOLE, RAW))).reason


def test_a_link_lets_through_what_was_seen_to_pass() -> None:
    """A cut with few bytes whose workers had sent all they may says nothing of one that many bytes passed at."""
    mistaken = profile(cuts=(WHOLE, RAW), link_bytes_per_s=RAW.per_s * RAW.output_bytes)
    assert bounded_there(WHOLE, mistaken) == WHOLE.per_s
    assert decide(mistaken).cut == "all there"


def test_a_disk_is_of_the_side_that_read() -> None:
    disk = HeldUp(by="disk", read_bytes=1e6)
    assert with_bound(profile(), HERE, disk, WHOLE).disk_here_bytes_per_s == 20e6
    assert with_bound(profile(), THERE, disk, WHOLE).disk_there_bytes_per_s == 20e6
    assert with_bound(profile(), THERE, disk, READ_HERE).disk_here_bytes_per_s == 12e6


def test_reading_here_for_others_goes_as_fast_as_the_disk_here_for_both_together() -> None:
    slow_there = profile(cuts=(WHOLE, READ_HERE), read_bytes=1e6, disk_there_bytes_per_s=2e6)
    assert bounded_there(READ_HERE, slow_there) == 12.0, "the disk there is not read from"
    assert decide(slow_there).cut == READ_HERE.cut
    slow_here = profile(cuts=(WHOLE, READ_HERE), read_bytes=1e6, disk_here_bytes_per_s=11e6)
    assert pace_of_both(READ_HERE, slow_here) == 11.0
    assert decide(slow_here).cut == "all there"


def test_a_side_that_cannot_reach_the_files_is_read_for() -> None:
    unreachable = CutPace(cut="all there", per_s=0.0, failure="reading elsewhere failed (FileNotFoundError)")
    assert decide(profile(cuts=(unreachable, READ_HERE))).cut == READ_HERE.cut
