"""Scaling by published numbers: Cachew's, tf.data service's and DPP's experiments in the fleet simulator.

python experiments/fleet.py [--quick] [--only PART ...]     or: make experiment E=fleet

The policies and the allotting that run are those of the service; trainers, workers, storage and network are fluids
(`penstock.fleet.fluids`). `workloads.toml` has every workload, which published points fix its figures, and what is
left to be predicted. Printed is a table for each experiment, then every claim beside what was seen. It ends with 1 if a
claim does not hold, and writes plots.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from fleet_claims import Claim, Curve, Shown, at_least, at_most, near, plot

from penstock.fleet.fluids import Fleet, FleetJob, FleetLimits, FleetRecord, JobRecord, settle
from penstock.policies.allotting import PoolWorker
from penstock.policies.cost import job_cost
from penstock.policies.scaling import buffers, cachew, model_first, utilization
from penstock.policies.scaling.records import ScalingLimits

ROOT = Path(__file__).resolve().parent.parent
WORKLOADS = tomllib.loads(Path(__file__).with_name("workloads.toml").read_text())
PRICES = WORKLOADS["prices"]
POLICIES = {"model_first": model_first, "cachew": cachew, "utilization": utilization, "buffers": buffers}
HOUR_S = 3600.0
BEAT_S = 120.0
BEATS = 300
"""Enough for Cachew to climb to fifty workers."""
FIELDS = ("trainer_per_s", "worker_per_s", "contention", "storage_per_s", "processor", "ranks")


def published(name: str, **changes: Any) -> FleetJob:
    table = WORKLOADS["published"][name]
    return replace(FleetJob(name=name, **{key: table[key] for key in FIELDS if key in table}), **changes)


def beat_of(job: FleetJob) -> float:
    """Return a beat in which some fifty batches are taken: a report of Cachew's is two of them."""
    return 50 / job.trainer_per_s


def run_alone(job: FleetJob, policy: str, **given: Any) -> JobRecord:
    beat_s = 15.0 if policy == "utilization" else beat_of(job)
    return settle(job, policy=POLICIES[policy], beat_s=beat_s, until_s=beat_s * BEATS, **given)


def path(record: JobRecord) -> str:
    shown = [str(workers) for _, workers, _ in record.path]
    return " -> ".join(shown if len(shown) <= 9 else [*shown[:3], "...", *shown[-4:]])


def converged(record: JobRecord) -> int:
    """Return the first number a climb went back to: what the paper calls the decision."""
    numbers = [workers for _, workers, _ in record.path]
    for before, after in pairwise(numbers):
        if after < before:
            return after
    return numbers[-1]


def figure_6() -> Iterator[Shown]:
    """Epoch time by workers, and where each policy ends."""
    yield "Cachew, figure 6: batch time by workers, as a multiple of the best; where each policy ends"
    sweep = (1, 2, 4, 8, 13, 16, 20, 24)
    yield (
        f"{'workload':<18}" + "".join(f"{n:>7}" for n in sweep) + "   " + "  ".join(f"{name:>12}" for name in POLICIES)
    )
    ends: dict[tuple[str, str], int] = {}
    for name in ("resnet-compute", "retinanet", "simclr-compute", "simclr-source"):
        job = published(name)
        for policy in POLICIES:
            record = run_alone(job, policy)
            ends[name, policy] = converged(record) if policy == "cachew" else record.workers
        times = "".join(f"{job.trainer_per_s / job.taken(n):>7.2f}" for n in sweep)
        over = [job.trainer_per_s / job.taken(n) for n in range(1, 25)]
        named = ("workers", "batch time over the best (o: Cachew, x: model_first)")
        yield Curve("Cachew figure 6", name, range(1, 25), over, named)
        for policy, style in (("cachew", "o"), ("model_first", "x")):
            end = min(ends[name, policy], 24)
            yield Curve("Cachew figure 6", "", [end], [over[end - 1]], named, style)
        yield f"{name:<18}{times}   " + "  ".join(f"{ends[name, policy]:>12}" for policy in POLICIES)
    yield near("SimCLR, Cachew", ends["simclr-compute", "cachew"], 16, predicted=False)
    yield near("SimCLR, HPA", ends["simclr-compute", "utilization"], 24, predicted=False)
    yield near("SimCLR in source mode, Cachew", ends["simclr-source", "cachew"], 13, predicted=False)
    yield Claim("ResNet, Cachew (published: about 4, at most 1 off)", ends["resnet-compute", "cachew"], 3, 5)
    yield Claim("ResNet, HPA (published: 1, rarely 2)", ends["resnet-compute", "utilization"], 1, 2)
    yield near("RetinaNet, Cachew", ends["retinanet", "cachew"], 4)
    for name in ("resnet-compute", "retinanet", "simclr-compute", "simclr-source"):
        job = published(name)
        best = job.trainer_per_s
        text = f"{name}: model_first's batch time over the best"
        yield at_most(text, best / job.taken(ends[name, "model_first"]), 1.04)


