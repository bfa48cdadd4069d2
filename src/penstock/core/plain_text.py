"""Text from elsewhere, as it may be shown on a terminal: without what would move its cursor or change its state."""

from __future__ import annotations

import re

_SEQUENCE = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"  # a control sequence: colours, cursor, screen
    "|(?:\x1b[P\\]X^_]|[\x90\x9d\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c|$)"  # a string: title, clipboard
    "|\x1b[ -/]*[0-~]?"  # any other escape
)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def plain_text(text: str) -> str:
    """Return text without escape sequences and control characters; of a line drawn again and again, the last.

    >>> plain_text("\\x1b[31mred\\x1b[0m and \\x1b]0;a title\\x07plain\\x08")
    'red and plain'
    >>> plain_text("10%\\r20%\\nnext")
    '20%\\nnext'
    """
    if text.isascii() and text.isprintable():
        return text
    lines = _SEQUENCE.sub("", text).split("\n")
    return "\n".join(_CONTROL.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in lines)
