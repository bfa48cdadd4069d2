"""Which worker serves which job: targets in, an allotment out.

Rules.
1. A higher priority is served first, and takes workers over. Inside a priority shares are *weighted max-min fair*:
   worker by worker, to the job that has the least for its weight and still wants one.
2. Nobody gets more than its target, nor an owner's jobs together more than the owner's quota.
3. A job that could only use kinds of workers that are taken gets one if its holder can use another kind.
4. A job keeps the workers it has, as far as it is due so many; among equals, who holds a worker is due it. Others are
   taken on hosts where the job already is: filling a host is cheaper than a second one.
5. A worker serves one job. Where there are fewer workers than jobs of a priority (or than jobs of an owner that is at
   its quota), jobs that got none share one.
6. What was wanted and could not be had is a reason, in words.

Sizes are in the unit of targets. With workers of one size the shares are max-min optimal; with several they are so
within the size of one worker.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

ANY_KIND: frozenset[str] = frozenset()


class PoolWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that can be given to a job."""

    worker: str
    host: str = ""
    kind: str = ""
    """Workers of a kind are alike to every job: what is installed, where it stands."""
    size: float = 1.0


class JobClaim(msgspec.Struct, frozen=True, kw_only=True):
    """What a job wants."""

    job: str
    target: int
    weight: float = 1.0
    priority: int = 0
    """The higher is served first."""
    owner: str = ""
    kinds: frozenset[str] = ANY_KIND
    """The kinds of workers that can run it. Empty: all."""

    def fits(self, kind: str) -> bool:
        return not self.kinds or kind in self.kinds


class Allotment(msgspec.Struct, frozen=True):
    """Which workers are a job's, and why some have fewer than they want."""

    workers: Mapping[str, tuple[str, ...]]
    shortages: Mapping[str, str]

    def __len__(self) -> int:
        return len({worker for workers in self.workers.values() for worker in workers})


def allot(
    claims: Iterable[JobClaim],
    pool: Iterable[PoolWorker],
    held: Mapping[str, Sequence[str]] | None = None,
    quotas: Mapping[str, float] | None = None,
) -> Allotment:
    """Give workers to jobs. `held` is who has which now, `quotas` the most an owner's jobs may have together.

    >>> six = [PoolWorker(worker=f"w{i}", host="a") for i in range(6)]
    >>> both = [JobClaim(job="big", target=8, weight=2), JobClaim(job="small", target=8)]
    >>> given = allot(both, six)
    >>> {job: len(workers) for job, workers in given.workers.items()}
    {'big': 4, 'small': 2}
    >>> given.shortages["small"]
    '2 of 8 workers: the pool of 6 is exhausted by 2 jobs'
    >>> urgent = [*both, JobClaim(job="urgent", target=5, priority=1)]
    >>> {job: len(workers) for job, workers in allot(urgent, six, given.workers).workers.items()}
    {'big': 1, 'small': 1, 'urgent': 5}
    """
    wanting = [claim for claim in claims if claim.target > 0]
    shares = _Shares(wanting, pool, held or {}, quotas or {})
    for priority in sorted({claim.priority for claim in wanting}, reverse=True):
        shares.fill([claim for claim in wanting if claim.priority == priority])
    workers = shares.name_workers()
    _share_workers(wanting, workers, shares)
    shortages = {claim.job: reason for claim in wanting if (reason := shares.shortage(claim, workers[claim.job]))}
    return Allotment({job: tuple(names) for job, names in workers.items()}, shortages)


class _Class(msgspec.Struct):
    """Workers that are alike: of one kind and size."""

    kind: str
    size: float
    workers: list[PoolWorker] = []
    free: int = 0


