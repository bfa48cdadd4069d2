"""One reader of a leg: a rank, a replica or a trainer, with a loader and a thread of its own."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.core.errors import InvalidArgumentError, PenstockError, SupersededError

from . import adapter
from .happenings import ON_ALL, ON_READER, ON_SERVICE, Event, Leg
from .outputs import Output, output_of


@dataclass(slots=True)
class Portion:
    """What a reader received in one iteration of a leg, as far as its trainer keeps it."""

    epoch: int
    outputs: list[Output] = field(default_factory=list)
    ended: bool = False
    """The iteration came to its end: the epoch did, as far as this reader is concerned."""
    states: list[Any] = field(default_factory=list)
    """Before each output, and after the last."""


@dataclass(slots=True, kw_only=True)
class Shared:
    """What the readers of a leg have in common."""

    leg: Leg
    limit: int | None
    make: Callable[[int], Any]
    """A loader for the n-th reader."""
    strike: Callable[[str], None]
    """Let something happen to the service."""
    graveyard: list[Any]
    """Loaders whose trainer was killed: closed when the case is over."""
    begins: Any
    """The state each reader loads first, by reader; None: it begins anew."""
    refuses_weights: bool = False
    """The pipeline's operators hold elements of the old weights."""
    saves_for_all: bool = False
    """The checkpoint is to stand for all ranks."""
    holds: bool = False
    """Operators after `distribute` hold what they were given: an older reader may give all of that."""
    moves_on: bool = False
    """Trainers share the job: who comes back after the others' epoch is over joins the present one."""
    together: threading.Barrier | None = None
    """Replicas take their steps together: none is through with an epoch that another has not opened. How many there
    are the service is not told: it keeps an epoch for ranks, and not for replicas that are yet to come."""
    stop: threading.Event = field(default_factory=threading.Event)
    """The case is over: an endless wait of a test must not outlive it."""


MOST_AFTER, MOST_HELD, PAUSE_S = 8, 40, 0.1
FEW = 4
"""What an older reader holds already it may give; but after so many, one at a time, it has heard of the newer one."""


class Superseding(AssertionError):
    """An older reader of a slot was not refused."""


class Misused(AssertionError):
    """Something that cannot be meant was not refused with a sentence."""


