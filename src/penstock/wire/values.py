"""Plain values as msgpack, those included that it has no room for: long integers, and text that is not Unicode."""

from __future__ import annotations

from typing import Any

import msgspec

_LONG_INT, _SURROGATES = 1, 2


def escaped(values: Any) -> Any:
    """Return values with bytes of our own for what msgpack has no room for.

    >>> decode_values(encode_values(escaped([1 << 80, "a\\ud800", None])))
    [1208925819614629174706176, 'a\\ud800', None]
    """
    match values:
        case list() | tuple():
            return [escaped(value) for value in values]
        case str():
            return msgspec.msgpack.Ext(_SURROGATES, values.encode("utf-8", "surrogatepass"))
        case int() if not isinstance(values, bool):
            return msgspec.msgpack.Ext(_LONG_INT, str(values).encode())
    return values


def _unescaped(code: int, content: memoryview) -> Any:
    if code == _SURROGATES:
        return str(content, "utf-8", "surrogatepass")
    if code == _LONG_INT:
        return int(bytes(content))
    raise ValueError(f"an extension {code} that is not known here")


encode_values = msgspec.msgpack.Encoder().encode
decode_values = msgspec.msgpack.Decoder(ext_hook=_unescaped).decode
