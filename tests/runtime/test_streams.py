"""Every operator and source as streams of a job: nothing lost, nothing twice, restored from what states name."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.element import Ragged, batch_rows
from penstock.core.errors import EmptyInputError, InvalidPipelineError
from penstock.graph import ops
from penstock.graph.regrouping import last_regrouping
from penstock.graph.traverse import walk
from penstock.runtime.budget import default_budget
from penstock.runtime.iterator import Run
from penstock.runtime.streams import Left, SplitPlace, StreamPart, StreamStopped, places
from penstock.testing.conformance import read_all
from tests.cases import (
    OPERATOR_NAMES,
    SOURCE_NAMES,
    children,
    double,
    is_even,
    length_of,
    noisy,
    operator_cases,
    record,
    sequence,
    source_cases,
)
from tests.runtime.streams_kit import SEED, FakeFeed, Job, dealt

pytestmark = pytest.mark.usefixtures("many_splits")

REFUSED = {
    "shuffle_after_map",
    "repeat_for_ever",
    "take",
    "skip",
    "enumerate",
    "zip",
    "mix_units",
    "with_epoch",
    "cache",
    "cache_files",
    "six_operators",
}
OF_GROUPS = {"map_batched_rng", "unbatch", "rebatch", "batch_then_rng", "batch_collated", "pack"}
"""Functions there draw by group, and which elements make a group depends on the streams."""
NOT_ALL = {"mix"}
"""It stops with the first input that ends, and so does each stream."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return {**operator_cases(tmp_path_factory.mktemp("o")), **source_cases(tmp_path_factory.mktemp("s"))}


def rows(name: str, elements: list[Any], grouped: bool) -> Counter[str]:
    """Return what there is, whatever groups it came in and however it was padded."""
    found: list[Any] = []
    for element in elements:
        while name in OF_GROUPS and isinstance(element, tuple):
            element = element[0]
        if name == "pack":
            found.extend(element["tokens"][element["segment_ids"] > 0].tolist())
        elif name == "batch_collated":
            found.extend(np.split(element["values"], np.cumsum(element["lengths"])[:-1]))
        elif isinstance(element, list) and grouped:
            found.extend(element)
        elif grouped and isinstance(element, Ragged):
            found.extend(element[i] for i in range(len(element)))
        elif grouped:
            found.extend(batch_rows(element))
        else:
            found.append(element)
    return Counter(_text(row) for row in found)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(part)}" for key, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(_text, value)) + ")"
    if isinstance(value, np.ndarray):
        kept = value.tolist()
        while value.ndim == 1 and kept and kept[-1] in (0, -1):
            kept.pop()
        return str(kept)
    return repr(value.item() if isinstance(value, np.generic) else value)


@pytest.mark.parametrize("of", [1, 2, 3])
@pytest.mark.parametrize("name", [n for n in (*OPERATOR_NAMES, *SOURCE_NAMES) if not n.endswith("_shuffled")])
def test_streams_and_their_tail_give_every_element_once(cases, name, of):
    _, make = cases[name]
    if name in REFUSED:
        with pytest.raises(InvalidPipelineError, match=r"put it after distribute\(\)"):
            Job(make())
        return
    job = Job(make())
    regrouping = last_regrouping(job.graph)
    grouped = regrouping is not None
    found = rows(name, job.epoch(of, every=3), grouped)
    expected = rows(name, read_all(job.alone, seed=SEED), grouped)
    if name in NOT_ALL:
        everything = ps.mix([ps.range(30), ps.range(100, 140)], [2, 1], stop="all").map(noisy)
        assert found.total() > 20 and found <= rows(name, read_all(everything, seed=SEED), grouped)
    elif getattr(regrouping, "drop_last", False):
        everything = rows(name, read_all(ps.range(40)), False)
        assert found <= everything and everything.total() - found.total() < regrouping.size
    else:
        assert found == expected


