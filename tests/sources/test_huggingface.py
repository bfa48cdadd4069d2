from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import InvalidArgumentError
from penstock.graph.functions import Payload
from penstock.graph.readers import FromHuggingface
from penstock.sources.base import IndexableSource, Source, SplitPosition
from penstock.sources.huggingface import huggingface_source

datasets = pytest.importorskip("datasets")


def source_of(dataset: Any) -> Source:
    return huggingface_source(FromHuggingface(dataset=Payload(dataset)))


def indexable(dataset: Any) -> IndexableSource:
    source = source_of(dataset)
    assert isinstance(source, IndexableSource)
    return source


def read(source: Source, want: int = 7) -> list[Any]:
    elements: list[Any] = []
    for split in source.splits():
        reader = source.open(split, SplitPosition())
        while found := reader.read(want).elements:
            elements.extend(found)
        reader.close()
    return elements


ROWS = [{"i": i, "text": f"row {i}", "ids": list(range(i)), "inner": {"flag": i % 2 == 0}} for i in range(50)]


def shards(names: list[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        for number in range(4):
            yield {"name": name, "number": number}


def test_rows_of_a_dataset_are_dicts_of_python_values() -> None:
    source = indexable(datasets.Dataset.from_list(ROWS))
    assert len(source) == 50
    assert read(source) == ROWS
    wanted = np.array([7, 3, 3, 49])
    assert source.fetch(wanted) == [ROWS[i] for i in wanted]
    assert source.fetch(range(9, 2, -3)) == [ROWS[9], ROWS[6], ROWS[3]]
    assert source.fetch([]) == []


def test_rows_chosen_from_a_dataset_keep_their_order() -> None:
    chosen = datasets.Dataset.from_list(ROWS).select([5, 3, 40])
    assert read(source_of(chosen)) == [ROWS[5], ROWS[3], ROWS[40]]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_arrays_are_writable_and_their_own(kind: str) -> None:
    if kind == "torch":
        pytest.importorskip("torch")
    dataset = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0]], "n": [1, 2]}).with_format(kind)
    for rows in (indexable(dataset).fetch([1, 0]), indexable(dataset).fetch(range(2))):
        for row in rows:
            assert isinstance(row["x"], np.ndarray)
            row["x"] += 1
    assert [row["x"].tolist() for row in indexable(dataset).fetch(range(2))] == [[1.0, 2.0], [3.0, 4.0]]


def test_a_format_without_rows_is_refused_with_the_remedy() -> None:
    with pytest.raises(InvalidArgumentError, match="with_format"):
        indexable(datasets.Dataset.from_list(ROWS).with_format("arrow")).fetch([1])


def test_an_iterable_dataset_has_a_split_for_each_shard() -> None:
    dataset = datasets.IterableDataset.from_generator(shards, gen_kwargs={"names": ["a", "b", "c"]})
    source = source_of(dataset)
    assert not isinstance(source, IndexableSource)
    assert len(source.splits()) == 3
    assert read(source) == list(shards(["a", "b", "c"]))
    reader = source.open(source.splits()[1], SplitPosition(2))
    assert reader.read(9).elements == [{"name": "b", "number": 2}, {"name": "b", "number": 3}]
    assert not reader.read(9).elements


def test_a_shuffled_iterable_dataset_gives_the_same_order_each_time() -> None:
    dataset = datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=5).shuffle(seed=3, buffer_size=7)
    assert read(source_of(dataset)) == read(source_of(dataset))
    assert sorted(row["i"] for row in read(source_of(dataset))) == list(range(50))


def test_a_mapped_iterable_dataset_with_tensors_gives_arrays() -> None:
    torch = pytest.importorskip("torch")
    dataset = datasets.Dataset.from_list(ROWS).to_iterable_dataset().map(lambda row: {"x": torch.ones(2) * row["i"]})
    assert read(source_of(dataset))[3]["x"].tolist() == [3.0, 3.0]


def test_anything_else_is_refused_with_what_is_needed() -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    with pytest.raises(InvalidArgumentError, match="choose one of train, test"):
        source_of(datasets.DatasetDict(train=dataset, test=dataset))
    with pytest.raises(InvalidArgumentError, match=r"got a list; it needs a datasets\.Dataset"):
        source_of([1, 2])
