"""Elements that kill the processes that work on them.

What was in flight when a process died is known from outside of it. Often that is a range (a whole chunk was handed to a
function): it becomes a suspect, to be worked on one element at a time, so that the next death names the one. The death
counts for every element of the range; an element is given up at its third death, if that one names it alone. Processes
that were ended on purpose prove nothing, and deaths of an earlier epoch no more: an element that ends its process is
never passed, so its three come in one epoch. Counted over epochs, whatever kills processes from outside (memory that
runs out, a machine that is taken away) would meet some element three times sooner or later.
"""

from __future__ import annotations

from penstock.control import events as e
from penstock.control.draft import Draft
from penstock.control.events import ElementKey, Suspect
from penstock.control.records import Job
from penstock.wire.messages import RunnerGone

DEATHS_TO_DROP = 3
ON_PURPOSE = "stopped"
"""A `RunnerGone.reason` that begins so says that somebody wanted it."""


def blame(draft: Draft, request: RunnerGone) -> None:
    job = draft.state.jobs.get(request.job)
    if job is None or not request.in_flight or request.reason.startswith(ON_PURPOSE) or request.runner in job.blamed:
        return
    exact: list[ElementKey] = []
    suspects: list[Suspect] = []
    for _, source, split, index, count in request.in_flight:
        if count == 1:
            exact.append((source, split, index))
        else:
            suspects.append((source, split, index, count))
    exact = list(dict.fromkeys(exact))
    known = [element for element in exact if deaths_of(job, element)]
    if len(exact) + len(suspects) > 1 and not known:
        # Several at once, none of them suspected before: each may be innocent.
        suspects += [(*element, 1) for element in exact]
        exact = []
    elif known:
        exact = known
    dropped = tuple(element for element in exact if deaths_of(job, element) + 1 >= DEATHS_TO_DROP)
    draft.emit(e.ElementsBlamed(request.job, request.runner, tuple(exact), tuple(suspects), dropped))


def deaths_of(job: Job, element: ElementKey) -> int:
    """Return how many processes died with this element in flight."""
    source, split, index = element
    ranges = sum(
        1 for s, p, first, count in job.suspects if (s, p) == (source, split) and first <= index < first + count
    )
    return job.deaths.get(element, 0) + ranges
