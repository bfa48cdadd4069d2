"""What each operator means, on data small enough to write down."""

from __future__ import annotations

from collections import Counter, namedtuple

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import InvalidArgumentError


def values(batches):
    return [batch.tolist() for batch in batches]


def test_batch_makes_arrays_of_numbers_and_object_arrays_of_the_rest():
    Point = namedtuple("Point", "x y")
    rows = [
        {"i": i, "f": i / 2, "b": i > 1, "s": f"a{i}\0", "y": b"b\0", "n": None, "p": Point(i, (i, [i]))}
        for i in range(3)
    ]
    (batch,) = ps.from_items(rows).batch(3)
    assert (batch["i"].dtype, batch["f"].dtype, batch["b"].dtype) == (np.int64, np.float64, np.bool_)
    assert batch["s"].tolist() == ["a0\0", "a1\0", "a2\0"] and batch["s"].dtype == object
    assert batch["y"].tolist() == [b"b\0"] * 3
    assert batch["n"].tolist() == [None] * 3
    assert type(batch["p"]) is Point and batch["p"].y[1][0].tolist() == [0, 1, 2]


def test_batch_keeps_every_dtype_and_zero_sizes():
    for dtype in ("bool", "i1", "u8", "f2", "f4", "c16", "M8[s]", "m8[ns]", "S3", "U2"):
        (batch,) = ps.range(3).map(lambda x, dtype=dtype: np.zeros(2, dtype)).batch(3)
        assert batch.dtype == np.dtype(dtype) and batch.shape == (3, 2)
    (empty,) = ps.range(3).map(lambda x: np.zeros((0, 4), np.float32)).batch(3)
    assert empty.shape == (3, 0, 4)
    (scalars,) = ps.range(3).map(lambda x: np.array(x, np.int16)).batch(3)
    assert scalars.dtype == np.int16 and scalars.tolist() == [0, 1, 2]


def test_batch_accepts_fortran_order_strides_and_large_ints():
    (batch,) = ps.range(2).map(lambda x: np.asfortranarray(np.arange(6).reshape(2, 3) + x)[:, ::2]).batch(2)
    assert batch.tolist() == [[[0, 2], [3, 5]], [[1, 3], [4, 6]]]
    (large,) = ps.from_items([1 << 63, (1 << 64) - 1]).batch(2)
    assert large.dtype == np.uint64
    (mixed,) = ps.from_items([1, 2.5]).batch(2)
    assert mixed.tolist() == [1.0, 2.5]


def test_torch_tensors_become_arrays():
    torch = pytest.importorskip("torch")
    (batch,) = ps.range(4).map(lambda x: torch.full((3,), x)).batch(4)
    assert isinstance(batch, np.ndarray) and batch[3].tolist() == [3, 3, 3]


