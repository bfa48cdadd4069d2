"""From a case to its verdict: the plain run, the run with processes, the undisturbed run, and the oracle."""

from __future__ import annotations

import time
import traceback
from pathlib import Path

import msgspec

import penstock as ps

from . import oracle
from .case import Case
from .datasets import build_for
from .driver import LegOutcome, Limits, Run, Services, scratch, seed_of
from .happenings import Leg
from .outputs import Output
from .plain import Plain
from .verdict import Failure, Verdict


def judge(case: Case, services: Services, limits: Limits) -> Verdict:
    """Run a case; what is wrong with it is in the verdict, and nothing is raised."""
    begin = time.monotonic()
    kind = text = ""
    refused = False
    outcomes: list[LegOutcome] = []
    try:
        refused = _judge(case, services, limits, outcomes)
    except Failure as failure:
        kind, text = failure.kind, failure.text
    except Exception as error:  # a plain run that fails, too, is something to report
        kind, text = f"here {type(error).__name__}", "".join(traceback.format_exception(error))[-2000:]
    happened = tuple(event for outcome in outcomes for event in outcome.happened)
    return Verdict(kind=kind, text=text, refused=refused, seconds=time.monotonic() - begin, happened=happened)


def _judge(case: Case, services: Services, limits: Limits, outcomes: list[LegOutcome]) -> bool:
    """Return whether the case was refused, rightly; `outcomes` are added to as they come about."""
    with scratch() as folder:
        dataset = build_for(case, folder)
        plain = Plain(case, _seed(case, dataset), folder)
        outcomes += Run(case, services, folder, limits, dataset).read()
        well = not any(outcome.errors or outcome.waited for outcome in outcomes)
        disturbed = len(case.legs) > 1 or case.legs[0].events or case.legs[0].workers != 1
        undisturbed: dict[tuple[int, int], list[Output]] = {}
        if well and disturbed and oracle.may_compare_order(case):
            undisturbed = _undisturbed(case, services, folder, limits, dataset, outcomes)
        return oracle.check(case, outcomes, plain, undisturbed)


def _seed(case: Case, dataset: ps.Dataset) -> int:
    """Return the seed of all random numbers: the first that is given, before the cut or after it."""
    after = [step.arguments["seed"] for step in case.modes.after if step.name == "shuffle"]
    given = [seed for seed in (*case.pipeline.seeds, *after) if seed is not None]
    return given[0] if given else seed_of(dataset)


def _undisturbed(
    case: Case, services: Services, folder: Path, limits: Limits, dataset: ps.Dataset, outcomes: list[LegOutcome]
) -> dict[tuple[int, int], list[Output]]:
    """Return what each rank gets of each epoch from one worker that nothing happens to."""
    epochs = max(portion.epoch for outcome in outcomes for portions in outcome.readers for portion in portions)
    quiet = msgspec.structs.replace(case, legs=(Leg(workers=1, ranks=case.modes.ranks, iterations=epochs + 1),))
    (outcome,) = Run(quiet, services, folder, limits, dataset).read()
    if outcome.errors or outcome.waited:
        raise Failure("undisturbed run", f"{outcome.errors} {outcome.waited}")
    return {
        (portion.epoch, reader): portion.outputs
        for reader, portions in enumerate(outcome.readers)
        for portion in portions
    }
