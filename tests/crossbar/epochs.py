"""One epoch, over all legs and ranks that read of it: what must have come, and how much may be missing or double."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from .case import Case
from .driver import LegOutcome
from .happenings import LOSES_A_STREAM
from .modes import BATCH_OPERATORS, ends_apart
from .outputs import Output, Row, rows_of, without
from .pipelines import COLUMN_BATCH, COLUMN_SOURCES, REGROUPING, WITH_RNG_OF_ROWS
from .plain import Plain
from .reader import Portion
from .verdict import Failure

GROUPS = {"bucket": 3}
"""How many groups each operator fills at a time."""
MOST_CHILDREN = 2
"""Of a `flat_map_rng`."""


@dataclass(slots=True)
class Part:
    """What one leg gave of an epoch, by reader."""

    leg: int
    portions: list[Portion]


def by_epoch(case: Case, outcomes: list[LegOutcome]) -> dict[int, list[Part]]:
    found: dict[int, list[Part]] = {}
    for number, outcome in enumerate(outcomes):
        ranks = outcome.readers[: outcome.leg.ranks]
        if case.modes.feed is not None:  # a longer sampler's last state is in an epoch that the others have ended
            read = [portion for portions in ranks for portion in portions]
            for epoch in sorted({portion.epoch for portion in read}):
                found.setdefault(epoch, []).append(Part(number, [each for each in read if each.epoch == epoch]))
            continue
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
        self._check_filled()
        self._check_numbers()
        expected = self.plain.rows(self.epoch)
        got = rows_of(self._outputs())
        hidden = self._hidden_fields()
        if hidden:
            expected, got = _hide(expected, hidden), _hide(got, hidden)
        ended = all(portion.ended for portion in self.parts[-1].portions)
        if case.pipeline.endless:
            self._check_universe(expected, got)
            least = min(
                [case.limit or 0, *(step.arguments["count"] for step in case.modes.after if step.name == "take")]
            )
            if any(len(p.outputs) < least and p.ended for p in self.parts[-1].portions) and expected:
                raise Failure("ended", f"epoch {self.epoch} of an endless pipeline ended")
            return
        if cut_otherwise(self.case) and self._has(*WITH_RNG_OF_ROWS):
            return
        if modes.sharding == "off":
            self._check_off(expected, got, ended=ended)
            return
        lost, extra = expected - got, got - expected
        most_lost, most_extra = self._bounds()
        if sum(extra.values()) > most_extra:
            strange = [row for row in extra if row not in expected]
            kind = "strange rows" if strange else "twice"
            raise Failure(kind, f"epoch {self.epoch}: {some(extra)} beyond the plain run's (at most {most_extra})")
        if ended and sum(lost.values()) > most_lost:
            raise Failure("lost", f"epoch {self.epoch}: {some(lost)} (at most {most_lost}) of {sum(expected.values())}")
        self._check_short_batches(ended=ended)

    def _outputs(self) -> list[Output]:
        return [output for part in self.parts for portion in part.portions for output in portion.outputs]

    def _has(self, *names: str) -> bool:
        """Whether there is such a step, before or after `distribute`."""
        return any(step.name in names for step in (*self.case.pipeline.steps, *self.case.modes.after))

    def _hidden_fields(self) -> tuple[str, ...]:
        if self.case.modes.sharding == "off":
            return ("noise", "drawn")  # every worker draws numbers of its own, whatever the seed (options.md)
        return ("noise", "drawn") if cut_otherwise(self.case) else ()

    def _check_universe(self, expected: Counter[Row], got: Counter[Row]) -> None:
        # Numbers drawn in a later pass are not those of the first.
        drawn = ("noise", "drawn")
        if self._has(*WITH_RNG_OF_ROWS):
            return
        strange = set(_hide(got, drawn)) - set(_hide(expected, drawn))
        if strange:
            raise Failure("strange rows", f"epoch {self.epoch}: {list(strange)[:3]}")

    def _check_off(self, expected: Counter[Row], got: Counter[Row], *, ended: bool) -> None:
        leg = self.case.legs[self.parts[0].leg]
        by_chance = self._hidden_fields() and self._has(*WITH_RNG_OF_ROWS, "take", "skip")
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
                    "not once a worker", f"lost {some(due - got)}, too many {some(got - due)}, {times} workers"
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
        size = self._rows_an_output()
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
        if ranks > 1 and modes.uneven == "pad" and not modes.evaluation:
            extra += (ranks - 1) * size
        if any(step.name == "flat_map_rng" for step in modes.after):
            lost, extra = lost * MOST_CHILDREN, extra * MOST_CHILDREN
        if first or counted or once:
            lost = float("inf")
        return lost, extra

    def _rows_an_output(self) -> int:
        """Return how many rows the service gives in one output, at most; operators after `distribute` apart."""
        pipeline = self.case.pipeline
        for step in reversed(pipeline.steps):
            if step.name in REGROUPING:
                return int(step.arguments["size"])
            if step.name == "pack":
                return int(step.arguments["length"])
            if step.name == "unbatch":
                return 1
        return COLUMN_BATCH if pipeline.sources[0].kind in COLUMN_SOURCES else 1

    def _check_numbers(self) -> None:
        """What `enumerate` counts after `distribute` goes on over breaks and states."""
        after = self.case.modes.after
        if not after or after[-1].name != "enumerate":
            return
        for rank in range(len(self.parts[-1].portions)):
            parts = self._alike(rank)
            numbers = [output.number for part in parts for output in part.portions[rank].outputs]
            if len(parts) == len(self.parts) and numbers != list(range(len(numbers))):
                raise Failure("numbers", f"epoch {self.epoch}: rank {rank} counted {numbers}")

    def _check_steps(self) -> None:
        """All ranks take the same number of steps, unless they may end apart."""
        modes = self.case.modes
        if modes.uneven == "allow" or ends_apart(modes):
            return
        if modes.guarantee == "at_most_once" and LOSES_A_STREAM & set(self._event_here()):
            return  # a stream that was given up ends at another step for each rank
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

    def _check_filled(self) -> None:
        """All batches with a mask have as many rows."""
        pipeline = self.case.pipeline
        last = pipeline.steps[-1] if pipeline.steps else None
        if last is None or not last.arguments.get("mask") or self.case.modes.after:
            return
        sizes = {output.filled for output in self._outputs()} - {last.arguments["size"]}
        if sizes:
            raise Failure("not filled up", f"epoch {self.epoch}: batches of {sizes} rows, not {last.arguments['size']}")

    def _check_short_batches(self, *, ended: bool) -> None:
        """An epoch has one short batch at most, and none with drop_last."""
        pipeline, modes = self.case.pipeline, self.case.modes
        last = pipeline.steps[-1] if pipeline.steps else None
        if last is None or last.name not in BATCH_OPERATORS | {"rebatch"} or modes.after or len(self.parts) > 1:
            return
        if last.name == "rebatch" and any(step.arguments.get("mask") for step in pipeline.steps):
            return  # rows that fill up a batch come to lie within others
        repeats = any(event in ("rejoin", "reload", "second", "weights") for event in self._event_here())
        short = [len(output.rows) for output in self._outputs() if len(output.rows) < last.arguments["size"]]
        most = 0 if last.arguments["drop_last"] else 1
        if modes.coordinated:
            most = 0 if last.arguments["drop_last"] else len(self.parts[-1].portions)
        if modes.uneven == "pad" and most:
            most = len(self.parts[-1].portions)
        if len(short) > most and not repeats:
            raise Failure("short batches", f"epoch {self.epoch}: {len(short)} of {short} rows, at most {most} may be")


def cut_otherwise(case: Case) -> bool:
    """Say whether small files, which the plain run reads several to a split, are splits of their own."""
    by_file = case.modes.sharding in ("file", "file_or_data")
    return by_file and any(source.files > 1 for source in case.pipeline.sources)


def _hide(rows: Counter[Row], names: tuple[str, ...]) -> Counter[Row]:
    hidden: Counter[Row] = Counter()
    for row, count in rows.items():
        hidden[without(row, *names)] += count
    return hidden


def some(rows: Counter[Row]) -> str:
    return f"{sum(rows.values())} rows, such as {list(rows)[:2]}"
