"""Runs a case with real processes: leg after leg, every wait bounded, nothing left running."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import penstock as ps

from . import adapter
from .case import Case
from .datasets import build_for
from .happenings import Leg
from .hostile import HostileFriend
from .modes import refuses_weights
from .reader import Portion, Reader, Shared
from .samplers import Sampler, make_sampler

_names = itertools.count()


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How long things may take: `timeout_s` is what a loader is told, `case_s` the whole case's."""

    timeout_s: float = 12.0
    case_s: float = 30.0


@dataclass(slots=True)
class LegOutcome:
    """What the readers of a leg received. `errors` has an exception for each reader that ended with one."""

    leg: Leg
    readers: list[list[Portion]]
    errors: dict[int, BaseException] = field(default_factory=dict)
    waited: str = ""
    """What was waited for when the time was up; empty: nothing."""
    happened: list[str] = field(default_factory=list)
    """The events that came about: an epoch may end before the step of one."""


class Services:
    """Services that no case harms are shared by all of them; the others are made for one case."""

    def __init__(self) -> None:
        self._shared: dict[tuple[int, int], ps.LocalService] = {}
        self._hostile: list[HostileFriend] = []

    def shared(self, workers: int, inline: int) -> ps.LocalService:
        key = workers, inline
        if key not in self._shared:
            self._shared[key] = adapter.start_service(*key)
            self._hostile.append(HostileFriend(self._shared[key]))
        return self._shared[key]

    def close(self) -> None:
        for friend in self._hostile:
            friend.close()
        for service in self._shared.values():
            service.close()
        self._shared.clear()
        breaches = [breach for friend in self._hostile for breach in friend.breaches]
        assert not breaches, breaches[:5]


class Run:
    """One run of a case."""

    def __init__(
        self, case: Case, services: Services, folder: Path, limits: Limits, dataset: ps.Dataset | None = None
    ) -> None:
        """`dataset` is the first leg's, if it is made already: with its seed, where the pipeline gives none."""
        self._case, self._services, self._folder, self._dataset = case, services, folder, dataset
        self._limits = limits
        self._deadline = time.monotonic() + limits.case_s
        self._job = f"case-{case.seed}-{next(_names)}"
        self._graveyard: list[Any] = []
        self._private: list[ps.LocalService] = []
        self._service: ps.LocalService | None = None
        self._stop = threading.Event()
        self.outcomes: list[LegOutcome] = []

    def read(self) -> list[LegOutcome]:
        """Run all legs, or as many as go well."""
        states: list[Any] | None = None
        try:
            for number, leg in enumerate(self._case.legs):
                following = self._case.legs[number + 1] if number + 1 < len(self._case.legs) else None
                outcome, states = self._leg(
                    leg, states, saves_for_all=following is not None and following.load == "all"
                )
                self.outcomes.append(outcome)
                if outcome.errors or outcome.waited:
                    break
        finally:
            self._stop.set()
            self._close()
        return self.outcomes

    def _close(self) -> None:
        for loader in self._graveyard:
            with contextlib.suppress(Exception):
                loader.close()
        for service in self._private:
            service.close()

    def _service_for(self, leg: Leg) -> ps.LocalService | int:
        if self._case.modes.own_processes:
            return leg.workers
        harmed = any(each.harmed for each in self._case.legs)
        if harmed and (self._service is None or leg.new_service):
            self._service = adapter.start_service(leg.workers, leg.inline)
            self._private.append(self._service)
        elif not harmed and (self._service is None or leg.new_service):
            self._service = self._services.shared(leg.workers, leg.inline)
        assert self._service is not None
        return self._service

    def _leg(self, leg: Leg, states: list[Any] | None, *, saves_for_all: bool) -> tuple[LegOutcome, list[Any]]:
        case = self._case
        service = self._service_for(leg)
        # A later leg is of other processes: each builds its dataset itself, and knows of the first one by states alone.
        given, self._dataset = self._dataset, None
        first = build_for(case, self._folder) if given is None else given
        seed_of(first)  # drawn before there are threads
        if leg.new_service:
            self._job += "-moved"
        modes = case.modes
        count = modes.trainers * modes.ranks if modes.sharing else leg.ranks * modes.replicas

        def make(reader: int) -> Any:
            shares = modes.sharing is not None
            dataset = first if given is not None or not reader else build_for(case, self._folder)
            if modes.evaluation:
                return adapter.open_evaluation(
                    dataset, service, case.pipeline.steps[-1], job=self._job_of(leg), ranks=leg.ranks, rank=reader
                )
            return adapter.open_loader(
                dataset,
                service,
                modes,
                job=self._job_of(leg),
                ranks=leg.ranks if not shares else modes.ranks,
                rank=reader % (modes.ranks if shares else leg.ranks),
                replica=0 if shares else reader // leg.ranks,
                trainer=reader // modes.ranks,
                sampler=sampler_of(case, reader % leg.ranks) if modes.feed else None,
                timeout_s=self._limits.timeout_s,
            )

        def strike(what: str) -> None:
            assert isinstance(service, ps.LocalService)
            if what == "kill_both":
                adapter.kill_runner(service)
                adapter.kill_dispatcher(service)
            else:
                getattr(adapter, what)(service)

        shared = Shared(
            leg=leg,
            limit=case.limit,
            make=make,
            strike=strike,
            graveyard=self._graveyard,
            begins=None if states is None else self._beginnings(leg, states, count),
            refuses_weights=refuses_weights(case.pipeline, modes),
            saves_for_all=saves_for_all,
            holds=bool(modes.after) or modes.evaluation,
            moves_on=case.modes.sharing is not None,
            together=threading.Barrier(count) if modes.replicas > 1 else None,
            stop=self._stop,
        )
        readers = [Reader(shared, number, first=number == 0) for number in range(count)]
        for reader in readers:
            reader.thread.start()
        for reader in readers:
            reader.thread.join(max(0.0, self._deadline - time.monotonic()))
        stuck = [reader for reader in readers if reader.thread.is_alive()]
        outcome = LegOutcome(
            leg,
            [reader.portions for reader in readers],
            {reader.number: reader.error for reader in readers if reader.error is not None},
            "; ".join(f"reader {reader.number} {reader.where}\n{reader.stack()}" for reader in stuck),
            [event for reader in readers for event in reader.happened],
        )
        return outcome, [reader.checkpoint for reader in readers]

    def _job_of(self, leg: Leg) -> str:
        return self._job if leg.ranks == self._case.modes.ranks else f"{self._job}-{leg.ranks}"

    def _beginnings(self, leg: Leg, states: list[Any], count: int) -> list[Any]:
        first_of_each = states[: len(states) // self._case.modes.replicas]
        match leg.load:
            case "own":
                return states
            case "list":
                return [first_of_each] * count
            case _:
                return [states[0]] * count


def seed_of(dataset: ps.Dataset) -> int:
    with dataset.iterator(epoch=0) as iterator:
        return int(iterator.state_dict()["seed"])


def sampler_of(case: Case, rank: int) -> Sampler:
    batch = case.pipeline.find("batch", "padded_batch", "ragged_batch")
    size = None if batch is None else int(batch.arguments["size"])
    return make_sampler(str(case.modes.feed), case.seed, rank, case.pipeline.rows, size)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for a case's files. Warnings of changed widths are expected there."""
    with tempfile.TemporaryDirectory(prefix="crossbar-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Path(folder)
