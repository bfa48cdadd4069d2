"""What a reader may rely on: order, epochs, errors, closing, nothing shared by accident."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import BatchShapeError, InterruptedReadError, InvalidPipelineError
from penstock.runtime import tuning
from tests.waiting import wait_until

_others: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def note_other_threads():
    """Those of services that other tests share are there before a test, and stay."""
    _others.update(threading.enumerate())
    yield
    _others.clear()


def penstock_threads():
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("penstock") and thread not in _others
    ]


def uneven_sleep(x):
    threading.Event().wait(0.001 * (x % 5))
    return x


def test_results_keep_their_order_whatever_the_threads_do():
    for threads in (1, 2, 8):
        assert list(ps.range(100).map(uneven_sleep, threads=threads)) == list(range(100))


def test_each_iteration_is_the_next_epoch():
    ds = ps.range(50).shuffle(seed=1)
    first, second = list(ds), list(ds)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert list(ds.iterator(epoch=0)) == first
    assert list(ps.range(50).shuffle(seed=1)) == first


def test_without_reshuffle_every_epoch_has_the_same_order():
    ds = ps.range(50).shuffle(seed=1, reshuffle=False)
    assert list(ds) == list(ds)


def test_a_seed_that_is_not_given_is_drawn_once():
    ds = ps.range(50).shuffle()
    assert list(ds.iterator(epoch=0)) == list(ds.iterator(epoch=0))
    assert list(ds.iterator(epoch=0)) != list(ps.range(50).shuffle().iterator(epoch=0))


def test_random_functions_draw_the_same_wherever_the_shuffle_stands():
    def draw(x, rng):
        return x, int(rng.integers(1 << 30))

    below = sorted(ps.range(40).shuffle(seed=3).map(draw).iterator(seed=5, epoch=0))
    above = sorted(ps.range(40).map(draw).shuffle(seed=3).iterator(seed=5, epoch=0))
    unshuffled = sorted(ps.range(40).map(draw).iterator(seed=5, epoch=0))
    assert below == above == unshuffled


def test_two_random_functions_do_not_draw_the_same():
    def draw(x, rng):
        return int(rng.integers(1 << 60))

    twice = list(
        ps.range(20)
        .map(lambda x: (x, x))
        .map(lambda p, rng: (p, draw(p, rng)))
        .map(lambda p, rng: (p[1], draw(p, rng)))
    )
    assert all(one != other for one, other in twice)


def test_random_numbers_differ_between_epochs_also_above_a_cache():
    def draw(x, rng):
        return int(rng.integers(1 << 60))

    ds = ps.range(20).cache().map(draw)
    assert set(ds).isdisjoint(ds)


def test_batches_are_writable_and_share_nothing():
    def row(x):
        return {"image": np.full((64, 64), x, np.uint8), "label": x, "name": str(x)}

    kept = list(ps.range(40).map(row, threads=2).batch(4))
    for batch in kept:
        batch["image"] += 1
        batch["label"] *= 2
    for i, batch in enumerate(kept):
        assert batch["image"][:, 0, 0].tolist() == [4 * i + j + 1 for j in range(4)]
        assert batch["label"].tolist() == [2 * (4 * i + j) for j in range(4)]
    arrays = [batch["image"] for batch in kept]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])


def test_a_buffer_is_not_reused_while_a_view_of_it_is_held():
    ds = ps.range(64).map(lambda x: np.full(8192, x), threads=2).batch(4)
    held = [batch[1][10:12] for batch in ds]
    assert [int(view[0]) for view in held] == [4 * i + 1 for i in range(16)]


def test_a_cached_element_is_not_changed_by_its_reader():
    ds = ps.range(5).map(lambda x: np.full(3, x)).cache()
    for _ in range(3):
        for x, element in enumerate(ds):
            assert element.tolist() == [x] * 3
            element[:] = -1


def test_a_memory_cache_computes_once():
    calls = []
    ds = ps.range(10).map(lambda x: calls.append(x) or x).cache()
    assert [list(ds), list(ds), list(ds)] == [list(range(10))] * 3
    assert sorted(calls) == list(range(10))


def test_a_cache_given_up_in_mid_pass_is_filled_by_the_next():
    calls = []
    ds = ps.range(10).map(lambda x: calls.append(x) or x).cache()
    with ds.iterator(threads=1) as iterator:
        next(iterator)
    assert list(ds) == list(ds) == list(range(10))
    assert len(calls) < 25


def test_a_cache_over_its_limit_warns_and_still_gives_everything():
    ds = ps.range(10).map(lambda x: np.zeros(1000)).cache(max_bytes=10_000)
    with pytest.warns(UserWarning, match="max_bytes"):
        assert len(list(ds.iterator(threads=1))) == 10


class Boom(Exception):
    pass


def explode_at_13(x):
    if x == 13:
        raise Boom(f"x is {x}")
    return x


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("optimize", [True, False])
def test_a_failing_function_raises_its_own_error_and_loses_nothing_before_it(threads, optimize):
    iterator = ps.range(100).map(explode_at_13).batch(5).iterator(threads=threads, optimize=optimize)
    assert [next(iterator).tolist(), next(iterator).tolist()] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    with pytest.raises(Boom, match="x is 13") as caught:
        next(iterator)
    notes = "\n".join(caught.value.__notes__)
    assert "map(explode_at_13)" in notes and "element 13 of split 0" in notes
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "explode_at_13"
    ours = [frame for frame in traceback.extract_tb(caught.value.__traceback__) if "/penstock/" in frame.filename]
    assert len(ours) <= 2, "only the iterator's own frames show"
    with pytest.raises(Boom):
        next(iterator)


def test_after_an_error_the_state_is_that_before_the_failing_batch():
    broken = ps.range(100).map(explode_at_13).batch(5)
    iterator = broken.iterator()
    before = [next(iterator).tolist() for _ in range(2)]
    with pytest.raises(Boom):
        list(iterator)
    mended = ps.range(100).map(lambda x: x).batch(5).iterator()
    with pytest.warns(UserWarning, match="changed"):
        mended.load_state_dict(iterator.state_dict())
    assert before + [batch.tolist() for batch in mended] == np.arange(100).reshape(20, 5).tolist()


def test_the_origin_of_a_failure_is_known_after_a_shuffle(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{i}\n" for i in range(5)))

    def fail(line):
        if line == "b3":
            raise Boom(line)
        return line

    with pytest.raises(Boom) as caught:
        list(ps.read_text(tmp_path / "*.txt").shuffle(4, seed=1).map(fail))
    assert "element" in caught.value.__notes__[0] and "split" in caught.value.__notes__[0]


def test_different_shapes_in_a_batch_name_the_leaf():
    ds = ps.range(10).map(lambda x: {"a": np.zeros(x + 1), "b": 1}).batch(4)
    with pytest.raises(BatchShapeError, match=r"\['a'\].*padded_batch"):
        list(ds)
    big = ps.range(10).map(lambda x: {"a": np.zeros(2000 + x), "b": 1}, threads=2).batch(4)
    with pytest.raises(BatchShapeError, match=r"\['a'\].*padded_batch"):
        list(big)


def test_different_keys_in_a_batch_are_named():
    with pytest.raises(BatchShapeError, match="'y'"):
        list(ps.range(4).map(lambda x: {"x": 1} if x < 3 else {"y": 1}).batch(4))


def test_select_of_a_missing_column_lists_what_there_is():
    with pytest.raises(InvalidPipelineError, match=r"select.*\['a', 'b'\]"):
        list(ps.range(4).map(lambda x: {"a": 1, "b": 2}).select("c"))


def test_a_full_shuffle_of_what_cannot_be_indexed_is_refused_with_the_remedy():
    with pytest.raises(InvalidPipelineError, match=r"shuffle\(10_000\)"):
        list(ps.range(10).flat_map(lambda x: [x]).shuffle())


def test_a_declared_length_is_checked():
    assert len(ps.range(10).filter(lambda x: x > 3).with_length(6)) == 6
    with pytest.raises(InvalidPipelineError, match="with_length"):
        list(ps.range(10).filter(lambda x: x > 3).with_length(7))
    with pytest.raises(InvalidPipelineError, match="with_length"):
        list(ps.range(10).filter(lambda x: x > 3).with_length(5))


def test_length_is_known_where_it_can_be():
    assert len(ps.range(10).map(str).batch(3)) == 4
    assert len(ps.range(10).repeat(2).batch(3, drop_last=True)) == 6
    assert len(ps.range(10).zip(ps.range(4)).concatenate(ps.range(3))) == 7
    with pytest.raises(TypeError, match="with_length"):
        len(ps.range(10).filter(bool))
    with pytest.raises(TypeError):
        len(ps.range(10).repeat())


def test_closing_in_mid_flight_leaves_no_thread():
    iterator = ps.range(10_000).map(uneven_sleep, threads=4).batch(8).prefetch(4).iterator()
    next(iterator)
    assert penstock_threads()
    iterator.close()
    wait_until(lambda: not penstock_threads(), "the threads to leave", 10.0)
    assert list(iterator) == []
    iterator.close()


def test_dropping_an_iterator_leaves_no_thread():
    iterator = iter(ps.range(10_000).map(uneven_sleep, threads=4))
    next(iterator)
    del iterator
    gc.collect()
    wait_until(lambda: not penstock_threads(), "the threads to leave", 10.0)


def test_a_finished_iterator_leaves_no_thread_once_dropped():
    list(ps.range(100).map(uneven_sleep, threads=4))
    gc.collect()
    wait_until(lambda: not penstock_threads(), "the threads to leave", 10.0)


def test_closing_does_not_wait_for_a_function_that_hangs():
    entered, release = threading.Event(), threading.Event()

    def hang(x):
        entered.set()
        release.wait(60)
        return x

    iterator = ps.range(100).map(hang, threads=2).iterator()
    read = []
    reader = threading.Thread(target=lambda: read.extend(iterator))
    reader.start()
    assert entered.wait(30)
    began = time.monotonic()
    with pytest.warns(ResourceWarning, match=r"map\(.*hang"):
        iterator.close()
    assert time.monotonic() - began < 5
    reader.join(10)
    assert not reader.is_alive() and read == []
    release.set()
    wait_until(lambda: not penstock_threads(), "the threads to leave", 10.0)


def test_many_open_and_close_cycles_do_not_hang():
    ds = ps.range(1000).map(uneven_sleep, threads=3).shuffle(10).batch(4).prefetch(2)
    for _ in range(30):
        with ds.iterator() as iterator:
            next(iterator)
    wait_until(lambda: not penstock_threads(), "the threads to leave", 10.0)


@pytest.fixture
def interruptible():
    """Have SIGINT interrupt this process and those it starts, also where its parent, a background shell, ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupting_stops_promptly_and_leaves_the_process_usable():
    script = textwrap.dedent(
        """
        import faulthandler, sys, time
        import penstock as ps

        faulthandler.dump_traceback_later(25, exit=True)  # a hang says where

        def slow(x):
            time.sleep(0.05)
            return x

        ds = ps.range(1_000_000).map(slow, threads=int(sys.argv[1]))
        iterator = ds.iterator(threads=max(2, int(sys.argv[1])))
        taken = 0
        try:
            for x in iterator:
                taken += 1
                if taken == 3:
                    print("ready", flush=True)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        again = ps.range(1_000_000).map(slow, threads=2).iterator()
        again.load_state_dict(iterator.state_dict())
        assert next(again) == taken, (taken,)
        again.close()
        print("usable", len(list(ps.range(10).batch(5))), flush=True)
        """
    )
    for threads in ("1", "2"):
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", script, threads],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0, out
        assert time.monotonic() - began < 10
        assert "interrupted" in out and "usable 2" in out


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_iterator_says_so():
    def interrupt(x):
        os.kill(os.getpid(), signal.SIGINT)
        return x

    iterator = ps.range(5).map(interrupt).iterator(threads=1)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(InterruptedReadError, match="load the state_dict"):
        next(iterator)


