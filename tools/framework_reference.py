"""The part of docs/reference.md about packages for frameworks: read from sources, since frameworks may be missing."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "src"
PACKAGES = ("torch", "jax", "keras", "tensorflow", "lightning", "accelerate", "huggingface")
WIDTH = 100
Definition = ast.ClassDef | ast.FunctionDef


def render_frameworks(missing: list[str], examples: Callable[[str], str]) -> Iterator[str]:
    """Yield a section for each package; what has no docstring is added to `missing`. `examples` puts code in fences."""
    for package in PACKAGES:
        yield f"## `penstock.{package}`\n"
        yield f"[Its page]({package}.md) says how it is used.\n"
        for name, definition in _shown(package):
            yield f"### `penstock.{package}.{name}`\n"
            yield from _described(definition, name, f"{package}.{name}", missing, examples)


def _shown(package: str) -> Iterator[tuple[str, Definition]]:
    """Yield what a package shows, each with its definition, in whichever module of the package it is."""
    folder = SOURCES / "penstock" / package
    defined = {
        node.name: node
        for path in sorted(folder.glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, Definition)
    }
    for name in _all(ast.parse((folder / "__init__.py").read_text())):
        yield name, defined[name]


def _all(module: ast.Module) -> list[str]:
    for statement in module.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(statement.value)
            return names
    return []


def _described(
    definition: Definition, title: str, path: str, missing: list[str], examples: Callable[[str], str]
) -> Iterator[str]:
    if isinstance(definition, ast.FunctionDef):
        yield _signature(title, definition)
    else:
        made = [each for each in _functions(definition) if each.name == "__init__"]
        yield from (_signature(title, each) for each in made)
    doc = ast.get_docstring(definition)
    if doc is None:
        missing.append(path)
    yield examples(inspect.cleandoc(doc or "")) + "\n"
    if isinstance(definition, ast.ClassDef):
        for method in _functions(definition):
            if not method.name.startswith("_") and ast.get_docstring(method):
                yield f"#### `{title}.{method.name}`\n"
                if not method.decorator_list:
                    yield _signature(method.name, method)
                yield examples(inspect.cleandoc(ast.get_docstring(method) or "")) + "\n"


def _functions(definition: ast.ClassDef) -> list[ast.FunctionDef]:
    return [each for each in definition.body if isinstance(each, ast.FunctionDef)]


def _signature(name: str, function: ast.FunctionDef) -> str:
    given = function.args
    first = [each.arg for each in (*given.posonlyargs, *given.args)][:1]
    shown = ast.unparse(given)
    if first in (["self"], ["cls"]):
        shown = shown.partition(", ")[2]
    returned = "" if function.name == "__init__" or function.returns is None else f" -> {ast.unparse(function.returns)}"
    text = f"{name}({shown}){returned}"
    if len(text) > WIDTH:
        parts = _parts(shown)
        text = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returned}"
    return f"```text\n{text}\n```\n"


def _parts(arguments: str) -> list[str]:
    """Cut a list of arguments at its commas, but not at those inside brackets."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]
