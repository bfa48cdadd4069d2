"""The order of columns by a read log: features that are read together stand together, the most popular first.

Sessions read groups: all build on the model in production, and each takes some of the proposals to change it, of which
each brings a few features or a few dozen. What a session reads is then as many runs of columns as it takes groups, if a
group lies in one piece. A log does not tell groups, but who read each feature:

- Features that nearly the same sessions have read are a group. Not exactly the same: somebody leaves one feature out.
- Groups that only have numbers come before those that have lists. A number is a thousandth of a list: what is not read
  of many small columns is little and is read along, but a small column that stands alone between unread lists costs a
  read of its own.
- Then the most popular group comes first.

Groups are found around leaders, and not by what lies between any two of them: that is one pass over features for each
group, and a group is as alike as is said.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from penstock.core.element import Array
from penstock.warehouse.read_log import LoggedRead

ALIKE = 0.8  # of the sessions that have read one of two features of a group, the share that has read both
AT_ONCE = 256  # signatures that are compared with all others by one product of matrices


def order_by_readers(reads: Sequence[LoggedRead], numbers: Collection[int] = ()) -> list[int]:
    """Return the features that were read, in the order in which their columns are best written.

    `numbers` are the features that are small.

    >>> sessions = (1, 2, 5, 8), (1, 5, 3, 9), (1, 2, 5, 8)
    >>> reads = [LoggedRead(at_s=0, features=features) for features in sessions]
    >>> order_by_readers(reads, numbers={1, 9})
    [1, 5, 2, 8, 9, 3]
    """
    features, read_by = _readers(reads)
    if not len(features):
        return []
    signatures, signature_of = np.unique(read_by, axis=0, return_inverse=True)
    signature_of = signature_of.ravel()
    popularity = signatures.sum(axis=1)
    group_of, leaders = _groups(signatures, np.bincount(signature_of))
    small = np.isin(features, np.fromiter(numbers, np.int64, len(numbers)))
    only_small = np.bincount(group_of[signature_of], ~small, len(leaders)) == 0
    group = group_of[signature_of]
    found = np.lexsort(
        [
            features,
            ~small,
            signature_of,
            -popularity[signature_of],
            group,
            -popularity[leaders][group],
            ~only_small[group],
        ]
    )
    ordered: list[int] = features[found].tolist()
    return ordered


def _readers(reads: Sequence[LoggedRead]) -> tuple[Array, Array]:
    """Return the features that were read, and for each of them which sessions have read it."""
    counts = [len(read.features) for read in reads]
    flat = np.fromiter((feature for read in reads for feature in read.features), np.int64, sum(counts))
    features, place = np.unique(flat, return_inverse=True)
    read_by = np.zeros((len(features), len(reads)), np.bool_)
    read_by[place, np.repeat(np.arange(len(reads)), counts)] = True
    return features, read_by


def _groups(signatures: Array, weights: Array) -> tuple[Array, Array]:
    """Return the group of each signature, and the signature that leads each group.

    The signature of most features leads, and takes those that are alike and have no group yet.
    """
    sets = signatures.astype(np.float32)
    sizes = sets.sum(axis=1)
    group_of = np.full(len(sets), -1)
    leaders: list[int] = []
    order = np.lexsort([np.arange(len(sets)), -sizes, -weights])
    for start in range(0, len(order), AT_ONCE):
        left = order[start:][group_of[order[start:]] < 0]
        block = left[: np.count_nonzero(group_of[order[start : start + AT_ONCE]] < 0)]
        shared = sets[block] @ sets[left].T
        alike = shared >= ALIKE * (sizes[block][:, None] + sizes[left] - shared)
        for leader, followers in zip(block.tolist(), alike):
            if group_of[leader] >= 0:
                continue
            taken = left[followers]
            group_of[taken[group_of[taken] < 0]] = len(leaders)
            leaders.append(leader)
    return group_of, np.array(leaders)
