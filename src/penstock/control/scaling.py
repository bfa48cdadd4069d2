"""How many workers each job should have, and which they are: what the dispatcher's tick does about it.

Only jobs of which somebody said how many are scaled (`Placement.workers`, or `penstock scale` later). A tick

1. ends windows that are long enough (`measuring`), and asks the policy for a target;
2. gives workers to jobs by all targets (`policies.allotting`), where a target or the pool changed;
3. journals what changed for a job, with the numbers and the reason.

`settle` then starts and stops processes: it asks `fitting_workers`, which asks the allotment. A process that is stopped
is drained: its streams go on elsewhere, at the positions that their readers hold.

Targets and windows are in memory. After a restart a job begins at its last decision, which is in the journal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from msgspec.structs import asdict, replace

from penstock.control import events as e
from penstock.control.draft import Draft
from penstock.control.fitting import asked_of, misfit, runners_of
from penstock.control.measuring import WINDOW_S, count, has_ended, measure, numbers_of, serving
from penstock.control.records import Job, Worker
from penstock.control.runners import is_kept
from penstock.control.scaling_records import NOTHING_ALLOTTED, Allotted, JobTracking, ScaleDecision, WorkerSizes
from penstock.control.scaling_rules import PolicyName, ScalingRules
from penstock.control.state import ClusterState
from penstock.core.ids import JobName, WorkerId
from penstock.policies.allotting import JobClaim, PoolWorker, allot
from penstock.policies.scaling import buffers, cachew, model_first, utilization
from penstock.policies.scaling.model_first import Learned, ModelMemory
from penstock.policies.scaling.records import Measured, ReaderPace, ScalingLimits, ScalingPolicy, WorkerTarget
from penstock.policies.scaling.worker_curve import MOVED
from penstock.wire.jobs import delivery_of
from penstock.wire.modes import WorkersAsked

LOOK_AGAIN_S = 0.5  # at a window that should have ended, or begun: some beats come late
NO_KIND = frozenset({"none"})
POLICIES: Mapping[PolicyName, ScalingPolicy[Any]] = MappingProxyType(
    {"model_first": model_first, "cachew": cachew, "utilization": utilization, "buffers": buffers}
)
_JUST_OPENED = Measured(seconds=0.0, workers=0, pace=ReaderPace(batches=0.0, step_s=1.0, wait_s=0.0), worker_per_s=None)


def scale_jobs(draft: Draft, rules: ScalingRules) -> list[JobName]:
    """Bring targets and allotment up to date; return the jobs whose workers changed."""
    scaled = [job for job in draft.state.jobs.values() if asked_of(job) is not None]
    if not scaled:
        if draft.state.allotted is not NOTHING_ALLOTTED:
            draft.emit(e.WorkersAllotted(NOTHING_ALLOTTED))
        return []
    before = draft.state.allotted
    same_pool = before.pool is draft.state.workers and before.drained is draft.state.drained
    sizes = before.sizes if same_pool else _sizes(draft.state)
    targets = {job.name: _target(draft, job, rules, sizes) for job in scaled}
    changed = _allot(draft, scaled, targets, rules, sizes)
    for job in scaled:
        _note(draft, job, targets[job.name])
    return changed


def limits_of(job: Job, rules: ScalingRules) -> ScalingLimits:
    """Return between what a job's workers may be chosen."""
    least, most = _bounds(asked_of(job))
    return ScalingLimits(least=least, most=most, streams=delivery_of(job.spec).streams, rent=rules.rent)


def _bounds(asked: WorkersAsked) -> tuple[int, int]:
    if isinstance(asked, tuple):
        return asked
    return (asked, asked) if isinstance(asked, int) else (1, ScalingLimits().most)


def _target(draft: Draft, job: Job, rules: ScalingRules, sizes: WorkerSizes) -> WorkerTarget:
    if not is_kept(draft, job):
        return WorkerTarget(0, "paused" if job.paused else job.failure or "nobody reads")
    asked, limits = asked_of(job), limits_of(job, rules)
    if isinstance(asked, int):
        return WorkerTarget(limits.clip(asked), f"{asked} were asked for")
    tracking = draft.state.tracked.get(job.name)
    if tracking is None or tracking.policy != rules.policy:
        tracking = _begin(draft, job, limits, rules, sizes.unit)
    elif tracking.unit != sizes.unit:
        worth = Learned(
            workers=max(1, math.ceil(tracking.target.workers * tracking.unit / sizes.unit)),
            demand_per_s=0.0,
            worker_per_s=0.0,
        )
        tracking = _begin(draft, job, limits, rules, sizes.unit, worth)
    elif tracking.mode != job.caching.mode:
        tracking = _change_mode(draft, job, tracking, limits)
    elif tracking.serving != serving(draft.state, job.name):
        tracking = _new_window(draft, job.name, tracking)
    elif draft.now >= tracking.look_at:
        tracking = _look(draft, job, tracking, limits)
    return WorkerTarget(limits.clip(tracking.target.workers), tracking.target.reason)


