"""Positions of a journal that only its service can have said.

A peer that has seen a higher position than the dispatcher's proves that the journal lost its end. So that nobody else
can claim that, each position leaves with a proof, and comes back with it. What has none is as if nothing was seen.
"""

from __future__ import annotations

import hashlib
import hmac

PROOF_BYTES = 16


class PositionSigner:
    """Signs with a key that follows from the service's secret: one that lost its journal can still tell.

    >>> signer = PositionSigner("a secret")
    >>> signer.verifies(7, signer.proof(7)), signer.verifies(8, signer.proof(7)), signer.verifies(7, b"")
    (True, False, False)
    """

    def __init__(self, secret: str) -> None:
        self._key = hashlib.blake2b(secret.encode(), person=b"penstock journal").digest()
        self._last = (-1, b"")

    def proof(self, position: int) -> bytes:
        """Return what proves a position; one that is asked for again is not signed again."""
        if self._last[0] != position:
            self._last = (position, self._sign(position))
        return self._last[1]

    def verifies(self, position: int, proof: bytes) -> bool:
        return hmac.compare_digest(self._sign(position), proof)

    def _sign(self, position: int) -> bytes:
        signed = hashlib.blake2b(position.to_bytes(8, "big", signed=True), key=self._key, digest_size=PROOF_BYTES)
        return signed.digest()
