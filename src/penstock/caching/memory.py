"""Memory for what is read: pieces that are used again as soon as no array stands on them any more.

Fresh memory is given by the system page by page, each filled with zeros first, which takes as long as reading into it.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np

from penstock.caching.entries import Bytes

PIECE_BYTES = 1 << 20  # as much as is read of an entry in one go
LEAST_BYTES = PIECE_BYTES // 4  # less is not worth a piece
SPARE_PIECES = 8

_spare: deque[Bytes] = deque(maxlen=SPARE_PIECES)  # no lock: a piece comes back wherever its last array goes


def memory_for(nbytes: int) -> Bytes:
    """Return memory with something in it.

    >>> first = memory_for(PIECE_BYTES)
    >>> row, place = first[5000:6000], first.ctypes.data
    >>> del first
    >>> memory_for(PIECE_BYTES).ctypes.data == place  # the row still stands on it
    False
    """
    if not LEAST_BYTES <= nbytes <= PIECE_BYTES:
        return np.empty(nbytes, np.uint8)
    try:
        piece = _spare.pop()
    except IndexError:
        piece = np.empty(PIECE_BYTES, np.uint8)
    # Over a memoryview: an array of it is what all arrays below it keep alive.
    lent: Bytes = np.frombuffer(piece.data, np.uint8, nbytes)
    weakref.finalize(lent, _spare.append, piece).atexit = False
    return lent
