"""What came out of the parts of `experiments/scaling.py`: kept in a file as they end, shown as a table, claims, a plot.

A part is a sweep over numbers of workers, a policy on a workload, or a bound. The file has a line of JSON for each, so
that parts can be run one by one, by several processes and after one another.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from scaling_workloads import TRAINER_PER_H, WORKER_PER_H, WORKLOADS, Decided, Run, phases

WITHIN = 0.03
SETTLES_S, CHANGES, COSTS = 20.0, 2, 1.05
ORACLE = "oracle"


class Claim(msgspec.Struct, frozen=True):
    text: str
    holds: bool

    def line(self) -> str:
        return f"{'yes' if self.holds else 'NO '}  {self.text}"


class Part(msgspec.Struct, frozen=True, order=True):
    """One thing to run."""

    name: str
    """Of a workload or a bound."""
    who: str = ""
    """`oracle` for a sweep, or a policy; nothing for a bound."""


class Swept(msgspec.Struct, frozen=True, tag=True):
    """What each fixed number of workers gave, at each speed of the trainer."""

    runs: dict[int, list[Run]]

    def best(self, phase: int) -> int:
        """Return the smallest number of workers within 3 % of the best."""
        rates = {workers: runs[phase].per_s for workers, runs in self.runs.items()}
        return min(workers for workers, rate in rates.items() if rate >= max(rates.values()) * (1 - WITHIN))

    def cost(self, spans: list[float]) -> float:
        """Return what a batch costs with the right number of workers in each phase, each as long as it is."""
        chosen = [self.runs[self.best(phase)][phase] for phase in range(len(spans))]
        paid = sum(run.paid / run.seconds * span for run, span in zip(chosen, spans))
        return paid / sum(run.per_s * span for run, span in zip(chosen, spans))


class Decision(msgspec.Struct, frozen=True, tag=True):
    """What a policy made of a workload."""

    run: Run


class Bound(msgspec.Struct, frozen=True, tag=True):
    lines: tuple[str, ...]
    claims: tuple[Claim, ...]


class _Line(msgspec.Struct, frozen=True):
    part: Part
    result: Swept | Decision | Bound


class Results:
    """Results by part. With a file they outlast the process; a part that was run again counts as it was last."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.found: dict[Part, Swept | Decision | Bound] = {}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            lines = path.read_bytes().splitlines()
            self.found = {line.part: line.result for line in map(msgspec.json.Decoder(_Line).decode, lines)}

    def add(self, part: Part, result: Swept | Decision | Bound) -> None:
        self.found[part] = result
        if self._path is not None:
            with self._path.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(msgspec.json.encode(_Line(part, result)) + b"\n")

    def swept(self, name: str) -> Swept | None:
        found = self.found.get(Part(name, ORACLE))
        return found if isinstance(found, Swept) else None

    def decided(self, name: str) -> dict[str, Run]:
        """Return what each policy made of a workload."""
        return {
            part.who: each.run for part, each in self.found.items() if part.name == name and isinstance(each, Decision)
        }


def spans_of(name: str, run: Run) -> list[tuple[float, float]]:
    """Return from when to when each phase of a run goes."""
    begins = [at for at, _ in phases(name)]
    return [(at, until) for at, until in zip(begins, [*begins[1:], run.seconds]) if at < run.seconds]


def cost_ratio(name: str, run: Run, swept: Swept) -> float:
    """Return what a batch cost, as a multiple of what it costs who knows the right number beforehand."""
    return run.paid / max(run.batches, 1) / swept.cost([until - at for at, until in spans_of(name, run)])


def decisions_in(run: Run, at: float, until: float) -> tuple[list[Decided], int]:
    """Return the changes of a phase, and where they ended. A job's first number is no change."""
    before = [each for each in run.path if each.at_s < until]
    return [each for each in run.path[1:] if at <= each.at_s < until], before[-1].target


