"""Feature transforms, declared: records that name their inputs, their output and their parameters, and hold no code.

Each checks itself when it is made. What they mean is written in `kernels/` and in `docs/features.md`; how a record is
carried out, in `runtime/ops/features.py`. As JSON or TOML, one is a table with its `op` and its fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from penstock.core.errors import InvalidArgumentError, choice
from penstock.core.records import UserRecord
from penstock.graph.fields import defaults_of

LARGEST, SMALLEST = 2**63 - 1, -(2**63)
Plain = bool | int | float | str
NAMING_INPUTS = ("input", "other", "features", "offset", "file", "row")
"""The fields of transforms that name features which are read."""


class FeatureTransform(UserRecord, frozen=True, kw_only=True):
    """Base of all: makes the feature `out` of others."""

    OP: ClassVar[str]

    out: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the features that it reads."""
        raise TypeError(f"{type(self).__name__} does not say what it reads")

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the features that it makes."""
        return (self.out,)

    @property
    def work(self) -> tuple[object, ...]:
        """Return what it does, whichever features it reads and makes: equal for those that differ in nothing else."""
        own = (name for name in self.__struct_fields__ if name != "out" and name not in NAMING_INPUTS)
        # By their texts: 0.0 equals -0.0, and gives something else.
        return (self.OP, len(self.inputs), *(repr(getattr(self, name)) for name in own))

    def __post_init__(self) -> None:
        for name in (*self.inputs, *self.outputs):
            if not isinstance(name, str) or not name or "\0" in name:
                raise InvalidArgumentError(f"{self.OP}: {name!r} is no name of a feature; it is a text")
        self.check()

    def check(self) -> None:
        """Refuse parameters that mean nothing."""

    def _whole(self, name: str, least: int = SMALLEST, most: int = LARGEST) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise InvalidArgumentError(f"{self.OP}: {name}={value!r} must be a whole number from {least} to {most}")

    def _finite(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise InvalidArgumentError(f"{self.OP}: {name}={value!r} must be a finite number")

    def _choice(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise choice(f"{self.OP}: {name}", getattr(self, name), list(allowed))


class OfOne(FeatureTransform, frozen=True):
    """Base of those that read one feature."""

    input: str

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input,)


class OfTwo(FeatureTransform, frozen=True):
    """Base of those that read two features."""

    input: str
    other: str

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input, self.other)


class Bucketize(OfOne, frozen=True, kw_only=True):
    """The number of the bucket that a value lies in: bucket i is above `borders[i - 1]`, up to `borders[i]`.

    A border that stands twice makes a bucket of that value alone. NaN lies in bucket 0. Of a list each item is put into
    its bucket. With several tuples of borders, a number becomes a list with a bucket of each, counted on from those
    before.
    """

    OP: ClassVar[str] = "Bucketize"

    borders: tuple[float, ...] | tuple[tuple[float, ...], ...]

    def check(self) -> None:
        for borders in self.border_sets:
            if not borders or any(isinstance(b, (bool, str)) or not math.isfinite(b) for b in borders):
                raise InvalidArgumentError(f"Bucketize: borders={borders!r} must be one finite number, or more")
            if any(one > other for one, other in pairwise(borders)):
                raise InvalidArgumentError(f"Bucketize: borders={borders!r:.200} must not fall; sort them")
            if any(one == other for one, other in zip(borders, borders[2:])):
                raise InvalidArgumentError(f"Bucketize: a border of {borders!r:.200} stands three times; twice at most")

    @property
    def border_sets(self) -> tuple[tuple[float, ...], ...]:
        """Return the borders, as one tuple or more."""
        nested = bool(self.borders) and all(isinstance(part, tuple) for part in self.borders)
        return self.borders if nested else (self.borders,)  # type: ignore[return-value]


class SigridHash(OfOne, frozen=True, kw_only=True):
    """Ids as salted hashes from 0 to `max_value` - 1."""

    OP: ClassVar[str] = "SigridHash"

    salt: int = 0
    max_value: int

    def check(self) -> None:
        self._whole("salt")
        self._whole("max_value", 1)


class FirstX(OfOne, frozen=True, kw_only=True):
    """The first `x` items of each list, or, by score, the `x` of the highest weights, in the list's order."""

    OP: ClassVar[str] = "FirstX"

    x: int
    by: Literal["position", "score"] = "position"

    def check(self) -> None:
        self._whole("x", 0)
        self._choice("by", ("position", "score"))


