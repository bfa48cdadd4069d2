"""Evaluation: every element once over all ranks, in equal batches with a mask."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

import penstock as ps


def rows(count):
    return ps.range(count).map(lambda x: {"x": x})


def test_a_short_batch_is_filled_up_and_the_mask_says_so():
    loader = rows(7).evaluation(3)
    batches = list(loader)
    assert [batch["x"].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 6, 6]]
    assert [batch["mask"].tolist() for batch in batches] == [[True] * 3, [True] * 3, [True, False, False]]
    assert [batch["x"].tolist() for batch in loader] == [batch["x"].tolist() for batch in batches], "in every epoch"


def test_a_mask_goes_with_a_collate_function():
    made = list(rows(3).batch(2, mask="real", collate=lambda xs: {"sum": [x["x"] for x in xs]}))
    assert [(batch["sum"], batch["real"].tolist()) for batch in made] == [
        ([0, 1], [True, True]),
        ([2, 2], [True, False]),
    ]


@pytest.mark.parametrize("count", [0, 1, 7, 24, 25, 31])
def test_ranks_take_equal_steps_and_see_every_element_once(count, service):
    ranks = 3

    def read(rank):
        loader = rows(count).evaluation(4, service, ranks=ps.Ranks(ranks, rank), job=f"evaluate-{count}")
        with loader:
            return [(batch["x"], batch["mask"]) for batch in loader]

    with ThreadPoolExecutor(ranks) as pool:
        seen = list(pool.map(read, range(ranks)))
    assert len({len(batches) for batches in seen}) == 1
    assert all(len(x) == 4 for batches in seen for x, _ in batches)
    assert sorted(int(value) for batches in seen for x, mask in batches for value in x[mask]) == list(range(count))


@pytest.fixture(scope="module")
def service():
    with ps.LocalService(workers=2) as service:
        yield service


def test_ranks_need_to_know_how_many_there_are():
    with pytest.raises(ps.InvalidArgumentError, match=r"declare it with with_length\(\)"):
        rows(9).filter(lambda row: True).evaluation(2, "tcp://nowhere:1", ranks=ps.Ranks(2, 0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask": ""}, "it is the name of a column"),
        ({"mask": "m", "drop_last": True}, "filled up, or dropped"),
    ],
)
def test_a_mask_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ps.InvalidArgumentError, match=message):
        rows(3).batch(2, **arguments)


def test_batches_that_take_no_mask_are_refused():
    with pytest.raises(ps.InvalidPipelineError, match="which are ndarrays"):
        list(ps.range(3).batch(2, mask="m"))
    with pytest.raises(ps.InvalidPipelineError, match="have a column 'x' already"):
        list(rows(3).batch(2, mask="x"))


def test_a_part_that_was_held_out_is_the_same_on_workers(service):
    train, held_out = rows(200).shuffle(16, seed=2).holdout(0.25, seed=3)
    for part in (train, held_out):
        expected = sorted(row["x"] for row in part)
        with part.batch(8).distribute(service) as loader:
            for _ in range(2):
                assert sorted(int(x) for batch in loader for x in batch["x"]) == expected


def test_a_part_that_was_held_out_is_not_read_by_file_where_small_files_share_a_split(service, tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number} {line}\n" for line in range(9)))
    _, held_out = ps.read_text(str(tmp_path / "*.txt")).holdout(0.3)
    with (
        held_out.distribute(service, sharding=ps.Sharding("file")) as loader,
        pytest.raises(ps.InvalidPipelineError, match="which elements are held out follows from the splits"),
    ):
        next(iter(loader))
    with held_out.distribute(service, sharding=ps.Sharding("data")) as loader:
        assert sorted(loader) == sorted(held_out)


def test_an_evaluation_goes_on_with_as_many_ranks_and_says_so_to_others(service):
    def loaders(count, job):
        return [rows(26).evaluation(4, service, ranks=ps.Ranks(count, rank), job=job) for rank in range(count)]

    def count_rest(pair):
        loader, state = pair
        loader.load_state_dict(state)
        with loader:
            return [int(x) for batch in loader for x in batch["x"][batch["mask"]]]

    first, seen = loaders(2, "two ranks"), []
    iterators = [iter(loader) for loader in first]
    for _ in range(3):
        for iterator in iterators:
            batch = next(iterator)
            seen += [int(x) for x in batch["x"][batch["mask"]]]
    states = [loader.state_dict() for loader in first]
    for loader in first:
        loader.close()
    with pytest.raises(ps.StateMismatchError, match=r"over 2 ranks, and this one is over 3: .* Load it on as many"):
        loaders(3, "three ranks")[0].load_state_dict(states)
    with ThreadPoolExecutor(2) as pool:
        for rest in pool.map(count_rest, zip(loaders(2, "two ranks"), states)):
            seen += rest
    assert sorted(seen) == list(range(26))