def figure_7() -> Iterator[Shown]:
    """Cachew's first decision by its threshold."""
    yield "Cachew, figure 7: its first decision by the threshold of improvement (five seeds, noise of 1 % a window)"
    thresholds = (0.01, 0.03, 0.05, 0.07, 0.09, 0.11)
    yield f"{'workload':<18}" + "".join(f"{t:>14.0%}" for t in thresholds)
    found: dict[str, list[list[int]]] = {}
    for name in ("resnet-compute", "retinanet", "simclr-compute"):
        job = replace(published(name), noise=0.01)
        found[name] = [
            [converged(run_alone(job, "cachew", begin=partial(cachew.begin, t), seed=seed)) for seed in range(5)]
            for t in thresholds
        ]
        yield f"{name:<18}" + "".join(f"{min(each):>7} to {max(each):>3}" for each in found[name])
        means = [sum(each) / len(each) for each in found[name]]
        yield Curve("Cachew figure 7", name, thresholds, means, ("threshold", "workers at the first decision"))
    for name in ("resnet-compute", "retinanet"):
        spread = max(map(max, found[name][1:])) - min(map(min, found[name][1:]))
        yield at_most(f"{name}: robust to the threshold from 3 to 11 % (workers between extremes)", spread, 1)
    fewer = sum(found["simclr-compute"][-1]) / max(sum(found["simclr-compute"][1]), 1)
    yield at_most("SimCLR: decisions at 11 % over those at 3 %, which suits it better", fewer, 0.6)


def figure_9() -> Iterator[Shown]:
    """RetinaNet over time, in get mode."""
    yield "Cachew, figure 9: RetinaNet, workers over time"
    climbs = {policy: run_alone(published("retinanet"), policy) for policy in POLICIES}
    for policy, record in climbs.items():
        yield f"  {policy:<12} {path(record)}"
        times, numbers_held = [at for at, _, _ in record.path], [workers for _, workers, _ in record.path]
        steps = [*times, 1000.0], [*numbers_held, numbers_held[-1]]
        yield Curve("Cachew figure 9: RetinaNet", policy, *steps, ("s", "workers"), "o-")
    numbers = [workers for _, workers, _ in climbs["cachew"].path]
    yield near("RetinaNet, the most that Cachew tries", max(numbers), 5)
    yield near("RetinaNet, where it ends", converged(climbs["cachew"]), 4)
    yield at_most("RetinaNet, model_first: changes until it ends", len(climbs["model_first"].path) - 1, 2)


