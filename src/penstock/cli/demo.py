"""`penstock demo`: what Penstock does, on data made on the spot, in under a minute.

A section is a function from the data to its findings; add one to `SECTIONS` to show more. Every number is measured in
the run that prints it, and a check that fails makes the demo fail.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import penstock as ps
from penstock.cli.demo_data import (
    BATCH,
    SEED,
    DemoData,
    augment,
    has_images_extra,
    image_pipeline,
    make_data,
    tokenize,
)
from penstock.cli.demo_service import kills, moving, service
from penstock.cli.demo_table import Finding, make_table
from penstock.runtime.quarantine import read_quarantine
from penstock.runtime.replay import replay
from penstock.testing.conformance import compare_all

PACKED = 512
ROUNDS = 3
ANALYZE_S = 1.5


def images(data: DemoData) -> Iterator[Finding]:
    """Decode and augment pictures on threads, against the same function in a plain loop."""
    dataset = image_pipeline(data)
    paths = sorted(path for path in data.images.rglob("*") if path.is_file())
    _count(dataset)  # both sides start with warm caches
    ours, plain = [], []
    for _ in range(ROUNDS):
        plain.append(_rate(lambda: _plain_loop(paths)))
        ours.append(_rate(lambda: _count(dataset)))
    rate, loop = statistics.median(ours), statistics.median(plain)
    kind = "JPEG" if has_images_extra() else "PPM"
    yield Finding(f"read, shuffle, decode, augment, batch ({kind})", f"{rate:,.0f} images/s")
    yield Finding("the same function in a plain Python loop", f"{loop:,.0f} images/s, {rate / loop:.2f}x")
    read = [path for batch in dataset for path in batch["path"]]
    once = len(read) == len(set(read)) == len(paths)
    yield Finding("every image came once", f"{len(read)} of {len(paths)}", once)


def resume(data: DemoData) -> Iterator[Finding]:
    """Stop in the middle of an epoch and go on in a new pipeline."""
    took_s: list[float] = []
    with image_pipeline(data).iterator(epoch=3) as iterator:
        for _ in range(len(image_pipeline(data)) // 2):
            next(iterator)
            began = perf_counter()
            saved = json.dumps(iterator.state_dict())
            took_s.append(perf_counter() - began)
        rest = list(iterator)
    with image_pipeline(data).iterator() as iterator:
        iterator.load_state_dict(json.loads(saved))
        difference = compare_all(rest, list(iterator))
    yield Finding("checkpoint at each step, as JSON", f"{len(saved)} bytes, {1e3 * statistics.median(took_s):.3f} ms")
    followed = f"{len(rest)} batches, byte for byte" if difference is None else difference
    yield Finding("the same batches follow after a restore", followed, difference is None)


def skipping(data: DemoData) -> Iterator[Finding]:
    """Leave a damaged file out, write it down, and run it again."""
    skip = ps.SkipErrors(budget=3, quarantine=str(data.quarantine))
    count = sum(1 for _ in ps.read_images(data.damaged).map(augment, on_error=skip))
    entries = list(read_quarantine(data.quarantine).values())
    named = [Path(entry.origin.path).name if entry.origin else "" for entry in entries]
    yield Finding(
        "a damaged file is skipped, the rest is read", f"{named[0]}, {count} read", named == [data.damaged_name]
    )
    error = replay(entries[0]).error
    same = error is not None and str(error) == entries[0].message
    yield Finding("run again, it fails the same way", f"{type(error).__name__}: {error}", same)


def packing(data: DemoData) -> Iterator[Finding]:
    """Lay texts of unequal lengths side by side into rows of a fixed length."""
    tokens = ps.read_jsonl(data.documents).shuffle(1000, seed=SEED).map(tokenize)
    began = perf_counter()
    rows = list(tokens.pack(PACKED, key="tokens"))
    took_s = perf_counter() - began
    used = sum(int((row["segment_ids"] > 0).sum()) for row in rows)
    padded = [batch["tokens"] for batch in tokens.padded_batch(BATCH)]
    padded_fill = sum(int((batch > 0).sum()) for batch in padded) / sum(batch.size for batch in padded)
    fill = used / (len(rows) * PACKED)
    yield Finding(f"JSON lines packed into rows of {PACKED} tokens", f"{used / took_s / 1e6:.1f} M tokens/s")
    yield Finding("how full the rows are", f"{fill:.1%}, against {padded_fill:.1%} with padding")
    yield Finding("every token is in a row, once", f"{used:,} of {data.tokens:,}", used == data.tokens)


def columns(data: DemoData) -> Iterator[Finding]:
    """Read two columns of ten, and of those only the rows that are asked for."""
    wanted = (ps.col("price") > 50.0) & (ps.col("clicked") == True)  # noqa: E712
    began = perf_counter()
    batches = list(ps.read_parquet(data.table).filter(wanted).select("price", "clicked").batch(4096))
    took_s = perf_counter() - began
    count = sum(len(batch["price"]) for batch in batches)
    yield Finding("Parquet: filter and select pushed into the file", f"{count:,} rows in {1e3 * took_s:.0f} ms")
    yield Finding("the rows are those the table was made with", f"{count:,} of {data.clicks:,}", count == data.clicks)


SECTIONS: dict[str, Callable[[DemoData], Iterator[Finding]]] = {
    "images": images,
    "resume": resume,
    "errors": skipping,
    "tokens": packing,
    "tables": columns,
    "service": service,
    "kills": kills,
    "moving": moving,
}


def run_demo(*, keep: bool) -> int:
    """Run every section; 0 if all checks passed."""
    from rich.console import Console

    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    findings: dict[str, list[Finding]] = {}
    try:
        with console.status("making data") if console.is_terminal else nullcontext() as progress:

            def show(step: int, text: str) -> None:
                if progress is not None:
                    progress.update(f"{step} of {len(SECTIONS) + 1}: {text}")

            data = make_data(folder)
            for step, (name, section) in enumerate(SECTIONS.items(), 1):
                show(step, (section.__doc__ or name).rstrip("."))
                findings[name] = list(section(data))
            show(len(SECTIONS) + 1, "Measure what limits the image pipeline")
            plan = image_pipeline(data).explain(analyze=True, duration_s=ANALYZE_S)
            command = f"penstock replay {data.quarantine} {next(iter(read_quarantine(data.quarantine)), 'ID')}"
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    console.print(plan, markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nto look at the skipped file: {command}", markup=False, highlight=False, soft_wrap=True)
    console.print("" if keep else "(the demo's files are gone now: run it with --keep first)\n")
    console.print(make_table(findings))
    failed = [finding.what for section in findings.values() for finding in section if finding.passed is False]
    console.print(f"\nfailed: {'; '.join(failed)}" if failed else "\nall checks passed", markup=False, style="bold")
    return 1 if failed else 0


def _plain_loop(paths: list[Path]) -> int:
    """Make the same batches the way one writes it by hand."""
    rng = np.random.default_rng(SEED)
    order = rng.permutation(len(paths))
    rows: list[dict[str, Any]] = []
    count = 0
    for index in order:
        rows.append(augment({"image": paths[index].read_bytes(), "label": 0, "path": str(paths[index])}, rng))
        if len(rows) == BATCH or len(rows) + count == len(paths):
            count += len(np.stack([row["image"] for row in rows]))
            rows = []
    return count


def _count(dataset: ps.Dataset) -> int:
    return sum(len(batch["label"]) for batch in dataset)


def _rate(run: Callable[[], int]) -> float:
    began = perf_counter()
    count = run()
    return count / (perf_counter() - began)
