import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import InvalidArgumentError
from penstock.graph.functions import Payload, UserFunction
from penstock.graph.readers import FromGenerator, FromItems, FromTorch, Range
from penstock.sources.base import IndexableSource, Source, SplitPosition
from penstock.sources.memory import GeneratorSource, ItemsSource, RangeSource, TorchSource, index_splits


def read_all(source: Source, want: int = 7) -> list[Any]:
    elements: list[Any] = []
    for split in source.splits():
        reader = source.open(split, SplitPosition())
        while records := reader.read(want).elements:
            elements.extend(records)
        reader.close()
    return elements


def items(value: Any) -> ItemsSource:
    return ItemsSource(FromItems(items=Payload(value)))


def generator(function: Any, splits: tuple[Any, ...] = (None,)) -> GeneratorSource:
    return GeneratorSource(FromGenerator(function=UserFunction.of(function), splits=splits))


@pytest.mark.parametrize("length", [0, 1, 2, 255, 256, 257, 5_000, 1_000_003, 10**12])
def test_index_splits_cover_every_index_once_in_order(length: int) -> None:
    splits = index_splits(length, at_least=256)
    assert [s.start for s in splits] == [0, *(s.stop for s in splits)][: len(splits)]
    assert (splits[-1].stop if splits else 0) == length
    assert all(s.start < s.stop for s in splits)


@pytest.mark.parametrize("length", [20_000, 1_000_000, 10**9])
def test_big_sources_have_a_useful_number_of_splits(length: int) -> None:
    assert 64 <= len(index_splits(length, at_least=256)) <= 1024


@pytest.mark.parametrize("values", [range(10), range(5, 2_000, 3), range(1_000, -1_000, -7), range(3, 3)])
def test_range_yields_what_python_s_range_does(values: range) -> None:
    source = RangeSource(Range(start=values.start, stop=values.stop, step=values.step))
    assert isinstance(source, IndexableSource)
    assert read_all(source) == list(values)
    assert len(source) == len(values)


def test_range_reads_are_ranges_and_fetched_values_are_python_ints() -> None:
    source = RangeSource(Range(start=10, stop=5_000, step=2))
    reader = source.open(source.splits()[0], SplitPosition(index=3))
    assert reader.read(4).elements == range(16, 24, 2)
    fetched = source.fetch(np.array([7, 0, 2]))
    assert fetched == [24, 10, 14]
    assert {type(value) for value in fetched} == {int}
    assert list(source.fetch(range(9, 2, -3))) == [28, 22, 16]


def test_range_beyond_int64_stays_exact() -> None:
    source = RangeSource(Range(start=1 << 70, stop=(1 << 70) + 10))
    assert source.fetch(np.array([3])) == [(1 << 70) + 3]


@pytest.mark.parametrize("sequence", [[1, "a", None], (1, 2), "abc", np.arange(6).reshape(3, 2)])
def test_items_yields_any_sequence(sequence: Any) -> None:
    source = items(sequence)
    np.testing.assert_equal(read_all(source), list(sequence))
    np.testing.assert_equal(source.fetch(np.array([1, 0])), [sequence[1], sequence[0]])


def test_rows_of_an_array_do_not_share_its_memory() -> None:
    array = np.zeros((4, 2))
    for row in read_all(items(array)):
        row += 1
    assert not array.any()


@pytest.mark.parametrize("wrong", [{1: 2}, {1, 2}, iter([1])])
def test_items_without_an_order_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="needs a sequence"):
        items(wrong)


def test_generator_is_called_once_per_declared_split() -> None:
    source = generator(lambda name: [name + str(i) for i in range(2)], ("a", "b"))
    assert read_all(source) == ["a0", "a1", "b0", "b1"]


def test_generator_function_without_parameters_is_called_without_arguments() -> None:
    assert read_all(generator(lambda: iter("xy"))) == ["x", "y"]


def test_generator_function_with_a_parameter_gets_the_none_split() -> None:
    assert read_all(generator(lambda split: [split])) == [None]


