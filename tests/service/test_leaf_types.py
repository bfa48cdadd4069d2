"""Leaves of every type of the table: what is read is what was made, wherever it was made and kept meanwhile."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core.errors import CodecError
from penstock.testing.conformance import compare_all
from tests.leaf_examples import LEAVES, Frozen, Plain, Span

COUNT = 12
GROUPS = {
    "tensors": [name for name in LEAVES if "tensor" in name],
    "others": [name for name in LEAVES if "tensor" not in name],
}
COLUMNS = {"ragged", "bfloat16 tensor"}
"""What `batch` does not take: one is a column already, of the other numpy has no such numbers."""
OBJECTS = ["date", "datetime of a zone", "decimal", "uuid", "enum", "registered", "text", "bytes", "none"]
"""Of which a batch's rows are what was batched; numbers are numpy's then."""


@pytest.fixture(params=GROUPS)
def group(request: pytest.FixtureRequest) -> list[str]:
    return GROUPS[request.param]


def elements(names: list[str]) -> Callable[[int], Any]:
    makers = {name: LEAVES[name] for name in names}  # not all of them: a worker that loads torch takes its time
    return lambda i: {name: make(i) for name, make in makers.items()}


def made(names: list[str]) -> ps.Dataset:
    return ps.range(COUNT).map(elements(names))


def expected(names: list[str]) -> list[Any]:
    return list(map(elements(names), range(COUNT)))


def same(wanted: list[Any], found: Any) -> None:
    assert compare_all(wanted, list(found)) is None


def test_what_a_worker_sends_is_what_was_made(group: list[str], one_worker: ps.LocalService) -> None:
    same(expected(group), made(group))
    same(expected(group), made(group).distribute(one_worker))
    same(list(made(group).shuffle(5, seed=1)), made(group).shuffle(5, seed=1).distribute(one_worker))


def test_batches_are_made_cut_joined_and_taken_apart(group: list[str], one_worker: ps.LocalService) -> None:
    names = [name for name in group if name not in COLUMNS]
    batches = made(names).batch(4)
    same(list(batches), batches.distribute(one_worker))
    same(list(made(names).batch(3)), batches.rebatch(3))
    same(list(batches), batches.unbatch().batch(4))
    same(list(batches.unbatch()), batches.unbatch().distribute(one_worker))


def test_rows_of_a_batch_of_objects_are_the_objects() -> None:
    same(expected(OBJECTS), made(OBJECTS).batch(4).unbatch())


def test_what_was_saved_is_read_here_and_by_a_worker_that_lacks_the_classes(
    group: list[str], one_worker: ps.LocalService, tmp_path: Path
) -> None:
    made(group).save(one_worker, tmp_path / "saved", rows_per_file=5)
    saved = ps.read_saved(tmp_path / "saved")
    same(expected(group), saved)
    same(expected(group), saved.distribute(one_worker))
    if not COLUMNS.intersection(group):
        same(list(saved.batch(4)), saved.batch(4).distribute(one_worker))


def test_caches_in_memory_and_in_files_give_the_same_again(group: list[str], tmp_path: Path) -> None:
    for dataset in (made(group).cache(), made(group).cache(str(tmp_path))):
        same(expected(group), dataset)
        same(expected(group), dataset)


def test_a_loaded_state_goes_on_with_the_same(group: list[str], one_worker: ps.LocalService) -> None:
    readings: list[Callable[[], Any]] = [
        lambda: made(group).iterator(),
        lambda: made(group).distribute(one_worker, order="deterministic"),
    ]
    for make in readings:
        loader = make()
        reading = iter(loader)
        same(expected(group)[:5], [next(reading) for _ in range(5)])
        state = json.loads(json.dumps(loader.state_dict()))
        reading.close()
        again = make()
        again.load_state_dict(state)
        same(expected(group)[5:], again)


def test_padded_and_ragged_batches_take_tensors_for_arrays() -> None:
    dataset = ps.range(4).map(lambda i: {"t": torch.arange(i), "p": Plain(i, np.arange(i))})
    (padded,) = dataset.padded_batch(4, value=-1)
    assert padded["t"].tolist() == padded["p"].values.tolist() == [[-1] * 3, [0, -1, -1], [0, 1, -1], [0, 1, 2]]
    (ragged,) = dataset.ragged_batch(4)
    assert ragged["t"] == ragged["p"].values and ragged["p"].number.tolist() == [0, 1, 2, 3]


def test_batches_of_tensors_are_cut_and_joined_as_tensors(one_worker: ps.LocalService) -> None:
    batches = ps.range(12).batch(4).map(lambda batch: {"t": torch.from_numpy(batch), "b": torch.ones(len(batch))})
    for read in (list(batches.rebatch(3)), list(batches.rebatch(3).distribute(one_worker))):
        assert [batch["t"].tolist() for batch in read] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
        assert all(type(batch["t"]) is torch.Tensor for batch in read)
    assert [int(row["t"]) for row in batches.unbatch()] == list(range(12))


def test_methods_are_those_of_the_class_that_left(one_worker: ps.LocalService) -> None:
    made = list(ps.range(2).map(lambda i: (Span(i, i + 3), Frozen(i))).distribute(one_worker))
    assert [(span.length(), frozen.doubled()) for span, frozen in made] == [(3, 0), (3, 2)]
    (batch,) = ps.range(4).map(Frozen).batch(4).distribute(one_worker)
    assert batch.doubled().tolist() == [0, 2, 4, 6] and batch.checked.all()


OTHER_PROGRAM = """
import sys
import penstock as ps

