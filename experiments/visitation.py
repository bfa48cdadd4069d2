"""Does it matter how often an element is seen? The question of tf.data service, section 4.1, asked of a small model.

python experiments/visitation.py [--quick] [--seeds 0-1]     or: make experiment E=visitation

A small convolutional network learns pictures of ten classes that are made here, through a service of two workers:

- `relaxed`: every picture once an epoch, in the order in which they come,
- `deterministic`: every picture once an epoch, in the same order each time,
- `at most once`: what a killed worker had under way is not made again.

Each is trained with several seeds, undisturbed and with a worker killed twice an epoch. Told are how many pictures were
visited, and how often of the test pictures are known afterwards. Targets: each mode's mean accuracy lies within the
spread of the seeds (two standard deviations of the undisturbed relaxed runs, at least one percent) of the undisturbed
relaxed one; exactly-once modes visit every picture once an epoch, kills or not; at most once never visits one twice,
and misses some where workers are killed: else the kills have come too late to show anything.
It prints a table, writes a plot, and ends with 1 where a target is missed.

Each run is kept in `.bench/visitation`, by the content of this file, and is not made again; so `--seeds` trains a part,
and judges what there is by then. `--afresh` forgets what was kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import statistics
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import penstock as ps

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / ".bench" / "visitation"
CLASSES, SIDE, BATCH = 10, 16, 32
MODES: dict[str, dict[str, Any]] = {
    "relaxed": {"order": "relaxed"},
    "deterministic": {"order": "deterministic"},
    "at most once": {"order": "relaxed", "sharding": ps.Sharding(guarantee="at_most_once")},
}
AHEAD = ps.Limits(memory_bytes=1 << 20)  # about 30 batches: else all of an epoch has arrived before anybody is killed
LEAST_SPREAD = 0.01


@dataclass(frozen=True, slots=True)
class Size:
    """How much is trained."""

    pictures: int
    epochs: int
    seeds: int


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of one run."""

    accuracy: float
    missed: int
    """Pictures that an epoch did not visit, over all epochs."""
    repeated: int
    """Visits beyond one an epoch."""
    kills: int


def picture(index: int) -> dict[str, Any]:
    """Return a noisy picture of a class: a wave of its own direction and length. The same for the same index."""
    rng = np.random.default_rng(index)
    label = index % CLASSES
    angle, length = np.pi * label / CLASSES, 3.0 + label % 3
    y, x = np.mgrid[:SIDE, :SIDE] - rng.integers(0, SIDE, (2, 1, 1))
    wave = np.sin(2 * np.pi * (x * np.cos(angle) + y * np.sin(angle)) / length)
    noisy = wave + rng.normal(0, 1.6, (SIDE, SIDE))
    return {"image": noisy.astype(np.float32)[None], "label": label, "index": index}


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4, CLASSES),
    )


def kill_a_worker(service: ps.LocalService, number: int) -> bool:
    """End a worker's process without warning; return whether there was one."""
    pids = sorted(service.worker_pids().values())
    if not pids:
        return False
    os.kill(pids[number % len(pids)], signal.SIGKILL)
    return True


