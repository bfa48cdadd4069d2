"""Break `penstock.stream` in seeded ways, one at a time, and see that its tests or the simulator notice.

A mutant is the package with one thing changed: a comparison flipped, one more or one less somewhere, a statement
dropped; a third of each, chosen by a seed. It is killed if a test in `tests/stream` fails or does not end, or else if
one of many simulated cases breaks a promise. What survives is printed as a difference: either a test is missing, or
the change makes none.

Left out is what no test could notice: assertions (they are for readers and the type checker), annotations, and the
module's own constants (one more of a tuning value is another tuning value).
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src/penstock/stream")
TESTS = ("tests/stream", "--ignore=tests/stream/test_simulator.py", str(PACKAGE))
CASES_AT_ONCE = 500
TESTS_TIMEOUT_S = 180.0
CASES_TIMEOUT_S = 600.0  # a mutant may turn in circles
KILLED_PART = 55 / 60

NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
WITH_EQUAL: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Return, ast.Raise, ast.Continue, ast.Break)

RUN_CASES = """
import sys
from penstock.testing.simulator.schedule import fails, make_schedule
for seed in range(int(sys.argv[1]), int(sys.argv[2])):
    failed = fails(make_schedule(seed))
    if failed is not None:
        print(f"case {seed}: {failed.why.strip().splitlines()[-1]}")
        sys.exit(1)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    path: Path
    line: int
    kind: str
    before: str
    after: str
    """The whole module, as it was and as it is now."""
    number: int = 0
    """Among those of a seed."""

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line} {self.kind}"

    @property
    def difference(self) -> str:
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), lineterm="", n=1)
        return "\n".join(f"    {line}" for line in list(lines)[2:])


@dataclass(frozen=True, slots=True)
class Change:
    """Replace a node of the tree by a text."""

    kind: str
    node: ast.expr | ast.stmt
    text: str


