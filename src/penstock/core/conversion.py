"""Plain values as records: `msgspec.convert` to one type.

msgspec learns a type when it is first used, and a second thread that uses it meanwhile crashes the process. So types
are learned while modules are imported: by a conversion or a decoder that stands in the module, never by
`msgspec.convert` and `decode(..., type=)` where several threads may come.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

Record = TypeVar("Record")


class Conversion(Generic[Record]):
    """Makes records of one type; `strict=False` takes "1" for 1 too.

    >>> Conversion(tuple[int, ...])([1, 2])
    (1, 2)
    """

    def __init__(self, record: type[Record], *, strict: bool = True) -> None:
        self._record, self._strict = record, strict
        msgspec.msgpack.Decoder(record)  # learns the type, and those inside it

    def __call__(self, value: Any) -> Record:
        return msgspec.convert(value, self._record, strict=self._strict)
