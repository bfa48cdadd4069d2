"""Coordinated reads: each run of m outputs is one round, of one bucket, padded alike; nothing lost, nothing twice."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import InvalidPipelineError
from penstock.runtime.budget import default_budget
from penstock.runtime.iterator import Run
from penstock.runtime.streams import Left, StreamPart, TornRounds
from penstock.testing.conformance import compare_all
from tests.runtime.streams_kit import SEED, FakeFeed, Job, dealt

pytestmark = pytest.mark.usefixtures("many_splits")

BOUNDARIES = [2, 4]
SIZES = [4, 3, 2]
COUNT = 130


def length_of(x: int) -> int:
    return (x * x + x // 3) % 7 + 1


def row(x):
    return {"id": x, "tokens": np.full(length_of(x), x + 1)}


def tokens(element):
    return len(element["tokens"])


def noisy(batch, rng):
    return {**batch, "noise": rng.integers(1 << 40)}


def buckets(count=COUNT, **options):
    return ps.range(count).map(row).bucket_by_length(tokens, boundaries=BOUNDARIES, batch_size=SIZES, **options)


def padded(**options):
    return ps.range(COUNT).map(row).padded_batch(3, **options)


def ids(batches) -> list[int]:
    return [int(x) for batch in batches for x in batch["id"]]


def bucket_of(batches) -> int:
    return bisect_left(BOUNDARIES, max(map(length_of, ids(batches))))


def rounds_of(elements, consumers):
    assert len(elements) % consumers == 0, "a round is not whole"
    return [elements[i : i + consumers] for i in range(0, len(elements), consumers)]


def check_alike(batches):
    """Check that batches are padded to one length, and with nothing else than padding."""
    assert len({batch["tokens"].shape[1] for batch in batches}) == 1
    for batch in batches:
        for x, values in zip(batch["id"], batch["tokens"]):
            assert Counter(values.tolist()) - Counter({0: len(values)}) == Counter({int(x) + 1: length_of(int(x))})


CASES = {
    "buckets": buckets,
    "to the boundary": lambda: buckets(pad_to_boundary=True),
    "shuffled": lambda: (
        ps.range(COUNT)
        .flat_map(lambda x: [row(x)])
        .shuffle(20, seed=1)
        .bucket_by_length(tokens, boundaries=BOUNDARIES, batch_size=SIZES)
        .map(noisy)
    ),
}


@pytest.mark.parametrize("of", [1, 3])
@pytest.mark.parametrize("consumers", [1, 2, 5])
@pytest.mark.parametrize("name", CASES)
def test_every_round_is_of_one_bucket_and_nothing_is_lost(name, consumers, of):
    *streams, tail = Job(CASES[name]()).reads(of, coordinated=consumers)
    for read in streams:
        for batches in rounds_of(read.elements, consumers):
            check_alike(batches)
            (bucket,) = {bisect_left(BOUNDARIES, length_of(x)) for x in ids(batches)}
            assert [len(batch["id"]) for batch in batches] == [SIZES[bucket]] * consumers
            longest = max(map(length_of, ids(batches)))
            if name == "to the boundary" and bucket < len(BOUNDARIES):
                longest = BOUNDARIES[bucket]
            assert batches[0]["tokens"].shape[1] == longest
    assert sorted(ids(x for read in [*streams, tail] for x in read.elements)) == list(range(COUNT))
    whole = len(tail.elements) // consumers * consumers
    rounds = rounds_of(tail.elements[:whole], consumers)
    for batches in rounds:
        check_alike(batches)
    for batches in rounds[:-1]:
        assert {len(batch["id"]) for batch in batches} in [{size} for size in SIZES[bucket_of(batches) :]]
    assert all(len(batch["id"]) == 1 for batch in tail.elements[whole:]), "only what cannot give each consumer a row"


@pytest.mark.parametrize("consumers", [1, 2, 5])
def test_padded_batches_of_a_round_are_padded_alike(consumers):
    *streams, tail = Job(padded(multiple_of=2)).reads(2, coordinated=consumers)
    for read in streams:
        for batches in rounds_of(read.elements, consumers):
            check_alike(batches)
            assert {len(batch["id"]) for batch in batches} == {3}
            longest = max(map(length_of, ids(batches)))
            assert batches[0]["tokens"].shape[1] == longest + longest % 2
    assert sorted(ids(x for read in [*streams, tail] for x in read.elements)) == list(range(COUNT))
    last = [len(batch["id"]) for batch in tail.elements[-consumers:]]
    assert max(last) - min(last) <= 1


@pytest.mark.parametrize("consumers", [1, 2, 5])
@pytest.mark.parametrize("build", [buckets, padded], ids=["buckets", "padded"])
def test_with_drop_last_only_whole_rounds_are_given(build, consumers):
    job = Job(build(drop_last=True))
    reads = job.reads(3, coordinated=consumers)
    sizes = SIZES if build is buckets else [3]
    for read in reads:
        for batches in rounds_of(read.elements, consumers):
            check_alike(batches)
            assert len({len(batch["id"]) for batch in batches}) == 1 and len(batches[0]["id"]) in sizes
    found = Counter(ids(x for read in reads for x in read.elements))
    assert set(found.values()) == {1} and COUNT - found.total() < consumers * max(sizes)


@pytest.mark.parametrize("consumers", [1, 2, 5])
def test_windows_of_a_round_have_one_key(consumers):
    job = Job(ps.range(COUNT).group_by_window(lambda x: x % 3, size=4))
    *streams, tail = job.reads(2, coordinated=consumers)
    for read in [*streams, tail]:
        for windows in rounds_of(read.elements, consumers):
            assert len({x % 3 for window in windows for x in window}) == 1
    found = Counter(x for read in [*streams, tail] for window in read.elements for x in window)
    lost = Counter(x % 3 for x in range(COUNT) if x not in found)
    assert set(found.values()) == {1} and all(count < consumers for count in lost.values())


@pytest.mark.parametrize("options", [{"threads": 2}, {"optimized": False}], ids=str)
def test_rounds_are_the_same_with_threads_and_without_passes(options):
    expected = Job(buckets().map(noisy)).epoch(2, coordinated=3)
    found = Job(buckets().map(noisy), **options).epoch(2, every=9, coordinated=3)
    assert compare_all(expected, found) is None


def everything(job: Job):
    return lambda source, pass_: list(range(job.counts[source]))


def test_at_the_end_what_fills_no_round_moves_up_and_the_last_is_shared_out():
    lengths = [1, 2, 1, 5, 3, 4, 9, 3, 8, 7, 2]
    rows = ps.from_items(lengths).map(lambda n: np.full(n, n))
    job = Job(rows.bucket_by_length(len, boundaries=[2, 4], batch_size=3))
    read = job.run(StreamPart(feed=FakeFeed(everything(job)), coordinated=2))
    found = [[int(row.max()) for row in batch] for batch in read.elements]
    assert found == [[1, 2, 1], [2, 3, 4], [3, 5, 9], [8, 7]]
    assert [batch.shape[1] for batch in read.elements] == [4, 4, 9, 9]


def test_fewer_rows_than_consumers_make_an_incomplete_round():
    job = Job(ps.range(8).map(lambda n: np.full(n + 1, n)).padded_batch(2))
    read = job.run(StreamPart(feed=FakeFeed(everything(job)), coordinated=3))
    assert [len(batch) for batch in read.elements] == [2, 2, 2, 1, 1]


def test_a_pipeline_that_pads_nothing_is_left_as_it_is():
    job = Job(ps.range(40).batch(3))
    plain = job.run(StreamPart(feed=FakeFeed(everything(job))))
    rounds = job.run(StreamPart(feed=FakeFeed(everything(job)), coordinated=2))
    assert plain.states == rounds.states and len(plain.elements) == len(rounds.elements)


def check_whole_rounds(build, elements, consumers):
    for batches in rounds_of(elements, consumers):
        check_alike(batches)
        size = SIZES[bucket_of(batches)] if build is buckets else 3
        assert [len(batch["id"]) for batch in batches] == [size] * consumers


@pytest.mark.parametrize("build", [buckets, padded], ids=["buckets", "padded"])
@pytest.mark.parametrize(("before", "after"), [(5, 2), (2, 5), (3, 1)])
def test_the_number_of_consumers_may_change_between_two_rounds(build, before, after):
    job = Job(build())
    first = job.run(StreamPart(feed=FakeFeed(everything(job)), rest="keep", coordinated=before))
    for done in range(0, len(first.elements) + 1, before):
        state = first.states[done]

        def read(state):
            feed = FakeFeed(everything(job), state)
            return job.run(StreamPart(feed=feed, rest="keep", coordinated=after), state=state)

        second = read(state)
        check_whole_rounds(build, second.elements, after)
        middle = second.states[min(after, len(second.elements))]
        assert ids(read(middle).elements) == ids(second.elements[after:])
        tail = job.tail([Left(second.states[-1])], [everything(job)], every=5, coordinated=after)
        assert sorted(ids([*first.elements[:done], *second.elements, *tail.elements])) == list(range(COUNT))


@pytest.mark.parametrize("in_tail", [False, True])
@pytest.mark.parametrize("start", [0, 6])
@pytest.mark.parametrize("given", [(2, 1, 0), (1, 1, 1), (0, 3, 1)])
@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("build", [buckets, padded], ids=["buckets", "padded"])
def test_what_nobody_received_of_rounds_for_other_consumers_comes_again(build, after, given, start, in_tail):
    job = Job(build())
    first = job.run(StreamPart(feed=FakeFeed(everything(job)), rest="keep", coordinated=3))
    state, torn = first.states[start], TornRounds(3, given)
    received = first.elements[:start]
    for number, batches in enumerate(rounds_of(first.elements[start:], 3)):
        received += [batch for batch, count in zip(batches, given) if number < count]
    if in_tail:
        tail = job.tail([Left(state, torn=torn)], [everything(job)], every=3, coordinated=after)
        assert sorted(ids([*received, *tail.elements])) == list(range(COUNT))
        return
    feed = FakeFeed(everything(job), state)
    second = job.run(StreamPart(feed=feed, rest="keep", coordinated=after, torn=torn), state=state)
    check_whole_rounds(build, second.elements, after)
    again = job.run(StreamPart(feed=feed, rest="keep", coordinated=after), state=second.states[after])
    assert compare_all(second.elements[after:], again.elements) is None
    for done in (after, len(second.elements)):
        tail = job.tail([Left(second.states[done])], [everything(job)], every=5, coordinated=after)
        assert sorted(ids([*received, *second.elements[:done], *tail.elements])) == list(range(COUNT))


def test_rounds_of_a_tail_can_be_taken_back_too():
    """In a tail the torn rounds may be those of its end: moved up, and shared out."""
    job = Job(buckets(20))
    old = job.run(StreamPart(feed=FakeFeed(everything(job)), coordinated=3))
    number_of_rounds = -(-len(old.elements) // 3)
    given = (number_of_rounds, number_of_rounds - 1, 1)
    rounds = [old.elements[i : i + 3] for i in range(0, len(old.elements), 3)]
    received = [b for n, batches in enumerate(rounds) for b, count in zip(batches, given) if n < count]
    part = StreamPart(feed=FakeFeed(everything(job)), coordinated=2, torn=TornRounds(3, given))
    assert sorted(ids([*received, *job.run(part).elements])) == list(range(20))


@pytest.mark.parametrize("optimized", [True, False])
@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (lambda: buckets().filter(lambda batch: True), r"filter.* put it before bucket_by_length"),
        (lambda: buckets().map(len).filter(bool).map(abs), r"filter.* put it before bucket_by_length"),
        (lambda: buckets().map(len, on_error=ps.SkipErrors()), r"map.* put it before bucket_by_length"),
        (lambda: buckets().shuffle(4), r"put shuffle\(\) before it"),
        (lambda: buckets().unbatch().batch(3), r"put unbatch\(\) before it"),
    ],
)
def test_what_would_tear_rounds_is_refused(dataset, message, optimized):
    job = Job(dataset(), optimized=optimized)
    with pytest.raises(InvalidPipelineError, match=message):
        job.run(StreamPart(feed=FakeFeed(everything(job)), coordinated=2))


def test_keys_too_many_for_rounds_are_an_error_and_not_a_memory_leak():
    job = Job(ps.range(40).group_by_window(lambda x: x, size=4, max_pending=10))
    with pytest.raises(InvalidPipelineError, match="11 elements wait and no 2 of them have the same key"):
        job.run(StreamPart(feed=FakeFeed(everything(job)), coordinated=2))


def test_each_batch_of_a_round_has_memory_of_its_own():
    given = []

    def allocate(shape, dtype):
        given.append(np.empty(shape, dtype))
        return given[-1]

    job = Job(ps.range(8).map(lambda x: np.full(9000 + x, x)).padded_batch(2))
    part = StreamPart(feed=FakeFeed(everything(job)), coordinated=2, allocate=allocate)
    assert all(a is b for a, b in zip(job.run(part).elements, given, strict=True))


def statistics_of(job: Job, **part):
    run = Run(
        job.graph,
        seed=SEED,
        epoch=0,
        budget=default_budget(1),
        source_of=job.source_of,
        part=StreamPart(feed=FakeFeed(everything(job)), **part),
    )
    run.open(0, None)
    batches = []
    while (chunk := run.pull(7)).elements:
        batches.extend(chunk.elements)
    run.close()
    return batches, {stage.name: stage for stage in run.statistics().stages}


@pytest.mark.parametrize("consumers", [0, 2])
def test_statistics_tell_how_much_is_padding(consumers):
    batches, stages = statistics_of(Job(buckets()), coordinated=consumers)
    padding = stages["bucket_by_length(tokens)"].padding
    assert [bucket.up_to for bucket in padding] == [2, 4, None]
    assert sum(bucket.batches for bucket in padding) == len(batches)
    assert sum(bucket.rows for bucket in padding) == COUNT
    assert sum(bucket.values for bucket in padding) == sum(map(length_of, range(COUNT)))
    assert sum(bucket.values + bucket.padding for bucket in padding) == sum(b["tokens"].size for b in batches)
    assert 0 < padding[-1].padding_fraction < 0.5


def test_a_batch_is_not_larger_than_the_pipeline_says_when_the_state_is_from_a_larger_one():
    def read(size, state=None):
        job = Job(ps.range(60).map(row).bucket_by_length(tokens, boundaries=[4], batch_size=size))
        feed = FakeFeed(dealt(job.counts, 0, 1), state)
        return job.run(StreamPart(feed=feed), state=state)

    first = read(16)
    second = read(3, first.states[1])
    assert max(len(batch["id"]) for batch in second.elements) == 3
    assert sorted(ids([first.elements[0], *second.elements])) == list(range(60))