ALL_KINDS = {
    "threads": {"threads": 2},
    "without passes": {"optimized": False},
}
REGROUPED = {
    "batch": lambda last: ps.range(45).map(double).batch(7, drop_last=last),
    "filtered": lambda last: ps.range(45).batch(7, drop_last=last).filter(len),
    "padded": lambda last: ps.range(45).map(sequence).padded_batch(7, drop_last=last),
    "ragged": lambda last: ps.range(45).map(sequence).ragged_batch(7, drop_last=last),
    "rebatch": lambda last: ps.range(45).batch(4).rebatch(7, drop_last=last),
    "bucket": lambda last: (
        ps.range(45).map(sequence).bucket_by_length(length_of, boundaries=[3], batch_size=7, drop_last=last)
    ),
    "window": lambda last: ps.range(45).group_by_window(lambda x: 0, size=7, drop_last=last),
    "shuffled": lambda last: ps.range(45).flat_map(lambda x: [x]).shuffle(9, seed=1).batch(7, drop_last=last).map(len),
}


@pytest.mark.parametrize("options", ALL_KINDS.values(), ids=ALL_KINDS)
@pytest.mark.parametrize("name", REGROUPED)
def test_an_epoch_has_one_short_batch_and_drops_less_than_one(name, options):
    def sizes(last: bool) -> list[int]:
        batches = Job(REGROUPED[name](last), **options).epoch(3, every=4)
        return sorted(batch if isinstance(batch, int) else len(batch) for batch in batches)

    keys = 2 if name == "bucket" else 1
    assert sum(sizes(False)) == 45 and sum(size < 7 for size in sizes(False)) <= keys
    assert set(sizes(True)) == {7} and 45 - 7 * len(sizes(True)) < 7 * keys


def test_what_divides_evenly_leaves_nothing_over():
    job = Job(ps.range(40).batch(4))
    assert [job.stream(number, 2).has_rest for number in range(2)] == [False, False]


@pytest.mark.parametrize("name", [n for n in SOURCE_NAMES if not n.endswith("_shuffled")])
def test_shuffled_sources_are_read_once_by_several_streams(cases, name):
    _, make = cases[name]
    dataset = make().map(noisy).shuffle(6, seed=4)
    job = Job(dataset)
    assert rows(name, job.epoch(3, every=2), False) == rows(name, read_all(dataset, seed=SEED), False)


def test_a_tail_takes_leftovers_from_before_whole_outputs():
    """A leftover may begin some outputs earlier: those are made and discarded, the rest is regrouped."""
    job = Job(ps.range(60).filter(is_even).batch(4).filter(len))
    streams = [job.stream(number, 2) for number in range(2)]
    lists = [dealt(job.counts, number, 2) for number in range(2)]
    lefts = [Left(stream.states[1], 2) for stream in streams]
    given = [batch for stream in streams for batch in stream.elements[:3]]
    tail = job.tail(lefts, lists)
    found = sorted(int(x) for batch in [*given, *tail.elements] for x in batch)
    assert found == list(range(0, 60, 2))
    assert sum(len(batch) < 4 for batch in tail.elements) <= 1


def test_each_leftover_of_a_tail_keeps_the_share_its_stream_had():
    dataset = ps.range(60).flat_map(lambda x: [x]).shuffle(12, seed=3).batch(5)
    job = Job(dataset)
    parts = [1, 3]
    reads = [
        job.run(StreamPart(feed=FakeFeed(dealt(job.counts, n, 2)), rest="keep", shuffle_parts=parts[n]))
        for n in range(2)
    ]
    lefts = [Left(read.states[2], 0, parts[n]) for n, read in enumerate(reads)]
    tail = job.tail(lefts, [dealt(job.counts, n, 2) for n in range(2)])
    given = [batch for read in reads for batch in read.elements[:2]]
    assert sorted(int(x) for batch in [*given, *tail.elements] for x in batch) == list(range(60))


