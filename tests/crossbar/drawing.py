"""Drawing pipelines from a seed."""

from __future__ import annotations

import random
import zlib

from msgspec.structs import replace

from .files import WRITERS
from .pipelines import ENDS_IDENTITY, INDEXABLE, ONCE, SPLIT_LOCAL, WITH_RNG, Pipeline, Source, Step
from .steps import ROWS, STEPS, draw_failing, kind_after, source_kind


def draw_source(rng: random.Random, first: int, *, rows: int | None = None) -> Source:
    kind = rng.choice([*["range"] * 4, "items", "items", "generator", *WRITERS])
    count = rng.choice([0, 1, 3, 10, 24, 24, 40, 40, 40, 64, 64, 100]) if rows is None else rows
    files = 1 if kind in ("range", "items") else rng.choice([1, 2, 3, 5])
    if kind == "generator":
        count = max(1, count // files) * files if count else 0
    sizes = [None, 5] if kind in INDEXABLE else [5]
    shuffle = (rng.choice(sizes), rng.choice([None, 1, 2])) if rng.random() < 0.35 else None
    return Source(kind=kind, rows=count, files=files, first=first, shuffle=shuffle)


def draw_join(rng: random.Random, sources: int) -> Step:
    if rng.random() < 0.3:
        return Step("concatenate")
    weights = [1.0] * sources if rng.random() < 0.5 else [float(rng.choice([1, 2, 5])) for _ in range(sources)]
    unit = "elements" if rng.random() < 0.7 else "size"
    return Step("mix", {"weights": weights, "unit": unit, "stop": rng.choice(["first", "all", "all", "never"])})


def draw_step(rng: random.Random, pipeline: Pipeline, kind: str, *, identity: bool) -> Step:
    names = [
        name
        for name, rule in STEPS.items()
        if kind in rule.takes and rule.weight and (identity or name not in WITH_RNG)
    ]
    name = rng.choices(names, [STEPS[name].weight for name in names])[0]
    return Step(name, STEPS[name].draw(rng, pipeline))


def draw_pipeline(rng: random.Random, way: str = "plain") -> Pipeline:
    """`way` is how it will be read: by a sampler and in coordinated steps only some pipelines can be."""
    if way == "feed":
        return _draw_fed(rng)
    several = rng.random() < 0.25
    count = rng.choice([2, 2, 3]) if several else 1
    sources = tuple(draw_source(rng, 1000 * number) for number in range(count))
    if several:  # columns of one source beside rows of another would be two kinds of elements
        sources = tuple(replace(s, kind="parquet") if s.kind == "parquet_batches" else s for s in sources)
    pipeline = Pipeline(sources=sources, join=draw_join(rng, count) if several else None)
    kind, identity = source_kind(pipeline), source_kind(pipeline) == "row"
    steps: list[Step] = []
    if kind == "row" and rng.random() < 0.08:
        steps.append(Step("failing", draw_failing(rng, pipeline)))
    most = 2 if way == "coordinated" else 4
    for _ in range(min(most, rng.choice([0, 1, 1, 2, 2, 3, 4]))):
        step = draw_step(rng, replace(pipeline, steps=tuple(steps)), kind, identity=identity)
        if step.name in ONCE and any(each.name == step.name for each in steps):
            continue
        kind = kind_after(kind, step) or kind
        identity = identity and step.name not in ENDS_IDENTITY
        steps.append(step)
    if way == "coordinated" and kind in ROWS and rng.random() < 0.85:
        name = rng.choice(["bucket", "bucket", "padded_batch", "group", "batch"])
        if kind == "row" and name in ("bucket", "padded_batch"):
            steps.append(Step("tokens"))
        if kind == "row" or name != "batch":
            steps.append(Step(name, STEPS[name].draw(rng, pipeline)))
    drawn = replace(pipeline, steps=tuple(steps))
    return _with_features(_with_kept_splits(_with_leaf_types(_of_bounded_size(_with_something_left(drawn)))))


def _with_something_left(pipeline: Pipeline) -> Pipeline:
    """Leave out a filter that lets nothing of endless data through: the plain run would never give anything either.

    Not drawn: what a seed gives stays the same.
    """
    kept: list[Step] = []
    for step in pipeline.steps:
        if step.name != "filter_all" or not replace(pipeline, steps=tuple(kept)).endless:
            kept.append(step)
    return replace(pipeline, steps=tuple(kept))


def _with_features(pipeline: Pipeline) -> Pipeline:
    """Let two of three that read columns read a feature table. Not drawn: what a seed gives stays the same."""
    (source, *others) = pipeline.sources
    if source.kind != "parquet_batches" or others or not source.rows or zlib.crc32(str(pipeline).encode()) % 3 == 0:
        return pipeline
    return replace(pipeline, sources=(replace(source, kind="features"),))


def _with_leaf_types(pipeline: Pipeline) -> Pipeline:
    """Give the rows of every fourth pipeline leaves of more types. Not drawn: what a seed gives stays the same."""
    if source_kind(pipeline) != "row" or zlib.crc32(str(pipeline).encode()) % 4:
        return pipeline
    first = next((i for i, step in enumerate(pipeline.steps) if step.name != "shuffle"), len(pipeline.steps))
    steps = (*pipeline.steps[:first], Step("leaf_types"), *pipeline.steps[first:])
    return replace(pipeline, steps=steps)


CACHING = ("keep", "evict", "choose")
"""Everything is put, and got from the second time on; most of it has to go again; the service decides."""


def _with_kept_splits(pipeline: Pipeline) -> Pipeline:
    """Let workers keep splits where a cache, which they refuse, was drawn, and in an eighth of all others. Not drawn: a
    seed gives the same rest."""
    if not pipeline.has("cache") and zlib.crc32(str(pipeline).encode()) % 8:
        return pipeline
    steps = [step for step in pipeline.steps if step.name != "cache"]
    source = pipeline.sources[0]
    if pipeline.join is None:
        mixed = source.shuffle is not None and source.kind not in INDEXABLE
        first = (i for i, step in enumerate(steps) if mixed or step.name not in SPLIT_LOCAL)
        how = CACHING[zlib.crc32(str(pipeline).encode()) // 8 % len(CACHING)]
        steps.insert(next(first, len(steps)), Step("autocache", {"how": how}))
    return replace(pipeline, steps=tuple(steps))


def _draw_fed(rng: random.Random) -> Pipeline:
    source = Source(kind=rng.choice(sorted(INDEXABLE)), rows=rng.choice([1, 3, 10, 24, 40]))
    names = rng.sample(["value", "noise", "blob", "prefetch", "cache", "tokens", "slow"], rng.choice([0, 1, 2, 3]))
    pipeline = Pipeline(sources=(source,))
    names.sort(key=lambda name: name == "tokens")  # rows of unequal lengths are for padded batches alone
    if rng.random() < 0.5 or "tokens" in names:
        names.append(rng.choice(["padded_batch", "ragged_batch"]) if "tokens" in names else "batch")
    steps = tuple(Step(name, STEPS[name].draw(rng, pipeline)) for name in names)
    return _with_kept_splits(_of_bounded_size(replace(pipeline, steps=steps)))


def _of_bounded_size(pipeline: Pipeline) -> Pipeline:
    """Return it with fewer rows where they are large: megabytes are for the way they travel, not for their number."""
    blob = pipeline.find("blob")
    if blob is None:
        return pipeline
    most = 12 if blob.arguments["size"].startswith("1M") else 40
    sources = tuple(replace(s, rows=min(s.rows, most // s.files * s.files)) for s in pipeline.sources)
    return replace(pipeline, sources=sources)
