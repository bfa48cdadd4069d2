"""Run an event traced, and reduce the trace to its walk: the modules it enters, in the order it first enters them.

What counts:

- A module is entered when a function of it is called. The same module in two processes counts once.
- What a library would be is one step. *The engine* (`runtime`, `sources`, `graph`, `passes`, `policies`) is one. *The
  dispatcher* is one: whatever that process enters to decide and to answer. *A runner starts* is one: whatever a process
  that is forked meanwhile enters until it says that it is ready.
- What runs by the clock (beats, figures, ticks, looking after things) is not the event's. A function is, if it is
  entered in two thirds of the stretches in which the event happens, and at least once in two of them beyond what it is
  entered in so much time when nothing happens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TRACER = Path(__file__).resolve().parent / "tracer"
LONGEST_S = 100.0

PACKAGES = frozenset({"api", "client", "control", "core", "dispatcher", "processes", "stream", "wire", "worker"}) | {
    "cluster_cache",
    "relays",
    "samplers",
    "submission",
}
ENGINE, DISPATCHER, START = "the engine", "the dispatcher", "a runner starts"
ENGINE_PACKAGES = frozenset({"runtime", "sources", "graph", "passes", "policies"})
PART = 2 / 3

ROLES = (("runner", "worker.runner", "run"), ("dispatcher", "dispatcher.main", "run"), ("agent", ".agent", "run"))
"""Whose process it is where the last part of a module's name, or all of it, has been entered by that function."""
READY = "_write_line"
"""A child tells its nursery something for the first time: that it is ready."""


class Call(NamedTuple):
    at_ns: int
    module: str
    """Without `penstock.`, or the step it is part of."""
    function: str


@dataclass(frozen=True, slots=True)
class Step:
    """A module of a walk."""

    module: str
    roles: tuple[str, ...]
    """The processes that enter it: the one that does so first is the first."""
    functions: tuple[str, ...]
    """Those of the first process, most entered first."""


@dataclass(frozen=True, slots=True)
class Walk:
    event: str
    steps: tuple[Step, ...]
    within_dispatcher: int
    """Modules that the dispatcher's process enters."""

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(step.module for step in self.steps)


def trace(event: str, source: Path) -> Walk:
    """Make an event happen with the Penstock of a folder, and return what it entered."""
    with tempfile.TemporaryDirectory(prefix="penstock-walk-") as folder:
        environment = {**os.environ, "WALK_FOLDER": folder, "PYTHONPATH": f"{source}{os.pathsep}{TRACER}"}
        command = [sys.executable, "-m", "tests.walks.events", event]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=LONGEST_S, check=True
        )
        times = json.loads(done.stdout.splitlines()[-1])
        processes = [_read(path) for path in Path(folder).iterdir()]
    return _walk(event, processes, tuple(times["idle"]), [tuple(span) for span in times["spans"]])


def _read(path: Path) -> tuple[str, list[Call]]:
    """Return a process's role and what it entered."""
    calls = []
    for line in path.read_text().splitlines():
        at, module, function = line.split(" ", 2)
        calls.append(Call(int(at), module.removeprefix("penstock."), function))
    role = _role(calls)
    return role, list(_in_steps(role, calls))


def _role(calls: Iterable[Call]) -> str:
    entered = {(call.module, call.function) for call in calls}
    for role, module, function in ROLES:
        if any(name.endswith(module) and entry == function for name, entry in entered):
            return role
    return "trainer" if any(name.startswith("api.") for name, _ in entered) else "nursery"


def _in_steps(role: str, calls: Iterable[Call]) -> Iterator[Call]:
    starting = role == "runner"
    for call in calls:
        package = call.module.partition(".")[0]
        if starting:
            starting = call.function != READY
            yield call._replace(module=START)
        elif package in ENGINE_PACKAGES:
            yield call._replace(module=ENGINE)
        elif package in PACKAGES:
            yield call


def _walk(
    event: str, processes: list[tuple[str, list[Call]]], idle: tuple[int, ...], spans: list[tuple[int, ...]]
) -> Walk:
    idle_calls: Counter[tuple[str, str, str]] = Counter()
    entered: list[Counter[tuple[str, str, str]]] = [Counter() for _ in spans]
    first: list[dict[tuple[str, str], int]] = [{} for _ in spans]
    """When a process first entered a module, by (role, module)."""
    for role, calls in processes:
        for call in calls:
            key = (role, call.module, call.function)
            if idle[0] <= call.at_ns < idle[1]:
                idle_calls[key] += 1
            for number, (began, ended) in enumerate(spans):
                if began <= call.at_ns < ended:
                    entered[number][key] += 1
                    place = (role, call.module)
                    first[number][place] = min(call.at_ns - began, first[number].get(place, call.at_ns))
    by_clock = sum(ended - began for began, ended in spans) / (idle[1] - idle[0])
    functions: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for key in set().union(*entered):
        calls_in = [counts[key] for counts in entered]
        beyond = sum(calls_in) - by_clock * idle_calls[key]
        if sum(map(bool, calls_in)) >= PART * len(spans) and beyond >= len(spans) / 2:
            functions[key[:2]][key[2]] = sum(calls_in)
    return _in_order(event, functions, first)


def _in_order(
    event: str,
    functions: defaultdict[tuple[str, str], Counter[str]],
    first: list[dict[tuple[str, str], int]],
) -> Walk:
    decided = {module for role, module in functions if role == "dispatcher"}
    if decided:
        counted = sum((functions.pop(("dispatcher", module)) for module in decided), Counter())
        functions["dispatcher", DISPATCHER] = counted
        for times in first:
            inside = [times.pop(("dispatcher", module)) for module in decided if ("dispatcher", module) in times]
            if inside:
                times["dispatcher", DISPATCHER] = min(inside)
    when = {place: median(times[place] for times in first if place in times) for place in functions}
    places = sorted(functions, key=lambda place: when[place])
    steps = []
    for module in dict.fromkeys(module for _, module in places):
        roles = tuple(role for role, name in places if name == module)
        names = tuple(name for name, _ in functions[roles[0], module].most_common() if "<" not in name)
        steps.append(Step(module, roles, names))
    return Walk(event, tuple(steps), len(decided))
