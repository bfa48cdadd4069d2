"""Saving and loading: what a state is, what it refuses, what it survives."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

import penstock as ps
from penstock.api.states import STATE_VERSION, SavedState, places_of, with_all_parts
from penstock.core.errors import StateMismatchError


def double(x):
    return 2 * x


def saved_after(ds, count, **options):
    iterator = ds.iterator(epoch=0, **options)
    taken = [next(iterator) for _ in range(count)]
    state = json.loads(json.dumps(iterator.state_dict()))
    iterator.close()
    return taken, state


def resumed(ds, state, **options):
    iterator = ds.iterator(**options)
    iterator.load_state_dict(state)
    return iterator


def test_prefetched_elements_are_not_part_of_the_state():
    ds = ps.range(1000).map(double, threads=2).prefetch(50)
    taken, state = saved_after(ds, 7)
    assert taken + list(resumed(ds, state)) == [2 * x for x in range(1000)]


def test_saved_right_after_loading_it_is_the_same():
    ds = ps.range(100).shuffle(7).map(double).batch(8)
    _, state = saved_after(ds, 3)
    assert resumed(ds, state).state_dict() == state


def test_a_second_resume_goes_on_from_the_first():
    ds = ps.range(100).flat_map(lambda x: [x, x]).shuffle(9, seed=1)
    whole = list(ds.iterator(epoch=0))
    first, state = saved_after(ds, 33)
    iterator = resumed(ds, state)
    second = [next(iterator) for _ in range(70)]
    third = list(resumed(ds, iterator.state_dict()))
    assert first + second + third == whole


def test_inside_the_last_iteration_the_rest_is_empty_and_after_the_loop_it_is_the_next_epoch():
    ds = ps.range(10).shuffle(seed=3).batch(5)
    taken, state = saved_after(ds, 2)
    assert len(taken) == 2
    last = resumed(ds, state)
    assert last.epoch == 0 and list(last) == []
    iterator = ds.iterator(epoch=0)
    list(iterator)
    following = resumed(ds, iterator.state_dict())
    assert following.epoch == 1
    assert [b.tolist() for b in following] == [b.tolist() for b in ds.iterator(epoch=1)]


def test_a_state_carries_the_seed_that_nobody_gave():
    taken, state = saved_after(ps.range(50).shuffle(), 20)
    rest = list(resumed(ps.range(50).shuffle(), state))
    assert sorted(taken + rest) == list(range(50))


def test_a_state_works_with_other_threads_and_without_passes():
    ds = ps.range(200).map(double).shuffle(10, seed=1).map(str).batch(7)
    whole = [batch.tolist() for batch in ds.iterator(epoch=0)]
    _, state = saved_after(ds, 9, threads=2)
    assert [b.tolist() for b in resumed(ds, state, threads=1, optimize=False)] == whole[9:]
    _, state = saved_after(ds, 9, threads=1, optimize=False)
    assert [b.tolist() for b in resumed(ds, state, threads=2)] == whole[9:]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda: ps.range(101).shuffle(7, seed=1).filter(bool).map(double).batch(4), "range"),
        (lambda: ps.range(100).shuffle(8, seed=1).filter(bool).map(double).batch(4), "shuffle"),
        (lambda: ps.range(100).shuffle(7, seed=2).filter(bool).map(double).batch(4), "shuffle"),
        (lambda: ps.range(100).shuffle(7, seed=1).filter(lambda x: x > 3).map(double).batch(4), "filter"),
        (lambda: ps.range(100).shuffle(7, seed=1).map(double).batch(4), "filter"),
        (
            lambda: ps.range(100).shuffle(7, seed=1).filter(bool).flat_map(lambda x: [x]).map(double).batch(4),
            "flat_map",
        ),
    ],
)
def test_another_pipeline_is_refused_and_the_difference_named(changed, said):
    original = ps.range(100).shuffle(7, seed=1).filter(bool).map(double).batch(4)
    _, state = saved_after(original, 3)
    with pytest.raises(StateMismatchError, match=said):
        resumed(changed(), state)


def test_changed_map_code_and_batch_size_are_warnings():
    original = ps.range(100).shuffle(7, seed=1).map(double).batch(4)
    taken, state = saved_after(original, 3)
    other = ps.range(100).shuffle(7, seed=1).map(lambda x: 2 * x + 0).batch(9)
    with pytest.warns(UserWarning, match=r"map.*batch.*changed"):
        rest = list(resumed(other, state))
    assert sorted(x for batch in taken + rest for x in batch.tolist()) == [2 * x for x in range(100)]


@pytest.mark.parametrize("wrong", [{}, {"version": 99, "pipeline": []}, {"epoch": 1}, {"version": 1, "pipeline": []}])
def test_what_is_not_a_state_is_refused(wrong):
    with pytest.raises(StateMismatchError):
        ps.range(10).iterator().load_state_dict(wrong)


def test_changed_files_refuse_and_moved_files_do_not(tmp_path):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        for i in range(3):
            (tmp_path / folder / f"{i}.txt").write_text("".join(f"{i}{j}\n" for j in range(5)))
    taken, state = saved_after(ps.read_text(tmp_path / "here" / "*.txt"), 4)
    moved = list(resumed(ps.read_text(tmp_path / "there" / "*.txt"), state))
    assert sorted(taken + moved) == sorted(f"{i}{j}" for i in range(3) for j in range(5))
    (tmp_path / "there" / "1.txt").write_text("shorter\n")
    with pytest.raises(StateMismatchError, match="files"):
        resumed(ps.read_text(tmp_path / "there" / "*.txt"), state)


def test_a_killed_process_resumes_where_its_last_state_was(tmp_path):
    script = textwrap.dedent(
        """
        import json, os, signal, sys
        import penstock as ps

        def noisy(x, rng):
            return x, int(rng.integers(1000))

        path, stop_at = sys.argv[1], int(sys.argv[2])
        iterator = ps.range(500).filter(lambda x: x % 3).shuffle(40, seed=9).map(noisy).batch(10).iterator(epoch=0)
        if os.path.exists(path):
            iterator.load_state_dict(json.load(open(path)))
        for n, batch in enumerate(iterator, 1):
            print([(int(a), int(b)) for a, b in zip(*batch)], flush=True)
            if n == stop_at:
                json.dump(iterator.state_dict(), open(path, "w"))
                os.kill(os.getpid(), signal.SIGKILL)
        """
    )

    def run(path, stop_at):
        process = subprocess.run(
            [sys.executable, "-c", script, str(path), str(stop_at)], capture_output=True, text=True, timeout=60
        )
        return process.stdout.splitlines()

    whole = run(tmp_path / "none.json", 0)
    parts = run(tmp_path / "state.json", 7) + run(tmp_path / "state.json", 11) + run(tmp_path / "state.json", 0)
    assert parts == whole and len(whole) == 34


def test_the_state_of_six_operators_is_small():
    ds = ps.range(10**6).filter(bool).shuffle(100, seed=1).map(double).batch(16).enumerate()
    _, state = saved_after(ds, 50)
    assert len(json.dumps(state)) < 1000


def calls_of(function):
    """How many functions, Python's and built-in ones, are called for one call."""
    events = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        function()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in events)


