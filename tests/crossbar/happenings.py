"""What happens while a case is read.

A case is read in legs. Each leg has loaders of its own, on a number of workers and ranks of its own; a later leg begins
with the states that the one before it ended with. Inside a leg events happen after so many steps of an iteration.
"""

from __future__ import annotations

import math
import random

import msgspec

from .modes import Modes, ends_apart
from .pipelines import REGROUPING, Pipeline

ON_SERVICE = (
    "kill_runner",
    "pause_runner",
    "kill_dispatcher",
    "kill_both",
    "kill_all",
    "add_worker",
    "remove_worker",
    "scale_up",
    "scale_down",
    "scale_auto",
)
"""Done by the first reader; they need a service that no other case uses."""
ON_READER = ("rejoin", "reload", "second", "misuse")
"""Done by one reader to itself."""
ON_ALL = ("break", "weights")
"""Done by all readers at the same step."""
SCALING = ("scale_up", "scale_down", "scale_auto")
LOSES_A_STREAM = frozenset({"kill_runner", "pause_runner", "kill_both", "kill_all", "remove_worker", "kill_dispatcher"})


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """After `step` outputs of the `iteration`-th iteration of its leg."""

    what: str
    iteration: int = 0
    step: int = 0
    reader: int = 0
    back: int = 0
    """`rejoin` and `reload` go back to the state of so many steps before."""
    fresh: bool = False
    """`second` has no state, and begins its epoch anew."""
    weights: tuple[float, ...] = ()

    def __str__(self) -> str:
        who = f" of reader {self.reader}" if self.what in ON_READER and self.reader else ""
        back = f" from {self.back} steps before" if self.back else " without a state" if self.fresh else ""
        weights = f" {list(self.weights)}" if self.weights else ""
        return f"{self.what}{weights}{who} at iteration {self.iteration} step {self.step}{back}"


