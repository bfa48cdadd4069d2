"""Making a failing case smaller: one thing less at a time, as long as it still fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from .case import Case
from .happenings import Leg
from .modes import Modes, refusals
from .pipelines import Pipeline, Source
from .verdict import Verdict

FEWER_ROWS = (3, 10, 24)


def shrink(
    case: Case, verdict: Verdict, run: Callable[[Case], Verdict], *, seconds: float
) -> tuple[Case, Verdict, int]:
    """Return the smallest failing case that was found in the time, its verdict, and how many were tried."""
    deadline = time.monotonic() + seconds
    tried = 0
    legal = not refusals(case.pipeline, case.modes)
    smaller = True
    while smaller:
        smaller = False
        for candidate in candidates(case):
            if time.monotonic() > deadline:
                return case, verdict, tried
            if not candidate.valid or legal != (not refusals(candidate.pipeline, candidate.modes)):
                continue
            tried += 1
            found = run(candidate)
            if found.kind == verdict.kind:
                case, verdict, smaller = candidate, found, True
                break
    return case, verdict, tried


def candidates(case: Case) -> Iterator[Case]:
    """Give cases with one thing less, those first that take most away."""
    yield from _fewer_legs(case)
    yield from _fewer_events(case)
    yield from _plainer_modes(case)
    yield from _fewer_steps(case)
    yield from _plainer_legs(case)
    yield from _less_data(case)


def _with_legs(case: Case, legs: list[Leg]) -> Case:
    if legs[0].ranks == case.modes.ranks:
        return replace(case, legs=tuple(legs))
    return replace(case, legs=tuple(legs), modes=replace(case.modes, ranks=legs[0].ranks))


def _fewer_legs(case: Case) -> Iterator[Case]:
    for number in range(len(case.legs)):
        if len(case.legs) > 1:
            yield _with_legs(case, [leg for place, leg in enumerate(case.legs) if place != number])


def _fewer_events(case: Case) -> Iterator[Case]:
    for number, leg in enumerate(case.legs):
        for event in leg.events:
            fewer = replace(leg, events=tuple(other for other in leg.events if other is not event))
            yield _with_leg(case, number, fewer)


def _with_leg(case: Case, number: int, leg: Leg) -> Case:
    return _with_legs(case, [leg if place == number else other for place, other in enumerate(case.legs)])


def _plainer_modes(case: Case) -> Iterator[Case]:
    usual = Modes()
    if case.modes.ranks > 1 and all(leg.ranks > 1 for leg in case.legs):
        legs = tuple(replace(leg, ranks=1) for leg in case.legs)
        yield replace(case, modes=replace(case.modes, ranks=1), legs=legs)
    for name in Modes.__struct_fields__:
        if name != "ranks" and getattr(case.modes, name) != getattr(usual, name):
            yield replace(case, modes=replace(case.modes, **{name: getattr(usual, name)}))


def _fewer_steps(case: Case) -> Iterator[Case]:
    pipeline = case.pipeline
    for number in range(len(pipeline.steps)):
        steps = tuple(step for place, step in enumerate(pipeline.steps) if place != number)
        yield _with_pipeline(case, replace(pipeline, steps=steps))
    if pipeline.join is not None:
        for source in pipeline.sources:
            yield _with_pipeline(case, replace(pipeline, join=None, sources=(source,)))
    for number, source in enumerate(pipeline.sources):
        plain = Source(rows=source.rows, first=source.first)
        for smaller in (plain, replace(source, shuffle=None), replace(source, files=1)):
            if smaller != source:
                sources = tuple(smaller if place == number else each for place, each in enumerate(pipeline.sources))
                yield _with_pipeline(case, replace(pipeline, sources=sources))


def _with_pipeline(case: Case, pipeline: Pipeline) -> Case:
    limit = case.limit if pipeline.endless else None
    return replace(case, pipeline=pipeline, limit=limit)


def _plainer_legs(case: Case) -> Iterator[Case]:
    for number, leg in enumerate(case.legs):
        for change in (
            {"workers": 1, "inline": 0},
            {"iterations": max(leg.iterations - 1, 0 if leg.stop is not None else 1)},
            {"new_service": False},
            {"dropped": False},
            {"reads_on": False},
            {"load": "own"},
        ):
            plainer = replace(leg, **change)
            if plainer != leg:
                yield _with_leg(case, number, plainer)


def _less_data(case: Case) -> Iterator[Case]:
    for rows in FEWER_ROWS:
        fewer = tuple(replace(source, rows=min(source.rows, rows)) for source in case.pipeline.sources)
        if fewer != case.pipeline.sources and all(source.kind != "generator" for source in fewer):
            yield replace(case, pipeline=replace(case.pipeline, sources=fewer))
