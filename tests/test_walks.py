"""The walks that `docs/architecture.md` tells are the ones that are walked."""

from __future__ import annotations

import re

import pytest

from .walks.events import EVENTS
from .walks.trace import ROOT, Walk, trace

TITLES = {
    "batch": "A batch",
    "death": "A worker dies",
    "loading": "A state is loaded on other ranks",
    "joining": "A trainer joins a shared job",
}
IN_ORDER = {
    "batch": ("client.reader", "stream.consuming", "stream.reading", "wire.elements"),
    "death": ("the dispatcher", "a runner starts", "worker.opening", "worker.feeds"),
    "loading": ("api.loader", "api.epochs", "api.states", "stream.checkpoint", "submission.jobs", "client.session"),
    "joining": ("api.dataset", "submission.options", "client.backend", "submission.jobs", "client.link"),
}
"""One thread, or one that waits for another, enters these: their order does not depend on who is faster."""
ATTEMPTS = 5
"""Where processors are busy, one may wait where it usually does not: what is told is what is walked as a rule."""

MODULE = r"(?:`([\w.]+)`|(the engine|the dispatcher|a runner starts))"


def _modules(text: str) -> list[str]:
    return [name or step for name, step in re.findall(rf"^\d+\. {MODULE}: ", text, re.MULTILINE)]


def _section(title: str) -> str:
    page = (ROOT / "docs" / "architecture.md").read_text()
    found = re.search(rf"^### {title}\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/architecture.md has no section {title!r}"
    return found.group(1)


def _told(event: str) -> list[str]:
    """Return the modules that the page names for an event, those of a batch included where it says so."""
    text = _section(TITLES[event])
    modules = _modules(text)
    taking, making = _section(TITLES["batch"]).split("A runner makes another:")
    if "all of a batch is entered" in text:
        modules += _modules(taking) + _modules(making)
    if "takes a batch, as above" in text:
        only = text.partition("only this is entered: ")[2]
        modules += _modules(taking) + [name or step for name, step in re.findall(MODULE, only)]
    return modules


def _in_order(modules: tuple[str, ...], walk: Walk) -> bool:
    return [step for step in walk.modules if step in modules] == list(modules)


@pytest.mark.alone
@pytest.mark.timeout(400)
@pytest.mark.parametrize("event", EVENTS)
def test_the_page_tells_the_modules_that_an_event_enters(event: str) -> None:
    told = _told(event)
    assert len(set(told)) == len(told), "a module is told twice"
    ordered = IN_ORDER[event]
    assert [module for module in told if module in ordered] == list(ordered)
    walks: list[Walk] = []
    while len(walks) < ATTEMPTS:
        walks.append(trace(event, ROOT / "src"))
        always = set.intersection(*(set(walk.modules) for walk in walks))
        ever = set.union(*(set(walk.modules) for walk in walks))
        if always <= set(told) <= ever and any(_in_order(ordered, walk) for walk in walks):
            return
    assert sorted(always - set(told)) == [], "entered, and not told"
    assert sorted(set(told) - ever) == [], "told, and not entered"
    assert [walk.modules for walk in walks if _in_order(ordered, walk)], f"entered in another order than {ordered}"