def figure_10() -> Iterator[Shown]:
    """Cost and time, Cachew against HPA."""
    yield f"Cachew, figure 10: time and cost ({PRICES['source']}, {PRICES['date']})"
    yield f"{'workload':<18}{'policy':<14}{'workers':>8}{'time':>8}{'cost':>8}"
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for name in ("resnet-compute", "simclr-compute"):
        job = published(name)
        trainer = PRICES[WORKLOADS["published"][name]["trainer"]]
        for policy in ("model_first", "cachew", "utilization"):
            record = run_alone(job, policy)
            workers = converged(record) if policy == "cachew" else record.workers
            seconds = HOUR_S / job.taken(workers)
            cost = job_cost(seconds, workers=workers, worker_per_h=PRICES["worker"], trainer_per_h=trainer)
            found[name, policy] = seconds, cost
            yield f"{name:<18}{policy:<14}{workers:>8}{seconds / HOUR_S:>8.3f}{cost:>8.3f}"
            drawn = [seconds / HOUR_S], [cost]
            yield Curve("Cachew figure 10", f"{name}, {policy}", *drawn, ("time", "cost"), "o")
    hpa, theirs = found["resnet-compute", "utilization"], found["resnet-compute", "cachew"]
    yield near("ResNet, HPA's time over Cachew's", hpa[0] / theirs[0], 4.1, predicted=False)
    yield near("ResNet, HPA's cost over Cachew's", hpa[1] / theirs[1], 3.8)
    hpa, theirs = found["simclr-compute", "utilization"], found["simclr-compute", "cachew"]
    yield Claim("SimCLR, what Cachew saves (published: 12 to 20 %)", 1 - theirs[1] / hpa[1], 0.108, 0.22)
    for name in ("resnet-compute", "simclr-compute"):
        ours, least = found[name, "model_first"][1], min(cost for (n, _), (_, cost) in found.items() if n == name)
        yield at_most(f"{name}: model_first's cost over the least of the three", ours / least, 1.05)


def figure_11() -> Iterator[Shown]:
    """Two jobs, the second of twice the demand."""
    yield "Cachew, figure 11: two jobs on one pool, the second takes twice as much"
    jobs = [published("multi-tenant-first"), replace(published("multi-tenant-second"), starts_s=1000.0)]
    pool = [PoolWorker(worker=str(n)) for n in range(20)]
    ends = {}
    for policy in ("cachew", "model_first"):
        record = Fleet(jobs, pool, policy=POLICIES[policy], beat_s=12.5, move_s=0.0).run(8000)
        for name, job in record.jobs.items():
            yield f"  {policy:<12} {name:<20} {path(job)}"
            at, held = [at for at, _, _ in job.path], [workers for _, workers, _ in job.path]
            yield Curve("Cachew figure 11", f"{policy}, {name}", at, held, ("s after its start", "workers"), "o-")
            ends[policy, name] = converged(job) if policy == "cachew" else job.workers
    yield near("first job, Cachew", ends["cachew", "multi-tenant-first"], 2, predicted=False)
    yield near("second job, Cachew", ends["cachew", "multi-tenant-second"], 4)
    yield near("second job, model_first", ends["model_first", "multi-tenant-second"], 4)
    rates = [job.taken(ends["cachew", job.name]) for job in jobs]
    yield near("epoch time, first over second", rates[1] / rates[0], 253 / 129)


def sweep_m1() -> Iterator[Shown]:
    """tf.data service, figure 9."""
    table = WORKLOADS["published"]["tf-data-m1"]
    job, alone = published("tf-data-m1"), table["colocated_per_s"]
    yield "tf.data service, figure 9: M1 by workers (cost: equation 1, the price of a worker from 11.4x at 512)"
    yield f"{'workers':>8}{'batches/s':>11}{'published':>11}{'speed-up':>10}{'saves':>8}"
    seen = {int(n): per_s for n, per_s in table["seen"].items()} | {128: 4.77, 512: 6.765}
    costs = {}
    for n in (8, 16, 32, 64, 128, 256, 442, 512, 640):
        per_s = job.taken(n)
        used = 0.9 * per_s / job.made(n) + 0.1  # memory stays used while a worker waits
        costs[n] = job_cost(HOUR_S / per_s, workers=n, worker_per_h=table["worker_price"], used=used, trainer_per_h=1.0)
        shown = f"{seen[n]:>11.3g}" if n in seen else f"{'':>11}"
        yield f"{n:>8}{per_s:>11.3g}{shown}{per_s / alone:>9.1f}x{1 / alone / costs[n]:>7.2f}x"
    for n, per_s in sorted(seen.items()):
        yield near(f"M1 with {n} workers, batches/s", job.taken(n), per_s, predicted=n not in (128, 512))
    counts, axes = sorted(costs), ("workers", "batches/s")
    yield Curve("tf.data service figure 9: M1", "simulated", counts, [job.taken(n) for n in counts], axes)
    yield Curve("tf.data service figure 9: M1", "published", sorted(seen), [seen[n] for n in sorted(seen)], axes, "o")
    yield at_most("M1, 640 workers against 512: how much faster", job.taken(640) / job.taken(512) - 1, 0.01)
    yield at_least("M1, 640 workers against 512: how much dearer", costs[640] / costs[512] - 1, 0.001)
    yield near("M1, what 512 workers save in cost", 1 / alone / costs[512], 11.4, predicted=False)
    yield near("M1, what 442 workers save in cost (figure 8b)", 1 / alone / costs[442], 10.8)
    yield near("M1, what 8 workers cost over colocated", costs[8] * alone, 1.83)
    record = run_alone(job, "model_first")
    yield f"  model_first: {path(record)}"
    yield at_least("M1, model_first: of the ideal", job.taken(record.workers) / job.trainer_per_s, 0.96)
    yield at_most("M1, model_first: workers over the least that would do", record.workers / 182, 1.05)


