"""How long and how much: what a loader may wait for and hold, and how long its job is kept."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.checks import check_positive, check_whole
from penstock.runtime.budget import check_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times and sizes that a loader keeps to.

    >>> Limits(timeout_s=60).collect_after_s
    600.0
    """

    timeout_s: float | None = None
    """Waiting longer than this for a batch is an error; None: it waits."""
    memory_bytes: int | None = None
    """What may be received ahead; None: a tenth of the memory this process may use."""
    collect_after_s: float = 600.0
    """A job that no process has held for so long is forgotten."""

    def __post_init__(self) -> None:
        if self.timeout_s is not None:
            check_positive("timeout_s", self.timeout_s)
        if self.memory_bytes is not None:
            check_whole("memory_bytes", self.memory_bytes, 1)
            check_memory(self.memory_bytes)
        check_positive("collect_after_s", self.collect_after_s)