_ScoreMode: TypeAlias = Literal[
    "has_id_overlap",
    "id_overlap_count",
    "get_max_count",
    "jaccard",
    "cosine",
    "score_sum",
    "score_min",
    "score_max",
]
_SCORE_MODES: tuple[str, ...] = get_args(_ScoreMode)


class ComputeScore(OfTwo, frozen=True, kw_only=True):
    """How alike two lists of ids are, as a number."""

    OP: ClassVar[str] = "ComputeScore"

    mode: _ScoreMode

    def check(self) -> None:
        self._choice("mode", _SCORE_MODES)


class EnumerateIds(OfOne, frozen=True, kw_only=True):
    """Lists with each item's position, from 0, as its weight. Its op is `Enumerate`."""

    OP: ClassVar[str] = "Enumerate"


class PositiveModulus(OfOne, frozen=True, kw_only=True):
    """The remainders of whole numbers, which are never negative."""

    OP: ClassVar[str] = "PositiveModulus"

    divisor: int

    def check(self) -> None:
        self._whole("divisor", 1)


class IdListTransform(OfTwo, frozen=True, kw_only=True):
    """The items of a list whose ids stand in the other list too; with `distinct`, the first of each id."""

    OP: ClassVar[str] = "IdListTransform"

    distinct: bool = False


class BoxCox(OfOne, frozen=True, kw_only=True):
    """The power transform ((x + lambda2) ** lambda1 - 1) / lambda1, or the logarithm where lambda1 is 0."""

    OP: ClassVar[str] = "BoxCox"

    lambda1: float
    lambda2: float = 0.0

    def check(self) -> None:
        self._finite("lambda1", "lambda2")


class Logit(OfOne, frozen=True, kw_only=True):
    """The logarithm of the odds of a probability, which is kept `epsilon` away from 0 and 1."""

    OP: ClassVar[str] = "Logit"

    epsilon: float = 1e-6

    def check(self) -> None:
        self._finite("epsilon")
        if not 1e-7 <= self.epsilon < 0.5:
            raise InvalidArgumentError(f"Logit: epsilon={self.epsilon} must be at least 1e-7 and less than 0.5")


class MapId(OfOne, frozen=True, kw_only=True):
    """Ids as others: by `mapping`, pairs of an id and what it becomes, or by `table`, which is read round and round.

    What is not in `mapping` becomes `default`, or is left out with `drop`. By `table` an id becomes `table[id % len]`,
    and a negative one 0.
    """

    OP: ClassVar[str] = "MapId"

    mapping: tuple[tuple[int, int], ...] = ()
    table: tuple[int, ...] = ()
    default: int = 0
    drop: bool = False

    def check(self) -> None:
        self._whole("default")
        if bool(self.mapping) == bool(self.table):
            raise InvalidArgumentError("MapId takes either mapping or table, with at least one entry")
        if self.table and (self.drop or self.default):
            raise InvalidArgumentError("MapId: default and drop are for a mapping; a table has an entry for each id")
        numbers = [number for pair in self.mapping for number in pair] + list(self.table)
        if not all(isinstance(number, int) and SMALLEST <= number <= LARGEST for number in numbers):
            raise InvalidArgumentError("MapId: ids are whole numbers of 64 bits")
        if len({id for id, _ in self.mapping}) < len(self.mapping):
            raise InvalidArgumentError("MapId: an id stands twice in mapping")


