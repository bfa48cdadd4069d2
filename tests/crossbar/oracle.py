"""What must come out of a case, told without the service: from a plain run in this process and what the pages promise.

Rows are compared, not batches: which rows share a batch depends on the streams. In deterministic order the outputs
themselves are compared with those of an undisturbed run on one worker.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from msgspec.structs import replace

from penstock.core.errors import PenstockError, WaitTimeoutError

from .case import Case
from .driver import LegOutcome, sampler_of
from .epochs import Epoch, by_epoch, cut_otherwise, some
from .modes import BATCH_OPERATORS, Refusal, ends_apart, refusals
from .outputs import Output, Row, rows_of, without
from .pipelines import WITH_RNG
from .plain import Plain
from .reader import Misused, Superseding
from .verdict import Failure

REMEDIES = ("use ", "give", "put ", "leave", "say ", "must ", "need", "make ", "load", "start ", "only", "set ")
"""A refusal that says what to do has one of them."""

# Refusals


def unclear(case: Case) -> bool:
    """Whether the pages leave open if this works: then it may be refused with a sentence, or must be right."""
    modes, pipeline = case.modes, case.pipeline
    if modes.evaluation and any(leg.ranks != modes.ranks for leg in case.legs):
        return True  # which elements are copies follows from the number of ranks
    if apart(case) or (modes.cached_by_arrival and len(case.legs) > 1):
        return True
    if ends_apart(modes) and any(leg.load != "own" and leg.ranks > 1 for leg in case.legs[1:]):
        return True  # after as many outputs here, ranks may have taken unequal numbers of steps
    static = modes.sharding in ("file", "data", "file_or_data", "hint", "custom")
    several = len(pipeline.sources) > 1 or len(case.legs) > 1
    few_files = modes.sharding == "file"
    if mixes_nothing(case):
        return True
    ranks = max(leg.ranks for leg in case.legs)
    if modes.guarantee == "at_most_once" and ranks > 1 and any(leg.harmed for leg in case.legs[:-1]):
        return True  # of a stream that is given up, ranks had taken unequal numbers of rounds: so do their epochs end
    if modes.uneven == "allow" and ranks > 1 and pipeline.join is not None and pipeline.join.name == "mix":
        return True  # each rank needs a stream of its own, and a mix cannot be cut into more than it has splits
    no_mark = modes.sharding == "hint" and not pipeline.has("shard")
    return static and (several or few_files or no_mark or pipeline.endless or modes.feed is not None)


def mixes_nothing(case: Case) -> bool:
    """Whether an endless mix has an input without elements, which a stream cannot tell from one it gets nothing of."""
    join = case.pipeline.join
    endless = join is not None and join.arguments.get("stop") == "never"
    return endless and any(not source.rows for source in case.pipeline.sources)


def apart(case: Case) -> bool:
    """Whether ranks that stand at different places are moved to another service, each with its own state alone."""
    return not case.modes.in_turn and any(
        leg.new_service and leg.load == "own" and leg.ranks > 1 for leg in case.legs[1:]
    )


def check_refusal(error: BaseException, expected: list[Refusal]) -> None:
    text = str(error)
    if not isinstance(error, PenstockError) or isinstance(error, WaitTimeoutError):
        raise Failure("raw refusal", f"{type(error).__name__}: {text}, where a PenstockError was due for {expected}")
    names = [name for refusal in expected for name in refusal.names]
    if not any(name in text for name in names):
        raise Failure("refused for another reason", f"{text!r} names none of {names}")
    check_sentence(text)


def check_sentence(text: str) -> None:
    if len(text.split()) < 5 or not any(word in text.lower() for word in REMEDIES):
        raise Failure("refusal without a remedy", repr(text))


# What was received


def check(
    case: Case, outcomes: list[LegOutcome], plain: Plain, undisturbed: dict[tuple[int, int], list[Output]]
) -> bool:
    """Raise `Failure` if a case did not come out as it must; return whether it was to be refused, and was.

    `undisturbed` has the outputs by (epoch, reader) of a run in the same order on one worker, if there was one.
    """
    expected = refusals(case.pipeline, case.modes)
    errors = [error for outcome in outcomes for error in outcome.errors.values()]
    delivered = sum(map(_delivered, outcomes))
    _check_waits(outcomes)
    if expected:
        if not errors:
            raise Failure("not refused", f"{expected} and {delivered} outputs came")
        if delivered:
            raise Failure("refused late", f"{delivered} outputs came before {errors[0]!r}")
        for error in errors:
            check_refusal(error, expected)
        return True
    refused = [
        error for error in errors if isinstance(error, PenstockError) and not isinstance(error, WaitTimeoutError)
    ]
    # What a state lists is read, and then files are dealt; a mix goes on until it is the turn of what gives nothing.
    late = (case.modes.sharding == "file" and len(case.legs) > 1) or mixes_nothing(case)
    if unclear(case) and refused and (late or not _delivered(outcomes[-1])):
        check_sentence(str(refused[0]))
        return True
    for error in errors:
        if isinstance(error, Superseding):
            raise Failure("not superseded", str(error))
        if isinstance(error, Misused):
            raise Failure("misuse", str(error))
    if case.pipeline.has("failing"):
        _check_failing(case, outcomes, plain)
        return False
    if errors:
        first = errors[0]
        notes = " | ".join(getattr(first, "__notes__", []))
        raise Failure(f"error {type(first).__name__}", f"{first} {notes[-600:]}")
    _check_replicas(case, outcomes)
    if case.modes.sharing is not None:
        _check_sharing(case, outcomes, plain)
    elif case.modes.feed is not None:
        _check_fed(case, outcomes, plain)
    else:
        for epoch, parts in sorted(by_epoch(case, outcomes).items()):
            Epoch(case, epoch, parts, plain).check()
    _check_order(case, outcomes, undisturbed)
    return False


def _delivered(outcome: LegOutcome) -> int:
    return sum(len(portion.outputs) for portions in outcome.readers for portion in portions)


def _check_waits(outcomes: list[LegOutcome]) -> None:
    for outcome in outcomes:
        if outcome.waited:
            raise Failure("hang", f"waited for {outcome.waited}")


def _check_failing(case: Case, outcomes: list[LegOutcome], plain: Plain) -> None:
    step = case.pipeline.find("failing")
    assert step is not None
    sources = [source for source in case.pipeline.sources if source.first <= step.arguments["at"]]
    exists = any(step.arguments["at"] < source.first + source.rows for source in sources)
    always = exists and case.limit is None and case.modes.feed is None
    broken = any(event.what == "break" for leg in case.legs for event in leg.events)
    stops_first = case.pipeline.join is not None and case.pipeline.join.arguments.get("stop") == "first"
    here = plain.error()
    if always and not stops_first and here is None:
        raise Failure("error lost here", f"{step} raised nothing in this process")
    errors = [error for outcome in outcomes for error in outcome.errors.values()]
    timeouts = [error for error in errors if isinstance(error, WaitTimeoutError)]
    others = [error for error in errors if not isinstance(error, WaitTimeoutError)]
    counted = any(after.name == "take" for after in case.modes.after)
    due = always and not broken and not stops_first and not counted and all(leg.stop is None for leg in case.legs[:1])
    if due and not others:
        raise Failure("error lost", f"{step} raised nothing in the trainer, but {timeouts[:1]}")
    for error in others:
        if here is not None and (type(error), str(error)) != (type(here), str(here)):
            raise Failure("another error", f"{type(error).__name__}: {error}, and here {type(here).__name__}: {here}")


def _check_replicas(case: Case, outcomes: list[LegOutcome]) -> None:
    loses = case.modes.guarantee == "at_most_once" and any(leg.harmed for leg in case.legs)
    if case.modes.replicas == 1 or loses:
        return
    for outcome in outcomes:
        for rank in range(outcome.leg.ranks):
            twins = outcome.readers[rank :: outcome.leg.ranks]
            for one, other in pairwise(twins):
                for a, b in zip(one, other):
                    if a.outputs != b.outputs:
                        raise Failure(
                            "replicas differ",
                            f"rank {rank}, epoch {a.epoch}: {_first_difference(a.outputs, b.outputs)}",
                        )


def _first_difference(one: list[Output], other: list[Output]) -> str:
    for step, (a, b) in enumerate(zip(one, other)):
        if a != b:
            return f"step {step} is {_brief(a)} and {_brief(b)}"
    return f"{len(one)} and {len(other)} outputs"


def _brief(output: Output) -> str:
    ids = [dict(row).get("id", row) if isinstance(row[0], tuple) else row[-1] for row in output.rows[:6] if row]
    return f"{ids}{'' if output.number is None else f' numbered {output.number}'}"


def _check_sharing(case: Case, outcomes: list[LegOutcome], plain: Plain) -> None:
    """A trainer reads a part of an epoch, each row once: all of it if it is waited for from the beginning.

    Together the trainers read all of it, since nothing is made that none of them asked for.
    """
    modes, pipeline = case.modes, case.pipeline
    drawing = any(step.name in WITH_RNG for step in (*pipeline.steps, *modes.after))
    if pipeline.endless or (drawing and (modes.sharding == "off" or cut_otherwise(case))):
        return
    taken_away = any(step.arguments.get("drop_last") for step in (*pipeline.steps, *modes.after))
    taken_away |= any(step.name in ("take", "skip") for step in modes.after)
    taken_away |= pipeline.join is not None and pipeline.join.arguments.get("stop") == "first"
    events = {event.what for leg in case.legs for event in leg.events}
    whole = not taken_away and modes.guarantee != "at_most_once" and not events & {"break", "second"}
    waited_for = modes.sharing == "wait" and (modes.trainers_named or modes.trainers == 1)
    whole = whole and modes.ranks == 1  # of several ranks, what does not fill a last round is nobody's
    together: dict[int, Counter[Row]] = {}
    for trainer in range(modes.trainers):
        ranks = outcomes[0].readers[trainer * modes.ranks : (trainer + 1) * modes.ranks]
        for portions in zip(*ranks):
            epoch = portions[0].epoch
            expected = plain.rows(epoch)
            got = rows_of(output for portion in portions for output in portion.outputs)
            together.setdefault(epoch, Counter()).update(got)
            extra = {row for row in got if row not in expected} if modes.sharding == "off" else got - expected
            if extra and modes.uneven != "pad":
                raise Failure("twice", f"trainer {trainer}, epoch {epoch}: {list(extra)[:3]}")
            ended = all(portion.ended for portion in portions)
            lost = expected - got
            if ended and waited_for and whole and lost:
                raise Failure("lost", f"trainer {trainer}, epoch {epoch}: {some(lost)}")
            steps = {len(portion.outputs) for portion in portions}
            if ended and not events and not modes.after and len(steps) > 1:
                raise Failure("steps", f"trainer {trainer}, epoch {epoch}: ranks took {sorted(steps)} steps")
    for epoch, read in together.items():
        lost = plain.rows(epoch) - read
        if whole and not events and lost:
            raise Failure("lost", f"epoch {epoch}: no trainer was given {some(lost)}")


def _check_fed(case: Case, outcomes: list[LegOutcome], plain: Plain) -> None:
    """Outputs come in the sampler's order, every unit whole."""
    if case.modes.after:
        return
    single = replace(
        case.pipeline, steps=tuple(s for s in case.pipeline.steps if s.name not in BATCH_OPERATORS | {"batch_map"})
    )
    by_index = Plain(replace(case, pipeline=single), plain.seed, plain.folder).outputs(0)
    batch = case.pipeline.find(*BATCH_OPERATORS)
    for epoch, parts in sorted(by_epoch(case, outcomes).items()):
        for rank in range(len(parts[-1].portions)):
            units = [unit if isinstance(unit, list) else [unit] for unit in sampler_of(case, rank).units(epoch)]
            if batch is not None and case.modes.feed != "lists":
                flat = [index for unit in units for index in unit]
                size = batch.arguments["size"]
                units = [flat[at : at + size] for at in range(0, len(flat), size)]
                if batch.arguments["drop_last"]:
                    units = [unit for unit in units if len(unit) == size]
            outputs = [output for part in parts for output in part.portions[rank].outputs]
            ended = parts[-1].portions[rank].ended
            for step, (output, unit) in enumerate(zip(outputs, units)):
                due = [without(row, "noise") for index in unit for row in by_index[index].rows]
                if [without(row, "noise", "w") for row in output.rows] != due:
                    raise Failure(
                        "another order", f"rank {rank}, epoch {epoch}, step {step}: {_brief(output)}, due {unit}"
                    )
            if len(outputs) > len(units) or (ended and len(outputs) != len(units)):
                raise Failure("lost", f"rank {rank}, epoch {epoch}: {len(outputs)} of {len(units)} units")


