"""Which outputs after a cut's engine state were received, through changes of the number of consumers.

Rounds of one width deal outputs in turn, so what was received is said by a number for each consumer. When the number of
consumers changes, what is left of those rounds makes rounds of the new width, and so on: each width deals what the ones
before left. Said output by output, all of that is one list of flags, and a list of flags is a `Regroup` again.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.errors import StateMismatchError
from penstock.wire.jobs import Cut, Regroup

MOST_OUTPUTS = 1 << 18  # since an engine's state: it comes with every output, or with one of some hundreds


def flags_received(regroup: Regroup | None, *, width: int, given: Sequence[int]) -> list[bool]:
    """Say of every output up to the last received one whether it was received.

    Of what `regroup` left, consumer c of `width` has received its outputs of the first `given[c]` rounds.

    >>> flags_received(Regroup(2, (3, 1)), width=1, given=[0])
    [True, True, True, False, True]
    >>> flags_received(Regroup(2, (3, 1)), width=2, given=[0, 1])
    [True, True, True, False, True, True]
    """
    flags: list[bool] = []
    dealt = 0  # outputs that the old rounds left, so far
    old_width, old_given = (1, (0,)) if regroup is None else (regroup.width, regroup.given)
    old_end, new_end = max(old_given, default=0) * old_width, max(given, default=0) * width
    if max(old_end, new_end) > MOST_OUTPUTS:
        raise StateMismatchError(
            f"a state that says what became of {max(old_end, new_end):,} outputs since it was taken: at most "
            f"{MOST_OUTPUTS:,} can be; load one that was saved by this loader"
        )
    while len(flags) < old_end or dealt < new_end:
        round_, consumer = divmod(len(flags), old_width)
        had = round_ < old_given[consumer]
        if not had:
            round_, consumer = divmod(dealt, width)
            had = round_ < given[consumer]
            dealt += 1
        flags.append(had)
    while flags and not flags[-1]:
        flags.pop()
    return flags


def received(cut: Cut, width: int) -> list[bool]:
    """Say the same of a cut between rounds of `width`, at which all consumers stand."""
    return flags_received(cut.regroup, width=width, given=(cut.since,) * width)


def regroup_of(flags: Sequence[bool]) -> Regroup | None:
    """Return the regroup that says the same.

    >>> regroup_of([True, True]), regroup_of([True, False, True]), regroup_of([])
    (Regroup(width=1, given=(2,)), Regroup(width=3, given=(1, 0, 1)), None)
    """
    if not flags:
        return None
    return Regroup(1, (len(flags),)) if all(flags) else Regroup(len(flags), tuple(map(int, flags)))


def gaps_in(flags: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    """Return the half-open ranges of outputs that nobody has, before one that somebody has.

    >>> gaps_in([True, False, False, True, False, True])
    ((1, 3), (4, 5))
    """
    gaps: list[tuple[int, int]] = []
    for number, had in enumerate(flags):
        if had:
            continue
        if gaps and gaps[-1][1] == number:
            gaps[-1] = (gaps[-1][0], number + 1)
        else:
            gaps.append((number, number + 1))
    return tuple(gaps)
