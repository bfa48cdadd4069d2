"""What must come out of a case, told without the service: from a plain run in this process and what the pages promise.

Rows are compared, not batches: which rows share a batch depends on the streams. In deterministic order the outputs
themselves are compared with those of an undisturbed run on one worker.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from penstock.core.errors import PenstockError, WaitTimeoutError

from .case import Case
from .driver import LegOutcome, sampler_of
from .happenings import LOSES_A_STREAM
from .modes import BATCH_OPERATORS, Refusal, refusals
from .outputs import Output, Row, output_of, without
from .pipelines import COLUMN_BATCH, REGROUPING, Pipeline, Step, build
from .reader import Misused, Portion, Superseding
from .verdict import Failure

REMEDIES = (
    "use ",
    "give",
    "put ",
    "leave",
    "say ",
    "must ",
    "needs",
    "need ",
    "make ",
    "load",
    "start ",
    "only",
    "set ",
)
GROUPS = {"bucket": 3}


# The plain run


def whole(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with nothing dropped and nothing endless: its rows are all there are to come."""

    def undropped(step: Step) -> Step:
        if "drop_last" in step.arguments:
            return Step(step.name, {**step.arguments, "drop_last": False})
        return step

    steps = tuple(
        undropped(step) for step in pipeline.steps if not (step.name == "repeat" and step.arguments["count"] < 0)
    )
    join = pipeline.join
    if join is not None and join.name == "mix":
        join = Step("mix", {**join.arguments, "stop": "all"})
    return msgspec.structs.replace(pipeline, steps=steps, join=join)


@dataclass(slots=True)
class Plain:
    """Runs the pipeline in this process, with the seed the service uses."""

    case: Case
    seed: int
    folder: Path

    def outputs(self, epoch: int) -> list[Output]:
        """Everything there is to come in an epoch, operators after `distribute` included."""
        steps = self.case.pipeline.steps
        uncounted = tuple(step for step in self.case.modes.after if step.name not in ("take", "skip", "enumerate"))
        pipeline = whole(msgspec.structs.replace(self.case.pipeline, steps=(*steps, *uncounted)))
        dataset = build(pipeline, self.folder)
        with dataset.iterator(epoch=epoch, seed=self.seed) as iterator:
            return [output_of(element) for element in iterator]

    def rows(self, epoch: int) -> Counter[Row]:
        return Counter(row for output in self.outputs(epoch) for row in output.rows)

    def error(self) -> BaseException | None:
        """Return what the pipeline raises here, None if nothing."""
        dataset = build(self.case.pipeline, self.folder)
        try:
            with dataset.iterator(epoch=0, seed=self.seed) as iterator:
                for number, _ in enumerate(iterator):
                    if number == self.case.limit:
                        return None
        except BaseException as error:
            return error
        return None


# Refusals


def unclear(case: Case) -> bool:
    """Whether the pages leave open if this works: then it may be refused with a sentence, or must be right."""
    modes, pipeline = case.modes, case.pipeline
    static = modes.sharding in ("file", "data", "file_or_data", "hint", "custom")
    several = len(pipeline.sources) > 1 or len(case.legs) > 1
    few_files = modes.sharding == "file"
    no_mark = modes.sharding == "hint" and not pipeline.has("shard")
    return static and (several or few_files or no_mark or pipeline.endless or modes.feed is not None)


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
    delivered = sum(len(portion.outputs) for o in outcomes for portions in o.readers for portion in portions)
    _check_waits(outcomes)
    if expected:
        if not errors:
            raise Failure("not refused", f"{expected} and {delivered} outputs came")
        if delivered:
            raise Failure("refused late", f"{delivered} outputs came before {errors[0]!r}")
        for error in errors:
            check_refusal(error, expected)
        return True
    if unclear(case) and errors and not delivered and isinstance(errors[0], PenstockError):
        check_sentence(str(errors[0]))
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
        for epoch, parts in sorted(_by_epoch(case, outcomes).items()):
            Epoch(case, epoch, parts, plain).check()
    _check_order(case, outcomes, undisturbed)
    return False


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


