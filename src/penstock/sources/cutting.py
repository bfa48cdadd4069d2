"""Where data is cut into splits: at steps that follow from how much there is, and from nothing else.

Several hundred splits are enough for tens of workers to end at about the same time, and few enough for a journal. So a
step is the power of two that makes 256 to 512 of them, within a least size (a split costs a message, a journal row
and an opened file) and a most size (a split is what is repeated at most when a stream moves). Data that grows a little
is cut at the same steps; when it has doubled, every other cut goes.

How long the work on a byte takes is not known here, and a few megabytes may be an hour of it. So data too small for
256 splits of the least size is cut finer, into 128 to 256: what these cost more is bounded by their number, a tenth of
a second an epoch, where with fewer the epoch's end waits for the worker that took the last.

Files that share a split are cut after a step, or, once half of it is full, before a file whose name says so: a file
that is added in the middle moves the cuts around it, and those behind stay where they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from zlib import crc32

import msgspec

WANTED_SPLITS = 512
FEWEST_SPLITS = 256  # a step of small data is the one that makes as many, or half
LEAST_BYTES = 512 << 10  # some milliseconds of parsing, beside which an opened file and a message cost little
FINEST_BYTES = 16 << 10  # of small data, to which the least size does not apply
LEAST_REMOTE_BYTES = 2 << 20  # a request of less spends more time on its way than on bytes
LEAST_COLUMNAR_BYTES = 4 << 20  # decoding columns pays for many rows; and batches that a source makes end with a split
MOST_BYTES = 64 << 20  # about a second of work
LEAST_FILES = 4
LEAST_REMOTE_FILES = 32  # as many as are asked for at once
MOST_FILES = 256


class SplitStep(msgspec.Struct, frozen=True):
    """The most that a split has of each."""

    nbytes: int
    files: int


def split_step(total_bytes: float, files: int, *, remote: bool = False, columnar: bool = False) -> SplitStep:
    """Return the step for so much data.

    >>> split_step(100e6, 1), split_step(101e6, 1) == split_step(100e6, 1)
    (SplitStep(nbytes=524288, files=4), True)
    >>> split_step(6e6, 40)
    SplitStep(nbytes=32768, files=4)
    >>> split_step(3_000 * 100e3, 3_000).files, split_step(1e12, 10_000).nbytes >> 20
    (8, 64)
    """
    fine = max(FINEST_BYTES, _power_of_two(total_bytes / FEWEST_SPLITS))
    least = LEAST_REMOTE_BYTES if remote else min(LEAST_BYTES, fine)
    if columnar:
        least = max(least, LEAST_COLUMNAR_BYTES)
    least_files = LEAST_REMOTE_FILES if remote else LEAST_FILES
    return SplitStep(
        min(max(_power_of_two(total_bytes / WANTED_SPLITS), least), MOST_BYTES),
        min(max(_power_of_two(files / WANTED_SPLITS), least_files), MOST_FILES),
    )


def cut_neighbours(sizes: Sequence[float], names: Sequence[str], step: SplitStep) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of neighbours that share a split; what is larger than a step has one for itself.

    >>> list(cut_neighbours([3, 3, 3, 9, 1], ["a", "b", "c", "d", "e"], SplitStep(nbytes=6, files=256)))
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    usual = min(step.files, _power_of_two(step.nbytes * len(sizes) / max(1.0, float(sum(sizes)))))
    mask = usual // 4 - 1  # so that past the half a cut comes a quarter of a step later, on average
    half_files, half_bytes = step.files // 2, step.nbytes / 2
    start, held = 0, 0.0
    for index, size in enumerate(sizes):
        if index > start and (
            index - start == step.files
            or held + size > step.nbytes
            or (
                mask > 0
                and (index - start >= half_files or held >= half_bytes)
                and not crc32(names[index].rpartition("/")[2].encode("utf-8", "surrogateescape")) & mask
            )
        ):
            yield start, index
            start, held = index, 0.0
        held += size
    if len(sizes):
        yield start, len(sizes)


def _power_of_two(value: float) -> int:
    """Return the least power of two that is not below."""
    return 1 << max(0, (int(-(-value // 1)) - 1).bit_length())