def train(mode: str, seed: int, size: Size, *, kills: bool) -> Trained:
    model = network(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    dataset = ps.range(size.pictures).shuffle(seed=seed).map(picture).batch(BATCH)
    missed = repeated = killed = 0
    with ps.LocalService(workers=2) as service, dataset.distribute(service, limits=AHEAD, **MODES[mode]) as loader:
        steps = size.pictures // BATCH
        for epoch in range(size.epochs):
            seen: Counter[int] = Counter()
            for step, batch in enumerate(loader):
                if kills and step in (steps // 4, steps // 2):
                    killed += kill_a_worker(service, epoch + step)
                loss = nn.functional.cross_entropy(
                    model(torch.from_numpy(batch["image"])), torch.from_numpy(batch["label"])
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.update(batch["index"].tolist())
            missed += size.pictures - len(seen)
            repeated += seen.total() - len(seen)
    return Trained(accuracy(model, size), missed, repeated, killed)


def accuracy(model: nn.Module, size: Size) -> float:
    held_out = [picture(index) for index in range(size.pictures, size.pictures + 1_000)]
    images = torch.from_numpy(np.stack([each["image"] for each in held_out]))
    labels = torch.tensor([each["label"] for each in held_out])
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def kept_or_trained(mode: str, seed: int, size: Size, *, kills: bool) -> Trained:
    """Return what came of a run: from the file that it left, if it was made before."""
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    name = f"{size.pictures}x{size.epochs}-{mode.replace(' ', '_')}-{'kills' if kills else 'undisturbed'}-{seed}"
    place = KEPT / code / f"{name}.json"
    if place.exists():
        return Trained(**json.loads(place.read_text()))
    trained = train(mode, seed, size, kills=kills)
    place.parent.mkdir(parents=True, exist_ok=True)
    unfinished = place.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(trained)))
    unfinished.rename(place)
    return trained


def numbers(text: str) -> range:
    """Read `3` or `0-4`."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def judge(runs: dict[tuple[str, bool], list[Trained]]) -> list[dict[str, Any]]:
    """Return a line for each mode, with its targets beside what was seen."""
    base = [run.accuracy for run in runs["relaxed", False]]
    centre = statistics.mean(base)
    spread = max(LEAST_SPREAD, 2 * statistics.stdev(base)) if len(base) > 1 else 3 * LEAST_SPREAD
    lines = []
    for (mode, kills), found in runs.items():
        mean = statistics.mean(run.accuracy for run in found)
        missed, repeated = sum(run.missed for run in found), sum(run.repeated for run in found)
        fits = abs(mean - centre) <= spread
        once = repeated == 0 and (missed > 0) == (mode == "at most once" and kills)
        lines.append(
            {
                "mode": mode,
                "kills": sum(run.kills for run in found),
                "accuracy": round(mean, 4),
                "of": [round(run.accuracy, 4) for run in found],
                "wanted": f"{centre:.4f} +- {spread:.4f}",
                "missed": missed,
                "repeated": repeated,
                "met": fits and once and (not kills or all(run.kills for run in found)),
            }
        )
    return lines


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    names = [f"{line['mode']}\n{line['kills']} kills" for line in lines]
    for place, line in enumerate(lines):
        axes.scatter([place] * len(line["of"]), line["of"], color="tab:blue", alpha=0.6)
        axes.scatter([place], [line["accuracy"]], marker="_", s=900, color="tab:red")
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("accuracy on held-out pictures")
    axes.set_title("each point a seed, the bar their mean")
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description="accuracy under relaxed, deterministic and at-most-once delivery")
    parser.add_argument("--quick", action="store_true", help="two seeds of little training: to see that it runs")
    parser.add_argument("--seeds", type=numbers, help="train with these only: one, or the first and the last")
    parser.add_argument("--afresh", action="store_true", help="forget the runs that were kept")
    parser.add_argument("--plot", type=Path, default=ROOT / ".bench" / "visitation.png")
    given = parser.parse_args()
    size = Size(pictures=1_920, epochs=2, seeds=2) if given.quick else Size(pictures=6_400, epochs=5, seeds=5)
    if given.afresh:
        shutil.rmtree(KEPT, ignore_errors=True)
    torch.set_num_threads(1)
    runs: dict[tuple[str, bool], list[Trained]] = {(mode, kills): [] for kills in (False, True) for mode in MODES}
    for seed in range(size.seeds) if given.seeds is None else given.seeds:
        for mode, kills in runs:
            runs[mode, kills].append(kept_or_trained(mode, seed, size, kills=kills))
            print(
                f"seed {seed}, {mode}, {'kills' if kills else 'undisturbed'}: {runs[mode, kills][-1]}", file=sys.stderr
            )
    lines = judge(runs)
    print(f"{'mode':15} {'kills':>5} {'accuracy':>8} {'wanted':>18} {'missed':>7} {'twice':>6}")
    for line in lines:
        told = f"{line['mode']:15} {line['kills']:5} {line['accuracy']:8.4f} {line['wanted']:>18} {line['missed']:7}"
        print(f"{told} {line['repeated']:6}  {'met' if line['met'] else 'MISSED'}")
    print(
        json.dumps(
            {"experiment": "visitation", "quick": given.quick, "seeds": len(runs["relaxed", False]), "lines": lines}
        )
    )
    given.plot.parent.mkdir(parents=True, exist_ok=True)
    plot(lines, given.plot)
    print(f"plot: {given.plot}")
    return 0 if all(line["met"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
