"""Predicates on columns that a source can evaluate itself."""

from __future__ import annotations

from typing import Any


class Expression:
    """Built from `col("name")` with comparisons and `& | ~`."""

    def columns(self) -> frozenset[str]:
        raise TypeError

    def evaluate(self, row: dict[str, Any]) -> bool:
        raise TypeError