@pytest.mark.parametrize("name", ["plain", "windows"])
def test_a_tail_without_a_short_rest_gives_what_the_pipeline_gives(name):
    """Outputs that fill no round of several consumers are left over too."""
    dataset = ps.range(30).map(noisy) if name == "plain" else ps.range(30).flat_map(children).interleave(lambda x: [x])
    job = Job(dataset)
    streams = [job.stream(number, 2) for number in range(2)]
    tail = job.tail([Left(s.states[-4]) for s in streams], [dealt(job.counts, n, 2) for n in range(2)])
    given = [x for s in streams for x in s.elements[: len(s.states) - 4]]
    assert Counter(map(str, [*given, *tail.elements])) == Counter(map(str, read_all(dataset, seed=SEED)))


def test_shuffles_hold_their_share():
    job = Job(ps.range(64).flat_map(lambda x: [x]).shuffle(16, seed=2))
    feed = FakeFeed(lambda source, pass_: list(range(job.counts[0])))
    read = job.run(StreamPart(feed=feed, shuffle_parts=8), most=2)
    assert set(read.elements) <= set(range(64)) and read.states[1][:2] == [0, 1] and read.states[2][:2] == [1, 0]


def test_an_endless_repeat_goes_on_when_others_got_a_whole_pass():
    job = Job(ps.range(8).repeat())

    def list_of(source: int, pass_: int) -> list[int]:
        return [0, 1] if pass_ % 3 == 2 else []

    read = job.run(StreamPart(feed=FakeFeed(list_of)), most=20)
    assert read.elements == [*range(8), *range(8), *range(4)]
    assert job.run(StreamPart(feed=FakeFeed(list_of, read.states[9])), state=read.states[9], most=4).elements == [
        *read.elements[9:13]
    ]


def test_a_finite_repeat_counts_passes_without_elements():
    job = Job(ps.range(8).repeat(3))
    read = job.run(StreamPart(feed=FakeFeed(lambda source, pass_: [1] if pass_ == 2 else [])))
    assert read.elements == [4, 5, 6, 7]


def test_an_endless_repeat_of_nothing_ends():
    assert Job(ps.range(0).repeat()).run(StreamPart(feed=FakeFeed(lambda source, pass_: []))).elements == []


def test_a_mix_that_never_stops_goes_on_when_others_got_a_whole_pass():
    job = Job(ps.mix([ps.range(4), ps.range(100, 108)], stop="never"))

    def list_of(source: int, pass_: int) -> list[int]:
        return [0] if source == 0 else [1] if pass_ % 2 else []

    read = job.run(StreamPart(feed=FakeFeed(list_of)), most=12)
    assert read.elements == [0, 104, 1, 105, 2, 106, 3, 107, 0, 104, 1, 105]


def test_a_source_read_twice_is_dealt_twice():
    numbers = ps.range(40)
    dataset = numbers.concatenate(numbers.map(double))
    job = Job(dataset)
    assert len(job.counts) == 2
    assert Counter(job.epoch(3, every=5)) == Counter(read_all(dataset))


def test_the_ends_of_what_is_over_stay_in_the_state():
    job = Job(ps.range(8).repeat(2).concatenate(ps.range(100, 108)).batch(5))
    read = job.stream(0, 1)
    assert SplitPlace(0, 1, -1) in places(read.states[4]) and places(read.states[4])[0].source == 1


@pytest.mark.parametrize(
    "dataset",
    [ps.range(40), ps.range(40).map(double).shard().map(double), ps.range(40).shuffle(seed=1).filter(is_even)],
    ids=["source", "marker", "shuffled"],
)
def test_data_sharding_takes_each_element_once(dataset):
    job = Job(dataset, sharding="data")
    found = []
    for number in range(3):
        states = []

        def read(state, number=number):
            feed = FakeFeed(lambda source, pass_: list(range(job.counts[source])), state)
            return job.run(StreamPart(feed=feed, rest="keep", keep=(number, 3)), state=state)

        whole = read(None)
        states = whole.states
        for position in range(0, len(whole.elements), 3):
            assert read(states[position]).elements == whole.elements[position:]
        found += whole.elements
    assert Counter(found) == Counter(read_all(dataset, seed=SEED))


