"""Sources that live in memory: ranges, items, generators and map-style datasets.

All but the generator are indexable: their splits are ranges of element indices, and a reader is a cursor over `fetch`.
`index_splits` and `IndexReader` serve the other indexable sources too.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import isqrt
from typing import Any

import numpy as np

from penstock.core.element import Element, rebuild_like
from penstock.core.errors import InvalidArgumentError, InvalidPipelineError
from penstock.graph.readers import FromGenerator, FromItems, FromTorch, Range
from penstock.sources.base import Reader, Records, Split, SplitPosition

MOST_SPLITS = 1024  # beyond it finer splits balance no better, and each costs a journal row in the service
LONGEST_STRUCTURE = 16  # a longer list that begins with a number holds numbers
INT64 = range(-(1 << 63), 1 << 63)


def index_splits(length: int, at_least: int = 1) -> list[Split]:
    """Cut `length` elements into equal index ranges; how many depends on the length alone.

    Half the square root of the length: splits and elements per split grow together.

    >>> [len(index_splits(n)) for n in (0, 1, 1_000, 1_000_000, 1_000_000_000)]
    [0, 1, 15, 500, 1024]
    """
    count = max(1, min(MOST_SPLITS, isqrt(length) // 2, length // at_least))
    size = max(1, -(-length // count))
    return [Split(start=start, stop=min(start + size, length)) for start in range(0, length, size)]


class IndexReader:
    """Reads a range of indices in order through `fetch`."""

    def __init__(self, fetch: Callable[[Sequence[int]], Sequence[Element]], split: Split, at: SplitPosition) -> None:
        self._fetch, self._next, self._stop = fetch, split.start + at.index, split.stop

    def read(self, want: int) -> Records:
        start, self._next = self._next, min(self._next + want, self._stop)
        return Records(self._fetch(range(start, self._next)) if start < self._next else ())

    def close(self) -> None:
        self._next = self._stop


class RangeSource:
    """Python ints. Elements stay a `range` as long as their indices are one: slicing it costs nothing."""

    remote = False

    def __init__(self, node: Range) -> None:
        self._values = range(node.start, node.stop, node.step)
        # Within int64 numpy computes the values; a range may go beyond.
        self._in_int64 = not self._values or (self._values[0] in INT64 and self._values[-1] in INT64)

    def __len__(self) -> int:
        return len(self._values)

    def splits(self) -> Sequence[Split]:
        return index_splits(len(self), at_least=256)

    def open(self, split: Split, at: SplitPosition) -> Reader:
        return IndexReader(self.fetch, split, at)

    def fetch(self, indices: Sequence[int]) -> Sequence[int]:
        first, step = self._values.start, self._values.step
        if isinstance(indices, range):
            return range(first + indices.start * step, first + indices.stop * step, indices.step * step)
        if self._in_int64:
            values: list[int] = (first + np.asarray(indices, np.int64) * step).tolist()
            return values
        return [first + int(i) * step for i in indices]


class ItemsSource:
    """Any sequence. A numpy array's rows are copies: an element changed in place leaves the user's array alone."""

    remote = False

    def __init__(self, node: FromItems) -> None:
        self._items: Any = node.items.value
        if not hasattr(self._items, "__len__") or not hasattr(self._items, "__getitem__") or _unordered(self._items):
            raise InvalidArgumentError(
                f"from_items got a {type(self._items).__name__}; it needs a sequence, such as list(items)"
            )

    def __len__(self) -> int:
        return len(self._items)

    def splits(self) -> Sequence[Split]:
        return index_splits(len(self), at_least=16)

    def open(self, split: Split, at: SplitPosition) -> Reader:
        return IndexReader(self.fetch, split, at)

    def fetch(self, indices: Sequence[int]) -> Sequence[Element]:
        items = self._items
        if isinstance(items, np.ndarray):
            return list(items[np.asarray(indices, np.intp)])
        if isinstance(items, list) and isinstance(indices, range) and indices.step == 1:
            return items[indices.start : indices.stop]
        return [items[i] for i in as_ints(indices)]  # list(map(...)) would end at a StopIteration of theirs


def _unordered(items: object) -> bool:
    return isinstance(items, (Mapping, set, frozenset))


def as_ints(indices: Any) -> Sequence[int]:
    """Return Python ints: a user's `__getitem__` need not accept numpy's."""
    ints: Sequence[int] = indices.tolist() if isinstance(indices, np.ndarray) else indices
    return ints


class GeneratorSource:
    """`function(split)` for each declared split; a position is reached by running it again and discarding.

    `Split.start` is the place of the split in the declared list.
    """

    remote = False

    def __init__(self, node: FromGenerator) -> None:
        self._function, self._declared = node.function, node.splits

    def splits(self) -> Sequence[Split]:
        return [Split(start=i, stop=i + 1) for i in range(len(self._declared))]

    def open(self, split: Split, at: SplitPosition) -> Reader:
        function = self._function.resolve()
        declared = self._declared[split.start]
        without = len(self._declared) == 1 and declared is None and _takes_nothing(function)
        made = function() if without else function(declared)
        if not hasattr(made, "__iter__") and not hasattr(made, "__getitem__"):
            raise InvalidPipelineError(
                f"from_generator's function returned a {type(made).__name__}, which cannot be iterated over; it must "
                "yield elements, or return something that gives them"
            )
        return GeneratorReader(iter(made), at)


def _takes_nothing(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return True
    except ValueError:  # a builtin without a signature
        return False
    return False


class GeneratorReader:
    def __init__(self, elements: Iterator[Element], at: SplitPosition) -> None:
        self._elements = elements
        self._discard = at.index
        self._failure: Exception | None = None

    def read(self, want: int) -> Records:
        if self._failure is not None:
            # A generator that raised has ended; asking it again would make the failure look like the end of the split.
            raise self._failure
        found: list[Element] = []
        try:
            while self._discard:
                self._discard -= 1
                next(self._elements)
            for element in islice(self._elements, want):
                found.append(element)  # noqa: PERF402 - list() would lose what came before a failure
        except StopIteration:
            self._discard = 0
        except Exception as failure:
            self._failure = failure
            if not found:
                raise
        return Records(found)

    def close(self) -> None:
        close = getattr(self._elements, "close", None)
        if close is not None:
            close()


class TorchSource:
    """A map-style dataset: `len(dataset)`, `dataset[i]` or `dataset.__getitems__([i, ...])`. Tensors become numpy."""

    remote = False

    def __init__(self, node: FromTorch) -> None:
        self._dataset: Any = node.dataset.value
        if not hasattr(self._dataset, "__len__") or not hasattr(self._dataset, "__getitem__"):
            raise InvalidArgumentError(
                f"from_torch got a {type(self._dataset).__name__} without __len__ or __getitem__; "
                "an iterable dataset is read by from_generator(lambda: iter(dataset))"
            )

    def __len__(self) -> int:
        return len(self._dataset)

    def splits(self) -> Sequence[Split]:
        return index_splits(len(self), at_least=16)

    def open(self, split: Split, at: SplitPosition) -> Reader:
        return IndexReader(self.fetch, split, at)

    def fetch(self, indices: Sequence[int]) -> Sequence[Element]:
        dataset = self._dataset
        if hasattr(dataset, "__getitems__"):
            elements = dataset.__getitems__(list(as_ints(indices)))
            if len(elements) != len(indices):
                raise ValueError(
                    f"{type(dataset).__name__}.__getitems__ gave {len(elements)} elements for {len(indices)} indices"
                )
        else:
            elements = [dataset[i] for i in as_ints(indices)]
        return tensors_to_numpy(elements)


def tensors_to_numpy(elements: Sequence[Element]) -> Sequence[Element]:
    """Return elements with a numpy array in the place of each torch tensor."""
    # Elements hold tensors only if something has imported torch: this module need not.
    torch = sys.modules.get("torch")
    if torch is None:
        return elements
    return [_without_tensors(element, torch) for element in elements]


def _without_tensors(element: Element, torch: Any) -> Element:
    if isinstance(element, torch.Tensor):
        return _to_numpy(element, torch)
    if isinstance(element, dict):
        return rebuild_like(element, [_without_tensors(value, torch) for value in element.values()])
    if isinstance(element, (list, tuple)) and not _is_vector(element):
        return rebuild_like(element, [_without_tensors(value, torch) for value in element])
    return element


def _is_vector(values: Sequence[Any]) -> bool:
    """Tell token ids and the like from structure: thousands of numbers must not be looked at one by one."""
    return len(values) > LONGEST_STRUCTURE and isinstance(values[0], (int, float, str, bytes))


def _to_numpy(tensor: Any, torch: Any) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes  # type: ignore[import-not-found,unused-ignore]  # numpy's bfloat16; torch users who need it have it

        array: np.ndarray[Any, Any] = tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    else:
        array = tensor.numpy()
    # A tensor that is part of a larger one (a TensorDataset's row) would let an in-place change reach the dataset.
    part_of_more = tensor.untyped_storage().nbytes() > array.nbytes
    return array.copy() if part_of_more else array
