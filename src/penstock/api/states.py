"""Saved states: one shape, wherever the work runs, and whether one belongs to a pipeline.

A state says where sources, shuffles and counters stood. It is refused when an operator that decides which elements
come, or in which order, is not the one it was saved with; a changed map or batch only changes what is made of them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.core.conversion import Conversion
from penstock.core.errors import StateMismatchError
from penstock.graph.fingerprint import SourceDigest, summary
from penstock.graph.node import Node

STATE_VERSION = 3
Phase: TypeAlias = Literal["start", "reading", "ended"]
"""start: nothing was read of the epoch. ended: the loop has ended, and the next epoch is due."""
SERVICE = "attempt"
"""The key by which a part of a place is known to say what a service had delivered."""


class SavedState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one process stood in its reading. `plain` makes it JSON-able, `read` checks what comes back."""

    version: int
    pipeline: list[str]
    """The operators' signatures, as `PipelineSignature.entries` has them."""
    epoch: int
    seed: int
    phase: Phase
    consumers: int = 1
    consumer: int | None = 0
    """The consumer that saved it; None: it is the same for every consumer."""
    weights: tuple[float, ...] | None = None
    """What a mix goes by, where that was changed."""
    skipped: int = 0
    attempts: list[tuple[int, str] | None] | None = None
    """By service that feeds a pipeline here: the pass that was opened last, and its attempt. None: there is none."""
    cut: str = ""
    """Where `offload` had cut the pipeline when it was saved; it may be loaded under any other. Empty: it had not."""
    place: Any = None
    """The operators' own states, nested as they are. What a service delivers stands in it as a
    `stream.checkpoint.ConsumerState`."""

    def plain(self) -> dict[str, Any]:
        # A place is plain already, and may hold a sampler's state, which is what its sampler makes it.
        made: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(self, place=None)))
        return {**made, "place": copy.deepcopy(self.place)}

    @staticmethod
    def read(state: Mapping[str, Any]) -> SavedState:
        try:
            return _saved(state)
        except msgspec.ValidationError as error:
            raise StateMismatchError(f"the state is damaged, or was not made by state_dict(): {error}") from None


def parts_in(place: Any) -> list[dict[str, Any]]:
    """Return the parts of a place that say what a service had delivered."""
    if isinstance(place, dict):
        return [place] if SERVICE in place else []
    return [found for part in place for found in parts_in(part)] if isinstance(place, list) else []


def with_parts(place: Any, change: Mapping[str, Any]) -> Any:
    """Return the place with those parts changed."""
    if isinstance(place, dict) and SERVICE in place:
        return {**place, **change}
    return [with_parts(part, change) for part in place] if isinstance(place, list) else place


def merged(places: Sequence[Any]) -> Any:
    """Return one place of which each service part is the list of all ranks' parts; the rest must be equal."""
    if all(isinstance(place, dict) and SERVICE in place for place in places):
        return list(places)
    if all(isinstance(place, list) for place in places) and len({len(place) for place in places}) == 1:
        return [merged(parts) for parts in zip(*places)]
    if all(place == places[0] for place in places):
        return places[0]
    raise StateMismatchError(
        "the ranks' operators after distribute() stand at different places, so their states cannot be merged; "
        "load them with the number of consumers they were saved with"
    )


def with_all_parts(own: Any, places: Sequence[Any]) -> Any:
    """Return one rank's own place, of which each service part is the list of all ranks' parts.

    >>> with_all_parts([3, {SERVICE: "a", "consumer": 1}], [[2, {SERVICE: "a"}], [3, {SERVICE: "a", "consumer": 1}]])
    [3, [{'attempt': 'a'}, {'attempt': 'a', 'consumer': 1}]]
    """
    parts = [parts_in(place) for place in places]
    if len({len(found) for found in parts}) > 1:
        raise StateMismatchError(
            "a rank had received nothing of the epoch when its state was saved, and operators after distribute() held "
            "elements on another; load states that were saved a little later"
        )
    together = iter([list(each) for each in zip(*parts)])

    def replaced(place: Any) -> Any:
        if isinstance(place, dict) and SERVICE in place:
            return next(together)
        return [replaced(part) for part in place] if isinstance(place, list) else place

    return replaced(own)


def places_of(saved: Sequence[SavedState]) -> list[Any]:
    """Return the place of each rank; one that had received nothing stands where the service began.

    (As far as operators after `distribute` hold nothing: else what they begin with is not known.)
    """
    places = [with_parts(one.place, {"consumer": one.consumer}) for one in saved]
    part = next((place for place in places if isinstance(place, dict) and SERVICE in place), None)
    if part is None:
        return places
    fixed = {name: value for name, value in part.items() if name not in ("progress", "sampler")}
    return [
        place
        if place is not None or one.phase != "reading"
        else {**fixed, "consumer": one.consumer, **_attempt_of(one)}
        for one, place in zip(saved, places)
    ]


def _attempt_of(saved: SavedState) -> dict[str, str]:
    opened = saved.attempts[0] if saved.attempts else None
    return {} if opened is None else {SERVICE: opened[1]}


HARMLESS = frozenset(
    {"Autocache", "Map", "Batch", "PaddedBatch", "RaggedBatch", "Select", "Drop", "Rename", "Prefetch", "WithLength"}
)
"""Operators whose change makes other batches of the same elements: a warning, not a refusal."""


class PipelineSignature(msgspec.Struct, frozen=True):
    """One entry per operator, sources first: its digest, kind and label, as `"8ca18132 Shuffle shuffle"`."""

    entries: list[str]

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of another pipeline, naming the difference; warn of one that does not matter."""
        if not isinstance(state, Mapping) or "version" not in state or "pipeline" not in state:
            raise StateMismatchError("this is not a state: it was not made by state_dict()")
        if state["version"] != STATE_VERSION:
            raise StateMismatchError(
                f"the state has version {state['version']}; this release reads version {STATE_VERSION}"
            )
        saved, own = _deciding(state["pipeline"]), _deciding(self.entries)
        if saved != own:
            raise StateMismatchError(
                f"the state was saved by another pipeline: {_first_difference(saved, own)}. "
                "Load it into the pipeline it was saved with, or start the epoch anew"
            )
        if state["pipeline"] != self.entries:
            changed = [_label_of(entry) for entry in self.entries if entry not in state["pipeline"]]
            what = f"{', '.join(changed)} changed" if changed else "operators were removed"
            warnings.warn(
                f"since the state was saved, {what}; the same elements follow, made differently",
                stacklevel=3,
            )


def signature_of(node: Node, source_digest: SourceDigest) -> PipelineSignature:
    operators = summary(node, source_digest=source_digest)
    return PipelineSignature([f"{each.digest.hex()[:8]} {each.kind} {each.label}" for each in operators])


def kind_of(entry: str) -> str:
    return entry.split(" ", 2)[1]


def _label_of(entry: str) -> str:
    return entry.split(" ", 2)[2]


def _deciding(entries: list[str]) -> list[str]:
    return [entry for entry in entries if kind_of(entry) not in HARMLESS]


def _first_difference(saved: list[str], own: list[str]) -> str:
    for old, new in zip(saved, own):
        if old != new:
            if kind_of(old) != kind_of(new):
                return f"where {_label_of(old)} was there is {_label_of(new)}"
            other = "files" if kind_of(new).startswith("Read") else "parameters or code"
            return f"{_label_of(new)} has other {other}"
    longer, verb = (saved, "is gone") if len(saved) > len(own) else (own, "is new")
    return f"{_label_of(longer[min(len(saved), len(own))])} {verb}"


_saved = Conversion(SavedState)