def test_drop_last_drops_less_than_a_batch():
    assert values(ps.range(10).batch(4, drop_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(ps.range(3).batch(4, drop_last=True)) == []
    assert list(ps.range(0).batch(4)) == []


def test_padded_batch_pads_every_axis():
    ds = ps.from_items([np.ones((1, 2)), np.ones((3, 1))])
    (batch,) = ds.padded_batch(2, value=-1)
    assert batch.shape == (2, 3, 2)
    assert batch[0].tolist() == [[1, 1], [-1, -1], [-1, -1]]
    (longer,) = ps.from_items([np.ones(3), np.ones(5)]).padded_batch(2, multiple_of=8)
    assert longer.shape == (2, 8)
    (fixed,) = ps.from_items([np.ones(3), np.ones(5)]).padded_batch(2, length=6)
    assert fixed.shape == (2, 6)
    with pytest.raises(ValueError, match="length=4"):
        list(ps.from_items([np.ones(3), np.ones(5)]).padded_batch(2, length=4))


def test_ragged_batch_and_unbatch_are_inverse():
    rows = [{"t": np.arange(i), "label": i} for i in range(5)]
    (batch,) = ps.from_items(rows).ragged_batch(5)
    assert isinstance(batch["t"], ps.Ragged) and batch["t"].offsets.tolist() == [0, 0, 1, 3, 6, 10]
    back = list(ps.from_items([batch]).unbatch())
    assert [row["t"].tolist() for row in back] == [row["t"].tolist() for row in rows]


def test_rebatch_cuts_and_joins_columns():
    ds = ps.range(10).map(lambda x: {"x": x, "r": np.arange(x)}).ragged_batch(4).rebatch(3)
    out = list(ds)
    assert [batch["x"].tolist() for batch in out] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert [len(row) for batch in out for row in batch["r"]] == list(range(10))
    assert len(list(ps.range(10).batch(4).rebatch(3, drop_last=True))) == 3


def test_interleave_takes_turns():
    ds = ps.from_items(["abcd", "12", "xyz"]).interleave(iter, cycle=2, block=2)
    assert "".join(ds) == "ab12cdxyz"


def test_repeat_zero_and_an_empty_dataset_for_ever_end():
    assert list(ps.range(5).repeat(0)) == []
    assert list(ps.range(0).repeat()) == []
    assert list(ps.range(3).repeat(2)) == [0, 1, 2, 0, 1, 2]


def test_every_pass_of_a_repeat_is_shuffled_anew():
    passes = np.array(list(ps.range(20).shuffle(seed=1).repeat(3))).reshape(3, 20)
    assert len({tuple(row) for row in passes.tolist()}) == 3
    assert all(sorted(row) == list(range(20)) for row in passes.tolist())


def test_take_asks_for_no_more_than_it_needs():
    calls = []
    assert list(ps.range(1000).map(lambda x: calls.append(x) or x).take(3).iterator(threads=1)) == [0, 1, 2]
    assert calls == [0, 1, 2]


def test_mix_follows_the_weights_at_every_moment():
    a, b, c = ps.range(0, 10_000), ps.range(10_000, 20_000), ps.range(20_000, 30_000)
    seen = Counter()
    for n, x in enumerate(ps.mix([a, b, c], [0.5, 0.3, 0.2]).take(5000), 1):
        seen[x // 10_000] += 1
        assert all(abs(seen[i] - weight * n) <= 1.5 for i, weight in enumerate([0.5, 0.3, 0.2]))


def test_mix_can_weigh_by_size():
    long, short = ps.range(1000).map(lambda x: np.zeros(90)), ps.range(10_000).map(lambda x: np.ones(10))
    tokens = Counter()
    for row in ps.mix([long, short], [1, 1], unit=len).take(2000):
        tokens[row[0]] += len(row)
    assert abs(tokens[0.0] / sum(tokens.values()) - 0.5) < 0.005


def test_mix_stops_as_asked():
    a, b = ps.range(2), ps.range(10, 16)
    assert len(list(ps.mix([a, b], [1, 1]))) in (4, 5)
    assert sorted(ps.mix([a, b], [1, 1], stop="all")) == [0, 1, 10, 11, 12, 13, 14, 15]
    for_ever = list(ps.mix([a, b], [1, 1], stop="never").take(100))
    assert Counter(x < 10 for x in for_ever) == {True: 50, False: 50}
    assert list(ps.mix([ps.range(0), a], [1, 1], stop="never").take(4)) == [0, 1, 0, 1]


def test_buckets_hold_elements_of_like_length():
    ds = ps.range(100).map(lambda x: np.full(x % 10 + 1, x))
    total = 0
    for batch in ds.bucket_by_length(len, boundaries=[3, 6], batch_size=[8, 4, 2]):
        lengths = (batch != 0).sum(axis=1)
        buckets = set(np.searchsorted([3, 6], lengths))
        assert len(buckets - {0}) <= 1
        total += len(batch)
    assert total == 100


def test_buckets_can_be_padded_to_their_boundary():
    ds = ps.range(50).map(lambda x: np.ones(x % 5 + 1))
    widths = {
        batch.shape[1] for batch in ds.bucket_by_length(len, boundaries=[3, 8], batch_size=4, pad_to_boundary=True)
    }
    assert widths == {3, 8}


def test_windows_are_given_short_when_too_much_is_pending():
    ds = ps.range(100).group_by_window(lambda x: x, size=2, max_pending=10)
    assert [len(window) for window in ds] == [1] * 100
    assert sorted(x for window in ps.range(20).group_by_window(lambda x: x % 3, size=4) for x in window) == list(
        range(20)
    )
    sums = list(ps.range(9).group_by_window(lambda x: x % 3, size=3, reduce=sum))
    assert sums == [9, 12, 15]


@pytest.mark.parametrize("long", ["split", "truncate", "drop"])
def test_pack_fills_rows_and_loses_no_token(long):
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 100, n) for n in rng.integers(1, 40, 300)]
    rows = list(ps.from_items(documents).pack(16, long=long, lookahead=100))
    assert all(set(row) == {"tokens", "segment_ids", "positions"} and len(row["tokens"]) == 16 for row in rows)
    pieces = Counter()
    for row in rows:
        for segment in range(1, row["segment_ids"].max() + 1):
            where = row["segment_ids"] == segment
            assert row["positions"][where].tolist() == list(range(where.sum()))
            pieces[tuple(row["tokens"][where].tolist())] += 1
        assert not row["tokens"][row["segment_ids"] == 0].any()
    expected = Counter()
    for document in documents:
        parts = [document[i : i + 16] for i in range(0, len(document), 16)]
        if len(document) > 16:
            parts = {"split": parts, "truncate": parts[:1], "drop": []}[long]
        expected.update(tuple(part.tolist()) for part in parts)
    assert pieces == expected
    fill = sum((row["segment_ids"] > 0).sum() for row in rows) / (16 * len(rows))
    assert fill > 0.9


def test_with_epoch_cuts_an_endless_stream():
    ds = ps.range(10).with_epoch(4)
    assert [list(ds), list(ds), list(ds)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    assert list(ps.range(10).with_epoch(4).iterator(epoch=2)) == [8, 9, 0, 1]


def test_with_epoch_goes_on_from_a_saved_epoch_in_another_process():
    ds = ps.range(10).with_epoch(4)
    iterator = ds.iterator()
    list(iterator)
    fresh = ps.range(10).with_epoch(4).iterator()
    fresh.load_state_dict(iterator.state_dict())
    assert fresh.epoch == 1 and list(fresh) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda ds: ds.batch(0), "size=0 must be at least 1"),
        (lambda ds: ds.batch(2.5), "size=2.5 must be an int"),
        (lambda ds: ds.shuffle(0), "size=0"),
        (lambda ds: ds.shuffle(seed="x"), "seed='x' must be an int of at least 0"),
        (lambda ds: ds.shuffle(seed=1.5), "seed=1.5 must be an int"),
        (lambda ds: ds.iterator(seed="x"), "seed='x' must be a whole number"),
        (lambda ds: ds.iterator(epoch=-1), "epoch=-1 must be a whole number of at least 0"),
        (lambda ds: ds.map(3), "map takes a function, not int"),
        (lambda ds: ds.map(str, on_error="ignore"), "'raise', 'skip'"),
        (lambda ds: ds.take(-2), "count=-2"),
        (lambda ds: ds.select(), "at least one column"),
        (lambda ds: ds.select("a", "a"), "twice"),
        (lambda ds: ds.zip(3), "zip takes datasets, not int"),
        (lambda ds: ps.mix([ds], [1, 2]), "1 sources and 2 weights"),
        (lambda ds: ps.mix([ds], [0]), "nor all zero"),
        (lambda ds: ps.mix([ds], stop="last"), "'first', 'all', 'never'"),
        (lambda ds: ds.pack(8, long="keep"), "'split', 'truncate', 'drop'"),
        (lambda ds: ds.bucket_by_length(len, boundaries=[3, 2], batch_size=1), "increasing"),
        (lambda ds: ds.bucket_by_length(len, boundaries=[3], batch_size=[1]), "2 buckets"),
        (lambda ds: ps.SkipErrors(budget=0), "budget=0"),
        (lambda ds: ps.range(0, 3, 0), "step=0"),
        (lambda ds: ps.read_text([]), "at least one path"),
        (lambda ds: ps.from_torch(iter([])), "map-style"),
    ],
)
def test_arguments_are_checked_when_given(make, message):
    with pytest.raises(InvalidArgumentError) as caught:
        make(ps.range(10))
    assert message in str(caught.value)


