"""Reading a job together with other trainers: how a trainer fares."""

from __future__ import annotations

import logging

USUAL_WINDOW_BYTES = 256 << 20  # taken for it where nobody says: what a worker gives it is not known here
SKIPPED_SHARE = 0.01
FEW_ELEMENTS = 1_000  # before so many, a share says little

_log = logging.getLogger("penstock")


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
            "moved on. A larger window_bytes= skips less, and ps.Share('wait') nothing",
            self._trainer,
            skipped,
            seen,
            self._job,
            100 * skipped / seen,
        )