def test_a_class_is_constructed_once():
    made = []

    class Adder:
        def __init__(self):
            made.append(1)

        def __call__(self, x):
            return x + 1

    ds = ps.range(50).map(Adder, threads=4)
    assert list(ds) == list(ds) == list(range(1, 51))
    assert len(made) == 1


@pytest.mark.alone
def test_functions_that_hold_the_gil_end_up_in_the_readers_thread(monkeypatch: pytest.MonkeyPatch):
    def python_only(x):
        total = 0
        for i in range(2000):
            total += i * x
        return total

    def judge(seconds: float) -> bool | None:
        with ps.range(100_000).repeat().map(python_only).batch(64).iterator(threads=2) as iterator:
            deadline = time.monotonic() + seconds
            while True:
                next(iterator)
                stage = next(s for s in iterator.statistics().stages if "python_only" in s.name)
                if stage.holds_gil is False or (stage.holds_gil and stage.threads == 0):
                    return stage.holds_gil
                if time.monotonic() > deadline:
                    return None

    # Trials during which others take the cores prove nothing and are repeated, each time after twice as long. However
    # busy the machine is, none of them may say the contrary, and of many some are left alone.
    monkeypatch.setattr(tuning, "RETRY_S", 0.05)
    verdicts = (judge(seconds=4.0) for _ in range(25))
    assert next((verdict for verdict in verdicts if verdict is not None), None) is True


