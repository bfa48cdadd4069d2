"""What a job keeps: judged by what its runners measured, and journaled before any of them is told.

The dispatcher opens neither an entry nor a data file, and knows no pipeline: points are numbers, and what it holds of
them are figures. Runners ask now and then, hand in what they found out, and rewrite their own plans. They fetch entries
from each other, and are told by the dispatcher whom they may ask.
"""

from __future__ import annotations

import msgspec

from penstock.control import events as e
from penstock.control.draft import Draft
from penstock.control.fitting import asked_of, runners_of
from penstock.control.measuring import serving
from penstock.control.records import Job, Runner
from penstock.control.state import ClusterState
from penstock.core.conversion import Conversion
from penstock.core.errors import InvalidArgumentError
from penstock.core.ids import RunnerId
from penstock.policies.cache_judging import CacheEvidence, CacheVerdict, check_evidence, judge
from penstock.policies.caching import CacheDemand
from penstock.wire.addresses import RunnerAddress
from penstock.wire.caching import CachingJudged, CachingLine, JudgeCaching
from penstock.wire.fetching import FellowPlace, FellowsFound, FindFellows
from penstock.wire.messages import Answer, NotKnown, Refused

_evidence = Conversion(CacheEvidence)

MOST_SOURCES = 1024  # of one job: a runner's word alone makes the state no larger
MOST_WORKERS = 256  # that a mode is judged for
MOST_FELLOWS = 64  # that a runner is told of: it asks each of them for what its host does not have


def judge_caching(draft: Draft, request: JudgeCaching) -> Answer:
    job = draft.state.jobs.get(request.job)
    if job is None:
        return NotKnown(what=f"job {request.job!r}")
    verdict = job.caching.verdicts.get(request.source, CacheVerdict())
    if request.evidence is not None:
        try:
            evidence = check_evidence(_evidence(request.evidence))
        except (msgspec.ValidationError, ValueError) as error:
            return Refused(reason=f"no evidence about caching: {error}", kind="invalid_argument")
        if not 0 <= request.source < MOST_SOURCES:
            return Refused(reason=f"a job has no source {request.source}", kind="invalid_argument")
        judged = judge(verdict, evidence, _demand(draft, job, request))
        if judged.number != verdict.number:
            draft.emit(e.CachingDecided(request.job, draft.now, request.source, judged))
            verdict = judged
    return CachingJudged(verdict=msgspec.to_builtins(verdict, str_keys=False))


def _demand(draft: Draft, job: Job, request: JudgeCaching) -> CacheDemand:
    workers = max(1, len(serving(draft.state, job.name)))
    asked = asked_of(job)
    most = (
        asked[1] if isinstance(asked, tuple) else max(workers, len(draft.state.workers)) if asked == "auto" else workers
    )
    return CacheDemand(
        epochs_left=max(1, request.epochs_left),
        workers=workers,
        max_workers=min(max(workers, most), MOST_WORKERS),
        cores=max(1, request.cores),
    )


def caching_lines(job: Job, now: float) -> tuple[CachingLine, ...]:
    return tuple(
        CachingLine(
            ago_s=now - each.at_s if now >= each.at_s else -1.0,
            source=each.source,
            step=each.step,
            point=each.point,
            reason=each.reason,
            seconds_by_mode=each.seconds_by_mode,
        )
        for each in job.caching.decisions
    )


def find_fellows(state: ClusterState, request: FindFellows, asker: str) -> Answer:
    """Return a process of each other host that runs the job: those of one host find the same entries."""
    if request.job not in state.jobs:
        return NotKnown(what=f"job {request.job!r}")
    runners = runners_of(state, request.job)
    own = runners.get(RunnerId(asker))
    hosts = {"", "" if own is None else _host_of(own)}
    found: list[FellowPlace] = []
    for runner in runners.ready():
        host = _host_of(runner)
        if host not in hosts:
            hosts.add(host)
            found.append(FellowPlace(runner.runner, runner.address))
            if len(found) == MOST_FELLOWS:
                break
    return FellowsFound(fellows=tuple(found))


def _host_of(runner: Runner) -> str:
    try:
        return RunnerAddress.parse(runner.address).host
    except InvalidArgumentError:
        return ""