def dpp() -> Iterator[Shown]:
    """DPP's nodes, skewed jobs and peaks, and five regions."""
    yield "DPP, table IX: worker nodes for a trainer node"
    for name, nodes in (("rm1", 24.16), ("rm2", 9.44), ("rm3", 55.22)):
        ends = {policy: run_alone(published(name), policy).workers for policy in ("model_first", "buffers")}
        yield f"  {name}: model_first {ends['model_first']}, buffers {ends['buffers']}, published {nodes}"
        yield near(f"{name}, model_first", ends["model_first"], nodes)
        for who, workers in (*ends.items(), ("published", nodes)):
            yield Curve("DPP table IX", f"{name}, {who}", [nodes], [workers], ("published", "nodes"), "o")
    yield from dpp_skew()
    yield from dpp_regions()


def combo_jobs(count: int, seed: int) -> list[FleetJob]:
    """Return jobs as figure 4 has them: begun when there is room, most ended early, some ten days long."""
    rng = random.Random(seed)
    jobs = []
    for number in range(count):
        model = published(rng.choice(("rm1", "rm2", "rm3")))
        nodes = rng.choice((1, 1, 2, 4))
        starts = max(0.0, rng.gauss(36, 14)) * HOUR_S  # a combo window: the peak of figure 5
        lasts = min(rng.expovariate(1 / 16.0) + 0.5, 96.0) * HOUR_S
        jobs.append(
            replace(
                model,
                name=f"combo{number}",
                trainer_per_s=model.trainer_per_s * nodes,
                starts_s=starts,
                ends_s=starts + lasts,
                noise=0.03,
            )
        )
    return jobs


def waits(record: FleetRecord) -> float:
    return sum(job.waiting_s for job in record.jobs.values()) / sum(job.reading_s for job in record.jobs.values())


def worker_hours(record: FleetRecord) -> float:
    return sum(job.worker_s for job in record.jobs.values()) / HOUR_S