class Reader:
    """Reads a leg on its own thread, and keeps what came."""

    def __init__(self, shared: Shared, number: int, *, first: bool) -> None:
        self._shared, self.number, self._first = shared, number, first
        self.portions: list[Portion] = []
        self.checkpoint: Any = None
        self.error: BaseException | None = None
        self.where = "begins"
        self.happened: list[str] = []
        self._loader: Any = None
        self._needs_states = (
            any(event.what in ON_READER and event.reader == number for event in shared.leg.events)
            or shared.leg.stop is not None
        )
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"reader {number}")

    def stack(self) -> str:
        """Return where the thread is, for a reader that does not come back."""
        import sys

        frame = sys._current_frames().get(self.thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-4:])

    # On the thread

    def _run(self) -> None:
        try:
            self._read()
        except BaseException as error:
            self.error = error
            if self._shared.together is not None:
                self._shared.together.abort()  # the others go on without it
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._loader is None:
            return
        if self._shared.leg.dropped:
            self._shared.graveyard.append(self._loader)
        else:
            self.where = "closes its loader"
            try:
                self._loader.close()
            except BaseException as error:
                self.error = self.error or error

    def _open(self, state: Any = None) -> None:
        self.where = "opens a loader"
        self._loader = self._shared.make(self.number)
        if state is not None:
            self.where = "loads a state"
            self._loader.load_state_dict(json.loads(json.dumps(state)))

    def _read(self) -> None:
        leg = self._shared.leg
        self._open(None if self._shared.begins is None else self._shared.begins[self.number])
        for number in range(leg.iterations):
            self._iterate(number, None)
        if leg.stop is not None:
            self._iterate(leg.iterations, leg.stop)
            portion = self.portions[-1]
            kept = min(leg.stop, len(portion.outputs))
            if not leg.reads_on:
                self.checkpoint = self._state() if not self._shared.saves_for_all else self._state(for_all=True)
            else:
                self.checkpoint = portion.states[kept]
                portion.ended = False  # the state was taken before the end was seen
            del portion.outputs[kept:]
        else:
            self.checkpoint = self._state(for_all=self._shared.saves_for_all)

    def _state(self, *, for_all: bool = False) -> Any:
        self.where = "saves a state"
        return json.loads(json.dumps(adapter.state_of(self._loader, for_all=for_all)))

    def _iterate(self, iteration: int, stop: int | None) -> None:
        leg, shared = self._shared.leg, self._shared
        self.where = "opens an epoch"
        elements: Iterator[Any] = iter(self._loader)
        portion = Portion(epoch=adapter.epoch_of(self._loader))
        self.portions.append(portion)
        self._meet()
        due = [event for event in leg.events if event.iteration == iteration and self._concerns(event)]
        while not shared.stop.is_set():
            step = len(portion.outputs)
            if self._needs_states and len(portion.states) == step:
                portion.states.append(self._state(for_all=shared.saves_for_all and leg.reads_on))
            event = next((event for event in due if event.step <= step), None)
            if event is not None:
                due.remove(event)
                self.happened.append(event.what)
                if event.what == "break":
                    return
                elements = self._happens(event, elements, portion)
                if shared.moves_on and adapter.epoch_of(self._loader) != portion.epoch:
                    portion = Portion(epoch=adapter.epoch_of(self._loader))
                    self.portions.append(portion)
                continue
            if step == shared.limit or (step == stop and not leg.reads_on):
                return
            self.where = f"waits for output {step} of epoch {portion.epoch}"
            try:
                element = next(elements)
            except StopIteration:
                portion.ended = True
                return
            portion.outputs.append(output_of(element))
            del element

    def _meet(self) -> None:
        if self._shared.together is not None:
            self.where = "waits for the other replicas to open the epoch"
            with contextlib.suppress(threading.BrokenBarrierError):
                self._shared.together.wait()

    def _concerns(self, event: Event) -> bool:
        if event.what in ON_SERVICE:
            return self._first
        return event.what in ON_ALL or event.reader == self.number

    def _happens(self, event: Event, elements: Iterator[Any], portion: Portion) -> Iterator[Any]:
        """Let an event happen; return what to read on from."""
        self.where = f"lets happen: {event}"
        match event.what:
            case "weights":
                self._set_weights(list(event.weights))
                return elements
            case "rejoin" | "reload":
                kept = max(0, len(portion.outputs) - event.back)
                state = portion.states[kept]
                del portion.outputs[kept:], portion.states[kept + 1 :]
                if event.what == "reload":
                    self._loader.load_state_dict(state)
                else:
                    self._shared.graveyard.append(self._loader)
                    self._open(state)
                again: Iterator[Any] = iter(self._loader)
                return again
            case "second":
                return self._second(elements, portion, fresh=event.fresh)
            case "misuse":
                self._misuse(portion.states[-1])
                return elements
            case _:
                self._shared.strike(event.what)
                return elements

    def _set_weights(self, weights: list[float]) -> None:
        try:
            self._loader.set_weights(weights)
        except InvalidArgumentError:
            if not self._shared.refuses_weights:
                raise
        else:
            if self._shared.refuses_weights:
                raise Misused("set_weights() with an operator after the mix that holds elements was not refused")

    def _second(self, older: Iterator[Any], portion: Portion, *, fresh: bool) -> Iterator[Any]:
        """Open a second reader of this slot: the newest reads, the older one is refused."""
        self._shared.graveyard.append(self._loader)
        if fresh:
            portion.outputs.clear()
            del portion.states[1:]
        self._open(None if fresh else portion.states[-1])
        elements: Iterator[Any] = iter(self._loader)
        self.where = "waits for the first output of a second reader"
        try:
            first = output_of(next(elements))
        except StopIteration:
            portion.ended = True
            return iter(())
        portion.outputs.append(first)
        self.where = "waits for an older reader to be refused"
        given, holds = 0, self._shared.holds
        try:
            for _ in older:
                given += 1
                if given == (MOST_HELD if holds else MOST_AFTER):
                    break
                time.sleep(PAUSE_S)  # the word that it was superseded is on its way
        except SupersededError:
            return elements
        if given >= (MOST_HELD if holds else FEW):
            raise Superseding(f"the older reader of a slot was given {given} outputs more, and not refused")
        return elements

    def _misuse(self, state: dict[str, Any]) -> None:
        """Ask for what the pages say is refused. The loader is then read on as if nothing had been asked."""
        first, *rest = state["pipeline"]
        _, described = first.split(" ", 1)
        misuses: dict[str, Callable[[], Any]] = {
            "no state": lambda: self._loader.load_state_dict({}),
            "an empty list": lambda: self._loader.load_state_dict([]),
            "another source": lambda: self._loader.load_state_dict(
                {**state, "pipeline": [f"00000000 {described}", *rest]}
            ),
            "weights below 0": lambda: self._loader.set_weights([-1.0]),
        }
        mine = state.get("consumer", 0)
        if state.get("consumers", 1) > 1 and mine is not None:  # one for all ranks is nobody else's
            other = (mine + 1) % state["consumers"]
            misuses["another rank's state"] = lambda: self._loader.load_state_dict({**state, "consumer": other})
        for name, misuse in misuses.items():
            self.where = f"misuses its loader: {name}"
            try:
                misuse()
            except PenstockError as error:
                if len(str(error).split()) < 5:
                    raise Misused(f"{name}: {error!r} is no sentence") from error
            except Exception as error:
                raise Misused(f"{name}: {error!r} where a PenstockError was due") from error
            else:
                raise Misused(f"{name} was not refused")