@pytest.mark.alone
def test_functions_that_wait_get_more_threads_than_cores():
    def wait(x):
        time.sleep(0.01)
        return x

    with ps.range(3000).map(wait).iterator(threads=2) as iterator:
        began = time.monotonic()
        for _ in range(600):
            next(iterator)
        took = time.monotonic() - began
        stage = next(s for s in iterator.statistics().stages if "wait" in s.name)
    assert stage.threads > 4
    assert took < 3.0, "600 waits of 10 ms one after the other take 6 s"


def test_statistics_and_explain_name_the_limiting_stage():
    def slow(x):
        time.sleep(0.002)
        return x

    ds = ps.range(2000).map(slow, threads=2).batch(8)
    with ds.iterator() as iterator:
        for _ in range(40):
            next(iterator)
        statistics = iterator.statistics()
    assert statistics.elements == 40
    names = [stage.name for stage in statistics.stages]
    assert names[0] == "range" and any("slow" in name for name in names)
    text = ds.explain(analyze=True, duration_s=0.3)
    assert "as written" in text and "input-bound" in text and "slow" in text
    assert ds.explain(format="mermaid").startswith("flowchart")
    with pytest.raises(ValueError, match="mermaid"):
        ds.explain(format="dot")


def test_a_slow_reader_is_prefetched_for():
    def make(x):
        time.sleep(0.004)
        return x

    with ps.range(1000).map(make, threads=2).batch(2).iterator(threads=2) as iterator:
        for _ in range(30):
            next(iterator)
            time.sleep(0.01)
        statistics = iterator.statistics()
    assert statistics.wait_fraction < 0.5
