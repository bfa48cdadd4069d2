"""Write docs/reference.md: what `import penstock` and packages for frameworks show, by signatures and docstrings.

`--check` writes nothing and fails if the page is not what would be written, or if something public says nothing.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from framework_reference import render_frameworks

import penstock as ps
from penstock.core import errors

PAGE = Path(__file__).parent.parent / "docs" / "reference.md"
WIDTH = 100

INTRODUCTION = """# Reference

Everything that `import penstock as ps` and the packages for frameworks show, from signatures and docstrings (`make
reference` writes this page).
What follows a `*` is given by name. [Operators](operators.md) and [readers](sources.md) have examples of each.
"""
MODULES = ("image", "transforms")
SECTIONS: dict[str, list[str]] = {
    "Datasets": ["Dataset", "mix", "count_classes", "col", "Column", "Expression", "SkipErrors", "register_type"],
    "Readers": [name for name in ps.__all__ if name.startswith(("range", "from_", "read_"))],
    "Reading": ["DatasetIterator", "Loader", "SavedDataset", "Ragged"],
    "Feature tables": ["Table", "Feature", "StripeSize", "TableSnapshot", "SnapshotLease", "Session", "SessionReader"],
    "Batches of features": ["KeyedDense", "KeyedRagged", "register_transform"],
    "Modes of distribute": ["Ranks", "Sharding", "Share", "Feed", "Placement", "Access", "Limits"],
    "Offloading": ["offload", "Offloading", "OffloadLoader", "Offload", "OffloadProfile"],
    "Services": ["LocalService", "RayService", "register"],
    "Figures": ["Statistics", "StageStatistics", "LoaderStatistics", "StreamStatistics"],
    "Figures of a service": ["JobFigures", "StageFigures", "WorkerFigures", "TrainerFigures"],
    "Lines of a service": ["JobLine", "TrainerLine", "WorkerLine", "DecisionLine", "CachingLine"],
    "Examples of TensorFlow": ["decode_example", "encode_example"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    missing: list[str] = []
    page = "\n".join(line.rstrip() for line in "\n".join(render(missing)).splitlines()) + "\n"
    if missing:
        print(f"no docstring: {', '.join(missing)}", file=sys.stderr)
        return 1
    if not options.check:
        PAGE.write_text(page)
    elif PAGE.read_text() != page:
        print(f"{PAGE.name} is not what the docstrings say: make reference", file=sys.stderr)
        return 1
    return 0


def render(missing: list[str]) -> Iterator[str]:
    """Yield the page; what has no docstring is added to `missing`."""
    yield INTRODUCTION
    shown = {name for names in SECTIONS.values() for name in names}
    left_out = [name for name in ps.__all__ if name not in shown and name not in MODULES and not _is_error(name)]
    assert not left_out, f"in no section: {left_out}"
    for title, names in SECTIONS.items():
        yield f"## {title}\n"
        for name in names:
            thing = getattr(ps, name)
            yield from _class(name, thing, missing) if isinstance(thing, type) else _function(name, thing, missing)
    yield "## Images\n"
    yield from _text(ps.image, "image", missing)
    for name in ps.image.__all__:
        thing = getattr(ps.image, name)
        yield from _function(f"image.{name}", thing, missing) if callable(thing) else [_constant(name, thing)]
    yield from render_frameworks(missing, _examples)
    yield "## Errors\n"
    yield "All are in `penstock.core.errors`; [when something fails](errors.md) says what to do.\n"
    for name, error in vars(errors).items():
        if isinstance(error, type) and issubclass(error, (errors.PenstockError, Warning)):
            bases = ", ".join(base.__name__ for base in error.__bases__)
            yield f"- `{name}` ({bases}): {_doc(error, name, missing).partition(chr(10) * 2)[0]}"


def _is_error(name: str) -> bool:
    thing = getattr(ps, name)
    return isinstance(thing, type) and issubclass(thing, (errors.PenstockError, Warning))


def _constant(name: str, value: Any) -> str:
    return f"### `ps.image.{name}`\n\n```text\n{value}\n```\n"


def _function(name: str, function: Any, missing: list[str]) -> Iterator[str]:
    yield f"### `ps.{name}`\n"
    yield _signature(name.rpartition(".")[2], function)
    yield from _text(function, name, missing)


def _class(name: str, cls: type, missing: list[str]) -> Iterator[str]:
    yield f"### `ps.{name}`\n"
    if dataclasses.is_dataclass(cls) or issubclass(cls, msgspec.Struct):
        yield from _text(cls, name, missing)
        yield from _fields(cls)
    else:
        if "__init__" in vars(cls) and name in CONSTRUCTED:
            yield _signature(name, cls.__init__)
        yield from _text(cls, name, missing)
        if "__init__" in vars(cls) and name in CONSTRUCTED and cls.__init__.__doc__:
            yield from _text(cls.__init__, name, missing)
    for member, value in _members(cls).items():
        if isinstance(value, classmethod):
            value = value.__func__
        if isinstance(value, property) or type(value).__name__ == "cached_property":
            yield f"#### `{name}.{member}`\n"
            yield from _text(getattr(value, "fget", None) or value.func, f"{name}.{member}", missing, cls, member)
        elif inspect.isfunction(value) or isinstance(value, staticmethod):
            yield f"#### `{name}.{member}`\n"
            yield _signature(member, getattr(cls, member))
            yield from _text(getattr(cls, member), f"{name}.{member}", missing, cls, member)


def _members(cls: type) -> dict[str, Any]:
    """Return what a class has to offer, its bases' first."""
    ours = [base for base in reversed(cls.__mro__) if base.__module__.startswith("penstock.")]
    return {name: value for base in ours for name, value in vars(base).items() if not name.startswith("_")}