class _Shares:
    """How many workers of each class every job is due."""

    def __init__(
        self,
        claims: Sequence[JobClaim],
        pool: Iterable[PoolWorker],
        held: Mapping[str, Sequence[str]],
        quotas: Mapping[str, float],
    ) -> None:
        self.claims = {claim.job: claim for claim in claims}
        self.quotas = quotas
        self.classes: dict[tuple[str, float], _Class] = {}
        self.by_name: dict[str, PoolWorker] = {}
        for worker in pool:
            self.by_name[worker.worker] = worker
            alike = self.classes.setdefault((worker.kind, worker.size), _Class(worker.kind, worker.size))
            alike.workers.append(worker)
            alike.free += 1
        self.held = {
            job: [self.by_name[name] for name in held.get(job, ()) if name in self.by_name] for job in self.claims
        }
        self.holds = {job: Counter((w.kind, w.size) for w in workers) for job, workers in self.held.items()}
        self.due: dict[str, Counter[tuple[str, float]]] = {job: Counter() for job in self.claims}
        self.number: dict[str, int] = dict.fromkeys(self.claims, 0)
        self.size: dict[str, float] = dict.fromkeys(self.claims, 0.0)
        self.allowed = {
            claim.job: [key for key, each in self.classes.items() if claim.fits(each.kind)] for claim in claims
        }
        self.owned: dict[str, float] = defaultdict(float)
        self.by_priority: dict[int, float] = defaultdict(float)
        self.stopped: dict[str, str] = {}

    def fill(self, claims: Sequence[JobClaim]) -> None:
        """Give the jobs of one priority what they are due, worker by worker."""
        order = {claim.job: number for number, claim in enumerate(claims)}
        heap = [self._rank(claim, order[claim.job]) for claim in claims]
        heapq.heapify(heap)
        while heap:
            claim = self.claims[heapq.heappop(heap)[-1]]
            if self.size[claim.job] >= claim.target:
                continue
            if self._take_one(claim):
                heapq.heappush(heap, self._rank(claim, order[claim.job]))

    def _rank(self, claim: JobClaim, number: int) -> tuple[float, bool, float, int, str]:
        job = claim.job
        return self.size[job] / claim.weight, self.number[job] >= len(self.held[job]), -claim.weight, number, job

    def _take_one(self, claim: JobClaim) -> bool:
        """Make one more worker a job's, if there is one and its owner may have it."""
        allowed = self.allowed[claim.job]
        if claim.owner in self.quotas:
            room = self.quotas[claim.owner] - self.owned[claim.owner]
            allowed = [key for key in allowed if self.classes[key].size <= room]
        if not allowed:
            self.stopped[claim.job] = "quota" if self.allowed[claim.job] else "kind"
            return False
        key = self._best_free(claim, allowed) or self._make_free(allowed)
        if key is None:
            self.stopped[claim.job] = "pool"
            return False
        self.classes[key].free -= 1
        self.due[claim.job][key] += 1
        self.number[claim.job] += 1
        self.size[claim.job] += self.classes[key].size
        self.owned[claim.owner] += self.classes[key].size
        self.by_priority[claim.priority] += self.classes[key].size
        return True

    def _best_free(self, claim: JobClaim, allowed: Sequence[tuple[str, float]]) -> tuple[str, float] | None:
        free = [key for key in allowed if self.classes[key].free]
        if len(free) <= 1:
            return free[0] if free else None
        job = claim.job
        missing = claim.target - self.size[job]

        def worth(key: tuple[str, float]) -> tuple[bool, bool, float]:
            size = self.classes[key].size
            return self.holds[job][key] > self.due[job][key], size <= missing, size if size <= missing else -size

        return max(free, key=worth)

    def _make_free(self, allowed: Sequence[tuple[str, float]]) -> tuple[str, float] | None:
        """Let jobs move to other classes of the same size until one of these is free; None if that cannot be."""
        if not any(each.free for each in self.classes.values()):
            return None
        came_from: dict[tuple[str, float], tuple[tuple[str, float], str] | None] = dict.fromkeys(allowed)
        queue = deque(allowed)
        while queue:
            key = queue.popleft()
            if self.classes[key].free:
                return self._move_along(key, came_from)
            for job, due in self.due.items():
                if due[key]:
                    for other, each in self.classes.items():
                        same = each.size == self.classes[key].size and self.claims[job].fits(each.kind)
                        if same and other not in came_from:
                            came_from[other] = (key, job)
                            queue.append(other)
        return None

    def _move_along(
        self, free: tuple[str, float], came_from: Mapping[tuple[str, float], tuple[tuple[str, float], str] | None]
    ) -> tuple[str, float]:
        while (step := came_from[free]) is not None:
            taken, job = step
            self.due[job][free] += 1
            self.due[job][taken] -= 1
            self.classes[free].free -= 1
            self.classes[taken].free += 1
            free = taken
        return free

    def name_workers(self) -> dict[str, list[str]]:
        """Say which workers they are: first those that are kept, then others, on the job's own hosts first."""
        named: dict[str, list[str]] = {job: [] for job in self.claims}
        left = {job: Counter(due) for job, due in self.due.items()}
        taken: set[str] = set()
        for job, workers in self.held.items():
            for worker in workers:
                if left[job][worker.kind, worker.size] > 0 and worker.worker not in taken:
                    left[job][worker.kind, worker.size] -= 1
                    named[job].append(worker.worker)
                    taken.add(worker.worker)
        free: dict[tuple[str, float], dict[str, deque[str]]] = {key: defaultdict(deque) for key in self.classes}
        for key, each in self.classes.items():
            for worker in each.workers:
                if worker.worker not in taken:
                    free[key][worker.host].append(worker.worker)
        roomy = {key: sorted(by_host, key=lambda host: len(by_host[host])) for key, by_host in free.items()}
        for job, counts in left.items():
            for key, count in counts.items():
                own = list(dict.fromkeys(self.by_name[name].host for name in named[job])) if count else []
                for _ in range(count):
                    while own and not free[key].get(own[-1]):
                        own.pop()
                    while not own and not free[key].get(roomy[key][-1]):
                        roomy[key].pop()
                    if not own:
                        own.append(roomy[key][-1])
                    named[job].append(free[key][own[-1]].popleft())
        return named

    def shortage(self, claim: JobClaim, names: Sequence[str]) -> str:
        """Say why a job has less than it wants, or nothing."""
        if self.size[claim.job] >= claim.target:
            return ""
        got = f"{self.size[claim.job]:g} of {claim.target} workers"
        if names and not self.size[claim.job]:
            got = f"a part of 1 of {claim.target} workers"
        stopped = self.stopped.get(claim.job)
        if stopped == "kind":
            return f"{got}: none of the pool can run it"
        if stopped == "quota":
            return f"{got}: the quota of {claim.owner!r} is {self.quotas[claim.owner]:g}"
        above = sum(size for priority, size in self.by_priority.items() if priority > claim.priority)
        before = f", {above:g} of them by jobs of higher priority" if above else ""
        pool = sum(each.size * len(each.workers) for each in self.classes.values() if claim.fits(each.kind))
        return (
            f"{got}: the pool of {pool:g} is exhausted by {len(self.claims)} job{'s' * (len(self.claims) > 1)}{before}"
        )


