"""Who reads what in a month: the production model, and proposals that come, are taken whole, and go."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.warehouse.release_process import draw_release, production_share

READ, EVER = (400, 100), (640, 160)
SESSIONS = 64


def a_release(**changes):
    return draw_release(
        READ, EVER, **{"production": 0.6, "proposal_features": 8.0, "liking": 0.5, "seed": 4, **changes}
    )


def test_all_read_the_production_model_and_of_a_proposal_all_or_nothing():
    release = a_release()
    reads = release.sessions(SESSIONS)
    assert reads[:, release.proposal_of < 0].all()
    for proposal, size in enumerate(release.sizes):
        taken = reads[:, release.proposal_of == proposal].sum(axis=1)
        assert set(taken) <= {0, size}
    assert len({row.tobytes() for row in reads}) > SESSIONS / 2


def test_a_job_takes_as_many_features_as_it_has_room_for():
    release = a_release()
    read = release.sessions(SESSIONS).sum(axis=1)
    assert np.abs(read - sum(READ)).max() <= release.sizes.max()
    assert read.mean() == pytest.approx(sum(READ), rel=0.01)


def test_a_proposal_is_read_between_its_coming_and_its_going():
    release = a_release()
    reads = release.sessions(SESSIONS)
    times = (np.arange(SESSIONS) + 0.5) / SESSIONS
    for proposal, (comes, goes) in enumerate(zip(release.comes, release.goes)):
        there = (comes <= times) & (times < goes)
        assert not reads[~there][:, release.proposal_of == proposal].any()
    first, second = reads[: SESSIONS // 2].any(axis=0), reads[SESSIONS // 2 :].any(axis=0)
    assert (second & ~first).sum() > 40 and (first & ~second).sum() > 40
    assert (release.came[second & ~first] > 0).mean() > 0.8


def test_the_more_one_session_reads_of_what_all_read_the_larger_is_the_production_model():
    shares = [production_share(used, 0.6, 0.39, 0.8) for used in (0.3, 0.37, 0.44)]
    assert shares == sorted(shares) and shares[1] == pytest.approx(0.66, abs=0.01)


def test_there_are_always_enough_proposals_to_fill_a_job():
    production = production_share(0.37, 0.4, 0.39, 0.8)  # all read nearly the same: few proposals, taken by nearly all
    ever = tuple(round(part * 0.4 / 0.37) for part in READ)
    release = draw_release(READ, ever, production=production, proposal_features=2.0, liking=0.0, seed=4)
    assert release.sessions(SESSIONS).sum(axis=1).mean() == pytest.approx(sum(READ), rel=0.03)


def test_the_same_seed_gives_the_same_month():
    assert (a_release().sessions(5) == a_release().sessions(5)).all()
    assert (a_release().sessions(5) != replace(a_release(), seed=5).sessions(5)).any()
