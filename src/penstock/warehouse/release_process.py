"""A month of sessions over a table: the production model's features, and some of the proposals to change it.

A model is released in rounds. Engineers propose ideas, each a group of features that travels as one; jobs combine
proposals in permutations on top of the production model, as many as a job has room for; what wins is released, and
proposals come and go all the time. So a session's features are not drawn one by one.

Features are places here: first the dense ones that anybody reads in the month, then the sparse ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.core.element import Array

MONTH_DAYS = 30
NEW_SHARE = 0.3  # of the month's proposals are new in it, and as many are given up: the stock stays as it is
_MOST_TAKEN = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Who may read what in the month; times are shares of it."""

    proposal_of: Array
    """The proposal of each place; -1: the production model."""
    sizes: Array
    """How many features each proposal has."""
    liked: Array
    comes: Array
    """When each proposal comes; 0: it was there before."""
    goes: Array
    """When it is given up; 1: not in this month."""
    room: float
    """For how many features of proposals a job has room."""
    seed: int

    @property
    def came(self) -> Array:
        """When the feature at each place came; 0: it was there before."""
        return self._of_places(self.comes)

    @property
    def registered(self) -> Array:
        """An order of places by when they were registered, proposal after proposal; 0: before the month."""
        rank = np.zeros(len(self.comes))
        rank[np.argsort(self.comes, kind="stable")] = np.arange(1, len(self.comes) + 1)
        return self._of_places(np.where(self.comes > 0, rank, 0))

    def sessions(self, count: int) -> Array:
        """Return which places each session reads, a row each, spread over the month."""
        found = np.zeros((count, len(self.proposal_of)), np.bool_)
        for number in range(count):
            taken = np.append(self._taken(number, (number + 0.5) / count), True)  # the last: the production model's
            found[number] = taken[self.proposal_of]
        return found

    def _taken(self, number: int, time: float) -> Array:
        """Return which proposals a job takes: of those that there are, liked ones rather, until its room is filled."""
        rng = np.random.default_rng([self.seed, 7, number])
        wait = rng.exponential(size=len(self.liked)) / self.liked
        there = (self.comes <= time) & (time < self.goes)
        order = np.argsort(np.where(there, wait, np.inf), kind="stable")[: np.count_nonzero(there)]
        filled = np.cumsum(self.sizes[order])
        taken = np.zeros(len(self.liked), np.bool_)
        taken[order[filled - self.sizes[order] / 2 <= self.room]] = True
        return taken

    def _of_places(self, of_proposals: Array) -> Array:
        return np.append(of_proposals, 0)[self.proposal_of]


def production_share(used: float, by_all: float, popular: float, traffic: float) -> float:
    """Return which share of a session's bytes the production model has, if all proposals are equally liked.

    A session reads the share `used` of the bytes, all sessions together read `by_all`, and `popular` is the share from
    which so much of the traffic comes. Proposals are read by the same share of sessions each: the bytes between
    `popular` and `by_all`, which are proposals', tell it by the traffic that they have. There are always enough
    proposals to fill a session.

    >>> round(production_share(0.37, 0.60, 0.39, 0.8), 2)
    0.66
    """
    taken = min(_MOST_TAKEN, (1 - traffic) * used / (by_all - popular))
    production = (used - taken * by_all) / (1 - taken)
    least = (1 - (1 - NEW_SHARE) * by_all / used) / NEW_SHARE
    return min(1.0, max(0.0, least, production / used))


def draw_release(
    read: tuple[int, int],
    ever: tuple[int, int],
    *,
    production: float,
    proposal_features: float,
    liking: float,
    seed: int,
) -> Release:
    """Return a month in which a session reads so many dense and sparse features, of those that anybody reads.

    `production` is the production model's share of a session, `proposal_features` what a proposal brings on average,
    `liking` how unequally proposals are liked; 0: equally.
    """
    rng = np.random.default_rng([seed, 5])
    own = [min(round(production * part), there) for part, there in zip(read, ever)]
    left = np.concatenate([np.arange(own[0], ever[0]), np.arange(ever[0] + own[1], sum(ever))])
    sizes = rng.geometric(1 / proposal_features, len(left))
    sizes = sizes[: np.searchsorted(np.cumsum(sizes), len(left)) + 1]
    proposal_of = np.full(sum(ever), -1)
    proposal_of[rng.permutation(left)] = np.repeat(np.arange(len(sizes)), sizes)[: len(left)]
    sizes = np.bincount(proposal_of[left], minlength=len(sizes))
    order = rng.permutation(len(sizes))
    new, given_up = np.split(order, [round(NEW_SHARE * len(order))])
    comes, goes = np.zeros(len(sizes)), np.ones(len(sizes))
    comes[new] = rng.uniform(0, 1, len(new))
    gone = given_up[: len(new)]
    goes[gone] = rng.uniform(0, 1, len(gone))
    return Release(
        proposal_of=proposal_of,
        sizes=sizes,
        liked=np.exp(liking * rng.standard_normal(len(sizes))),
        comes=comes,
        goes=goes,
        room=sum(read) - sum(own),
        seed=seed,
    )