def rows(results: Results) -> Iterator[str]:
    """Yield the table: what each number of workers makes, and where each policy went."""
    for name in WORKLOADS:
        swept, decided = results.swept(name), results.decided(name)
        for phase, (_, per_s) in enumerate(phases(name)):
            if swept is not None:
                made = "  ".join(f"{n}: {runs[phase].per_s:.1f}" for n, runs in swept.runs.items())
                yield f"{name:<16} the trainer takes {per_s:g}/s; by workers, batches/s:  {made}"
        for who, run in decided.items():
            path = " ".join(f"{each.target}@{each.at_s:.0f}s" for each in run.path)
            costs = "" if swept is None else f"cost {cost_ratio(name, run, swept):5.3f}x  "
            shown = []
            for phase, (at, until) in enumerate(spans_of(name, run)):
                changes, reached = decisions_in(run, at, until)
                settled = f"settled {changes[-1].at_s - at:5.1f} s" if changes else "unchanged"
                oracle = "" if swept is None else f" (oracle {swept.best(phase)})"
                shown.append(f"{reached}{oracle} by {len(changes)} changes, {settled}")
            yield f"{'':<16} {who:<12} waited {run.waited_s / run.seconds:4.0%}  {costs}{'; '.join(shown)}  {path}"
    for bound in results.found.values():
        if isinstance(bound, Bound):
            yield from bound.lines


def claims(results: Results, *, whole: bool) -> Iterator[Claim]:
    """Yield what is claimed of `model_first` and of the bounds. `whole`: runs are long enough to say what they cost."""
    for name in WORKLOADS:
        swept, run = results.swept(name), results.decided(name).get("model_first")
        if swept is None or run is None:
            continue
        for phase, (at, until) in enumerate(spans_of(name, run)):
            yield from _of_phase(name, phase, run, swept, at, until)
        if whole:
            ratio = cost_ratio(name, run, swept)
            yield Claim(f"{name}: costs {ratio:.3f} times the oracle's ({COSTS} at most)", ratio <= COSTS)
    for bound in results.found.values():
        if isinstance(bound, Bound):
            yield from bound.claims


def _of_phase(name: str, phase: int, run: Run, swept: Swept, at: float, until: float) -> Iterator[Claim]:
    changes, reached = decisions_in(run, at, until)
    oracle, takes_per_s = swept.best(phase), phases(name)[phase][1]
    label = name if len(phases(name)) == 1 else f"{name}, at {takes_per_s:g}/s"
    settled_s = changes[-1].at_s - at if changes else 0.0
    yield Claim(f"{label}: {reached} workers, where the oracle has {oracle} (within 1)", abs(reached - oracle) <= 1)
    yield Claim(f"{label}: {len(changes)} changes ({CHANGES} at most)", len(changes) <= CHANGES)
    yield Claim(f"{label}: settled after {settled_s:.1f} s ({SETTLES_S:g} at most)", settled_s <= SETTLES_S)
    if swept.runs[oracle][phase].per_s >= takes_per_s * (1 - WITHIN):
        most = max((each.target for each in changes), default=reached)
        text = f"{label}: {most} workers asked for at most, where the trainer limits (one above the oracle)"
        yield Claim(text, most <= oracle + 1)


Form = Literal["o", "x", "s", "^"]
_FORMS: dict[str, Form] = {"model_first": "o", "cachew": "x", "utilization": "s", "buffers": "^"}


def plot(results: Results, path: Path) -> None:
    """Draw each workload's workers over time beside what the oracle has, and what each policy costs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 3, figsize=(16, 11), squeeze=False)
    places = list(axes.flat)
    for place, name in zip(places, WORKLOADS):
        swept, decided = results.swept(name), results.decided(name)
        for who, run in decided.items():
            at = [*(max(each.at_s, 0.0) for each in run.path), run.seconds]
            numbers = [each.target for each in run.path]
            place.step(at, [*numbers, numbers[-1]], where="post", label=who, linewidth=1)
            if swept is not None:
                for phase, (begins, until) in enumerate(spans_of(name, run)):
                    place.hlines(swept.best(phase), begins, until, color="grey", linestyle=":", linewidth=2)
        place.set(title=name, xlabel="s (dotted: the oracle)", ylabel="workers asked for", ylim=(0, None))
        if decided:
            place.legend(fontsize="x-small")
    last = places[len(WORKLOADS)]
    for who, form in _FORMS.items():
        ratios = {
            name: cost_ratio(name, run, swept)
            for name in WORKLOADS
            for run in [results.decided(name).get(who)]
            if (swept := results.swept(name)) is not None and run is not None
        }
        if ratios:
            last.plot(list(ratios.values()), list(ratios), form, label=who)
    last.axvline(COSTS, color="lightgrey")
    prices = f"a trainer {TRAINER_PER_H:g}, a worker {WORKER_PER_H:g} an hour"
    last.set(title="What a batch costs, search included", xlabel=f"over the oracle's ({prices})")
    last.legend(fontsize="x-small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
