"""The dispatcher as the judge of what is kept: runners hand evidence in, and ask now and then what holds.

While it is away what it said last holds. Until it has answered once nothing is known, and elements are computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import TypeAlias

import msgspec

from penstock.core.conversion import Conversion
from penstock.core.ids import JobName
from penstock.policies.cache_judging import CacheEvidence, CacheVerdict
from penstock.policies.caching import CacheDemand
from penstock.wire.caching import CachingJudged, JudgeCaching
from penstock.wire.messages import Answer

_verdict = Conversion(CacheVerdict)

ASK_EVERY_S = 1.0  # others of the job may have found something out
LOST_AFTER_S = 5.0  # a question, after which it is asked again

PostQuestion: TypeAlias = Callable[[JudgeCaching, Callable[[Answer], None]], None]
"""Sends it until it is answered, and calls back from another thread."""


class DispatcherJudge:
    """One runner's. Any thread may use it."""

    def __init__(self, post: PostQuestion, job: JobName) -> None:
        self._post, self._job = post, job
        self._lock = threading.Lock()
        self._verdicts: dict[int, CacheVerdict] = {}
        self._ask_at: dict[int, float] = {}

    @property
    def job(self) -> str:
        return f"job {self._job}"

    def verdict(self, source: int) -> CacheVerdict:
        now = monotonic()
        with self._lock:
            due = now >= self._ask_at.get(source, 0.0)
            if due:
                self._ask_at[source] = now + LOST_AFTER_S
            found = self._verdicts.get(source, CacheVerdict())
        if due:
            self._ask(JudgeCaching(job=self._job, source=source))
        return found

    def tell(self, source: int, evidence: CacheEvidence, demand: CacheDemand) -> None:
        self._ask(
            JudgeCaching(
                job=self._job,
                source=source,
                evidence=msgspec.to_builtins(evidence, str_keys=False),
                cores=demand.cores,
                epochs_left=demand.epochs_left,
            )
        )

    def _ask(self, request: JudgeCaching) -> None:
        self._post(request, lambda answer: self._answered(request.source, answer))

    def _answered(self, source: int, answer: Answer) -> None:
        with self._lock:
            self._ask_at[source] = monotonic() + ASK_EVERY_S
            if isinstance(answer, CachingJudged):
                verdict = _verdict(answer.verdict)
                if verdict.number >= self._verdicts.get(source, verdict).number:
                    self._verdicts[source] = verdict