def test_data_sharding_counts_at_the_marker():
    job = Job(ps.range(20).filter(is_even).shard(), sharding="hint")
    feed = FakeFeed(lambda source, pass_: list(range(job.counts[source])))
    assert job.run(StreamPart(feed=feed, keep=(1, 5))).elements == [2, 12]


@pytest.mark.parametrize("optimized", [True, False])
def test_dropped_elements_are_left_out_and_no_others(cases, tmp_path, optimized):
    _, make = cases["read_text"]
    for dataset in (ps.range(40).shuffle(seed=3), make()):
        job = Job(dataset, optimized=optimized)
        expected = read_all(dataset, seed=SEED)
        dropped = frozenset({(0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 1, 3)})
        found = job.epoch(2, dropped=dropped)
        assert len(found) == len(expected) - 5 and set(found) < set(expected)
    assert 2 not in Job(ps.range(40)).epoch(2, dropped=dropped)


class Recorder:
    def __init__(self):
        self.begun, self.open = [], {}

    def begin(self, origin, count):
        assert origin is not None
        self.begun.append((origin.source, origin.split, origin.index, count))
        self.open[len(self.begun)] = self.begun[-1]
        return len(self.begun)

    def end(self, token):
        del self.open[token]


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(
    "build",
    [lambda ds: ds.map(double), lambda ds: ds.map(double).batch(5), lambda ds: ds.flat_map(children)],
    ids=["map", "fused batch", "flat_map"],
)
def test_suspects_are_worked_on_one_by_one(build, shuffled):
    source = ps.range(40).shuffle(seed=3) if shuffled else ps.range(40)
    job = Job(build(source.filter(lambda x: True)))
    feed = FakeFeed(lambda source, pass_: list(range(job.counts[source])))

    def read(suspects):
        recorder = Recorder()
        part = StreamPart(feed=feed, recorder=recorder, suspects=frozenset(suspects))
        elements = job.run(part, want=8).elements
        assert not recorder.open
        return [str(x) for x in elements], recorder.begun

    plain, begun = read(())
    assert any(count > 1 for *_, count in begun)
    again, begun = read({(0, 5, 2, 3)})
    assert again == plain
    alone = [origin for *origin, count in begun if count == 1]
    assert [0, 5, 2] in alone and len({tuple(origin) for origin in alone}) >= 3


def test_a_failure_leaves_nothing_in_flight():
    def fail(x):
        raise ValueError(x)

    job = Job(ps.range(40).map(fail))
    recorder = Recorder()
    part = StreamPart(feed=FakeFeed(lambda source, pass_: [3]), recorder=recorder)
    with pytest.raises(ValueError, match="12") as failure:
        job.run(part)
    assert not recorder.open
    assert sum("penstock/runtime" in str(frame.path) for frame in failure.traceback) == 1


@pytest.mark.parametrize("optimized", [True, False])
def test_large_arrays_of_batches_lie_in_the_memory_that_is_given(optimized):
    given = []

    def allocate(shape, dtype):
        if len(given) == 3:
            return None
        given.append(np.empty(shape, dtype))
        return given[-1]

    job = Job(ps.range(40).map(_picture).batch(4), optimized=optimized)
    feed = FakeFeed(lambda source, pass_: list(range(job.counts[source])))
    batches = job.run(StreamPart(feed=feed, allocate=allocate)).elements
    assert [int(batch["x"][0, 0, 0]) for batch in batches] == list(range(0, 40, 4))
    assert sum(any(np.shares_memory(batch["x"], array) for array in given) for batch in batches) == 3
    assert all(not np.shares_memory(batch["label"], array) for batch in batches for array in given)


