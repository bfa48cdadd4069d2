"""What to say of an element that cannot leave the process: which leaf it is, of which type, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.core.errors import CodecError
from penstock.core.leaves import UnsendableError, leaf_type


def refusal(value: Any, path: str, error: UnsendableError, send: Callable[[Any], object]) -> CodecError:
    """Return the error for the innermost value that cannot be sent."""
    content, kind = value, type(value)
    entry = leaf_type(kind)
    if entry.flatten is not None:
        try:
            content = entry.flatten(value)
        except UnsendableError:
            pass  # its own refusal
    if isinstance(content, np.ndarray) and content.dtype == object:
        content = content.ravel().tolist()
    parts = list(content.items()) if isinstance(content, dict) else []
    if isinstance(content, (list, tuple)):
        parts = list(enumerate(content))
    for key, part in parts:
        try:
            send(part)
        except UnsendableError as inner:
            return refusal(part, f"{path}[{key!r}]", inner, send)
    return CodecError(f"leaf {path or 'of the element'} is a {kind.__qualname__}, which cannot be encoded: {error}")