CONSTRUCTED = ("LocalService",)
"""Classes that users make themselves; of the others a constructor is nobody's business."""


def _signature(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    shown = [one for one in signature.parameters.values() if one.name != "self"]
    parts: list[str] = []
    for number, one in enumerate(shown):
        before = shown[number - 1].kind if number else None
        if one.kind is one.KEYWORD_ONLY and before not in (one.KEYWORD_ONLY, one.VAR_POSITIONAL):
            parts.append("*")
        parts.append(str(one).replace("'", "") if one.default is one.empty else _with_default(one))
    returned = "" if function.__name__ == "__init__" else f" -> {signature.return_annotation}"
    text = f"{name}({', '.join(parts)}){returned}"
    if len(text) > WIDTH:
        text = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returned}"
    return f"```text\n{text}\n```\n"


def _with_default(one: inspect.Parameter) -> str:
    annotation = "" if one.annotation is one.empty else f": {one.annotation}"
    default = f"{one.default:_}" if type(one.default) is int else repr(one.default)
    return f"{one.name}{annotation} = {default}"


def _fields(cls: type) -> Iterator[str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    for statement, following in zip(body.body, [*body.body[1:], None]):
        if isinstance(statement, ast.AnnAssign) and not ast.unparse(statement.target).startswith("_"):
            said = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                said = ": " + " ".join(str(following.value.value).split())
            yield f"- `{ast.unparse(statement)}`{said}"
    yield ""


def _text(thing: Any, name: str, missing: list[str], cls: type | None = None, member: str = "") -> Iterable[str]:
    return [_examples(_doc(thing, name, missing, cls, member)), ""]


def _doc(thing: Any, name: str, missing: list[str], cls: type | None = None, member: str = "") -> str:
    found = inspect.getdoc(thing) or (inspect.getdoc(getattr(cls, member)) if cls is not None else None)
    if not found or (isinstance(thing, type) and "__doc__" not in vars(thing)):
        missing.append(name)
    return found or ""


def _examples(text: str) -> str:
    """Put examples and indented code between fences."""
    lines: list[str] = []
    fenced = False
    for line in text.splitlines():
        starts = not fenced and (line.startswith((">>> ", "    ")))
        if starts:
            lines.append("```text")
            fenced = True
        elif fenced and not line:
            lines.append("```")
            fenced = False
        lines.append(line)
    return "\n".join([*lines, "```"] if fenced else lines)


if __name__ == "__main__":
    sys.exit(main())
