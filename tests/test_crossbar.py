"""The crossbar itself: seeds reproduce cases, the oracle sees planted errors, and some cases run.

`make crossbar SEEDS=a-b` runs as many cases as one likes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as changed
from pathlib import Path

import pytest

from penstock.core.errors import InvalidArgumentError, WaitTimeoutError
from tests.crossbar import oracle
from tests.crossbar.case import Case, draw
from tests.crossbar.driver import LegOutcome, Limits
from tests.crossbar.happenings import Event, Leg
from tests.crossbar.lanes import Lane
from tests.crossbar.modes import Modes, refusals
from tests.crossbar.outputs import Output
from tests.crossbar.pipelines import Pipeline, Source, Step
from tests.crossbar.plain import Plain
from tests.crossbar.reader import Portion
from tests.crossbar.runner import run_seeds
from tests.crossbar.shrink import shrink
from tests.crossbar.verdict import Failure, Verdict

SEEDS = (3, 5, 6, 14, 20, 21, 29, 36, 69, 72, 78, 90, 98, 99, 109, 153, 161, 175, 180, 207, 217, 243, 246, 178, 248)
"""Together they have nearly every mode, source, operator and happening; none is about a defect known today."""
SEED = 7


def test_a_seed_reproduces_its_case_and_a_case_survives_as_text() -> None:
    for seed in range(300):
        case = draw(seed)
        assert case.valid, case
        assert case == draw(seed) == Case.decode(case.encode())


# The oracle, with outcomes made here: what a service would deliver is dealt from the plain run


BATCHES = Pipeline(
    sources=(Source(rows=22),),
    steps=(Step("noise"), Step("batch", {"size": 3, "drop_last": False})),
)
BUCKETS = Pipeline(sources=(Source(rows=24),), steps=(Step("tokens"), Step("bucket", {"size": 2, "drop_last": False})))


def outcome_of(case: Case, plain: Plain) -> LegOutcome:
    """Deal the outputs of two epochs to the ranks in turn, as a service would."""
    ranks = case.modes.ranks
    readers: list[list[Portion]] = [[] for _ in range(ranks)]
    for epoch in range(2):
        outputs = plain.outputs(epoch)
        steps = len(outputs) // ranks
        for rank, portions in enumerate(readers):
            dealt = [outputs[step * ranks + rank] for step in range(steps)]
            portions.append(Portion(epoch=epoch, outputs=dealt, ended=True))
    return LegOutcome(case.legs[0], readers)


def plain_of(case: Case, folder: Path) -> Plain:
    return Plain(case, SEED, folder)


Plant = Callable[[list[list[Portion]]], object]


def change_noise(readers: list[list[Portion]]) -> None:
    first = readers[0][0].outputs[0]
    row = tuple((name, 0.5 if name == "noise" else value) for name, value in first.rows[0])
    readers[0][0].outputs[0] = Output((row, *first.rows[1:]))


def cut_a_batch(readers: list[list[Portion]]) -> None:
    outputs = readers[0][0].outputs
    outputs[0:1] = [Output(outputs[0].rows[:2]), Output(outputs[0].rows[2:])]


PLANTED: dict[str, tuple[str, int, Plant]] = {
    "an output lost": ("lost", 1, lambda readers: readers[0][0].outputs.pop(2)),
    "an output lost in the second epoch": ("lost", 1, lambda readers: readers[0][1].outputs.pop()),
    "an output given twice": ("twice", 1, lambda readers: readers[0][0].outputs.append(readers[0][0].outputs[0])),
    "an output given to two ranks": (
        "twice",
        2,
        lambda readers: readers[1][0].outputs.__setitem__(0, readers[0][0].outputs[0]),
    ),
    "other random numbers": ("strange rows", 1, change_noise),
    "two short batches": ("short batches", 1, cut_a_batch),
    "ranks that take unequal steps": ("steps", 2, lambda readers: readers[1][0].outputs.pop()),
    "an epoch left out": ("epoch numbers", 1, lambda readers: readers[0].pop(0)),
    "ranks in two epochs": ("epochs apart", 2, lambda readers: readers[1].pop(0)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_oracle_sees(name: str, tmp_path: Path) -> None:
    kind, ranks, plant = PLANTED[name]
    case = Case(seed=0, pipeline=BATCHES, modes=Modes(ranks=ranks), legs=(Leg(ranks=ranks, iterations=2),))
    plain = plain_of(case, tmp_path)
    outcome = outcome_of(case, plain)
    assert oracle.check(case, [outcome], plain, {}) is False
    plant(outcome.readers)
    with pytest.raises(Failure) as failure:
        oracle.check(case, [outcome], plain, {})
    assert failure.value.kind == kind


def test_the_oracle_sees_another_order(tmp_path: Path) -> None:
    case = Case(seed=0, pipeline=BATCHES, modes=Modes(order="deterministic"), legs=(Leg(iterations=2),))
    plain = plain_of(case, tmp_path)
    outcome = outcome_of(case, plain)
    undisturbed = {(epoch, 0): plain.outputs(epoch) for epoch in range(2)}
    oracle.check(case, [outcome], plain, undisturbed)
    outputs = outcome.readers[0][1].outputs
    outputs[0], outputs[1] = outputs[1], outputs[0]
    with pytest.raises(Failure, match="another order: reader 0, epoch 1: step 0"):
        oracle.check(case, [outcome], plain, undisturbed)


def test_the_oracle_sees_a_torn_step(tmp_path: Path) -> None:
    modes = Modes(ranks=2, coordinated=True)
    case = Case(seed=0, pipeline=BUCKETS, modes=modes, legs=(Leg(ranks=2, iterations=2),))
    plain = plain_of(case, tmp_path)
    with pytest.raises(Failure, match="torn step"):
        oracle.check(case, [outcome_of(case, plain)], plain, {})


def test_the_oracle_sees_a_leg_that_begins_too_early(tmp_path: Path) -> None:
    legs = (Leg(iterations=0, stop=3), Leg(iterations=1))
    case = Case(seed=0, pipeline=BATCHES, legs=legs)
    plain = plain_of(case, tmp_path)
    outputs = plain.outputs(0)
    first = LegOutcome(legs[0], [[Portion(epoch=0, outputs=outputs[:3])]])
    second = LegOutcome(legs[1], [[Portion(epoch=0, outputs=outputs[3:], ended=True)]])
    oracle.check(case, [first, second], plain, {})
    early = LegOutcome(legs[1], [[Portion(epoch=0, outputs=outputs[2:], ended=True)]])
    with pytest.raises(Failure, match="twice"):
        oracle.check(case, [first, early], plain, {})


ILLEGAL = Case(seed=0, modes=Modes(replicas=2))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TypeError("replica= must not be 1"), "raw refusal"),
        (WaitTimeoutError("a batch", "replica 1 is not there", 8.0), "raw refusal"),
        (InvalidArgumentError("this cannot be done; use something else"), "refused for another reason"),
        (InvalidArgumentError("replica=1 with order='relaxed' is bad"), "refusal without a remedy"),
        (None, "not refused"),
    ],
)
def test_the_oracle_sees_bad_refusals(error: Exception | None, kind: str, tmp_path: Path) -> None:
    assert refusals(ILLEGAL.pipeline, ILLEGAL.modes)
    outcome = LegOutcome(Leg(), [[], []], {} if error is None else {0: error})
    with pytest.raises(Failure) as failure:
        oracle.check(ILLEGAL, [outcome], plain_of(ILLEGAL, tmp_path), {})
    assert failure.value.kind == kind


def test_the_oracle_accepts_a_sentence_with_a_remedy(tmp_path: Path) -> None:
    error = InvalidArgumentError("replica=1 with order='relaxed' differs; use order='deterministic'")
    outcome = LegOutcome(Leg(), [[], []], {0: error, 1: error})
    assert oracle.check(ILLEGAL, [outcome], plain_of(ILLEGAL, tmp_path), {}) is True


def test_the_oracle_sees_an_error_that_is_lost_or_another_one(tmp_path: Path) -> None:
    failing = Step("failing", {"error": "ValueError", "at": 3, "how": "map"})
    case = Case(seed=0, pipeline=Pipeline(steps=(failing,)))
    plain = plain_of(case, tmp_path)
    right = plain.error()
    assert isinstance(right, ValueError)
    oracle.check(case, [LegOutcome(Leg(), [[]], {0: right})], plain, {})
    with pytest.raises(Failure, match="error lost"):
        oracle.check(case, [LegOutcome(Leg(), [[Portion(epoch=0, ended=True)]])], plain, {})
    with pytest.raises(Failure, match="another error"):
        oracle.check(case, [LegOutcome(Leg(), [[]], {0: KeyError("planted at 3")})], plain, {})


def test_the_oracle_sees_a_wait_without_end(tmp_path: Path) -> None:
    case = Case(seed=0)
    outcome = changed(outcome_of(case, plain_of(case, tmp_path)), waited="reader 0 waits for output 2 of epoch 0")
    with pytest.raises(Failure, match="hang"):
        oracle.check(case, [outcome], plain_of(case, tmp_path), {})


# Shrinking


def test_a_failing_case_is_made_smaller() -> None:
    """What fails here is a rejoin while a shuffle is there: all the rest must go."""
    legs = (Leg(workers=3, iterations=2, events=(Event(what="break", step=1), Event(what="rejoin", step=2))),)
    steps = (Step("value"), Step("shuffle", {"size": 4, "seed": 1}), Step("prefetch"))
    case = Case(seed=0, pipeline=Pipeline(sources=(Source(kind="text", files=3),), steps=steps), legs=legs)

    def run(candidate: Case) -> Verdict:
        rejoins = any(event.what == "rejoin" for leg in candidate.legs for event in leg.events)
        return Verdict(kind="lost" if rejoins and candidate.pipeline.has("shuffle") else "")

    small, verdict, _ = shrink(case, Verdict(kind="lost"), run, seconds=20)
    assert verdict.kind == "lost"
    assert [step.name for step in small.pipeline.steps] == ["shuffle"]
    assert small.pipeline.sources == (Source(rows=3),)
    assert small.legs == (Leg(events=(Event(what="rejoin", step=2),)),)


# With processes


@pytest.mark.parametrize(
    ("limits", "kind"),
    [(Limits(timeout_s=0.5, case_s=60), "error WaitTimeoutError"), (Limits(timeout_s=60, case_s=2), "hang")],
)
def test_every_wait_is_bounded(limits: Limits, kind: str) -> None:
    never = Pipeline(sources=(Source(rows=3),), steps=(Step("slow", {"seconds": 3600}),))
    lane = Lane()
    try:
        verdict = lane.run(Case(seed=0, pipeline=never), limits)
    finally:
        lane.close()
    assert verdict.kind == kind


@pytest.mark.timeout(300)
def test_some_cases_come_out_as_they_must() -> None:
    summary = run_seeds(SEEDS, jobs=2, shrink_s=0, limits=Limits(timeout_s=30, case_s=60), quiet=True)
    assert not summary.found, "\n".join(f"{found.verdict}\n{found.smallest}" for found in summary.found)
    assert summary.cases == len(SEEDS)