def _share_workers(claims: Sequence[JobClaim], workers: dict[str, list[str]], shares: _Shares) -> None:
    """Let jobs that got no worker share one: of their priority, or of their owner where its quota is the reason."""
    load: dict[str, float] = defaultdict(float)
    holders: dict[str, list[JobClaim]] = defaultdict(list)
    for claim in claims:
        for worker in workers[claim.job]:
            load[worker] += claim.weight
            holders[worker].append(claim)
    alone = {worker: tuple(jobs) for worker, jobs in holders.items()}
    for claim in claims:
        if workers[claim.job] or shares.stopped.get(claim.job) not in ("quota", "pool"):
            continue
        by_quota = shares.stopped[claim.job] == "quota"
        room = shares.quotas.get(claim.owner, float("inf")) - shares.owned[claim.owner]
        others = [
            worker
            for worker, (holder, *_) in alone.items()
            if claim.fits(shares.by_name[worker].kind)
            and (holder.owner == claim.owner or (not by_quota and shares.by_name[worker].size <= room))
            and (holder.priority == claim.priority if not by_quota else holder.priority <= claim.priority)
        ]
        kept = {worker.worker for worker in shares.held[claim.job]}
        if others:
            joined = min(others, key=lambda each: (load[each], each not in kept))
            if all(holder.owner != claim.owner for holder in holders[joined]):
                shares.owned[claim.owner] += shares.by_name[joined].size
            workers[claim.job].append(joined)
            load[joined] += claim.weight
            holders[joined].append(claim)
