"""What a case came to."""

from __future__ import annotations

import msgspec


class Failure(Exception):
    """`kind` is a word or two by which failures are told apart; the text says what was seen."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind, self.text = kind, text
        super().__init__(f"{kind}: {text}")


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """An empty `kind` means that all was well; `refused` that the combination was to be refused, and was."""

    kind: str = ""
    text: str = ""
    refused: bool = False
    seconds: float = 0.0
    happened: tuple[str, ...] = ()