def _begin(
    draft: Draft, job: Job, limits: ScalingLimits, rules: ScalingRules, unit: int, known: Learned | None = None
) -> JobTracking:
    """Begin to decide; `known`: what it had, where that is counted otherwise now."""
    policy = POLICIES[rules.policy]
    memory: Any = policy.begin()
    if policy is model_first:
        memory = model_first.begin(known or _known(draft.state, job))
    memory, target = policy.decide(memory, _JUST_OPENED, limits, draft.now)
    tracking = JobTracking(
        rules.policy,
        memory,
        target,
        count(draft.state, job.name, draft.now),
        unit=unit,
        mode=job.caching.mode,
        speed_up=job.caching.speed_up,
    )
    return _new_window(draft, job.name, tracking)


def _change_mode(draft: Draft, job: Job, tracking: JobTracking, limits: ScalingLimits) -> JobTracking:
    """Elements are got from a cache now, or no longer: what a worker makes is another rate from here on."""
    memory, target, speed_up = tracking.memory, tracking.target, job.caching.speed_up
    if isinstance(memory, ModelMemory):
        known = draft.state.metrics.get(metric_key(job), Learned)
        rate = memory.worker_per_s * speed_up / tracking.speed_up if known is None else known.worker_per_s
        memory = model_first.with_rate(memory, rate)
        target = WorkerTarget(limits.clip(memory.held or target.workers), memory.reason or target.reason)
    changed = replace(tracking, memory=memory, target=target, mode=job.caching.mode, speed_up=speed_up)
    return _new_window(draft, job.name, changed)


def _known(state: ClusterState, job: Job) -> Learned | None:
    """Return where a job begins: where it was before a restart, or where the last run of the same ended."""
    last = job.scaling.last
    if last is not None and last.target:
        return Learned(workers=last.target, demand_per_s=0.0, worker_per_s=0.0)
    return state.metrics.get(metric_key(job), Learned)


def metric_key(job: Job) -> str:
    """Return under which name is kept what is learned of a pipeline and its trainer, by what is kept of it."""
    spec, mode = job.spec, job.caching.mode
    return f"scaling/{spec.fingerprint}/{spec.owner}/{spec.host}/{spec.ranks.count}" + (f"/{mode}" if mode else "")


def _new_window(draft: Draft, job: JobName, tracking: JobTracking) -> JobTracking:
    """Begin to count anew: a window in which workers come or go shows neither number."""
    there, window = serving(draft.state, job), count(draft.state, job, draft.now)
    memory = tracking.memory
    workers = sum(window.sizes.values())
    if isinstance(memory, ModelMemory) and (memory.workers != workers or window.making != tracking.window.making):
        memory = model_first.with_workers(memory, workers)
    awaited = there - window.making  # the window begins anew with their first outputs
    look_at = draft.now + (LOOK_AGAIN_S if awaited else WINDOW_S)
    tracking = replace(tracking, memory=memory, window=window, serving=there, look_at=look_at)
    draft.emit(e.JobTracked(job, tracking))
    return tracking


def _look(draft: Draft, job: Job, tracking: JobTracking, limits: ScalingLimits) -> JobTracking:
    now = count(draft.state, job.name, draft.now)
    if now.runners.keys() != tracking.window.runners.keys() or now.making != tracking.window.making:
        return _new_window(draft, job.name, tracking)  # what serves has made its first output since
    if not has_ended(tracking.window, now):
        tracking = replace(tracking, look_at=draft.now + LOOK_AGAIN_S)
        draft.emit(e.JobTracked(job.name, tracking))
        return tracking
    measured = measure(tracking.window, now, width=delivery_of(job.spec).width)
    if measured.pace is None:
        return _new_window(draft, job.name, tracking)  # nobody took anything: there is nothing to decide on
    memory, target = POLICIES[tracking.policy].decide(tracking.memory, measured, limits, draft.now)
    tracking = replace(
        tracking,
        memory=memory,
        target=target,
        window=now,
        look_at=draft.now + WINDOW_S,
        figures=numbers_of(measured),
    )
    draft.emit(e.JobTracked(job.name, tracking))
    _keep_what_was_learned(draft, job, memory)
    return tracking


def _keep_what_was_learned(draft: Draft, job: Job, memory: Any) -> None:
    learned = model_first.learned_by(memory) if isinstance(memory, ModelMemory) else None
    if learned is None:
        return
    known = draft.state.metrics.get(metric_key(job), Learned)
    moved = known is None or any(
        abs(getattr(learned, name) - value) > MOVED * abs(value) for name, value in asdict(known).items()
    )
    if known is None or learned.workers != known.workers or moved:
        draft.emit(e.MetricLearned(metric_key(job), {name: float(value) for name, value in asdict(learned).items()}))