class Leg(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`iterations` are read to their ends; then, if `stop` is given, so many steps of one more.

    `load` says which states the leg begins with: each rank its own, the list of all, or one made for all.
    """

    workers: int = 1
    inline: int = 0
    ranks: int = 1
    load: str = "own"
    new_service: bool = False
    iterations: int = 1
    stop: int | None = None
    reads_on: bool = False
    """The trainers read on after the checkpoint, and what they read then is lost with them."""
    dropped: bool = False
    """The loaders are not closed at the end of the leg: their process was killed."""
    events: tuple[Event, ...] = ()

    @property
    def harmed(self) -> bool:
        return any(event.what in ON_SERVICE for event in self.events)


def draw_workers(rng: random.Random) -> tuple[int, int]:
    return rng.choices([(1, 0), (2, 0), (3, 0), (0, 1), (1, 1)], [5, 5, 3, 1, 0.7])[0]


def _outputs(pipeline: Pipeline, modes: Modes, ranks: int) -> int:
    """Return about how many steps an epoch has: most events are to come about."""
    count = min(pipeline.rows, 60)
    for step in (*pipeline.steps, *modes.after):
        if step.name in REGROUPING:
            count //= step.arguments["size"]
    return count // ranks


def _events(rng: random.Random, pipeline: Pipeline, modes: Modes, leg: Leg, *, first: bool) -> list[Event]:
    choices: dict[str, float] = {"break": 2.0, "rejoin": 2.0, "reload": 1.0, "second": 1.5, "misuse": 0.7}
    if not modes.own_processes and leg.workers:
        choices |= {"kill_runner": 0.5, "kill_dispatcher": 0.25, "kill_both": 0.1, "pause_runner": 0.1}
        choices |= {"add_worker": 0.2, "kill_all": 0.06} | ({"remove_worker": 0.25} if leg.workers > 1 else {})
    mixed = pipeline.join is not None and pipeline.join.name == "mix"
    if mixed and not modes.after and modes.sharing is None and (modes.ranks == 1 or modes.in_turn):
        choices["weights"] = 3.0
    if modes.uneven == "allow" or modes.sharing == "wait":
        del choices["break"]  # who breaks out leaves the others waiting, as documented
    if modes.cached_by_arrival:
        del choices["rejoin"], choices["second"]  # their loaders have not cached what the first one has
    if modes.replicas > 1 or modes.own_processes or modes.moving_cut or (modes.sharing and modes.ranks > 1):
        # A replica's place is its sibling's too, and so is a rank's of a trainer that shares; nobody else reads a
        # service of one's own, or is in the job of another cut.
        for name in ON_READER:
            choices.pop(name, None)
    made = []
    for _ in range(rng.choices([0, 1, 2], [5, 3, 1])[0]):
        if not choices:
            break
        what = rng.choices(list(choices), list(choices.values()))[0]
        iteration = rng.randrange(leg.iterations + (leg.stop is not None))
        last = _outputs(pipeline, modes, leg.ranks) if iteration < leg.iterations else leg.stop or 0
        step = rng.randint(0, max(0, min(last, 8)))
        stops = iteration == leg.iterations
        alone = first and iteration == 0 and leg.ranks == 1 and modes.sharing is None
        if what == "second" and stops and step == leg.stop:
            continue  # the newer reader takes an output, and none is left to take
        made.append(
            Event(
                what=what,
                iteration=iteration,
                step=step,
                reader=rng.randrange(modes.trainers if modes.sharing else leg.ranks) if what in ON_READER else 0,
                fresh=what == "second" and alone and rng.random() < 0.6,
                back=rng.choice([0, 0, 1, 2]) if what in ("rejoin", "reload") else 0,
                weights=tuple(float(rng.choice([1, 3])) for _ in pipeline.sources) if what == "weights" else (),
            )
        )
    # A newer reader takes an output, or the epoch's end, which others that have left do not come to.
    breaks = {event.iteration: event.step for event in made if event.what == "break"}
    return [event for event in made if event.what != "second" or event.step < breaks.get(event.iteration, math.inf)]


def _scalings(rng: random.Random, pipeline: Pipeline, modes: Modes, leg: Leg) -> list[Event]:
    """Return when the job is given other numbers of workers, in some of the cases."""
    if modes.own_processes or modes.sharding == "off" or leg.workers < 2 or rng.random() >= 0.3:
        return []
    last = min(_outputs(pipeline, modes, leg.ranks), 8)
    iterations = leg.iterations + (leg.stop is not None)
    return [
        Event(what=rng.choice(SCALING), iteration=rng.randrange(iterations), step=rng.randint(0, max(0, last)))
        for _ in range(rng.randint(1, 4))
    ]


def draw_legs(rng: random.Random, pipeline: Pipeline, modes: Modes) -> tuple[Leg, ...]:
    single = modes.sharing is not None or modes.sharding == "off" or modes.own_processes
    count = 1 if single else rng.choices([1, 2, 3], [5, 4, 1])[0]
    legs: list[Leg] = []
    ranks = modes.ranks
    for number in range(count):
        workers, inline = draw_workers(rng)
        last = number == count - 1
        load = "own"
        if number:
            loads = ["own", "list", "list"] if modes.feed is None and modes.replicas == 1 else ["own"]
            if modes.in_turn and modes.feed is None:
                loads.append("all")
            load = rng.choice(loads)
            if load == "all" and ends_apart(modes):
                load = "list"  # one rank's place is not everybody's: refused
            if load != "own" and not modes.after:
                ranks = rng.choice([1, 2, 3]) if rng.random() < 0.6 else ranks
        iterations = rng.choices([0, 1, 2] if not last else [1, 2, 3], [5, 3, 1] if not last else [5, 3, 2])[0]
        stop = None if last or (iterations and rng.random() < 0.25) else rng.choice([0, 1, 2, 3, 5, 9])
        if iterations == 0 and stop is None:
            iterations = 1
        leg = Leg(
            workers=workers if not modes.own_processes else max(1, workers),
            inline=inline if not modes.own_processes else 0,
            ranks=ranks,
            load=load,
            new_service=bool(number) and rng.random() < 0.6,
            iterations=iterations,
            stop=stop,
            # With uneven='allow' one rank alone cannot come to the end, so all read on.
            reads_on=stop is not None and (rng.random() < 0.3 or (modes.uneven == "allow" and ranks > 1)),
            dropped=not last and rng.random() < 0.3,
        )
        events = _events(rng, pipeline, modes, leg, first=number == 0)
        # By a die of their own: other cases stay what they were.
        events += _scalings(random.Random(f"scaling {pipeline} {modes} {number}"), pipeline, modes, leg)
        legs.append(msgspec.structs.replace(leg, events=tuple(events)))
    return _with_workers_left(legs)


def _with_workers_left(legs: list[Leg]) -> tuple[Leg, ...]:
    """Return the legs, each with the workers its service has, and none of them without a worker to the end."""
    made: list[Leg] = []
    left = 0
    for leg in legs:
        if made and not leg.new_service:
            leg = msgspec.structs.replace(leg, workers=made[-1].workers, inline=made[-1].inline)
        else:
            left = leg.workers
        events = []
        for event in leg.events:
            if event.what == "remove_worker":
                if left <= 1:
                    continue
                left -= 1
            events.append(event)
        made.append(msgspec.structs.replace(leg, events=tuple(events)))
    return tuple(made)