def test_a_state_with_every_step_costs_a_few_calls():
    iterator = ps.range(1000).filter(bool).shuffle(100, seed=1).map(double).batch(16).repeat(2).iterator(threads=1)
    next(iterator)
    state = iterator.state_dict()
    assert calls_of(iterator.state_dict) <= 20
    assert json.loads(json.dumps(state)) == state == SavedState.read(state).plain()


def test_what_becomes_of_a_state_does_not_change_the_next():
    ds = ps.range(1000).shuffle(100, seed=1).map(double).batch(16).repeat(2)
    _, saved = saved_after(ds, 3)
    iterator = resumed(ds, json.loads(json.dumps(saved)))  # nothing was read, so that it stands at what was loaded
    state = iterator.state_dict()
    state["pipeline"].clear()
    state["place"][1].clear()
    state["place"].clear()
    assert iterator.state_dict() == saved


def ranks_after_distribute(*places):
    """The states of ranks with operators after `distribute`, which stood at these places."""
    return [
        SavedState(
            version=STATE_VERSION,
            pipeline=[],
            epoch=1,
            seed=0,
            phase="reading",
            consumers=len(places),
            consumer=rank,
            attempts=[(1, "a")],
            place=place,
        )
        for rank, place in enumerate(places)
    ]


def test_a_rank_that_had_received_nothing_stands_where_the_service_began():
    there = {"attempt": "a", "uneven": "allow", "progress": {"step": 9}}
    first, second = places_of(ranks_after_distribute(None, there))
    assert second == {**there, "consumer": 1}
    assert first == {"attempt": "a", "uneven": "allow", "consumer": 0}
    assert with_all_parts(first, [first, second]) == [first, second]
    assert places_of(ranks_after_distribute(None, None)) == [None, None]


def test_each_rank_goes_on_with_what_its_own_operators_held():
    first, second = places_of(ranks_after_distribute([2, {"attempt": "a"}], [3, {"attempt": "a"}]))
    assert with_all_parts(second, [first, second]) == [3, [first[1], second[1]]]
    with pytest.raises(StateMismatchError, match="load states that were saved a little later"):
        with_all_parts(first, [first, None])
