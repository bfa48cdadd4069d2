"""What a comparison is, how it is summed up, and how it is shown."""

from __future__ import annotations

import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A comparison, ready to print. The ratio is above 1 where ours is better, whatever the unit."""

    bench: str
    case: str
    ours: float
    peer: str
    theirs: float
    unit: str
    ratio: float
    low: float
    target: float | None = None
    low_target: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def missed(self) -> bool:
        too_small = self.target is not None and self.ratio < self.target
        return too_small or (self.low_target is not None and self.low < self.low_target)

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        if self.missed:
            return "missed"
        if self.low_target is not None:
            return "met"
        return "met" if self.low >= self.target else "met, low below"

    def line(self) -> dict[str, Any]:
        line = {
            "bench": self.bench,
            "case": self.case,
            "ours": figures(self.ours),
            "peer": self.peer,
            "theirs": figures(self.theirs),
            "unit": self.unit,
            "ratio": figures(self.ratio),
            "low": figures(self.low),
        }
        if self.target is not None:
            line |= {"target": self.target, "met": not self.missed}
        if self.low_target is not None:
            line["low_target"] = self.low_target
        return line | self.details


def paired(
    bench: str,
    case: str,
    peer: str,
    unit: str,
    pairs: Sequence[tuple[float, float]],
    target: float | None = None,
    **details: Any,
) -> Result:
    """Compare figures of which more is better, measured in pairs."""
    ratio, low = median_and_low([a / b for a, b in pairs])
    mine, theirs = (statistics.median(side) for side in zip(*pairs))
    return Result(
        bench=bench,
        case=case,
        ours=mine,
        peer=peer,
        theirs=theirs,
        unit=unit,
        ratio=ratio,
        low=low,
        target=target,
        details=details,
    )


def paired_costs(
    bench: str,
    case: str,
    peer: str,
    unit: str,
    pairs: Sequence[tuple[float, float]],
    target: float | None = None,
    **details: Any,
) -> Result:
    """Compare figures of which less is better: the ratio is theirs over ours, so that above 1 is better here too."""
    ratio, low = median_and_low([b / a for a, b in pairs])
    mine, theirs = (statistics.median(side) for side in zip(*pairs))
    return Result(
        bench=bench,
        case=case,
        ours=mine,
        peer=peer,
        theirs=theirs,
        unit=unit,
        ratio=ratio,
        low=low,
        target=target,
        details={
            "rounds": [[figures(a), figures(b)] for a, b in pairs],
            **details,
            "versions": our_versions(),
            "machine": machine(),
        },
    )


def median_and_low(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the median and the lower end of its 95 % bootstrap interval (seeded: the same figures, the same end)."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return statistics.median(ratios), medians[int(0.025 * RESAMPLES)]


def figures(value: float) -> float:
    """Round to four significant figures: more is noise."""
    return float(f"{value:.4g}")


def _readable(value: float) -> str:
    return f"{figures(value):,.0f}" if value >= 1000 else f"{figures(value):g}"


def machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def our_versions() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    versions = {name: metadata.version(name) for name in ("penstock", "numpy")}
    return versions | ({"commit": commit.stdout.strip()} if commit.returncode == 0 else {})


def show_table(results: Sequence[Result]) -> None:
    """Print what was measured, for people, on stderr: stdout has the JSON lines alone."""
    header = ("case", "peer", "ours", "theirs", "unit", "ratio", "low", "target", "")
    rows = [
        (
            result.case,
            result.peer,
            _readable(result.ours),
            _readable(result.theirs),
            result.unit,
            f"{result.ratio:.2f}",
            f"{result.low:.2f}",
            "" if result.target is None else f"{result.target:g}",
            result.verdict,
        )
        for result in results
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    for row in (header, *rows):
        cells = [
            cell.rjust(w) if 2 <= i <= 7 and i != 4 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))
        ]
        print("  ".join(cells).rstrip(), file=sys.stderr)
    missed = [result for result in results if result.missed]
    aimed = [result for result in results if result.target is not None]
    print(f"{len(aimed) - len(missed)} of {len(aimed)} targets met", file=sys.stderr)