class Finder(ast.NodeVisitor):
    """Collects all changes that can be made inside functions."""

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def visit_Module(self, node: ast.Module) -> None:
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Nothing in it is changed."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """What people read is not changed."""

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, DROPPED) and not _is_text(node):
            self.changes.append(Change("statement dropped", node, "pass"))
        super().generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for at, operator in enumerate(node.ops):
            for table in (NEGATED, WITH_EQUAL):
                if type(operator) in table:
                    operators = [*node.ops[:at], table[type(operator)](), *node.ops[at + 1 :]]
                    flipped = ast.Compare(left=node.left, ops=operators, comparators=node.comparators)
                    self.changes.append(Change("comparison flipped", node, f"({ast.unparse(flipped)})"))
        super().generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self._shift(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Add | ast.Sub):
            self._shift(node)
        super().generic_visit(node)

    def _shift(self, node: ast.expr) -> None:
        for sign in "+-":
            self.changes.append(Change(f"{sign}1", node, f"({ast.unparse(node)} {sign} 1)"))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def mutants_of(path: Path) -> Iterator[Mutant]:
    before = (ROOT / path).read_text()
    finder = Finder()
    finder.visit(ast.parse(before))
    for change in finder.changes:
        yield Mutant(
            path=path, line=change.node.lineno, kind=change.kind, before=before, after=_replaced(before, change)
        )


def _replaced(source: str, change: Change) -> str:
    lines, node = source.encode().splitlines(keepends=True), change.node
    assert node.end_lineno is not None and node.end_col_offset is not None
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    stop = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    whole = source.encode()
    return (whole[:start] + change.text.encode() + whole[stop:]).decode()


def choose(seed: int, count: int) -> list[Mutant]:
    """Return mutants of a seed, as many of each kind, in the order of the source."""
    found = [mutant for path in sorted((ROOT / PACKAGE).glob("*.py")) for mutant in mutants_of(path.relative_to(ROOT))]
    rng = random.Random(f"mutants {seed}")
    chosen: list[Mutant] = []
    for place, kinds in enumerate((("comparison flipped",), ("+1", "-1"), ("statement dropped",))):
        of_kind = [mutant for mutant in found if mutant.kind in kinds]
        chosen += rng.sample(of_kind, (count + place) // 3)
    chosen.sort(key=lambda mutant: (mutant.path, mutant.line, mutant.kind))
    return [replace(mutant, number=number) for number, mutant in enumerate(chosen, 1)]


class Bench:
    """A copy of the source tree in which a mutant takes its module's place."""

    def __init__(self, where: Path) -> None:
        self._where = where
        for name in ("src", "tests/stream"):
            shutil.copytree(ROOT / name, where / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for name in ("pyproject.toml", "tests/__init__.py", "tests/job_specs.py"):
            shutil.copy(ROOT / name, where / name)

    def killed_by(self, mutant: Mutant, cases: int) -> str:
        """Return what noticed the mutant; nothing: it survived."""
        self._put(mutant.path, mutant.after)
        try:
            return self.test() or self._simulate(cases)
        finally:
            self._put(mutant.path, mutant.before)

    def _put(self, path: Path, text: str) -> None:
        module = self._where / path
        module.write_text(text)
        # Byte code is known by its source's time in seconds and its size: two mutants may have both in common.
        Path(cache_from_source(str(module))).unlink(missing_ok=True)

    def test(self) -> str:
        """Return the first test that fails; nothing: none."""
        done = self._run(TESTS_TIMEOUT_S, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=60", *TESTS)
        if done is None:
            return "tests that do not end"
        if done.returncode == 0:
            return ""
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        return f"tests that end with {done.returncode}" if found is None else found[1].removeprefix("tests/stream/")

    def _simulate(self, cases: int) -> str:
        for first in range(0, cases, CASES_AT_ONCE):
            stop = min(first + CASES_AT_ONCE, cases)
            done = self._run(CASES_TIMEOUT_S, "-c", RUN_CASES, str(first), str(stop))
            if done is None:
                return f"a case of {first}-{stop - 1} that does not end"
            if done.returncode:
                return done.stdout.strip()[:160] or f"cases that end with {done.returncode}"
        return ""

    def _run(self, timeout_s: float, *arguments: str) -> subprocess.CompletedProcess[str] | None:
        environment = {**os.environ, "PYTHONPATH": str(self._where / "src")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling everything anew would take longer than the tests
        command = [sys.executable, *arguments]
        try:
            return subprocess.run(
                command, cwd=self._where, env=environment, capture_output=True, text=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            return None


def run(mutants: list[Mutant], *, cases: int, jobs: int) -> list[Mutant]:
    """Try all of them, and say what killed each; return the survivors."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as made:
        benches: SimpleQueue[Bench] = SimpleQueue()
        for number in range(jobs):
            bench = Bench(Path(made) / str(number))
            if number == 0 and (wrong := bench.test()):
                raise SystemExit(f"without any mutant {wrong} fails: mend that first")
            benches.put(bench)

        def attempt(mutant: Mutant) -> str:
            bench = benches.get()
            try:
                killer = bench.killed_by(mutant, cases)
            finally:
                benches.put(bench)
            print(f"{mutant.number:3} {mutant}: {killer or 'survived'}", flush=True)
            return killer

        with ThreadPoolExecutor(jobs) as pool:
            killers = list(pool.map(attempt, mutants))
    return [mutant for mutant, killer in zip(mutants, killers) if not killer]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="?", default="0", help="of the choice: a number, or first-last")
    parser.add_argument("--count", type=int, default=60, help="mutants of each seed")
    parser.add_argument("--cases", type=int, default=20_000, help="simulated cases, where tests notice nothing")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tried at a time")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of mutants, to try these again")
    given = parser.parse_args()
    first, _, last = given.seeds.partition("-")
    too_few = False
    for seed in range(int(first), int(last or first) + 1):
        mutants = choose(seed, given.count)
        if given.only:
            mutants = [mutants[number - 1] for number in given.only]
        survivors = run(mutants, cases=given.cases, jobs=given.jobs)
        killed = len(mutants) - len(survivors)
        print(f"seed {seed}: {killed} of {len(mutants)} mutants were killed")
        for mutant in survivors:
            print(f"{mutant}\n{mutant.difference}")
        too_few |= killed < KILLED_PART * len(mutants)
    return 1 if too_few else 0


if __name__ == "__main__":
    sys.exit(main())
