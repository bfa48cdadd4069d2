"""What an experiment of `experiments/fleet.py` shows: claims beside published numbers, and curves to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

WITHIN = 0.1
COLUMNS = 4


@dataclass(frozen=True)
class Claim:
    """A published number, or a target, beside what was seen."""

    text: str
    seen: float
    low: float
    high: float
    predicted: bool = True
    published: float = 0.0
    """0: it is a target of ours."""

    @property
    def holds(self) -> bool:
        return self.low <= self.seen <= self.high

    def line(self) -> str:
        kind = "predicted" if self.predicted else "calibrated"
        wanted = (
            f"{self.low:g} to {self.high:g}"
            if self.low > -1e9 and self.high < 1e9
            else (f"at most {self.high:g}" if self.low <= -1e9 else f"at least {self.low:g}")
        )
        return f"{'yes' if self.holds else 'NO '}  {kind:<10}  {self.text}: {self.seen:.4g} ({wanted})"


@dataclass(frozen=True)
class Curve:
    """Something to draw, in the panel of its experiment."""

    panel: str
    label: str
    x: Sequence[float]
    y: Sequence[float]
    axes: tuple[str, str]
    style: str = "-"


Shown: TypeAlias = str | Claim | Curve


def near(text: str, seen: float, published: float, *, predicted: bool = True) -> Claim:
    """Claim that a number is the published one within a tenth."""
    text = f"{text} (published: {published:g})"
    return Claim(text, seen, published * (1 - WITHIN), published * (1 + WITHIN), predicted, published)


def at_most(text: str, seen: float, most: float) -> Claim:
    return Claim(text, seen, -1e10, most)


def at_least(text: str, seen: float, least: float) -> Claim:
    return Claim(text, seen, least, 1e10)


def plot(curves: list[Curve], claims: list[Claim], path: Path) -> None:
    """Draw a panel for each experiment, and one with every published number beside what was seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, list[Curve]] = {}
    for curve in curves:
        panels.setdefault(curve.panel, []).append(curve)
    rows = -(-(len(panels) + 1) // COLUMNS)
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(5 * COLUMNS, 4 * rows), squeeze=False)
    places = list(axes.flat)
    for place, (title, drawn) in zip(places, panels.items()):
        for curve in drawn:
            place.plot(curve.x, curve.y, curve.style, label=curve.label, linewidth=1)
        place.set_title(title, fontsize="medium")
        place.set(xlabel=drawn[0].axes[0], ylabel=drawn[0].axes[1])
        place.legend(fontsize="x-small")
    beside = [claim for claim in claims if claim.published]
    last = places[len(panels)]
    last.axvspan(1 - WITHIN, 1 + WITHIN, color="lightgrey")
    for predicted, color in ((True, "tab:blue"), (False, "tab:grey")):
        own = [n for n, claim in enumerate(beside) if claim.predicted == predicted]
        ratios = [beside[n].seen / beside[n].published for n in own]
        last.plot(ratios, own, "o", color=color, label="predicted" if predicted else "calibrated")
    last.set_yticks(range(len(beside)), [claim.text.partition(" (published")[0] for claim in beside], fontsize=5)
    last.set(xlabel="seen over published", title="Every published number")
    last.legend(fontsize="x-small")
    for place in places[len(panels) + 1 :]:
        place.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
