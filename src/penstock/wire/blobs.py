"""Blobs: graphs and split lists, named by their content and sent in pieces.

A blob's name is the hash of its bytes, so that sending it twice, or by two clients at once, is the same as once. Pieces
lie on a fixed grid: every one starts at a multiple of `PIECE_BYTES` and all but the last are that long.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

from penstock.core.errors import ProtocolError
from penstock.core.ids import BlobHash
from penstock.wire.messages import BlobPiece, GetBlob, PutBlob

PIECE_BYTES = 4 << 20
MAX_BLOB_BYTES = 4 << 30
HASH_CHARACTERS = 40


def blob_hash(data: bytes) -> BlobHash:
    """Return the name of a blob.

    >>> blob_hash(b"")
    '3345524abf6bbe1809449224b5972c41790b6cf2'
    """
    return BlobHash(hashlib.blake2b(data, digest_size=HASH_CHARACTERS // 2).hexdigest())


def put_blob_pieces(data: bytes) -> Iterator[PutBlob]:
    """Return the requests that store a blob; an empty one is one empty piece.

    >>> [(put.offset, len(put.piece)) for put in put_blob_pieces(b"abc")]
    [(0, 3)]
    """
    name = blob_hash(data)
    for offset in range(0, max(len(data), 1), PIECE_BYTES):
        yield PutBlob(hash=name, offset=offset, size=len(data), piece=data[offset : offset + PIECE_BYTES])


def fetch_blob(name: BlobHash, ask: Callable[[GetBlob], object]) -> bytes:
    """Return a blob."""
    return b"".join(piece.piece for piece in blob_pieces(name, ask))


def blob_pieces(name: BlobHash, ask: Callable[[GetBlob], object]) -> Iterator[BlobPiece]:
    """Give a blob's pieces, asked for one after the other; `ProtocolError` says that it is not all there."""
    got = 0
    while True:
        answer = ask(GetBlob(hash=name, offset=got))
        if not isinstance(answer, BlobPiece):
            raise ProtocolError(f"the dispatcher answered {type(answer).__name__} to the question for blob {name}")
        got += len(answer.piece)
        yield answer
        if got >= answer.size:
            return
        if not answer.piece:
            raise ProtocolError(f"the dispatcher has only {got} of {answer.size} bytes of blob {name}")


def expected_piece_bytes(offset: int, size: int) -> int | None:
    """Return how long the piece at `offset` of a blob of `size` must be; None: no piece starts there.

    >>> expected_piece_bytes(0, 10), expected_piece_bytes(PIECE_BYTES, 10), expected_piece_bytes(5, 10)
    (10, None, None)
    """
    if offset < 0 or size < 0 or offset % PIECE_BYTES or (offset >= size and offset > 0):
        return None
    return min(PIECE_BYTES, size - offset)
