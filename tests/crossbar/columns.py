"""What trainers ask of a pipeline, put into some of the cases: a part held out, sampling by weight, a collate function
of the user's own, batches with a mask, and evaluation.

Not drawn with the rest: by a die of their own, so that what else a seed gives stays the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from .modes import Modes
from .pipelines import ENDS_IDENTITY, INDEXABLE, WITH_RNG, Pipeline, Step
from .steps import ROWS, kind_of

SHARE = 0.45
"""Of the cases that may have something of it."""
LEAST_ROWS = 10
"""Of each source of an endless pipeline: with fewer, chance might leave nothing to be repeated."""
COUNTED_SOURCES = frozenset({"range", "items", "numpy", "parquet"})
KEEPS_LENGTH = frozenset(
    {"value", "noise", "blob", "slow", "tokens", "shuffle", "prefetch", "leaf_types", "batch", "autocache"}
)
FORGETS_MASK = frozenset({"select", "pack", "zip"})
"""They leave out the column that says which rows fill up a batch."""
NUMBER_OF_CLASSES = 3
SEED = 5


def with_columns(rng: random.Random, pipeline: Pipeline, modes: Modes, most_ranks: int) -> tuple[Pipeline, Modes]:
    """Return the pipeline and the modes, some of them with one or several of these."""
    if rng.random() >= SHARE:
        return pipeline, modes
    if rng.random() < 0.5:
        pipeline = _with_rows_chosen(rng, pipeline, modes)
    if rng.random() < 0.7:
        pipeline = _with_batches(rng, pipeline, modes)
    return _evaluated(rng, pipeline, modes, most_ranks)


def _places(pipeline: Pipeline, *, drawing: bool) -> Iterator[int]:
    """Yield where elements are rows, of which it is known which record they were made of."""
    # What stands between a shuffle of records in sequence and an autocache() keeps the point from sinking below it.
    mixed = any(source.shuffle is not None and source.kind not in INDEXABLE for source in pipeline.sources)
    for place in range(len(pipeline.steps) + 1):
        before = replace(pipeline, steps=pipeline.steps[:place])
        if kind_of(before) not in ROWS or before.has(*ENDS_IDENTITY):
            return
        later = pipeline.steps[place:]
        kept = any(step.name == "autocache" for step in later) if mixed else before.has("autocache")
        if not (_refuses_draws(later) if drawing else kept):
            yield place


def _refuses_draws(later: tuple[Step, ...]) -> bool:
    """Say whether a later step keeps what was drawn, or permutes by index what was drawn."""
    return any(
        step.name == "autocache" or (step.name == "shuffle" and step.arguments["size"] is None) for step in later
    )


def _with_rows_chosen(rng: random.Random, pipeline: Pipeline, modes: Modes) -> Pipeline:
    few = any(source.rows < LEAST_ROWS for source in pipeline.sources)
    if modes.feed is not None or pipeline.has("failing") or (pipeline.endless and few):
        return pipeline
    name = rng.choice(["holdout", "holdout", "resample", "balanced"])
    by_file = modes.sharding in ("file", "file_or_data") and any(source.files > 1 for source in pipeline.sources)
    if name == "holdout" and by_file:
        return pipeline  # refused: small files share a split, and become splits of their own
    if name != "holdout" and modes.sharding == "off":
        return pipeline  # each worker draws numbers of its own: what it gives is not the plain run's
    places = list(_places(pipeline, drawing=name != "holdout"))
    if not places:
        return pipeline
    draw: dict[str, Callable[[], Step]] = {
        "holdout": lambda: _holdout(rng, pipeline),
        "resample": lambda: Step("resample"),
        "balanced": lambda: Step("balanced", {"counts": _counts(pipeline)}),
    }
    place = rng.choice(places)
    return replace(pipeline, steps=(*pipeline.steps[:place], draw[name](), *pipeline.steps[place:]))


def _holdout(rng: random.Random, pipeline: Pipeline) -> Step:
    part = "train" if pipeline.endless else rng.choice(["train", "held out"])
    return Step("holdout", {"fraction": rng.choice([0.1, 0.4]), "seed": rng.choice([0, 3]), "part": part})


def _counts(pipeline: Pipeline) -> list[int]:
    ids = [source.first + row for source in pipeline.sources for row in range(source.rows)]
    return [max(1, sum(each % NUMBER_OF_CLASSES == number for each in ids)) for number in range(NUMBER_OF_CLASSES)]


def _with_batches(rng: random.Random, pipeline: Pipeline, modes: Modes) -> Pipeline:
    place = next((at for at, step in enumerate(pipeline.steps) if step.name == "batch"), None)
    if place is None:
        if modes.after or modes.coordinated or kind_of(pipeline) != "row":
            return pipeline
        place = len(pipeline.steps)
        added = Step("batch", {"size": rng.choice([2, 3, 4]), "drop_last": False})
        pipeline = replace(pipeline, steps=(*pipeline.steps, added))
    batch = pipeline.steps[place]
    keyed = any(
        source.kind == "features" for source in pipeline.sources
    )  # a function of one's own puts together others
    how = {"collate": True} if rng.random() < 0.5 and not keyed else {}
    later = (*pipeline.steps[place + 1 :], *modes.after)
    if not batch.arguments["drop_last"] and not any(step.name in FORGETS_MASK for step in later):
        how |= {"mask": True} if rng.random() < 0.6 else {}
    changed = Step("batch", {**batch.arguments, **how})
    return replace(pipeline, steps=(*pipeline.steps[:place], changed, *pipeline.steps[place + 1 :]))


def _evaluated(rng: random.Random, pipeline: Pipeline, modes: Modes, most_ranks: int) -> tuple[Pipeline, Modes]:
    """Read what ends in batches as an evaluation does, where no other way of reading was drawn."""
    special = modes.feed or modes.sharing or modes.coordinated or modes.after or modes.replicas > 1
    if special or modes.sharding != "dynamic" or pipeline.endless:
        return pipeline, modes
    batches = [step for step in pipeline.steps if step.name == "batch"]
    if not pipeline.steps or pipeline.steps[-1].name != "batch" or len(batches) > 1 or rng.random() < 0.3:
        return pipeline, modes
    pipeline = _seeded(pipeline)
    if pipeline.unseeded and pipeline.has(*WITH_RNG):
        return pipeline, modes  # each loader draws a seed: there is no order to compare with
    if most_ranks > 1 and not length_is_known(pipeline):
        return pipeline, modes
    last = pipeline.steps[-1]
    batch = Step("batch", {**last.arguments, "drop_last": False, "mask": True})
    evaluated = Modes(
        order="deterministic",
        ranks=modes.ranks,
        uneven="pad" if modes.ranks > 1 else "drop",
        evaluation=True,
        own_processes=modes.own_processes,
    )
    return replace(pipeline, steps=(*pipeline.steps[:-1], batch)), evaluated


def _seeded(pipeline: Pipeline) -> Pipeline:
    sources = tuple(
        replace(source, shuffle=source.shuffle and (source.shuffle[0], source.shuffle[1] or SEED))
        for source in pipeline.sources
    )
    steps = tuple(
        Step(step.name, {**step.arguments, "seed": step.arguments["seed"] or SEED}) if step.name == "shuffle" else step
        for step in pipeline.steps
    )
    return replace(pipeline, sources=sources, steps=steps)


def length_is_known(pipeline: Pipeline) -> bool:
    """Say whether a listing says how many elements there are."""
    if pipeline.join is not None and pipeline.join.name != "concatenate":
        return False
    return all(source.kind in COUNTED_SOURCES for source in pipeline.sources) and all(
        step.name in KEEPS_LENGTH for step in pipeline.steps
    )
