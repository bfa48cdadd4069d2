"""Reading a job together with other trainers: what may be asked for, and how a trainer fares."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import cast

from penstock.core.errors import InvalidArgumentError, choice
from penstock.wire.jobs import Sharing

KINDS = ("skip", "wait")
TRAINER_TIMEOUT_S = 30.0
SMALLEST_WINDOW_BYTES = 4096
USUAL_WINDOW_BYTES = 256 << 20  # taken for it where nobody says: what a worker gives it is not known here
SKIPPED_SHARE = 0.01
FEW_ELEMENTS = 1_000  # before so many, a share says little

_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingOptions:
    """Checked arguments of `distribute` that concern sharing. `window_bytes` and `trainers` of 0: not given."""

    kind: Sharing
    trainer: str
    window_bytes: int
    trainer_timeout_s: float
    trainers: int
    writable: bool


def check_sharing(
    sharing: str | None,
    *,
    trainer: str | None,
    window_bytes: int | None,
    trainer_timeout: float | None,
    trainers: int | None,
    writable: bool,
    coordinated: bool,
    uneven: str,
    replica: int,
    order: str,
) -> SharingOptions | None:
    """Return the options, None without sharing, or raise `InvalidArgumentError` with the reason."""
    if sharing is None:
        given = {"trainer": trainer, "window_bytes": window_bytes, "trainer_timeout": trainer_timeout}
        for name, value in {**given, "trainers": trainers, "writable": writable or None}.items():
            if value is not None:
                raise InvalidArgumentError(f"{name}={value!r} is for trainers that share a job: give sharing= too")
        return None
    if sharing not in KINDS:
        raise choice("sharing", sharing, KINDS)
    if not isinstance(trainer, str) or not trainer.strip():
        raise InvalidArgumentError(
            f"sharing={sharing!r} without trainer=: the window keeps a place for each trainer, so each needs an id of "
            f"its own that it has again when it is restarted, such as trainer='lr-0.01' (given: {trainer!r})"
        )
    if replica:
        raise InvalidArgumentError(
            f"sharing={sharing!r} with replica={replica}: a trainer's place in the window is known by its trainer= id; "
            "give each replica an id of its own, and leave replica= out"
        )
    if uneven == "allow":
        raise InvalidArgumentError(
            f"sharing={sharing!r} with uneven='allow': the ranks of a trainer take equal steps, whatever it skips; use "
            "uneven='drop' or 'pad'"
        )
    if order == "deterministic" and not coordinated:
        raise InvalidArgumentError(
            f"sharing={sharing!r} with order='deterministic' (or streams=1): there streams take turns by rounds that "
            "may be gone from the window; use order='relaxed'"
        )
    if trainers is not None and sharing != "wait":
        raise InvalidArgumentError(
            f"trainers={trainers} says who is waited for, and sharing={sharing!r} waits for none"
        )
    return SharingOptions(
        kind=cast(Sharing, sharing),
        trainer=trainer,
        window_bytes=_whole("window_bytes", window_bytes, SMALLEST_WINDOW_BYTES),
        trainer_timeout_s=_positive("trainer_timeout", trainer_timeout, TRAINER_TIMEOUT_S),
        trainers=_whole("trainers", trainers, 1),
        writable=bool(writable),
    )


def trainer_number(trainer: str) -> int:
    """Return the number that stands for a trainer where slots and readers are counted.

    >>> trainer_number("t7") == trainer_number("t7") != trainer_number("t8")
    True
    """
    return int.from_bytes(hashlib.blake2b(trainer.encode(), digest_size=6).digest())


class SkipWarning:
    """Says once that a trainer skips more than a hundredth of its epoch."""

    def __init__(self, job: str, trainer: str) -> None:
        self._job, self._trainer = job, trainer
        self._said = False

    def check(self, read: int, skipped: int, *, ended: bool = False) -> None:
        seen = read + skipped
        if self._said or skipped <= SKIPPED_SHARE * (seen if ended else max(seen, FEW_ELEMENTS)):
            return
        self._said = True
        _log.warning(
            "trainer %r skipped %d of %d elements of job %r (%.1f %%): others read faster than it, and the window has "
            "moved on. A larger window_bytes= or sharing='wait' skips less",
            self._trainer,
            skipped,
            seen,
            self._job,
            100 * skipped / seen,
        )


def _whole(argument: str, value: object, least: int) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgumentError(f"{argument}={value!r} must be a whole number of at least {least}")
    return value


def _positive(argument: str, value: object, default: float) -> float:
    if value is None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise InvalidArgumentError(f"{argument}={value!r} must be a number above 0")
    return float(value)