def test_a_shuffle_is_a_permutation_whatever_its_size():
    for n in (0, 1, 2, 17, 1000, 65_536, 65_537, 200_000):
        assert sorted(ps.range(n).shuffle(seed=1)) == list(range(n))
    for size in (1, 7, 1000):
        assert sorted(ps.range(100).take(90).shuffle(size, seed=2)) == list(range(90))


@pytest.mark.parametrize("n", [70_000, 1 << 17, 1 << 21])
def test_large_permutations_look_random(n):
    order = np.array(list(ps.range(n).shuffle(seed=5)))
    noise = 4 / n**0.5  # four standard deviations of what a uniform permutation shows
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < noise
    gaps = np.abs(np.diff(order))
    assert abs(gaps.mean() / n - 1 / 3) < noise, "neighbours are as far apart as in a uniform permutation"
    eighths = np.histogram2d(np.arange(n), order, bins=8)[0]
    assert abs(eighths / (n / 64) - 1).max() < 5 * (64 / n) ** 0.5


def test_small_permutations_are_uniform():
    seen = Counter(tuple(ps.range(4).shuffle(seed=s)) for s in range(2400))
    assert len(seen) == 24 and max(seen.values()) < 160


def test_no_two_blocks_are_shuffled_alike():
    blocks = np.array(list(ps.range(80).take(80).shuffle(20, seed=1))).reshape(4, 20) - np.arange(0, 80, 20)[:, None]
    assert len({tuple(block) for block in blocks.tolist()}) == 4


def test_batches_made_ahead_are_not_lost_behind_a_shuffle_or_take():
    shuffled = ps.range(3000).map(lambda x: x, threads=2).batch(2).shuffle(5, seed=1)
    assert sorted(x for batch in shuffled for x in batch.tolist()) == list(range(3000))
    assert len(list(ps.range(300).batch(6).rebatch(1).take(7))) == 7


def test_the_keys_of_a_batch_are_in_the_order_of_its_first_row():
    def row(x):
        image, label = ("image", np.zeros(5000, np.uint8)), ("label", x)
        return dict([image, label] if x % 2 == 0 else [label, image])

    assert {tuple(batch) for batch in ps.range(400).map(row, threads=4).batch(4)} == {("image", "label")}
