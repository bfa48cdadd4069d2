"""A case: drawn from its seed, told as text, carried as JSON."""

from __future__ import annotations

import random

import msgspec

from .columns import with_columns
from .drawing import draw_pipeline
from .happenings import Leg, draw_legs
from .modes import Modes, draw_modes, draw_way, refusals
from .pipelines import Pipeline, Step
from .steps import valid

ILLEGAL_SHARE = 0.05
SLOW = Step("slow", {"seconds": 0.002})


class Case(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    pipeline: Pipeline = Pipeline()
    modes: Modes = Modes()
    legs: tuple[Leg, ...] = (Leg(),)
    limit: int | None = None
    """The driver takes so many steps of an iteration and breaks out: of endless pipelines, at least."""

    @property
    def valid(self) -> bool:
        """A shrunken case may have become nonsense."""
        if not valid(self.pipeline, self.modes.after) or (self.pipeline.endless and self.limit is None):
            return False
        widths = [leg.ranks for leg in self.legs]
        own = all(leg.load != "own" or leg.ranks == before.ranks for before, leg in zip(self.legs, self.legs[1:]))
        return own and widths[0] == self.modes.ranks and all(leg.workers + leg.inline for leg in self.legs)

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(text: str | bytes) -> Case:
        return msgspec.json.decode(text, type=Case)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}", f"  pipeline  {self.pipeline}", f"  modes     {self.modes}"]
        if self.limit is not None:
            lines.append(f"  limit     {self.limit} steps an iteration")
        for number, leg in enumerate(self.legs):
            lines.append(f"  leg {number}     {leg_text(leg, first=number == 0)}")
            lines += [f"            {event}" for event in leg.events]
        return "\n".join(lines)


def leg_text(leg: Leg, *, first: bool) -> str:
    inline = f" + {leg.inline} inline" if leg.inline else ""
    begin = "" if first else f"from {leg.load} state{' on a new service' if leg.new_service else ''}: "
    end = ""
    if leg.stop is not None:
        end = f", then {leg.stop} steps and a checkpoint"
        end += ", reading on" if leg.reads_on else ""
    end += ", loaders dropped" if leg.dropped else ""
    return f"{begin}{leg.workers}{inline} workers, {leg.ranks} ranks, {leg.iterations} iterations{end}"


def draw(seed: int) -> Case:
    """Return the case of a seed."""
    rng = random.Random(seed)
    illegal = rng.random() < ILLEGAL_SHARE
    while True:
        way = draw_way(rng)
        pipeline = draw_pipeline(rng, draw_way(rng) if illegal else way)
        modes = draw_modes(rng, pipeline, way)
        if illegal == bool(refusals(pipeline, modes)):
            break
    if pipeline.endless and modes.uneven == "allow" and not illegal:
        modes = msgspec.structs.replace(modes, uneven="drop")  # a rank that owns no stream would wait for ever, rightly
    if modes.sharding == "hint" and rng.random() < 0.8:
        place = rng.randrange(len(pipeline.steps) + 1)
        steps = (*pipeline.steps[:place], Step("shard"), *pipeline.steps[place:])
        pipeline = msgspec.structs.replace(pipeline, steps=steps)
    if refusals(pipeline, modes):
        legs: tuple[Leg, ...] = (Leg(workers=rng.choice([1, 2]), ranks=modes.ranks),)
    else:
        legs = draw_legs(rng, pipeline, modes)
    limit = rng.choice([4, 9, 17]) if pipeline.endless else None
    if not illegal and not any(event.what == "weights" for leg in legs for event in leg.events):
        pipeline, modes = with_columns(
            random.Random(f"columns {seed}"), pipeline, modes, max(leg.ranks for leg in legs)
        )
    if any(leg.harmed for leg in legs) and not pipeline.has("slow"):
        # Something must be under way when processes die.
        pipeline = msgspec.structs.replace(pipeline, steps=(SLOW, *pipeline.steps))
    return Case(seed=seed, pipeline=pipeline, modes=modes, legs=legs, limit=limit)