def _picture(x):
    return {"x": np.full((200, 100), x, np.int64), "label": x}


@pytest.mark.parametrize("sharding", ["dynamic", "data", "file"])
@pytest.mark.parametrize(
    ("dataset", "what"),
    [
        (lambda: ps.range(9).take(3), "take"),
        (lambda: ps.range(9).skip(3).batch(2), "skip"),
        (lambda: ps.range(9).enumerate(), "enumerate"),
        (lambda: ps.range(9).zip(ps.range(9)), "zip"),
        (lambda: ps.range(9).with_epoch(3), "with_epoch"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_counts_over_all_workers_is_refused_with_the_remedy(dataset, what, sharding):
    with pytest.raises(InvalidPipelineError, match=rf"{what}.*put it after distribute\(\), or use sharding='off'"):
        Job(dataset(), sharding=sharding)
    Job(dataset(), sharding="off")


@pytest.mark.parametrize(
    ("build", "blocker"),
    [
        (lambda ds: ds.batch(4, drop_last=True).shuffle(8), "shuffle"),
        (lambda ds: ds.batch(4, drop_last=True).repeat(2), "repeat"),
        (lambda ds: ds.batch(4, drop_last=True).unbatch(), "unbatch"),
        (lambda ds: ds.batch(4, drop_last=True).map(double).rebatch(3), "rebatch"),
    ],
    ids=["shuffle", "repeat", "unbatch", "rebatch"],
)
def test_a_rest_that_each_worker_would_drop_is_refused(build, blocker):
    with pytest.raises(InvalidPipelineError, match=rf"put {blocker}\(\) before it, or leave drop_last out"):
        Job(build(ps.range(9)))


def test_without_drop_last_nothing_is_lost_wherever_groups_are_made():
    for dataset in (ps.range(50).batch(4).shuffle(3, seed=1), ps.range(50).batch(7).repeat(2), ps.range(50).batch(3)):
        found = Job(dataset).epoch(3, every=4)
        assert sorted(int(x) for b in found for x in b) == sorted(int(x) for b in read_all(dataset) for x in b)


def test_a_cache_is_refused_with_the_remedy_and_a_length_left_out():
    with pytest.raises(InvalidPipelineError, match=r"autocache\(\) keeps what workers make, put it after distribute"):
        Job(ps.range(9).map(record).cache())
    job = Job(ps.range(9).map(record).with_length(9))
    assert not any(isinstance(node, ops.WithLength) for node in walk(job.graph))


def test_a_tail_that_begins_in_the_middle_of_a_batch_is_restored_there():
    job = Job(ps.range(60).batch(10).rebatch(3))
    reads = [job.stream(number, 2) for number in range(2)]
    tail = job.tail([Left(read.states[1]) for read in reads], [dealt(job.counts, n, 2) for n in range(2)])
    found = [int(x) for batch in [*(read.elements[0] for read in reads), *tail.elements] for x in batch]
    assert sorted(found) == list(range(60))


def test_a_stream_that_is_stopped_while_it_waits_for_a_split_ends_at_once():
    class Waiting(FakeFeed):
        stopped = threading.Event()

        def next_split(self, source, pass_, after):
            if after is None:
                return 0
            assert self.stopped.wait(30)
            raise StreamStopped

    job = Job(ps.range(40).map(double), threads=2)
    run = Run(
        job.graph,
        seed=SEED,
        epoch=0,
        budget=default_budget(2),
        source_of=job.source_of,
        part=StreamPart(feed=Waiting(dealt(job.counts, 0, 1))),
    )
    run.open(0, None)
    found = [x for _ in range(4) for x in run.pull(1).elements]
    threading.Timer(0.1, Waiting.stopped.set).start()
    with pytest.raises(StreamStopped):
        run.pull(1)
    run.close()
    with pytest.raises(StreamStopped):
        run.pull(1)
    assert found == [0, 2, 4, 6]


def test_a_tail_shares_elements_out_as_the_streams_did():
    job = Job(ps.range(50).batch(7), sharding="data")

    def all_splits(source: int, pass_: int) -> list[int]:
        return list(range(job.counts[source]))

    reads = [job.run(StreamPart(feed=FakeFeed(all_splits), rest="keep", keep=(n, 3))) for n in range(3)]
    tail = job.tail([Left(read.states[-1], keep=(n, 3)) for n, read in enumerate(reads)], [all_splits] * 3)
    found = [batch for read in reads for batch in read.elements] + tail.elements
    assert sorted(int(x) for batch in found for x in batch) == list(range(50))
    assert sum(len(batch) < 7 for batch in found) == 1


def test_a_repeat_ends_where_a_filter_leaves_nothing_of_all_that_the_stream_gets():
    job = Job(ps.range(8).filter(lambda x: x > 100).repeat().batch(3))
    read = job.run(StreamPart(feed=FakeFeed(lambda source, pass_: [0])))
    assert read.elements == [] and not read.has_rest


def test_a_repeat_waits_for_passes_of_which_others_got_everything():
    job = Job(ps.range(8).repeat())
    read = job.run(StreamPart(feed=FakeFeed(lambda source, pass_: [0, 1] if pass_ == 5_000 else [])), most=8)
    assert read.elements == list(range(8))


def test_the_rest_of_a_repeat_that_has_ended_is_given_by_the_tail():
    job = Job(ps.range(8).filter(lambda x: x < 3).repeat().batch(10))
    assert job.counts[0] > 1
    stream = job.run(StreamPart(feed=FakeFeed(lambda source, pass_: [1] if pass_ else [0, 1]), rest="keep"))
    assert stream.has_rest and stream.elements == []
    tail = job.tail([Left(stream.states[-1])], [lambda source, pass_: [] if pass_ else [0, 1]])
    assert [batch.tolist() for batch in tail.elements] == [[0, 1, 2]]


def all_of_an_empty_file_and_of_three_numbers(folder):
    (folder / "empty.txt").touch()
    dataset = ps.mix([ps.range(3), ps.read_text(str(folder / "*.txt"))], [5, 2], stop="never")
    job = Job(dataset)
    assert job.counts[1] == 1, "a file of which nobody knows that it is empty before it was read"
    return dataset, job, lambda state: FakeFeed(lambda source, pass_: list(range(job.counts[source])), state)


def test_a_mix_that_never_stops_goes_on_without_an_input_of_which_a_stream_had_all_and_nothing_came(tmp_path):
    dataset, job, feed = all_of_an_empty_file_and_of_three_numbers(tmp_path)
    read = job.run(StreamPart(feed=feed(None)), most=8)
    assert read.elements == list(dataset.take(8)) == [0, 1, 2, 0, 1, 2, 0, 1]
    for position, state in enumerate(read.states):
        assert (
            job.run(StreamPart(feed=feed(state)), state=state, most=8 - position).elements == read.elements[position:]
        )


def test_a_mix_that_never_stops_is_not_sure_of_an_input_whose_other_elements_go_elsewhere(tmp_path):
    _, job, feed = all_of_an_empty_file_and_of_three_numbers(tmp_path)
    with pytest.raises(EmptyInputError, match="gave a stream nothing"):
        job.run(StreamPart(feed=feed(None), keep=(0, 2)))


def test_a_mix_that_never_stops_says_so_when_an_input_gives_the_stream_nothing():
    job = Job(ps.mix([ps.range(8), ps.range(8).filter(lambda x: x > 100)], stop="never"))
    with pytest.raises(EmptyInputError, match=r"mix.*input 1 gave a stream nothing in 100 passes.*fewer streams"):
        job.run(StreamPart(feed=FakeFeed(lambda source, pass_: [0])))
