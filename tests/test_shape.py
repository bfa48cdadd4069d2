"""Who changes what: an object of the stream's protocol, and of those who carry it out, changes only itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / "src" / "penstock"


HELD = ["client", "cluster_cache", "fleet", "relays", "samplers", "stream", "submission", "testing", "worker"]


@pytest.mark.parametrize("package", HELD)
def test_an_attribute_is_changed_by_its_own_object_only(package: str) -> None:
    foreign = [
        f"{path.relative_to(PACKAGES)}:{node.lineno} {ast.unparse(node)}"
        for path in sorted((PACKAGES / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del))
        if not (isinstance(node.value, ast.Name) and node.value.id == "self")
    ]
    assert not foreign