@dataclass(slots=True)
class Part:
    """What one leg gave of an epoch, by reader."""

    leg: int
    portions: list[Portion]


def _by_epoch(case: Case, outcomes: list[LegOutcome]) -> dict[int, list[Part]]:
    found: dict[int, list[Part]] = {}
    for number, outcome in enumerate(outcomes):
        ranks = outcome.readers[: outcome.leg.ranks]
        for iteration in range(max(map(len, ranks))):
            portions = [portions[iteration] for portions in ranks if iteration < len(portions)]
            epochs = {portion.epoch for portion in portions}
            if len(epochs) > 1 or len(portions) < len(ranks):
                raise Failure("epochs apart", f"ranks of leg {number} read epochs {epochs} in iteration {iteration}")
            found.setdefault(epochs.pop(), []).append(Part(number, portions))
    if sorted(found) != list(range(len(found))):
        raise Failure("epoch numbers", f"epochs {sorted(found)} were read")
    return found


@dataclass(slots=True)
class Epoch:
    """One epoch over all legs and ranks that read of it."""

    case: Case
    epoch: int
    parts: list[Part]
    plain: Plain

    def check(self) -> None:
        case, modes = self.case, self.case.modes
        self._check_steps()
        self._check_groups()
        expected = self.plain.rows(self.epoch)
        got = Counter(row for output in self._outputs() for row in output.rows)
        hidden = self._hidden_fields()
        if hidden:
            expected, got = _hide(expected, hidden), _hide(got, hidden)
        ended = all(portion.ended for portion in self.parts[-1].portions)
        if case.pipeline.endless:
            self._check_universe(expected, got)
            if any(len(p.outputs) < (case.limit or 0) and p.ended for p in self.parts[-1].portions) and expected:
                raise Failure("ended", f"epoch {self.epoch} of an endless pipeline ended")
            return
        if modes.sharding == "off":
            self._check_off(expected, got, ended=ended)
            return
        lost, extra = expected - got, got - expected
        most_lost, most_extra = self._bounds()
        if sum(extra.values()) > most_extra:
            strange = [row for row in extra if row not in expected]
            kind = "strange rows" if strange else "twice"
            raise Failure(kind, f"epoch {self.epoch}: {_some(extra)} beyond the plain run's (at most {most_extra})")
        if ended and sum(lost.values()) > most_lost:
            raise Failure(
                "lost", f"epoch {self.epoch}: {_some(lost)} (at most {most_lost}) of {sum(expected.values())}"
            )
        self._check_short_batches(ended=ended)

    def _outputs(self) -> list[Output]:
        return [output for part in self.parts for portion in part.portions for output in portion.outputs]

    def _hidden_fields(self) -> tuple[str, ...]:
        pipeline = self.case.pipeline
        if self.case.modes.sharding == "off" and pipeline.unseeded:
            return ("noise", "drawn")  # every worker draws a seed of its own
        return ()

    def _check_universe(self, expected: Counter[Row], got: Counter[Row]) -> None:
        # Numbers drawn in a later pass are not those of the first.
        drawn = ("noise", "drawn")
        if self.case.pipeline.has("filter_rng", "flat_map_rng"):
            return
        strange = set(_hide(got, drawn)) - set(_hide(expected, drawn))
        if strange:
            raise Failure("strange rows", f"epoch {self.epoch}: {list(strange)[:3]}")

    def _check_off(self, expected: Counter[Row], got: Counter[Row], *, ended: bool) -> None:
        leg = self.case.legs[self.parts[0].leg]
        pipeline = self.case.pipeline
        by_chance = self._hidden_fields() and pipeline.has("filter_rng", "flat_map_rng", "take", "skip")
        if by_chance:
            return
        if set(got) - set(expected):
            raise Failure("strange rows", f"epoch {self.epoch}: {list(set(got) - set(expected))[:3]}")
        quiet = not any(event.what in LOSES_A_STREAM or event.what == "add_worker" for event in leg.events)
        limited = self.case.modes.max_workers is not None or self._takes_away() or any(self._event_here())
        if ended and quiet and not limited and leg.ranks == 1:
            times = leg.workers + leg.inline
            due = Counter({row: count * times for row, count in expected.items()})
            if got != due:
                raise Failure(
                    "not once a worker", f"lost {_some(due - got)}, too many {_some(got - due)}, {times} workers"
                )

    def _event_here(self) -> list[str]:
        return [event.what for part in self.parts for event in self.case.legs[part.leg].events]

    def _takes_away(self) -> bool:
        """Whether what comes is a part of everything, by the pipeline itself."""
        pipeline, after = self.case.pipeline, self.case.modes.after
        dropped = any(step.arguments.get("drop_last") for step in (*pipeline.steps, *after))
        first = pipeline.join is not None and pipeline.join.arguments.get("stop") == "first"
        return dropped or first or any(step.name in ("take", "skip", "zip") for step in (*pipeline.steps, *after))

    def _bounds(self) -> tuple[float, float]:
        """Return how many rows may be missing in an epoch that came to its end, and how many may be too many."""
        case, modes = self.case, self.case.modes
        first = case.pipeline.join is not None and case.pipeline.join.arguments.get("stop") == "first"
        counted = any(step.name in ("take", "skip") for step in modes.after)
        events = set(self._event_here())
        once = modes.guarantee == "at_most_once" and (events & LOSES_A_STREAM or len(self.parts) > 1 or events)
        ranks = max(case.legs[part.leg].ranks for part in self.parts)
        sizes = [len(output.rows) for output in self._outputs()]
        size = max([*sizes, *self._sizes(), 1])
        lost: float = 0
        for step in (*case.pipeline.steps, *modes.after):
            if step.arguments.get("drop_last"):
                groups = GROUPS.get(step.name, step.arguments.get("keys", 1))
                lost += step.arguments["size"] * groups * ranks * (ranks if step in modes.after else 1)
        extra: float = 0
        if ranks > 1 and modes.uneven == "drop":
            lost += ranks * size - 1
        if modes.coordinated and case.pipeline.has("group"):
            lost += 3 * (ranks - 1)
        if ranks > 1 and modes.uneven == "pad":
            extra += (ranks - 1) * size
        if first or counted or once:
            lost = float("inf")
        return lost, extra

    def _sizes(self) -> list[int]:
        steps = self.case.pipeline.steps
        columns = any(source.kind == "parquet_batches" for source in self.case.pipeline.sources)
        return [COLUMN_BATCH * columns, *(int(step.arguments["size"]) for step in steps if step.name in REGROUPING)]

    def _check_steps(self) -> None:
        """All ranks take the same number of steps, unless they may end apart."""
        if self.case.modes.uneven == "allow" or any(s.name in ("filter", "unbatch") for s in self.case.modes.after):
            return
        portions = self.parts[-1].portions
        counts = [sum(len(part.portions[rank].outputs) for part in self._alike(rank)) for rank in range(len(portions))]
        if all(portion.ended for portion in portions) and len(set(counts)) > 1:
            raise Failure("steps", f"epoch {self.epoch}: the ranks took {counts} steps")

    def _alike(self, rank: int) -> list[Part]:
        width = len(self.parts[-1].portions)
        return [part for part in self.parts if len(part.portions) == width and rank < width]

    def _check_groups(self) -> None:
        """With coordinated reads the outputs of a step are of one bucket, one length or one key."""
        modes, pipeline = self.case.modes, self.case.pipeline
        if not modes.coordinated or modes.after or not pipeline.steps:
            return
        last = pipeline.steps[-1]
        for part in self.parts:
            for step, outputs in enumerate(zip(*(portion.outputs for portion in part.portions))):
                if last.name in ("bucket", "padded_batch"):
                    found: set[Any] = {output.width for output in outputs}
                elif last.name == "group":
                    found = {dict(row)["id"] % last.arguments["keys"] for output in outputs for row in output.rows}
                else:
                    return
                if len(found) > 1:
                    raise Failure("torn step", f"epoch {self.epoch} step {step} of leg {part.leg} has {sorted(found)}")

    def _check_short_batches(self, *, ended: bool) -> None:
        """An epoch has one short batch at most, and none with drop_last."""
        pipeline, modes = self.case.pipeline, self.case.modes
        last = pipeline.steps[-1] if pipeline.steps else None
        if last is None or last.name not in BATCH_OPERATORS | {"rebatch"} or modes.after or len(self.parts) > 1:
            return
        repeats = any(event in ("rejoin", "reload", "second", "weights") for event in self._event_here())
        short = [len(output.rows) for output in self._outputs() if len(output.rows) < last.arguments["size"]]
        most = 0 if last.arguments["drop_last"] else 1
        if modes.coordinated:
            most = 0 if last.arguments["drop_last"] else len(self.parts[-1].portions)
        if modes.uneven == "pad" and most:
            most = len(self.parts[-1].portions)
        if len(short) > most and not repeats:
            raise Failure("short batches", f"epoch {self.epoch}: {len(short)} of {short} rows, at most {most} may be")


