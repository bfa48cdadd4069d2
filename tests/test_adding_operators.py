"""An operator is added in five edits, and no list elsewhere is touched: done here on a copy of the tree, twice.

One is an operator on columns, one to one and without a function; the other regroups. What holds for every operator is
then asked of them: the tests of totality, codec, plans, resuming and streams run on the copy, for these two.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent

import pytest

ROOT = Path(__file__).parent.parent
TESTS = (
    "tests/test_totality.py",
    "tests/graph/test_graph_codec.py",
    "tests/passes/test_golden.py",
    "tests/runtime/test_conformance.py",
    "tests/runtime/test_streams.py",
)


@dataclass(frozen=True)
class Edit:
    """Lines that are added to a file, before the first line that begins with `before`; without it, a new file."""

    path: str
    lines: str
    before: str | None = None


RATIO = (
    Edit(
        "src/penstock/graph/ops/columns.py",
        '''\
        class Ratio(ColumnOperator, frozen=True, kw_only=True, eq=False):
            """A column divided by another."""

            of: str
            to: str
            into: str

            @property
            def needs(self) -> tuple[str, ...]:
                return (self.of, self.to)

            @property
            def gives(self) -> tuple[str, ...]:
                return (self.into,)


        ''',
        before="def check_names",
    ),
    Edit(
        "src/penstock/runtime/ops/ratio.py",
        """\
        from penstock.graph import ops
        from penstock.runtime.ops.columns import Compute, computes


        @computes(ops.Ratio)
        def _ratio(node: ops.Ratio) -> Compute:
            return lambda columns: {node.into: columns[node.of] / columns[node.to]}
        """,
    ),
    Edit(
        "src/penstock/api/operators.py",
        '''\
            def ratio(self, of: str, to: str, *, into: str) -> Self:
                """Add a column: one divided by another."""
                return self._with(ops.Ratio, of=of, to=to, into=into)

        ''',
        before="    # Where and when it is made",
    ),
    Edit(
        "tests/cases.py",
        """\
                "ratio": (ops.Ratio, lambda: ps.range(1, 41).map(record).ratio("id", "id", into="one")),
        """,
        before='        "repeat": ',
    ),
    Edit(
        "tests/passes/golden.py",
        '''\
            "ratio": (
                ps.read_parquet("t.parquet").ratio("a", "b", into="r").shuffle(8).filter(col("c") > 1).select("r"),
                """
                read_parquet('t.parquet', columns=('c', 'a', 'b'))
                shuffle(size=8)
                fused: ratio('a', 'b', 'r') + filter(col('c') > 1) + select('r')
                prefetch()
                """,
            ),
        ''',
        before='    "repeat": ',
    ),
)
REVERSED_BATCH = (
    Edit(
        "src/penstock/graph/ops/batches.py",
        '''\
        class ReversedBatch(Batches, frozen=True, kw_only=True, eq=False):
            """Batches with their last row first."""


        ''',
        before="def batches_of",
    ),
    Edit(
        "src/penstock/runtime/ops/reversed_batch.py",
        """\
        from penstock.graph import ops
        from penstock.runtime.building import Site, builds
        from penstock.runtime.contract import Stage
        from penstock.runtime.ops.batch import batching, stacking


        @builds(ops.ReversedBatch)
        def _reversed(node: ops.ReversedBatch, at: Site, upstream: Stage) -> Stage:
            stack = stacking(at.placement.empty)
            return batching(node.name, node.size, node.drop_last, lambda rows: stack(rows[::-1]), at, upstream)
        """,
    ),
    Edit(
        "src/penstock/api/operators.py",
        '''\
            def reversed_batch(self, size: int, *, drop_last: bool = False) -> Self:
                """Stack `size` elements, the last one first."""
                return self._with(ops.ReversedBatch, size=size, drop_last=drop_last)

        ''',
        before="    # Where and when it is made",
    ),
    Edit(
        "tests/cases.py",
        """\
                "reversed_batch": (ops.ReversedBatch, lambda: ps.range(40).reversed_batch(7)),
        """,
        before='        "repeat": ',
    ),
    Edit(
        "tests/passes/golden.py",
        '''\
            "reversed_batch": (
                ps.read_parquet("t.parquet").reversed_batch(4).prefetch().select("b"),
                """
                read_parquet('t.parquet', columns='b')
                reversed_batch(4)
                prefetch()
                """,
            ),
        ''',
        before='    "repeat": ',
    ),
)


@pytest.fixture
def tree(tmp_path) -> Path:
    copy = tmp_path / "tree"
    without = shutil.ignore_patterns("__pycache__", "crossbar", "walks")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=without)
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def make(tree: Path, edit: Edit) -> None:
    path = tree / edit.path
    if edit.before is None:
        assert not path.exists()
        path.write_text(dedent(edit.lines))
        return
    kept = path.read_text()
    margin = re.match(" *", edit.before)
    assert margin is not None and kept.count(f"\n{edit.before}") == 1
    before, after = kept.split(f"\n{edit.before}")
    lines = indent(dedent(edit.lines), margin[0])
    path.write_text(f"{before}\n{lines}{edit.before}{after}")


def run_tests(tree: Path, *, only: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rf", "-p", "no:cacheprovider", "-k", only, *TESTS],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.parametrize(
    ("edits", "names"),
    [(RATIO, "Ratio or ratio"), (REVERSED_BATCH, "ReversedBatch or reversed_batch")],
    ids=["one to one", "regrouping"],
)
def test_five_edits_add_an_operator(tree, edits, names):
    assert len(edits) == 5
    for edit in edits:
        make(tree, edit)
    done = run_tests(tree, only=names)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 15, done.stdout


def test_totality_names_the_edits_that_are_missing(tree):
    make(tree, REVERSED_BATCH[0])
    done = run_tests(tree, only="ReversedBatch")
    for missing in ("a_conformance_case", "a_method_or_function", "a_golden_plan", "a_stage_or_a_step"):
        assert re.search(rf"FAILED .*{missing}\S*\[ReversedBatch\]", done.stdout), done.stdout