def _check_order(case: Case, outcomes: list[LegOutcome], undisturbed: dict[tuple[int, int], list[Output]]) -> None:
    """In deterministic order each rank gets what it gets in an undisturbed run, whatever happened."""
    if not undisturbed:
        return
    for (epoch, reader), due in undisturbed.items():
        outputs: list[Output] = []
        ended = False
        for outcome in outcomes:
            for portion in outcome.readers[reader]:
                if portion.epoch == epoch:
                    outputs += portion.outputs
                    ended = portion.ended
        if outputs[: len(due)] != due[: len(outputs)] or (ended and len(outputs) != len(due)):
            raise Failure("another order", f"reader {reader}, epoch {epoch}: {_first_difference(outputs, due)}")


def may_compare_order(case: Case) -> bool:
    """Whether an undisturbed run on one worker gives the same outputs, step by step."""
    modes = case.modes
    if not modes.in_order and modes.feed is None:
        return False
    if modes.sharding != "dynamic" or modes.sharing is not None or case.pipeline.has("failing"):
        return False
    changed = any(leg.ranks != modes.ranks for leg in case.legs)
    weighed = any(event.what == "weights" for leg in case.legs for event in leg.events)
    once = modes.guarantee == "at_most_once"
    return not (changed or weighed or once)