def _hide(rows: Counter[Row], names: tuple[str, ...]) -> Counter[Row]:
    hidden: Counter[Row] = Counter()
    for row, count in rows.items():
        hidden[without(row, *names)] += count
    return hidden


def _some(rows: Counter[Row]) -> str:
    return f"{sum(rows.values())} rows, such as {list(rows)[:2]}"


def _check_replicas(case: Case, outcomes: list[LegOutcome]) -> None:
    if case.modes.replicas == 1:
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
    return f"{ids}{'' if output.index is None else f' numbered {output.index}'}"


def _check_sharing(case: Case, outcomes: list[LegOutcome], plain: Plain) -> None:
    """A trainer reads a part of an epoch, each row once; all of it where it is waited for from the beginning."""
    if case.pipeline.endless:
        return
    quiet = not case.legs[0].events
    plenty = case.modes.sharing == "wait" and (case.modes.trainers_named or case.modes.trainers == 1)
    lost_by_design = any(step.arguments.get("drop_last") for step in (*case.pipeline.steps, *case.modes.after))
    lost_by_design |= any(step.name in ("take", "skip") for step in case.modes.after)
    lost_by_design |= case.pipeline.join is not None and case.pipeline.join.arguments.get("stop") == "first"
    off = case.modes.sharding == "off"
    for trainer, portions in enumerate(outcomes[0].readers):
        for portion in portions:
            expected = plain.rows(portion.epoch)
            got = Counter(row for output in portion.outputs for row in output.rows)
            extra = {row for row in got if row not in expected} if off else got - expected
            if extra and not (off and case.pipeline.unseeded):
                raise Failure("twice", f"trainer {trainer}, epoch {portion.epoch}: {list(extra)[:3]}")
            lost = expected - got
            if portion.ended and plenty and quiet and lost and not lost_by_design and not off:
                raise Failure("lost", f"trainer {trainer}, epoch {portion.epoch}: {_some(lost)}")


def _check_fed(case: Case, outcomes: list[LegOutcome], plain: Plain) -> None:
    """Outputs come in the sampler's order, every unit whole."""
    if case.modes.after:
        return
    single = msgspec.structs.replace(
        case.pipeline, steps=tuple(s for s in case.pipeline.steps if s.name not in BATCH_OPERATORS | {"batch_map"})
    )
    by_index = Plain(msgspec.structs.replace(case, pipeline=single), plain.seed, plain.folder).outputs(0)
    batch = case.pipeline.find(*BATCH_OPERATORS)
    for epoch, parts in sorted(_by_epoch(case, outcomes).items()):
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
                short = batch is not None and batch.arguments["drop_last"] and case.modes.feed == "lists"
                if not short:
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
