"""Where a `DataLoader` stands, as it is saved: how many batches were received, and how the sampler's order came about.

Most samplers have no state of their own. What they give follows from the generators they draw from, as these stood when
the epoch began. So those are saved, the sampler is asked again, and what had been received is passed over; a checksum
finds a sampler that does not give the same again.
"""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from penstock.core.errors import StateMismatchError

STATE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPlace:
    """Where a loader stands in an epoch; `tasks` is 0 where it has not begun."""

    epoch: int = 0
    tasks: int = 0
    """How many orders were answered."""
    yielded: int = 0
    """How many batches were handed out; of an iterable dataset that is less, because ends are answers too."""
    ended: tuple[int, ...] = ()
    """Streams of an iterable dataset that are through."""
    checksum: int = 0
    base_seed: int | None = None
    seed: int | None = None
    """What samples are seeded with in all epochs; None: it was not drawn yet."""
    generators: tuple[str, ...] = ()
    """Of the generators that samplers draw from: how they stood when the epoch began."""
    states: dict[str, Any] = field(default_factory=dict)
    """By stream: the own state of an iterable dataset that has one."""
    streams: int = 0

    def plain(self) -> dict[str, Any]:
        fields = asdict(self)
        return {"version": STATE_VERSION, **fields, "ended": list(self.ended), "generators": list(self.generators)}

    @staticmethod
    def read(state: Mapping[str, Any]) -> LoaderPlace:
        known = {field.name for field in dataclasses.fields(LoaderPlace)}
        if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION or set(state) != {"version", *known}:
            raise StateMismatchError(
                "this is not a state of penstock.torch.DataLoader: load what its state_dict() returned"
            )
        fields = {name: state[name] for name in state if name != "version"}
        return LoaderPlace(**{**fields, "ended": tuple(fields["ended"]), "generators": tuple(fields["generators"])})


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader's samplers draw from; the global one, where they were given none."""
    found: list[torch.Generator] = []
    sampler = loader._index_sampler
    given = [loader.generator]
    while sampler is not None:
        given.append(getattr(sampler, "generator", None))
        sampler = getattr(sampler, "sampler", None)
    for generator in given:
        chosen = torch.default_generator if generator is None else generator
        if isinstance(chosen, torch.Generator) and all(chosen is not other for other in found):
            found.append(chosen)
    return found


def written(generators: list[torch.Generator]) -> tuple[str, ...]:
    return tuple(base64.b85encode(zlib.compress(g.get_state().numpy().tobytes())).decode() for g in generators)


def put_back(generators: list[torch.Generator], states: tuple[str, ...]) -> None:
    if len(generators) != len(states):
        raise StateMismatchError(
            f"the state was saved with {len(states)} generators, and this loader's samplers draw from "
            f"{len(generators)}; make the loader as it was made then"
        )
    for generator, state in zip(generators, states):
        content = bytearray(zlib.decompress(base64.b85decode(state)))
        generator.set_state(torch.frombuffer(content, dtype=torch.uint8))
