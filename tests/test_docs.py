"""The documentation tells the truth: examples run, every operator and reader is there, links lead somewhere."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest

import penstock as ps
from penstock.api import readers
from penstock.api.operators import Operators
from penstock.api.statistics import LoaderStatistics
from penstock.dispatcher.http import _Collector
from penstock.dispatcher.service import DispatcherStatistics
from tests.pages import BLOCK, OF_FRAMEWORKS, PAGES, ROOT, name_of, run_examples


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if BLOCK.search(page.read_text()) and name_of(page) not in OF_FRAMEWORKS],
    ids=name_of,
)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_examples(page)


def test_every_operator_has_an_example():
    text = (ROOT / "docs" / "operators.md").read_text()
    examples = "".join(block[2] for block in BLOCK.finditer(text))
    not_operators = {"LEADS", "explain", "fingerprint", "node"}
    public = {name for name in vars(Operators) if not name.startswith("_")} - not_operators
    assert [name for name in sorted(public | {"mix"}) if f".{name}(" not in examples] == []


def test_every_reader_has_an_example():
    text = (ROOT / "docs" / "sources.md").read_text()
    examples = "".join(block[2] for block in BLOCK.finditer(text))
    public = [name for name in vars(readers) if name in ps.__all__ and name.startswith(("read_", "from_", "range"))]
    assert len(public) > 12
    assert [name for name in public if f"ps.{name}(" not in examples] == []


HEADED = re.compile(r"`(?:ps\.)?(\w+)\((.*?)\)`")


@pytest.mark.parametrize("page", ["operators.md", "sources.md"])
def test_headings_show_signatures_as_they_are(page):
    """Every operator's is complete; readers leave out what they share, which is told once."""
    headings = re.findall(r"^### (.*)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    shown = [found for heading in headings for found in HEADED.findall(heading) if found[1] != "…"]
    assert len(shown) > 12
    for name, arguments in shown:
        function = getattr(ps, name) if page == "sources.md" or name == "mix" else getattr(ps.Dataset, name)
        actual = {n: one for n, one in inspect.signature(function).parameters.items() if n != "self"}
        stated = inspect.signature(eval(f"lambda {arguments}: None")).parameters
        expected = actual if page == "operators.md" else {n: actual[n] for n in stated}
        assert [(one.name, one.kind, one.default) for one in stated.values()] == [
            (one.name, one.kind, one.default) for one in expected.values()
        ], f"{name}({arguments})"


def test_every_metric_is_explained():
    text = (ROOT / "docs" / "service.md").read_text()
    families = list(_Collector(SimpleNamespace(statistics=DispatcherStatistics()), lambda: 0).collect())
    assert len(families) > 30
    names = [f"{family.name}{'_total' if family.type == 'counter' else ''}" for family in families]
    short = [name.removeprefix("penstock_dispatcher") for name in names]  # a row may name several
    assert [name for name, end in zip(names, short) if f"`{name}`" not in text and f"`{end}`" not in text] == []


def test_every_figure_of_a_loader_is_explained():
    text = (ROOT / "docs" / "service.md").read_text()
    public = {name for name in dir(LoaderStatistics) if not name.startswith("_")}
    assert {"wait_s", "hit_ratio"} <= public
    assert [name for name in sorted(public) if f"`{name}`" not in text] == []


def test_the_map_of_packages_is_the_one_that_is_checked():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    checked = [{name.strip().removeprefix("penstock.") for name in layer.split("|")} for layer in reversed(layers)]
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert [{package for at, package in rows if int(at) == row} for row in range(1, len(checked) + 1)] == checked
    assert {path.parent.name for path in (ROOT / "src" / "penstock").glob("*/__init__.py")} == set().union(*checked)


def test_the_reference_is_what_the_docstrings_say():
    tool = ROOT / "tools" / "reference.py"
    elsewhere = {**os.environ, "SOMETHING_OF_THIS_MACHINE": "secret"}
    done = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True, timeout=60, env=elsewhere)
    assert done.returncode == 0, done.stderr
    text = (ROOT / "docs" / "reference.md").read_text()
    assert "group_by_window(\n    key: Function,\n    *,\n    size: int,\n" in text


def test_the_figure_is_drawn_from_what_was_measured():
    folder = ROOT / "docs" / "figures"
    tool = runpy.run_path(str(ROOT / "tools" / "figure.py"))
    results = tool["chosen"]([folder / "images.jsonl"], "another day")
    assert len(results) == len(tool["CASES"]) and "another day" not in str(results)
    assert (folder / "images.svg").read_text() == tool["drawing"](results)
    assert "docs/figures/images.svg" in (ROOT / "README.md").read_text()


def test_the_guide_says_what_to_run_for_every_package():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    packages = {path.parent.name for path in (ROOT / "src" / "penstock").glob("*/__init__.py")}
    assert set(rows) == packages
    for cell in rows.values():
        for named in re.findall(r"`(tests/[\w/.]+)`", cell):
            assert (ROOT / named).exists(), named


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES if page.name != "README.md")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"