for element in ps.read_saved(sys.argv[1]):
    print(type(element).__name__, repr(element))
    try:
        print(element.label)
    except AttributeError as error:
        print(error)
print(list(ps.read_saved(sys.argv[1]).distribute(1)))
"""


def test_a_program_without_the_class_passes_values_on_and_is_told_what_is_missing(tmp_path: Path) -> None:
    ps.range(1).map(LEAVES["registered"]).save(None, tmp_path / "saved")
    command = [sys.executable, "-c", OTHER_PROGRAM, str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (
        "which this process does not know" in done.stdout and "ps.register_type(Box, flatten, unflatten)" in done.stdout
    )
    last = done.stderr.splitlines()[-1]
    assert (
        done.returncode == 1 and "CodecError" in done.stderr and "Box, which this process does not know" in done.stderr
    ), last


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda i: {"a": {"words": {"x", "y"}}}, r"\['a'\]\['words'\] is a set.*sorted\(value\)"),
        (lambda i: {"f": [1, lambda: i]}, r"\['f'\]\[1\] is a function.*call it in map\(\)"),
        (lambda i: {"f": (1, io.StringIO("x"))}, r"\['f'\]\[1\] is a StringIO.*file.read\(\)"),
        (lambda i: Plain(1, iter([2])), r"\['values'\] is a list_iterator.*list\(value\)"),
        (lambda i: {"p": Path("x")}, r"\['p'\] is a PosixPath.*str\(path\)"),
        (lambda i: {"o": object()}, r"\['o'\] is a object.*ps.register_type\(object, flatten, unflatten\)"),
        (lambda i: {"s": torch.eye(2).to_sparse()}, r"\['s'\] is a Tensor.*to_dense"),
        (lambda i: np.array([1, {2}], object), r"\[1\] is a set"),
    ],
)
def test_what_cannot_leave_is_refused_with_its_key_its_type_and_what_to_do(
    make: Callable[[int], Any], said: str, one_worker: ps.LocalService, tmp_path: Path
) -> None:
    assert len(list(ps.range(2).map(make))) == 2  # in one process, anything goes
    with pytest.raises(CodecError, match=said):
        list(ps.range(2).map(make).distribute(one_worker))
    with pytest.raises(CodecError, match=said):
        ps.range(2).map(make).save(None, tmp_path / "saved")
