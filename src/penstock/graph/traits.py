"""What others must know of an operator, in words: passes, the runtime and the service ask it, and list no operators.

An operator says all of it in its `TRAITS`; where a parameter decides, its property `traits` does. No trait has a
default, because what is right for one operator is wrong for the next. What takes more than a word (how many elements
there are, which columns) is a method of `Node`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from functools import cache
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

Length: TypeAlias = int | None
"""A number of elements; None: data or functions decide."""

Columns: TypeAlias = tuple[str, ...] | None
"""Names in the order of the keys; None: any, not known."""


class Flow(Enum):
    """How elements come through an operator, and with them the order that a shuffle asks for."""

    STEP = "step"
    """It works on each element by itself, and the result stands in its place or is left out. It can be fused."""
    THROUGH = "through"
    """Elements come through in order and states too, so that passes may move or remove it."""
    IN_PLACE = "in place"
    """Each output stands in the place of one input, but the operator has a state, or means something where it is."""
    CHILDREN = "children"
    """Some outputs for each input. A shuffle above permutes the inputs, and has to permute the outputs all the same."""
    OWN = "own"
    """It counts, groups, orders or joins. A shuffle above does not reach what is below."""


class GroupedBy(Enum):
    """What makes a group, and so what is left of a stream that ends inside one."""

    ORDER = "order"
    """Elements that follow each other: `size` of them are one output."""
    ROWS = "rows"
    """Rows of batches: a batch may lie in two groups."""
    KEY = "key"
    """Elements of one key: they wait for each other."""


class RoundGrouping(Enum):
    """What the consumers of coordinated reads get of a regrouping operator in one step."""

    ANY = "any"
    """Outputs that follow each other: they are alike anyway."""
    TOGETHER = "together"
    """Outputs that are made together, so that they are alike."""
    BUCKETS = "buckets"
    """The same, of one bucket: whatever regroups them afterwards would mix buckets."""


class OnWorkers(Enum):
    """What becomes of an operator where each of several workers has a part of the elements."""

    RUNS = "runs"
    """It means the same on a part as on everything."""
    REFUSED = "refused"
    """It means something only over all parts together."""
    LEFT_TO_READER = "left to the reader"
    """The reader alone can do it: it is not in what workers run."""


class Inputs(Enum):
    """What a stream needs of an operator's inputs."""

    ANY = "any"
    """With something of one input there is something to give."""
    ALL = "all"
    """Without something of each input there is nothing to give."""
    ALL_OR_WRONG = "all, or wrong"
    """The same, and it is no honest end: it would mix in other proportions, or run through empty passes for ever."""


class Regroups(msgspec.Struct, frozen=True, kw_only=True):
    """An operator makes the groups that a reader gets; what is short at the end of a stream is its rest.

    It has a parameter `drop_last`, and its stage keeps the rest when it is asked to.
    """

    by: GroupedBy
    rounds: RoundGrouping


class Traits(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Everything that others must know of an operator."""

    flow: Flow
    may_skip: bool
    """It may leave out an element because of what is in it."""
    regroups: Regroups | None
    only_counts: bool
    """It hands elements on and counts them: it is not worth a thread."""
    holds_back: bool
    """After an output it may hold elements, or a part of one: its state says from where to read the same again."""
    order_bound: bool
    """What it gives next depends on the order in which elements arrived: it cannot be restored unless they arrive so
    again."""
    on_workers: OnWorkers
    inputs: Inputs
    same_columns: bool
    """The keys that come in go out, and what becomes of one does not depend on the others."""
    threads: int | None
    """How many threads its work is asked to use; None: as many as measurements say; 0: it has no work for any."""

    @property
    def fuses(self) -> bool:
        """Whether it can be a step of a fused operator."""
        return self.flow is Flow.STEP

    @property
    def one_to_one(self) -> bool:
        """Whether each output depends on one input alone and stands in its place: a shuffle may move across it."""
        return self.flow is Flow.STEP and not self.may_skip

    @property
    def passes_states(self) -> bool:
        """Whether groups and states below come through it one for one, or are left out."""
        return self.flow in (Flow.STEP, Flow.THROUGH)

    @property
    def keeps_order(self) -> bool:
        """Whether shuffling below is as good as shuffling above."""
        return self.flow in (Flow.STEP, Flow.THROUGH, Flow.IN_PLACE)

    @property
    def passes_order(self) -> bool:
        """Whether a shuffle above permutes the splits below."""
        return self.keeps_order or self.flow is Flow.CHILDREN


@cache
def varied(traits: Traits, **changes: Any) -> Traits:
    """Return the traits with some changed: for a property, which passes ask thousands of times."""
    return replace(traits, **changes)


def either(one: Columns, other: Iterable[str] | None) -> Columns:
    """Return the columns of both.

    >>> either(("a", "b"), ("b", "c")), either(None, ("a",))
    (('a', 'b', 'c'), None)
    """
    return None if one is None or other is None else tuple(dict.fromkeys((*one, *other)))
