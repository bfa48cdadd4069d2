"""What the demo finds, and the table it is shown in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the table; `passed` is None where it measures and does not check."""

    what: str
    figure: str
    passed: bool | None = None


def make_table(findings: dict[str, list[Finding]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("", style="bold")
    table.add_column("what", overflow="fold", ratio=3)
    table.add_column("measured in this run", overflow="fold", ratio=2)
    table.add_column("check")
    marks = {True: Text("passed", style="green"), False: Text("FAILED", style="red"), None: Text("")}
    for name, section in findings.items():
        for row, finding in enumerate(section):
            table.add_row(name if row == 0 else "", Text(finding.what), Text(finding.figure), marks[finding.passed])
    return table