# Who serves whom


def _allot(
    draft: Draft,
    jobs: Iterable[Job],
    targets: dict[JobName, WorkerTarget],
    rules: ScalingRules,
    sizes: WorkerSizes,
) -> list[JobName]:
    state, before = draft.state, draft.state.allotted
    kinds = _kinds(state) if before.pool is not state.workers or before.drained is not state.drained else None
    known = kinds if kinds is not None else before.kinds
    claims = _claims(state, jobs, targets, rules, known)
    if kinds is None and claims == before.claims:
        return []
    pool = [
        PoolWorker(
            worker=worker.worker,
            host=state.agents[worker.agent].host,
            kind=known[worker.worker],
            size=sizes.size(worker.worker),
        )
        for worker in state.workers.values()
        if worker.worker in known
    ]
    held = {claim.job: [r.worker for r in runners_of(state, JobName(claim.job)).values()] for claim in claims}
    quotas = {claim.owner: quota for claim in claims if (quota := rules.of(claim.owner).quota) is not None}
    given = allot(claims, pool, held, quotas)
    allotted = Allotted(
        workers={JobName(job): tuple(map(WorkerId, names)) for job, names in given.workers.items()},
        shortages={JobName(job): text for job, text in given.shortages.items()},
        claims=claims,
        pool=state.workers,
        drained=state.drained,
        kinds=known,
        sizes=sizes,
    )
    draft.emit(e.WorkersAllotted(allotted))
    names = {claim.job for claim in claims} | before.workers.keys()
    changed = [JobName(name) for name in names if _differ(before, allotted, JobName(name))]
    # Those that give workers up before those that take them: a worker has one process for a moment, not two.
    return sorted(changed, key=lambda name: (len(allotted.workers.get(name, ())), name))


def _differ(one: Allotted, other: Allotted, job: JobName) -> bool:
    return set(one.workers.get(job, ())) != set(other.workers.get(job, ()))


def _sizes(state: ClusterState) -> WorkerSizes:
    there = (w for w in state.workers.values() if not w.leaving and w.worker not in state.drained)
    return WorkerSizes.of({worker.worker: worker.threads for worker in there})


def _kinds(state: ClusterState) -> dict[WorkerId, str]:
    """Return the kind of each worker that can be given to somebody: workers of a kind fit the same jobs."""
    found: dict[WorkerId, str] = {}
    names: dict[tuple[object, ...], str] = {}
    for worker in state.workers.values():
        if not worker.leaving and worker.worker not in state.drained:
            agent = state.agents[worker.agent]
            key = (agent.host, worker.tags, tuple(sorted(agent.versions.items())))
            found[worker.worker] = names.setdefault(key, f"{agent.host} {','.join(worker.tags)} {len(names)}")
    return found


def _claims(
    state: ClusterState,
    jobs: Iterable[Job],
    targets: dict[JobName, WorkerTarget],
    rules: ScalingRules,
    kinds: dict[WorkerId, str],
) -> tuple[JobClaim, ...]:
    one_of_each: dict[str, Worker] = {
        kind: state.workers[worker] for worker, kind in kinds.items() if worker in state.workers
    }
    wanting = [job for job in jobs if targets[job.name].workers]
    shares: dict[tuple[str, int], float] = {}
    for job in wanting:
        key = (job.spec.owner, _priority(job, rules))
        shares[key] = shares.get(key, 0.0) + job.spec.placement.weight
    return tuple(
        JobClaim(
            job=job.name,
            target=targets[job.name].workers,
            weight=rules.of(job.spec.owner).weight
            * job.spec.placement.weight
            / shares[job.spec.owner, _priority(job, rules)],
            priority=_priority(job, rules),
            owner=job.spec.owner,
            kinds=frozenset(kind for kind, worker in one_of_each.items() if misfit(state, job.spec, worker) is None)
            or NO_KIND,
        )
        for job in wanting
    )


def _priority(job: Job, rules: ScalingRules) -> int:
    most = rules.of(job.spec.owner).most_priority
    asked = job.spec.placement.priority
    return asked if most is None else min(asked, most)


def _note(draft: Draft, job: Job, target: WorkerTarget) -> None:
    """Journal a decision that changed something."""
    allotted = draft.state.allotted
    given, shortage = len(allotted.workers.get(job.name, ())), allotted.shortages.get(job.name, "")
    last = job.scaling.last
    if last is not None and (last.target, last.shortage) == (target.workers, shortage):
        return
    tracking = draft.state.tracked.get(job.name)
    draft.emit(
        e.WorkersDecided(
            job.name,
            ScaleDecision(
                at_s=draft.now,
                target=target.workers,
                reason=target.reason,
                allotted=given,
                shortage=shortage,
                figures={} if tracking is None else tracking.figures,
            ),
        )
    )
