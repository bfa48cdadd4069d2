"""An element in one line."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.core.element import Element, opened

_LONG_TEXT = 40
_MANY_PARTS = 8


def outline(element: Element) -> str:
    """Return an element's structure with shapes and types, and the values of small leaves.

    >>> outline({"image": np.zeros((2, 3), np.uint8), "raw": b"12345", "label": 7})
    "{'image': uint8[2, 3], 'raw': bytes[5], 'label': 7}"
    """
    match element:
        case dict():
            return f"{{{_joined([f'{key!r}: {outline(value)}' for key, value in element.items()])}}}"
        case list():
            return f"[{_joined(list(map(outline, element[: _MANY_PARTS + 1])))}]"
        case tuple():
            name = type(element).__name__ if type(element) is not tuple else ""
            return f"{name}({_joined(list(map(outline, element[: _MANY_PARTS + 1])))})"
        case np.ndarray():
            return f"{element.dtype}[{', '.join(map(str, element.shape))}]"
        case bytes() | bytearray() | memoryview():
            return f"{type(element).__name__}[{len(element)}]"
        case str() if len(element) > _LONG_TEXT:
            return f"{element[:_LONG_TEXT]!r}… ({len(element)} characters)"
        case None | bool() | int() | float() | str() | np.generic():
            return repr(element)
    inside = opened(element)
    return _shortened(element) if inside is None else f"{type(element).__name__}({outline(inside[0])})"


def _joined(parts: list[str]) -> str:
    return ", ".join(parts) if len(parts) <= _MANY_PARTS else f"{', '.join(parts[:_MANY_PARTS])}, …"


def _shortened(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 2 * _LONG_TEXT else f"a {type(value).__qualname__}"