class GetLocalHour(OfOne, frozen=True, kw_only=True):
    """The hour of the day, 0 to 23, of seconds since 1970, in a zone `offset_s` ahead of UTC.

    With `offset`, a feature of whole numbers says how far ahead each row's zone is.
    """

    OP: ClassVar[str] = "GetLocalHour"

    offset_s: int = 0
    offset: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input,) if self.offset is None else (self.input, self.offset)

    def check(self) -> None:
        self._whole("offset_s")
        if self.offset is not None and self.offset_s:
            raise InvalidArgumentError("GetLocalHour takes either offset_s or offset")


class NGram(FeatureTransform, frozen=True):
    """Ids that follow each other, as one: of a list, or of several features.

    Of one list each `n` items that follow each other are a window, and all items where there are fewer. A window
    becomes its salted hash, or with `form="flat"` its ids. With `vocabularies`, one for each of several features, a row
    becomes their places there as the digits of one number, the first feature's lowest; what is in no vocabulary has
    place 0.
    """

    OP: ClassVar[str] = "NGram"

    features: tuple[str, ...]
    n: int = 2
    form: Literal["hash", "flat"] = "hash"
    salt: int = 0
    vocabularies: tuple[tuple[int, ...], ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.features

    def check(self) -> None:
        self._whole("n", 1)
        self._whole("salt")
        self._choice("form", ("hash", "flat"))
        if not isinstance(self.features, tuple) or len(self.features) != max(1, len(self.vocabularies)):
            raise InvalidArgumentError(
                f"NGram: features={self.features!r} must be a tuple of one list, or of a feature for each vocabulary"
            )
        for vocabulary in self.vocabularies:
            if not vocabulary or len(set(vocabulary)) < len(vocabulary):
                raise InvalidArgumentError("NGram: a vocabulary is a tuple of at least one id, and none of them twice")
        if math.prod(map(len, self.vocabularies)) > LARGEST:
            raise InvalidArgumentError("NGram: there are more combinations than numbers of 64 bits; map ids first")


class Onehot(OfOne, frozen=True, kw_only=True):
    """In which of `count` equal parts of `low` to `high` a number lies.

    A row has a list of `count` numbers, of which one is 1, and none where it lies outside; with `form="index"`, a list
    with the part's number, or an empty one.
    """

    OP: ClassVar[str] = "Onehot"

    low: float
    high: float
    count: int
    form: Literal["vector", "index"] = "vector"

    def check(self) -> None:
        self._finite("low", "high")
        self._whole("count", 1, 1 << 31)
        self._choice("form", ("vector", "index"))
        if not self.low < self.high or not math.isfinite(self.high - self.low):
            raise InvalidArgumentError(f"Onehot: low={self.low} must be less than high={self.high}")


class Clamp(OfOne, frozen=True, kw_only=True):
    """Numbers no less than `low` and no more than `high`; NaN stays."""

    OP: ClassVar[str] = "Clamp"

    low: float
    high: float

    def check(self) -> None:
        for value in (self.low, self.high):
            if isinstance(value, (bool, str)) or math.isnan(value):
                raise InvalidArgumentError(f"Clamp: {value!r} is no bound; it is a number")
        if self.low > self.high:
            raise InvalidArgumentError(f"Clamp: low={self.low} must not be more than high={self.high}")


class Cartesian(OfTwo, frozen=True, kw_only=True):
    """An id for each pair of ids of two lists, the first list's outermost; at most `limit` of them a row."""

    OP: ClassVar[str] = "Cartesian"

    limit: int

    def check(self) -> None:
        self._whole("limit", 1, 1 << 31)


class OfRows(FeatureTransform, frozen=True):
    """Base of what reads two columns that say which row it is."""

    file: str
    row: str

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.file, self.row)


