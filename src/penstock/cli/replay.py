"""`penstock replay`: look at elements that were skipped, and run one of them again under a debugger."""

from __future__ import annotations

import bdb
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.cli.loading import load_object
from penstock.cli.main import UsageError
from penstock.cli.outline import outline
from penstock.graph.functions import UserFunction
from penstock.runtime.quarantine import Quarantined, read_quarantine
from penstock.runtime.replay import replay


def list_skipped(file: str) -> int:
    """Print a line for each skipped element."""
    entries = _read(file)
    if not entries:
        print(f"no element was skipped: there is none in {file}")
        return 0
    rows = [(entry.id, entry.operator, str(entry.origin or "?"), _failure(entry)) for entry in entries.values()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for *cells, failure in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths)), failure]))
    print(f"{len(entries)} skipped; run one again with: penstock replay {file} ID", file=sys.stderr)
    return 0


def run_again(file: str, id_: str, *, function: str | None, debugger: str) -> int:
    """Run one element again. 0: it does not fail any more; 1: it does."""
    entry = _chosen(_read(file), id_, file)
    replacement = None
    if function is not None:
        loaded = load_object(function)
        if not callable(loaded):
            raise UsageError(f"{function} is of type {type(loaded).__name__}, not a function")
        replacement = UserFunction.of(loaded)
    print(f"{entry.operator}, {entry.origin or 'element unknown'}, epoch {entry.epoch}", flush=True)
    print(f"failed with {_failure(entry)}", flush=True)
    if Path(entry.folder).is_dir():
        os.chdir(entry.folder)  # relative paths mean what they meant then
    replayed = replay(entry, replacement, called_with=lambda e: print(f"called with {outline(e)}", flush=True))
    if replayed.error is None:
        print(f"it does not fail any more; the result is {outline(replayed.result)}")
        return 0
    if isinstance(replayed.error, bdb.BdbQuit):
        print("the debugger was left", file=sys.stderr)
        return 1
    traceback.print_exception(replayed.error)
    _post_mortem(replayed.error, debugger)
    return 1


def _read(file: str) -> dict[str, Quarantined]:
    try:
        return read_quarantine(file)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from None


def _chosen(entries: dict[str, Quarantined], id_: str, file: str) -> Quarantined:
    matching = [entry for entry in entries.values() if entry.id.startswith(id_)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UsageError(f"{id_} is the beginning of {', '.join(entry.id for entry in matching)}: say which")
    raise UsageError(f"{file} has no element {id_}; list its {len(entries)} with: penstock replay {file}")


def _failure(entry: Quarantined) -> str:
    first_line = entry.message.partition("\n")[0]
    return f"{entry.exception.removeprefix('builtins.')}: {first_line}" if first_line else entry.exception


def _post_mortem(error: Exception, debugger: str) -> None:
    """Look at the failure in the frame where it happened."""
    if error.__traceback__ is None or debugger == "none":
        return
    if debugger == "auto" and not (sys.stdin.isatty() and sys.stdout.isatty()):
        return
    chosen = _debugger_module() if debugger == "auto" else import_module("pdb")
    if chosen is not None:
        chosen.post_mortem(error.__traceback__)


def _debugger_module() -> Any | None:
    """Return the module that `breakpoint()` would use, where it can look at failures; None where it is turned off."""
    named = os.environ.get("PYTHONBREAKPOINT", "")
    if named == "0":
        return None
    if named:
        try:
            module = import_module(named.rpartition(".")[0])
        except (ImportError, ValueError):
            print(f"PYTHONBREAKPOINT={named} cannot be imported; this is pdb", file=sys.stderr)
        else:
            if hasattr(module, "post_mortem"):
                return module
    return import_module("pdb")