def test_generator_resumes_by_running_again() -> None:
    source = generator(lambda: iter(range(10)))
    reader = source.open(source.splits()[0], SplitPosition(index=8))
    assert list(reader.read(5).elements) == [8, 9]
    assert not reader.read(5).elements


def test_generator_position_past_its_end_is_the_end() -> None:
    source = generator(lambda: iter(range(3)))
    assert not source.open(source.splits()[0], SplitPosition(index=9)).read(5).elements


def test_closing_a_reader_closes_its_generator() -> None:
    events = []

    def rows() -> Iterator[int]:
        try:
            yield from range(10)
        finally:
            events.append("closed")

    source = generator(rows)
    reader = source.open(source.splits()[0], SplitPosition())
    reader.read(2)
    assert not events
    reader.close()
    assert events == ["closed"]


def test_elements_before_a_generator_s_failure_are_delivered_and_the_failure_stays() -> None:
    def rows() -> Iterator[int]:
        yield 1
        raise KeyError("row 2")

    source = generator(rows)
    reader = source.open(source.splits()[0], SplitPosition())
    assert reader.read(5).elements == [1]
    for _ in range(2):
        with pytest.raises(KeyError, match="row 2"):
            reader.read(5)


class Squares:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[int, str]:
        assert type(i) is int
        return i * i, str(i)


class BatchedSquares(Squares):
    def __getitem__(self, i: int) -> tuple[int, str]:
        raise AssertionError("__getitems__ is there to be used")

    def __getitems__(self, indices: list[int]) -> list[tuple[int, str]]:
        return [(i * i, str(i)) for i in indices]


@pytest.mark.parametrize("dataset", [Squares(), BatchedSquares()], ids=["getitem", "getitems"])
def test_torch_dataset_is_read_by_index(dataset: Any) -> None:
    source = TorchSource(FromTorch(dataset=Payload(dataset)))
    assert read_all(source) == [(i * i, str(i)) for i in range(40)]
    assert source.fetch(np.array([5, 3])) == [(25, "5"), (9, "3")]


def test_a_batch_of_another_length_than_asked_for_is_an_error() -> None:
    class Short(Squares):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return indices[1:]

    with pytest.raises(ValueError, match="gave 2 elements for 3 indices"):
        TorchSource(FromTorch(dataset=Payload(Short()))).fetch([1, 2, 3])


def test_tensors_become_writable_numpy_arrays_of_their_own() -> None:
    torch = pytest.importorskip("torch")
    values = torch.arange(12.0).reshape(4, 3)
    dataset = torch.utils.data.TensorDataset(values, torch.arange(4))
    source = TorchSource(FromTorch(dataset=Payload(dataset)))
    row, label = source.fetch([2])[0]
    assert isinstance(row, np.ndarray) and isinstance(label, np.ndarray)
    assert row.tolist() == [6.0, 7.0, 8.0] and label == 2
    row += 1
    assert values[2].tolist() == [6.0, 7.0, 8.0]


def test_tensors_are_found_beside_numbers_and_long_lists_of_numbers_stay_lists() -> None:
    torch = pytest.importorskip("torch")
    ids = list(range(1_000))
    element = [3, torch.ones(2), {"ids": ids, "pair": (torch.tensor(1), "a")}]
    (found,) = TorchSource(FromTorch(dataset=Payload([element]))).fetch([0])
    np.testing.assert_equal(found, [3, np.ones(2), {"ids": ids, "pair": (np.array(1), "a")}])
    assert isinstance(found[1], np.ndarray) and isinstance(found[2]["pair"], tuple)


def test_torch_is_not_imported_for_a_dataset_without_tensors() -> None:
    program = (
        "import sys\n"
        "from penstock.graph.functions import Payload\n"
        "from penstock.graph.readers import FromTorch\n"
        "from penstock.sources.memory import TorchSource\n"
        "assert TorchSource(FromTorch(dataset=Payload(['a', 'b']))).fetch([1]) == ['b']\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_iterable_dataset_is_refused_with_the_remedy() -> None:
    with pytest.raises(InvalidArgumentError, match="from_generator"):
        TorchSource(FromTorch(dataset=Payload(iter([1]))))
