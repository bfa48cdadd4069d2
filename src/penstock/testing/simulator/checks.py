"""What must hold of what trainers were given, knowing nothing of how it came about."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from penstock.testing.simulator.engine import PASS, Batch, Shape
from penstock.testing.simulator.trainer import Read
from penstock.testing.simulator.world import Failed


def check(read: Read, *, streams_moved: bool) -> None:
    """Check what one trainer was given in an epoch. `streams_moved`: a process that served may have been lost."""
    shape = read.shape
    if shape.sharing:
        # Who comes back without a state is known to the process that served it, and to nobody else.
        check_shared(read, may_repeat=streams_moved and read.joined_late)
    else:
        check_histories(shape, read.histories, read.before, read.padded)
    if shape.streams and shape.uneven != "allow":
        check_steps(read.places)


def check_histories(
    shape: Shape, histories: list[list[Batch]], before: Sequence[Batch] = (), padded: Sequence[int] = ()
) -> None:
    """Every element once, up to what does not fill a last round.

    `before` was given while there was another number of consumers, and a last round of theirs may repeat `padded`.
    """
    if shape.uneven == "allow":
        histories = [[batch for batch in history if batch] for history in histories]  # without the steps they sat out
    given = sorted(x for batches in (before, *histories) for batch in batches for x in batch)
    _check_known(shape, given)
    twice = sorted({a for a, b in pairwise(given) if a == b})
    if shape.uneven == "pad":
        last = {x for history in histories if history for x in history[-1]}
        earlier = [
            x for batches in (before, *(history[:-1] for history in histories)) for batch in batches for x in batch
        ]
        twice = sorted({*(set(twice) - last), *(last & set(earlier))} - set(padded))
    if twice:
        raise Failed(f"elements {twice} were given more than once")
    missing = sorted(set(shape.everything) - set(given))
    most = shape.batch * (shape.consumers - 1) if shape.uneven == "drop" else 0
    if len(missing) > most:
        raise Failed(f"elements {missing} were lost, where at most {most} may be left over")
    if shape.uneven != "allow" and len({len(history) for history in histories}) > 1:
        raise Failed(f"consumers ended at different steps: {[len(history) for history in histories]}")
    if shape.streams and not shape.coordinated and not before:
        expected = deterministic_histories(shape)
        if histories != expected:
            raise Failed(f"deterministic order gave {histories} instead of {expected}")


def _check_known(shape: Shape, given: list[int]) -> None:
    strangers = sorted(set(given) - set(shape.everything))
    if strangers:
        raise Failed(f"elements {strangers} came from nowhere")


def check_shared(read: Read, *, may_repeat: bool = False) -> None:
    """Nothing twice, all ranks as many steps, with "wait" everything; less of one that came back without its state."""
    shape, histories = read.shape, read.histories
    given = sorted(x for batches in (read.before, *histories) for batch in batches for x in batch)
    _check_known(shape, given)
    twice = sorted({a for a, b in pairwise(given) if a == b})
    if twice and not may_repeat:
        raise Failed(f"a trainer was given {twice} more than once")
    if len({len(history) for history in histories}) > 1:
        raise Failed(f"the ranks of a trainer ended at different steps: {[len(history) for history in histories]}")
    missing = sorted(set(shape.everything) - set(given))
    most = shape.batch * (shape.consumers - 1) if shape.uneven == "drop" else 0
    if shape.sharing == "wait" and not read.joined_late and len(missing) > most:
        raise Failed(f"a trainer that is waited for missed {missing}, where at most {most} may be left over")


def check_steps(places: list[list[tuple[int, int]]]) -> None:
    """Check that a step was, for all consumers, the same round of the same stream."""
    for step, taken in enumerate(zip(*places)):
        if len(set(taken)) > 1:
            raise Failed(f"step {step} was torn: consumers took (stream, round) {list(taken)}")


def deterministic_histories(shape: Shape) -> list[list[Batch]]:
    """Return what consumers must see in deterministic order, from the description alone."""
    if shape.fed:
        return [shape.units]
    size = shape.batch * shape.width
    rounds: list[tuple[int, int, list[int]]] = []
    tail: list[int] = []
    for number in range(shape.streams):
        own = shape.splits[number :: shape.streams]
        elements = [x + p * PASS for p in range(shape.repeat) for split in own for x in split]
        whole = len(elements) // size
        rounds += [(r, number, elements[r * size : (r + 1) * size]) for r in range(whole)]
        tail += elements[whole * size :]
    in_order = [elements for _, _, elements in sorted(rounds)]
    while tail and (-(-len(tail) // shape.batch) >= shape.consumers or shape.uneven == "pad"):
        in_order.append(tail[:size])
        tail = tail[size:]
    rounds_given = [round_of(shape, elements) for elements in in_order]
    return [[batches[c] for batches in rounds_given] for c in range(shape.consumers)]


def round_of(shape: Shape, elements: list[int]) -> list[Batch]:
    """Return each reader's batch of a round; one that is not whole is filled up with its own batches."""
    batches = [tuple(elements[at : at + shape.batch]) for at in range(0, len(elements), shape.batch)]
    return [batches[place % len(batches)] for place in range(shape.width)]
