"""The transforms of the representative session in whole-array calls of numpy and torch, as their users write them.

Each takes and gives numbers, or lists as (values, offsets). Lists of up to five ids, which is what the session
compares, become rows of five, so that all pairs are looked at in one call. Nulls are computed as zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from penstock.graph import transforms as tr

MUL = 0x9DDFEA08EB382D69
WORD = (1 << 64) - 1
FEW = 5
NOTHING = -(2**63)  # no id of the data


class NumpyArrays:
    """Words are uint64, as numpy has them."""

    xp: Any = np

    @staticmethod
    def words(ids: Any) -> Any:
        return ids.view(np.uint64)

    @staticmethod
    def ids(words: Any) -> Any:
        return words.view(np.int64)

    @staticmethod
    def shifted(word: Any, by: int) -> Any:
        return word >> np.uint64(by)

    @staticmethod
    def risen(word: Any, by: int) -> Any:
        return word << np.uint64(by)

    @staticmethod
    def constant(number: int) -> Any:
        return np.uint64(number & WORD)

    @staticmethod
    def arange(count: int) -> Any:
        return np.arange(count)

    @staticmethod
    def repeated(values: Any, counts: Any) -> Any:
        return np.repeat(values, counts)

    @staticmethod
    def least(values: Any, most: int) -> Any:
        return np.minimum(values, most)

    @staticmethod
    def full(shape: tuple[int, ...], value: int) -> Any:
        return np.full(shape, value, np.int64)

    @staticmethod
    def bucketize(values: Any, borders: tuple[float, ...]) -> Any:
        return np.searchsorted(np.array(borders, np.float32), values)

    @staticmethod
    def kept(values: Any, low: float, high: float) -> Any:
        return np.clip(values, np.float32(low), np.float32(high))

    @staticmethod
    def remainder(values: Any, divisor: int) -> Any:
        return np.mod(values, divisor)

    @staticmethod
    def whole(values: Any) -> Any:
        return values.astype(np.int64)

    @staticmethod
    def part(count: Any, of: Any) -> Any:
        return (count / np.maximum(of, 1)).astype(np.float32)


class TorchArrays(NumpyArrays):
    """Words are int64: torch has no arithmetic on unsigned ones."""

    xp: Any = torch

    @staticmethod
    def words(ids: Any) -> Any:
        return ids

    @staticmethod
    def ids(words: Any) -> Any:
        return words

    @staticmethod
    def shifted(word: Any, by: int) -> Any:
        return (word >> by) & ((1 << (64 - by)) - 1)

    @staticmethod
    def risen(word: Any, by: int) -> Any:
        return word << by

    @staticmethod
    def constant(number: int) -> Any:
        number &= WORD
        return number - (1 << 64) if number >> 63 else number

    @staticmethod
    def arange(count: int) -> Any:
        return torch.arange(count)

    @staticmethod
    def repeated(values: Any, counts: Any) -> Any:
        return torch.repeat_interleave(values, counts)

    @staticmethod
    def least(values: Any, most: int) -> Any:
        return values.clamp(max=most)

    @staticmethod
    def full(shape: tuple[int, ...], value: int) -> Any:
        return torch.full(shape, value, dtype=torch.int64)

    @staticmethod
    def bucketize(values: Any, borders: tuple[float, ...]) -> Any:
        return torch.bucketize(values, torch.tensor(borders))

    @staticmethod
    def kept(values: Any, low: float, high: float) -> Any:
        return values.clamp(low, high)

    @staticmethod
    def remainder(values: Any, divisor: int) -> Any:
        return torch.remainder(values, divisor)

    @staticmethod
    def whole(values: Any) -> Any:
        return values.long()

    @staticmethod
    def part(count: Any, of: Any) -> Any:
        return count.float() / of.clamp(min=1)


class SessionArrays:
    """Applies transforms to features, one after the other, with the arrays of one library."""

    def __init__(self, arrays: type[NumpyArrays]) -> None:
        self.on = arrays

    def run(self, transforms: Iterable[tr.FeatureTransform], features: dict[str, Any]) -> dict[str, Any]:
        """Return the features with what the transforms make of them."""
        made = dict(features)
        with np.errstate(over="ignore"):
            for each in transforms:
                made[each.out] = self._applied(each, [made[name] for name in each.inputs])
        return made

    def _applied(self, each: Any, given: list[Any]) -> Any:
        match each:
            case tr.FirstX():
                return self.first(*given[0], each.x)
            case tr.SigridHash():
                return self._of_values(given[0], lambda ids: self.hashed(ids, each.salt, each.max_value))
            case tr.PositiveModulus():
                return self._of_values(given[0], lambda ids: self.on.remainder(ids, each.divisor))
            case tr.Bucketize():
                return self.on.bucketize(given[0], each.borders)
            case tr.Clamp():
                return self.on.kept(given[0], each.low, each.high)
            case tr.BoxCox():
                shifted = self.on.kept(given[0] + each.lambda2, 1e-6, float("inf"))
                return self.on.xp.log(shifted) if not each.lambda1 else (shifted**each.lambda1 - 1) / each.lambda1
            case tr.Logit():
                kept = self.on.kept(given[0], each.epsilon, 1 - each.epsilon)
                return self.on.xp.log(kept / (1 - kept))
            case tr.NGram():
                return self.pairs_hashed(*given[0], each.salt)
            case tr.Cartesian():
                return self.cartesian(*given[0], *given[1], each.limit)
            case tr.IdListTransform():
                return self.intersect(given[0], given[1])
            case tr.ComputeScore():
                return self.jaccard(given[0], given[1])
        raise TypeError(f"the session has a {each.OP}, which is not written for the peers")

    def _of_values(self, feature: Any, compute: Any) -> Any:
        return (compute(feature[0]), feature[1]) if isinstance(feature, tuple) else compute(feature)

    def mixed(self, word: Any) -> Any:
        on = self.on
        word = (~word) + on.risen(word, 21)
        word = word ^ on.shifted(word, 24)
        word = word + on.risen(word, 3) + on.risen(word, 8)
        word = word ^ on.shifted(word, 14)
        word = word + on.risen(word, 2) + on.risen(word, 4)
        word = word ^ on.shifted(word, 28)
        return word + on.risen(word, 31)

    def combined(self, upper: Any, lower: Any) -> Any:
        mul = self.on.constant(MUL)
        a = (lower ^ upper) * mul
        a = a ^ self.on.shifted(a, 47)
        b = (upper ^ a) * mul
        return (b ^ self.on.shifted(b, 47)) * mul

    def hashed(self, ids: Any, salt: int, most: int) -> Any:
        word = self.combined(self.on.constant(salt), self.mixed(self.on.words(ids)))
        return self.on.remainder(self.on.ids(word), most)

    def _offsets(self, counts: Any) -> Any:
        offsets = self.on.full((len(counts) + 1,), 0)
        offsets[1:] = counts.cumsum(0)
        return offsets

    def first(self, values: Any, offsets: Any, x: int) -> Any:
        kept = self.on.least(offsets[1:] - offsets[:-1], x)
        made = self._offsets(kept)
        places = self.on.arange(int(made[-1])) + self.on.repeated(offsets[:-1] - made[:-1], kept)
        return values[places], made

    def pairs_hashed(self, values: Any, offsets: Any, salt: int) -> Any:
        """Return a hash of each two ids that follow each other; of the only one, where there is one."""
        lengths = offsets[1:] - offsets[:-1]
        counts = self.on.whole(lengths > 0) + self.on.whole(lengths > 2) * (lengths - 2)
        made = self._offsets(counts)
        starts = self.on.arange(int(made[-1])) + self.on.repeated(offsets[:-1] - made[:-1], counts)
        scrambled = self.mixed(self.on.words(values))
        word = self.combined(self.on.constant(salt), scrambled[starts])
        two = self.on.repeated(lengths, counts) > 1
        word[two] = self.combined(word[two], scrambled[starts[two] + 1])
        return self.on.ids(word), made

    def cartesian(self, ones: Any, one_offsets: Any, others: Any, other_offsets: Any, limit: int) -> Any:
        lengths, widths = one_offsets[1:] - one_offsets[:-1], other_offsets[1:] - other_offsets[:-1]
        counts = self.on.least(lengths * widths, limit)
        made = self._offsets(counts)
        within = self.on.arange(int(made[-1])) - self.on.repeated(made[:-1], counts)
        width = self.on.repeated(widths, counts)
        left = self.mixed(self.on.words(ones))[self.on.repeated(one_offsets[:-1], counts) + within // width]
        right = self.mixed(self.on.words(others))[self.on.repeated(other_offsets[:-1], counts) + within % width]
        return self.on.ids(self.combined(left, right)), made

    def _padded(self, feature: Any) -> tuple[Any, Any]:
        """Return lists as rows of equal length, and which places in them are used."""
        values, offsets = feature
        lengths = offsets[1:] - offsets[:-1]
        used = self.on.arange(FEW)[None, :] < lengths[:, None]
        rows = self.on.full((len(lengths), FEW), NOTHING)
        rows[used] = values
        return rows, used

    def intersect(self, one: Any, other: Any) -> Any:
        rows, used = self._padded(one)
        others, other_used = self._padded(other)
        shared = ((rows[:, :, None] == others[:, None, :]) & other_used[:, None, :]).any(-1) & used
        return rows[shared], self._offsets(shared.sum(-1))

    def jaccard(self, one: Any, other: Any) -> Any:
        rows, used = self._padded(one)
        others, other_used = self._padded(other)
        there = ((rows[:, :, None] == others[:, None, :]) & other_used[:, None, :]).sum(-1)
        earlier = self.on.arange(FEW)[:, None] > self.on.arange(FEW)[None, :]
        before = ((rows[:, :, None] == rows[:, None, :]) & earlier).sum(-1)
        overlap = ((before < there) & used).sum(-1)
        return self.on.part(overlap, used.sum(-1) + other_used.sum(-1) - overlap)