class Sampling(OfRows, frozen=True, kw_only=True):
    """Leaves out rows: kept is a share `rate`, by a hash of the seed and two columns that say which row it is.

    It makes no feature. It changes how many rows there are, and all columns of the batch lose the same.
    """

    OP: ClassVar[str] = "Sampling"

    rate: float
    seed: int = 0
    out: str = ""

    @property
    def outputs(self) -> tuple[str, ...]:
        return ()

    def check(self) -> None:
        if self.out:
            raise InvalidArgumentError(f"Sampling makes no feature, so that out={self.out!r} names none")
        self._whole("seed")
        self._finite("rate")
        if not 0 <= self.rate <= 1:
            raise InvalidArgumentError(f"Sampling: rate={self.rate} must be from 0 to 1")


class OfNamed(FeatureTransform, frozen=True):
    """Base of what is registered under a name."""

    name: str
    features: tuple[str, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.features


class CustomTransform(OfNamed, frozen=True, kw_only=True):
    """A transform that an installed package has registered under a name, with its parameters."""

    OP: ClassVar[str] = "Custom"

    parameters: tuple[tuple[str, Plain], ...] = ()

    def check(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidArgumentError(f"Custom: name={self.name!r} must be a name that is registered")
        if not isinstance(self.features, tuple) or not self.features:
            raise InvalidArgumentError("Custom: features must be a tuple of the features that it reads")


BY_OP: dict[str, type[FeatureTransform]] = {
    cls.OP: cls
    for cls in (
        *(Bucketize, SigridHash, FirstX, ComputeScore, EnumerateIds, PositiveModulus, IdListTransform, BoxCox, Logit),
        *(MapId, GetLocalHour, NGram, Onehot, Clamp, Cartesian, Sampling, CustomTransform),
    )
}
"""Every transform, by what it is called in JSON and TOML."""


def transform_from_plain(plain: Mapping[str, Any]) -> FeatureTransform:
    """Return the transform that a table of JSON or TOML describes.

    >>> transform_from_plain({"op": "FirstX", "input": "f7", "out": "f7_10", "x": 10})
    FirstX(input='f7', out='f7_10', x=10, by='position')
    """
    given = dict(plain)
    op = given.pop("op", None)
    cls = BY_OP.get(op) if isinstance(op, str) else None
    if cls is None:
        raise choice("op", op, sorted(BY_OP))
    names = cls.__struct_fields__
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise InvalidArgumentError(f"{op} has no {', '.join(map(repr, unknown))}; it has {', '.join(names)}")
    try:
        return cls(**{name: _as_tuples(value) for name, value in given.items()})
    except TypeError as error:
        raise InvalidArgumentError(f"{op}: {str(error).partition('() ')[2] or error}") from None


def transform_to_plain(transform: FeatureTransform) -> dict[str, Any]:
    """Return a transform as a table of JSON or TOML; what is at its default is left out.

    >>> transform_to_plain(FirstX("f7", out="f7_10", x=10))
    {'op': 'FirstX', 'input': 'f7', 'out': 'f7_10', 'x': 10}
    """
    plain: dict[str, Any] = {"op": transform.OP}
    defaults = defaults_of(type(transform))
    for name in transform.__struct_fields__:
        value = getattr(transform, name)
        if name not in defaults or value != defaults[name]:
            plain[name] = _as_lists(value)
    return plain


def _as_tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((_whole_if_text(key), _as_tuples(part)) for key, part in value.items())
    return tuple(map(_as_tuples, value)) if isinstance(value, (list, tuple)) else value


def _whole_if_text(key: Any) -> Any:
    # Keys of JSON and TOML are texts: {"7": 1} is a mapping of ids.
    return int(key) if isinstance(key, str) and key.lstrip("-").isdigit() else key


def _as_lists(value: Any) -> Any:
    return list(map(_as_lists, value)) if isinstance(value, tuple) else value
