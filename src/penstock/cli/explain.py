"""`penstock explain`: the plan of a pipeline in the user's code."""

from __future__ import annotations

from penstock.api.operators import Operators
from penstock.cli.loading import load_object
from penstock.cli.main import UsageError


def print_plan(named: str, *, analyze: bool, mermaid: bool, seconds: float) -> int:
    if mermaid and analyze:
        raise UsageError("--mermaid draws the plan and --analyze measures it: ask for one of them")
    dataset = load_dataset(named)
    print(dataset.explain(analyze=analyze, format="mermaid" if mermaid else "text", duration_s=seconds))
    return 0


def load_dataset(named: str) -> Operators:
    """Return a dataset, or what a function without arguments returns."""
    found = load_object(named)
    made = found() if callable(found) and not isinstance(found, Operators) else found
    if not isinstance(made, Operators):
        what = f"{named}() is" if made is not found else f"{named} is"
        raise UsageError(f"{what} of type {type(made).__name__}, not a Dataset")
    return made
