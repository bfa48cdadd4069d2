"""Draw the README's figure from measured results: `python tools/figure.py`, or with new ones, `... RESULTS.jsonl ...`.

RESULTS are JSON lines as `make bench` prints them. Those of the cases that the figure shows are kept in
`docs/figures/images.jsonl`, with the day they were measured, and drawn to `docs/figures/images.svg`.
"""

from __future__ import annotations

import argparse
import datetime
import json
from html import escape
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "docs" / "figures"
KEPT = FOLDER / "images.jsonl"
DRAWN = FOLDER / "images.svg"

CASES = {
    ("images-torch", "moved script"): "A PyTorch script moved by its import, 2 worker processes",
    ("images", "user's opencv function, files"): "The same work as a pipeline on threads, files",
    ("images", "user's opencv function, records"): "Python and OpenCV, TFRecords",
    ("images", "ps.image, records"): "Built-in image functions, TFRecords",
}
"""What is shown, and under which words."""
FIELDS = ("bench", "case", "peer", "ours", "theirs", "unit", "ratio", "low", "day", "pairs", "machine")

WIDTH, LEFT, BAR, GAP, HEAD, FOOT = 760, 150, 18, 26, 46, 42
MOST = WIDTH - LEFT - 170  # the length of the longest bar
OURS, THEIRS, TEXT, FAINT = "#1f6feb", "#9aa4b2", "#1f2328", "#59636e"


def chosen(paths: list[Path], day: str) -> list[dict[str, Any]]:
    """Return the results that are shown: of several of one case the last."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            result = {"day": day, **json.loads(line)}
            if (result["bench"], result["case"]) in CASES:
                found[result["bench"], result["case"]] = {name: result[name] for name in FIELDS if name in result}
    return [found[case] for case in CASES if case in found]


def drawing(results: list[dict[str, Any]]) -> str:
    """Return the figure: two bars a case, with figures beside them."""
    longest = max(max(result["ours"], result["theirs"]) for result in results)
    height = HEAD + len(results) * (2 * BAR + GAP + 16) + FOOT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{escape(_told(results))}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(16, 26, "Training images a second: decode, random crop, resize to 224, flip, batch", TEXT, "600", 15),
    ]
    top = HEAD
    for result in results:
        lines.append(_text(16, top + 14, CASES[result["bench"], result["case"]], TEXT, "600"))
        lines.append(_text(WIDTH - 16, top + 14, f"{result['ratio']:.2f}x", OURS, "600", anchor="end"))
        for row, (name, rate, colour) in enumerate(
            (("Penstock", result["ours"], OURS), (result["peer"], result["theirs"], THEIRS))
        ):
            y = top + 22 + row * (BAR + 2)
            length = MOST * rate / longest
            lines.append(_text(LEFT - 8, y + 13, name, FAINT, anchor="end", size=12))
            lines.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" fill="{colour}"/>')
            lines.append(_text(LEFT + length + 6, y + 13, f"{rate:,.0f}/s", FAINT, size=12))
        top += 2 * BAR + GAP + 16
    machine, days = results[0]["machine"], sorted({result["day"] for result in results})
    where = f"{machine['cpu']}, {machine['cores']} cores; {' and '.join(days)}. Medians of pairs of rounds in turn."
    lines += [_text(16, height - 16, where, FAINT, size=11), "</svg>"]
    return "\n".join(lines) + "\n"


def _told(results: list[dict[str, Any]]) -> str:
    said = [f"{CASES[r['bench'], r['case']]}: {r['ours']:,.0f}/s, {r['peer']} {r['theirs']:,.0f}/s" for r in results]
    return "Penstock and others, images a second. " + "; ".join(said)


def _text(
    x: float, y: float, text: str, colour: str, weight: str = "400", size: int = 13, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-weight="{weight}" font-size="{size}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="*", type=Path, help="what `make bench` printed; none: what is kept")
    given = parser.parse_args()
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    kept = [KEPT] if KEPT.exists() else []
    results = chosen([*kept, *given.results], today)
    FOLDER.mkdir(exist_ok=True)
    KEPT.write_text("".join(json.dumps(result) + "\n" for result in results))
    DRAWN.write_text(drawing(results))
    print(f"{DRAWN.name}: {len(results)} of {len(CASES)} cases")


if __name__ == "__main__":
    main()
