"""Samplers for `feed=`: each rank and each epoch has an order of its own, which follows from the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


class Sampler:
    """Gives indices, or lists of one to four of them."""

    def __init__(self, seed: int, rank: int, rows: int, kind: str, size: int | None) -> None:
        self._seed, self._rank, self._rows, self._kind = seed, rank, rows, kind
        self._longest = 4 if size is None else size
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def units(self, epoch: int) -> list[Any]:
        rng = random.Random(f"{self._seed} {self._rank} {epoch}")
        order = [rng.randrange(self._rows) for _ in range(self._rows + self._rank)] if self._rows else []
        if self._kind != "lists":
            return order
        units = []
        while order:
            size = rng.randint(1, self._longest)
            units.append(order[:size])
            order = order[size:]
        return units

    def __iter__(self) -> Iterator[Any]:
        return iter(self.units(self._epoch))


class StatefulSampler(Sampler):
    """Has a state of its own, as samplers of other packages have."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._given = 0
        self._resumed = False

    def __iter__(self) -> Iterator[Any]:
        if not self._resumed:
            self._given = 0
        self._resumed = False
        units = self.units(self._epoch)
        while self._given < len(units):
            self._given += 1
            yield units[self._given - 1]

    def state_dict(self) -> dict[str, int]:
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._given, self._resumed = state["given"], True


def make_sampler(kind: str, seed: int, rank: int, rows: int, size: int | None) -> Sampler:
    return (StatefulSampler if kind == "stateful" else Sampler)(seed, rank, rows, kind, size)
