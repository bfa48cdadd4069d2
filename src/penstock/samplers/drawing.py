"""A sampler of the user's: which elements are read, in which order, and where it stands.

Items of the sampler become units, the elements of one output each. Every operator gives one output a unit, so all there
is to a checkpoint is where the sampler stood before the first unit not received.

Rules:

1. A sampler gives indices, or lists of indices: one kind throughout. A list is a unit. Indices are units one by one or,
   where the pipeline has a batch operator, as many of them as a batch has.
2. Each epoch is drawn by `iter(sampler)` anew, after `set_epoch(epoch)` if the sampler, or one it draws from, has that.
   A function is called with the epoch and returns what to iterate over.
3. A place is the sampler's own state, if it has `state_dict` and `load_state_dict` (or its iterator has), and how many
   items were drawn. Without a state of its own the items are drawn again and passed over; a checksum over them finds a
   sampler that does not give the same ones.
4. A sampler whose `__iter__` is a generator stands where the last epoch left it until the first item is drawn. Its own
   state is left out of a place before that: such an epoch is begun anew, by `set_epoch` and `iter`.
"""

from __future__ import annotations

import copy
import operator
import zlib
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Literal, TypeAlias, cast

import msgspec
import numpy as np

from penstock.core.checks import check_whole
from penstock.core.errors import InvalidArgumentError, StateMismatchError, never_the_end
from penstock.core.records import UserRecord

Unit: TypeAlias = tuple[int, ...]
StateHolder: TypeAlias = Literal["sampler", "iterator"]

DEFAULT_AHEAD = 64
DEEPEST = 4  # samplers that draw from samplers, as BatchSampler does
REFILL_AT = 0.75  # units are drawn several at a time, when so many of those allowed are left
_NONE_LEFT = object()


class Feed(UserRecord, frozen=True):
    """A sampler that says what a loader reads, and how many of its outputs may be ahead of the trainer.

    >>> Feed([2, 0, 1]).ahead
    64
    """

    sampler: Any
    """Gives indices, or lists of them, each epoch anew; or a function of the epoch that returns such a sampler."""
    ahead: int = DEFAULT_AHEAD

    def __post_init__(self) -> None:
        sampler = self.sampler
        check_whole("ahead", self.ahead, 1)
        if isinstance(sampler, (str, bytes)) or not (hasattr(sampler, "__iter__") or callable(sampler)):
            raise InvalidArgumentError(
                f"feed={sampler!r} must be a sampler (something that can be iterated over once an epoch and gives "
                "indices, or lists of them), or a function that takes the epoch and returns one"
            )
        if isinstance(sampler, Iterator):
            raise InvalidArgumentError(
                f"feed={type(sampler).__name__} can be iterated over only once; give a sampler, or a function that "
                "takes the epoch and returns an iterator"
            )

    def length(self, grouping: Grouping | None, lists: bool | None) -> int | None:
        """Return how many units an epoch has, where the sampler says; epochs are taken to be alike."""
        try:
            items = len(self.sampler)
        except TypeError:
            return None
        if grouping is None or (lists if lists is not None else hasattr(self.sampler, "batch_size")):
            return items
        return items // grouping.size if grouping.drop_last else -(-items // grouping.size)


class Grouping(msgspec.Struct, frozen=True, kw_only=True):
    """What the pipeline's batch operator says about units."""

    size: int
    drop_last: bool


class SamplerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sampler stands: before unit number `units` of its epoch."""

    units: int = 0
    items: int = 0
    checksum: int = 0
    lists: bool | None = None
    """Whether it gives lists; None: it has given nothing."""
    held_by: StateHolder | None = None
    state: Any = None

    def plain(self) -> dict[str, Any]:
        own: dict[str, Any] = {} if self.held_by is None else {self.held_by: copy.deepcopy(self.state)}
        return {
            "units": self.units,
            "items": self.items,
            "checksum": self.checksum,
            "lists": self.lists,
            **own,
        }

    @staticmethod
    def read(plain: Mapping[str, Any]) -> SamplerPlace:
        held_by: StateHolder | None = "sampler" if "sampler" in plain else "iterator" if "iterator" in plain else None
        return SamplerPlace(
            units=int(plain["units"]),
            items=int(plain["items"]),
            checksum=int(plain["checksum"]),
            lists=plain["lists"],
            held_by=held_by,
            state=None if held_by is None else plain[held_by],
        )


class Drawing:
    """One epoch of a sampler, from a place on."""

    def __init__(
        self, feed: Feed, *, epoch: int, grouping: Grouping | None, count: int, at: SamplerPlace | None = None
    ) -> None:
        """`count` is how many elements there are to be sampled."""
        self._grouping, self._count = grouping, count
        self._units = self._items = self._checksum = 0
        self.lists: bool | None = None if at is None else at.lists
        """Whether the sampler gives lists; None: it has given nothing."""
        self._error: BaseException | None = None
        try:
            self._begin(feed, epoch, at)
        except StopIteration as error:
            raise never_the_end(error, "the sampler") from error

    def _begin(self, feed: Feed, epoch: int, at: SamplerPlace | None) -> None:
        sampler = feed.sampler if hasattr(feed.sampler, "__iter__") else feed.sampler(epoch)
        start = SamplerPlace() if at is None else at
        _set_epoch(sampler, epoch)
        if start.held_by == "sampler":
            _loads(sampler, "the sampler").load_state_dict(copy.deepcopy(start.state))
        self._iterator: Iterator[Any] = iter(sampler)
        if start.held_by == "iterator":
            _loads(self._iterator, "the sampler's iterator").load_state_dict(copy.deepcopy(start.state))
        self._holder, self._held_by = _holder(sampler, self._iterator)
        if start.held_by is None:
            self._pass_over(start)
        self._units, self._items, self._checksum = start.units, start.items, start.checksum
        self._first: Unit | None = None
        self._first_place = self._beginning() if at is None else at
        self._first = self._draw()

    def _beginning(self) -> SamplerPlace:
        if self._held_by == "sampler" and isinstance(self._iterator, Generator):
            return SamplerPlace()
        return self.place()

    def place(self) -> SamplerPlace:
        """Return where the sampler stands: before the next unit."""
        if self._first is not None:
            return self._first_place
        state = None if self._holder is None else copy.deepcopy(self._holder.state_dict())
        return SamplerPlace(
            units=self._units,
            items=self._items,
            checksum=self._checksum,
            lists=self.lists,
            held_by=self._held_by,
            state=state,
        )

    def draw(self) -> Unit | None:
        """Return the next unit; None: there is none."""
        if self._first is not None:
            unit, self._first = self._first, None
            return unit
        return self._draw()

    def _draw(self) -> Unit | None:
        if self._error is not None:
            raise self._error  # an iterator that has raised looks ended the next time
        try:
            unit = self._next_unit()
        except StopIteration as error:  # not of the iterator, whose end `next` has met
            self._error = never_the_end(error, "the sampler")
            raise self._error from error
        except BaseException as error:
            self._error = error
            raise
        self._units += unit is not None
        return unit

    def _next_unit(self) -> Unit | None:
        grouping = self._grouping
        rows: list[int] = []
        while (item := next(self._iterator, _NONE_LEFT)) is not _NONE_LEFT:
            indices = self._indices(item)
            self._count_item(indices)
            if not self.lists:
                rows += indices
                if grouping is None or len(rows) == grouping.size:
                    return tuple(rows)
            elif grouping is not None and len(indices) > grouping.size:
                raise InvalidArgumentError(
                    f"the sampler gave a list of {len(indices)} indices for batch({grouping.size}): leave the batch "
                    "operator out, so that each list is a batch, or give it the length of the longest list"
                )
            else:
                return indices
        return None if not rows or grouping is None or grouping.drop_last else tuple(rows)

    def _indices(self, item: Any) -> Unit:
        single = None if type(item) is list else _index(item)
        if self.lists is None:
            self.lists = single is None
        if self.lists is not (single is None):
            raise InvalidArgumentError("the sampler gave both indices and lists of indices; it must give one kind")
        found = _listed(item) if single is None else (single,)
        if not found or None in found:
            raise InvalidArgumentError(
                f"the sampler gave {item!r}; it must give indices, or lists of at least one index"
            )
        if min(found) < 0 or max(found) >= self._count:
            wrong = next(index for index in found if not 0 <= index < self._count)
            raise InvalidArgumentError(
                f"the sampler gave index {wrong}, and the source has {self._count} elements: 0 to {self._count - 1}"
            )
        return found

    def _count_item(self, indices: Unit) -> None:
        self._items += 1
        self._checksum = zlib.crc32(np.asarray(indices, np.int64).tobytes(), self._checksum)

    def _pass_over(self, at: SamplerPlace) -> None:
        while self._items < at.items and (item := next(self._iterator, _NONE_LEFT)) is not _NONE_LEFT:
            self._count_item(self._indices(item))
        if (self._items, self._checksum) != (at.items, at.checksum):
            raise StateMismatchError(
                f"the sampler did not give the same {at.items} items again that it had given when the state was saved, "
                "so where it stood cannot be found. It must give the same ones in the same epoch: seed it, for example "
                "with feed=lambda epoch: RandomSampler(data, generator=torch.Generator().manual_seed(epoch)), or give "
                "it state_dict() and load_state_dict()"
            )


class KeptUnits:
    """Units that were drawn and may be needed again, each with where the sampler stood before it."""

    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing
        self.first = drawing.place().units
        """The number of the first unit that is kept."""
        self._kept: deque[tuple[Unit, SamplerPlace]] = deque()
        self._end: SamplerPlace | None = None

    @property
    def next(self) -> int:
        """The number of the unit that is drawn next."""
        return self.first + len(self._kept)

    @property
    def ended(self) -> bool:
        return self._end is not None

    def draw(self) -> None:
        """Draw one more, if there is one."""
        place = self._drawing.place()
        unit = self._drawing.draw()
        if unit is None:
            self._end = place
        else:
            self._kept.append((unit, place))

    def forget(self, until: int) -> None:
        while self._kept and self.first < until:
            self._kept.popleft()
            self.first += 1

    def unit(self, number: int) -> Unit:
        return self._kept[number - self.first][0]

    def place(self, number: int) -> SamplerPlace:
        """Return where the sampler stood before a unit; after the last one for all beyond."""
        if number < self.next:
            return self._kept[number - self.first][1]
        return self._end or self._drawing.place()


def _listed(item: Any) -> Unit:
    # Samplers of batches give lists of plain numbers, for each of which the trainer would wait.
    if type(item) is list and set(map(type, item)) == {int}:
        return tuple(item)
    return tuple(cast(int, _index(each)) for each in _each(item))


def _each(item: Any) -> Any:
    if isinstance(item, (str, bytes, Mapping)) or not hasattr(item, "__iter__"):
        raise InvalidArgumentError(f"the sampler gave {item!r}; it must give indices, or lists of indices")
    return item.tolist() if hasattr(item, "tolist") else item


def _index(item: Any) -> int | None:
    """Return an index, of Python, numpy or torch; None: it is something else."""
    if type(item) is int:
        return item
    if getattr(item, "ndim", 0) or isinstance(item, (bool, list, tuple)):
        return None
    try:
        return operator.index(item)
    except TypeError:
        return None


def _set_epoch(sampler: Any, epoch: int) -> None:
    for _ in range(DEEPEST):
        if sampler is None:
            return
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
        sampler = getattr(sampler, "sampler", None)


def _holder(sampler: Any, iterator: Any) -> tuple[Any, StateHolder | None]:
    """Return what holds the sampler's state: its iterator, itself, or nobody."""
    if _is_stateful(iterator):
        return iterator, "iterator"
    return (sampler, "sampler") if _is_stateful(sampler) else (None, None)


def _is_stateful(holder: Any) -> bool:
    return callable(getattr(holder, "state_dict", None)) and callable(getattr(holder, "load_state_dict", None))


def _loads(holder: Any, what: str) -> Any:
    if not callable(getattr(holder, "load_state_dict", None)):
        raise StateMismatchError(
            f"the state has the state of a sampler, and {what} ({type(holder).__name__}) has no load_state_dict(); "
            "give the sampler it was saved with"
        )
    return holder
