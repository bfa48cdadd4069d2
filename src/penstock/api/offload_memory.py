"""What was measured of a pipeline and a model, kept by the service: the next run of the same measures nothing.

Records, from the general to the particular: G by model; L by pipeline and model, on as many processors; and what each
cut gave, and what link and disks gave where they were full, by these and by the workers that the service has.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from penstock.client.backend import ServiceBackend
from penstock.core.conversion import Conversion
from penstock.core.errors import PenstockError
from penstock.graph.cutting import READ_HERE
from penstock.policies.offloading import CutPace, OffloadProfile
from penstock.runtime.budget import available_cores
from penstock.wire.messages import Answer, ListWorkers, Request, Workers
from penstock.wire.modes import guest_of
from penstock.wire.scaling import LearnMetric, RecalledMetric, RecallMetric

ANSWER_S = 5.0


_Record = TypeVar("_Record")


class _StepRecord(msgspec.Struct, frozen=True):
    step_per_s: float
    step_cpu_s: float


class _HereRecord(msgspec.Struct, frozen=True):
    here_per_s: float
    cores: float


class _CutRecord(msgspec.Struct, frozen=True):
    per_s: float
    output_bytes: float
    here_cpu_s: float
    workers: int


class _BoundRecord(msgspec.Struct, frozen=True):
    """What was seen to be full; 0: nothing was."""

    link_bytes_per_s: float = 0.0
    read_bytes: float = 0.0
    disk_here_bytes_per_s: float = 0.0
    disk_there_bytes_per_s: float = 0.0


class ServiceMemory:
    """A service that cannot be asked remembers nothing: then all is measured."""

    def __init__(self, backend: ServiceBackend, fingerprint: Callable[[], str], *, model: str) -> None:
        self._backend, self._fingerprint, self._model = backend, fingerprint, model

    def recall(self) -> OffloadProfile | None:
        """Return what is known; None: G or L is not. Cuts that are not in it are still to be tried."""
        step, here = self._get(self._step_key(), _StepRecord), self._get(self._here_key(), _HereRecord)
        if step is None or here is None:
            return None
        profile = OffloadProfile(
            step_per_s=step.step_per_s, step_cpu_s=step.step_cpu_s, here_per_s=here.here_per_s, cores=here.cores
        )
        there = self._there_key()
        bounds = self._get(f"{there}/full", _BoundRecord) or _BoundRecord()
        known = {name: value or None for name, value in msgspec.structs.asdict(bounds).items()}
        return replace(profile, cuts=cuts_in(self._values(there) or {}), **known)

    def learn(self, profile: OffloadProfile) -> None:
        """Keep a profile; of a cut that could not be read, nothing: another time it may be."""
        step = _StepRecord(profile.step_per_s, profile.step_cpu_s)
        self._put(self._step_key(), msgspec.structs.asdict(step))
        self._put(self._here_key(), msgspec.structs.asdict(_HereRecord(profile.here_per_s, profile.cores)))
        values, there = numbers_of_cuts(profile.cuts), self._there_key()
        if values:
            self._put(there, values)
        bounds = {name: float(getattr(profile, name) or 0.0) for name in _BoundRecord.__struct_fields__}
        if any(bounds.values()):
            self._put(f"{there}/full", bounds)

    # Keys

    def _step_key(self) -> str:
        return f"offload/{_short(self._model, self._fingerprint() if not self._model else '')}"

    def _here_key(self) -> str:
        return f"{self._step_key()}/{_short(self._fingerprint(), str(available_cores()))}"

    def _there_key(self) -> str:
        kinds: Counter[tuple[str, ...]] = Counter()
        answer = self._ask(ListWorkers(), "the list of workers")
        if isinstance(answer, Workers):
            kinds.update((line.host, *line.tags) for line in answer.workers if not guest_of(line.tags))
        return f"{self._here_key()}/{_short(repr(sorted(kinds.items())))}"

    # The service

    def _get(self, key: str, kind: type[_Record]) -> _Record | None:
        try:
            return msgspec.convert(self._values(key), kind)
        except msgspec.ValidationError:
            return None

    def _values(self, key: str) -> dict[str, float] | None:
        answer = self._ask(RecallMetric(key=key), "what was learned of this pipeline")
        return answer.values if isinstance(answer, RecalledMetric) else None

    def _put(self, key: str, values: Mapping[str, float]) -> None:
        self._ask(LearnMetric(key=key, values=dict(values)), "keeping what was learned of this pipeline")

    def _ask(self, request: Request, what: str) -> Answer | None:
        with contextlib.suppress(PenstockError):
            return self._backend.ask(request, timeout_s=ANSWER_S, what=what)
        return None


def numbers_of_cuts(cuts: tuple[CutPace, ...]) -> dict[str, float]:
    """
    >>> numbers_of_cuts((CutPace(cut="all there", per_s=9.0), CutPace(cut="before batch", per_s=0.0, failure="gone")))
    {'all there|per_s': 9.0, 'all there|output_bytes': 0.0, 'all there|here_cpu_s': 0.0, 'all there|workers': 1.0}
    """
    return {
        f"{pace.cut}|{name}": float(getattr(pace, name))
        for pace in cuts
        if not pace.failure
        for name in _CutRecord.__struct_fields__
    }


def cuts_in(values: Mapping[str, float]) -> tuple[CutPace, ...]:
    """
    >>> cuts_in(numbers_of_cuts((CutPace(cut="all there", per_s=9.0, workers=2),)))[0].workers
    2
    """
    found: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        cut, _, field = name.rpartition("|")
        found.setdefault(cut, {})[field] = value
    made = []
    for cut, fields in found.items():
        try:
            record = _cut_record(fields)
        except msgspec.ValidationError:
            continue
        made.append(CutPace(cut=cut, reads_here=cut == READ_HERE, **msgspec.structs.asdict(record)))
    return tuple(made)


def _short(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


_cut_record = Conversion(_CutRecord, strict=False)