def dpp_skew() -> Iterator[Shown]:
    jobs = combo_jobs(82, seed=4)  # as many as in figure 4
    needed = {job.name: job.trainer_per_s / job.worker_per_s for job in jobs}
    everything = int(sum(needed.values())) + len(jobs)
    free = Fleet(jobs, workers_in(everything // 2), beat_s=BEAT_S, seed=1).run(150 * HOUR_S)
    peak = int(max(free.held))
    yield "DPP, figures 4 and 5: 82 skewed combo jobs, a peak"
    yield f"{'pool':<34}{'workers':>9}{'worker hours':>14}{'trainers wait':>15}"
    yield f"{'a part for each job, for good':<34}{everything:>9}{everything * 150:>14.0f}{0:>15.1%}"
    yield f"{'follows demand':<34}{peak:>9}{worker_hours(free):>14.0f}{waits(free):>15.1%}"
    tight = Fleet(jobs, workers_in(int(peak * 0.8)), beat_s=BEAT_S, seed=1).run(150 * HOUR_S)
    less = int(peak * 0.8)
    yield f"{'follows demand, a fifth too small':<34}{less:>9}{worker_hours(tight):>14.0f}{waits(tight):>15.1%}"
    for label, record in (("enough workers", free), ("a fifth too few", tight)):
        hours = [at / HOUR_S for at in record.times]
        yield Curve("DPP figures 4 and 5", label, hours, record.held, ("h", "workers held"))
    yield at_most("skewed jobs: the peak of a shared pool over a part for each", peak / everything, 0.8)
    yield at_most("skewed jobs: trainers wait", waits(free), 0.03)
    yield at_least("skewed jobs in a pool a fifth too small: of the fair-share optimum", tight.utilization, 0.9)


def workers_in(count: int, kinds: tuple[str, ...] = ("",)) -> list[PoolWorker]:
    return [PoolWorker(worker=f"w{n}", host=f"h{n // 4}", kind=kinds[n % len(kinds)]) for n in range(count)]


def dpp_regions() -> Iterator[Shown]:
    regions = ("R1", "R2", "R3", "R4", "R5")
    rng = random.Random(9)
    jobs = [
        replace(job, region=rng.choice(regions), starts_s=0.0, ends_s=20 * HOUR_S) for job in combo_jobs(30, seed=6)
    ]
    by_region = {r: sum(job.trainer_per_s / job.worker_per_s for job in jobs if job.region == r) for r in regions}
    count = int(5 * max(by_region.values()) * 1.1) + 5
    limits = FleetLimits(crossing_per_s=0.1 * sum(job.trainer_per_s for job in jobs))
    anywhere = Fleet(jobs, workers_in(count, regions), beat_s=BEAT_S, limits=limits).run(20 * HOUR_S)
    placed_jobs = [replace(job, kinds=frozenset({job.region})) for job in jobs]
    placed = Fleet(placed_jobs, workers_in(count, regions), beat_s=BEAT_S, limits=limits).run(20 * HOUR_S)
    yield "DPP, section IV-B: five regions, links between them carry a tenth of what trainers take"
    yield f"{'placement':<20}{'crosses, of all':>17}{'trainers wait':>15}{'worker hours':>14}"
    for name, record in (("anywhere", anywhere), ("where the data is", placed)):
        share = sum(record.crossed) / max(sum(j.batches for j in record.jobs.values()) / BEAT_S, 1e-9)
        yield f"{name:<20}{share:>17.1%}{waits(record):>15.1%}{worker_hours(record):>14.0f}"
        drawn = [at / HOUR_S for at in record.times], record.crossed
        yield Curve("DPP: five regions", name, *drawn, ("h", "crosses between regions"))
    yield at_most("five regions, placed by data: trainers wait", waits(placed), 0.03)
    yield at_most("five regions, placed by data: batches that cross", sum(placed.crossed), 0.0)
    yield at_least("five regions: waiting anywhere over waiting where the data is", waits(anywhere) / waits(placed), 5)


def a_day() -> Iterator[Shown]:
    """Forty jobs on a shared pool against a part for each."""
    rng = random.Random(2)
    jobs = []
    for number in range(40):
        need, rate = rng.choice((1, 2, 4, 8, 16)) * rng.uniform(0.8, 1.2), rng.choice((0.5, 2.0, 10.0))
        starts = rng.uniform(0, 16) * HOUR_S
        jobs.append(
            FleetJob(
                name=f"job{number}",
                trainer_per_s=need * rate,
                worker_per_s=rate,
                starts_s=starts,
                batches=need * rate * rng.uniform(2, 8) * HOUR_S,
                noise=0.05,
                contention=rng.choice((0.0, 0.0, 0.01)),
                limits=ScalingLimits(most=64),
            )
        )
    pool = workers_in(120)
    shared = Fleet(jobs, pool, beat_s=20.0).run(40 * HOUR_S)
    static = Fleet(jobs, pool, beat_s=20.0, fixed={job.name: 3 for job in jobs}).run(80 * HOUR_S)
    yield "A day of 40 jobs on 120 workers"
    yield f"{'allotment':<22}{'mean job hours':>16}{'last ends, h':>14}{'trainers wait':>15}{'worker hours':>14}"
    hours = {}
    for name, record in (("3 for each, for good", static), ("model_first", shared)):
        took = [job.reading_s / HOUR_S for job in record.jobs.values()]
        hours[name] = sum(took) / len(took)
        last = max(job.ended_s or 0.0 for job in record.jobs.values()) / HOUR_S
        yield f"{name:<22}{hours[name]:>16.2f}{last:>14.1f}{waits(record):>15.1%}{worker_hours(record):>14.0f}"
        drawn = [at / HOUR_S for at in record.times], record.used
        yield Curve("A day of 40 jobs", name, *drawn, ("h", "workers in use"))
    yield at_least(
        "a day: mean time of a job, static over shared", hours["3 for each, for good"] / hours["model_first"], 1.3
    )
    yield at_least("a day: of the fair-share optimum", shared.utilization, 0.9)


def large(hours: float) -> Iterator[Shown]:
    """5,000 workers and 500 jobs."""
    rng = random.Random(4)
    jobs = []
    for number in range(500):
        rate, need = rng.choice((0.2, 1.0, 5.0)), rng.uniform(1, 28)
        starts = rng.uniform(-20, 16) * HOUR_S
        later = need * rate * rng.choice((1.0, 0.5, 1.5))
        jobs.append(
            FleetJob(
                name=f"job{number}",
                trainer_per_s=need * rate,
                worker_per_s=rate,
                contention=rng.choice((0.0, 0.0, 0.01)),
                noise=0.05,
                starts_s=max(0.0, starts),
                ends_s=starts + rng.uniform(6, 30) * HOUR_S,
                changes=((2 * HOUR_S, later),),
                weight=rng.choice((1.0, 1.0, 2.0)),
                limits=ScalingLimits(most=256),
            )
        )
    began = time.perf_counter()
    record = Fleet(jobs, workers_in(5000)).run(hours * HOUR_S)
    took = time.perf_counter() - began
    changes = sorted(len(job.path) for job in record.jobs.values())
    yield f"5,000 workers, 500 jobs, {hours:g} hours: {took:.0f} s"
    yield f"  most held {max(record.held):.0f}, most wanted {max(record.wanted):.0f}, trainers wait {waits(record):.1%}"
    yield f"  changes of a target: median {changes[250]}, most {changes[-1]}"
    hours_on = [at / HOUR_S for at in record.times]
    for label, series in (("wanted", record.wanted), ("held", record.held), ("possible", record.possible)):
        yield Curve("5,000 workers, 500 jobs", label, hours_on, series, ("h", "workers"))
    yield at_most("5,000 workers, 500 jobs: seconds for 24 hours", took * 24 / hours, 600)
    yield at_least("5,000 workers, 500 jobs: of the fair-share optimum", record.utilization, 0.9)


PARTS: dict[str, Callable[[], Iterator[Shown]]] = {
    "cachew-6": figure_6,
    "cachew-7": figure_7,
    "cachew-9": figure_9,
    "cachew-10": figure_10,
    "cachew-11": figure_11,
    "tf-data-service-9": sweep_m1,
    "dpp": dpp,
    "a-day": a_day,
    "large": partial(large, 24.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two hours of the large fleet instead of a day")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--plots", type=Path, default=ROOT / "build" / "experiments")
    options = parser.parse_args()
    claims: list[Claim] = []
    curves: list[Curve] = []
    parts = PARTS | ({"large": partial(large, 2.0)} if options.quick else {})
    for name in options.only:
        for part in parts[name]():
            match part:
                case Claim():
                    claims.append(part)
                case Curve():
                    curves.append(part)
                case _:
                    print(part, flush=True)
        print()
    for claim in claims:
        print(claim.line())
    plot(curves, claims, options.plots / "fleet.png")
    print(f"plot: {options.plots / 'fleet.png'}")
    sys.exit(0 if all(claim.holds for claim in claims) else 1)


if __name__ == "__main__":
    main()
