"""Elements that failed and were left out: counted against a budget, and written down so that they can be replayed.

The file is JSON lines. A `pipeline` line holds the whole graph, because what is above an operator decides too in which
order its source is read; each `skipped` line holds what happened to one element, the pass and the state just before it,
so that `runtime.replay` can run just that element again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from penstock.core.errors import (
    CannotWriteError,
    CodecError,
    ErrorBudgetExceededError,
    FunctionShippingError,
    InvalidArgumentError,
)
from penstock.core.private_files import open_private
from penstock.graph.ops import SkipErrors
from penstock.runtime.contract import Marks, Origin, State
from penstock.runtime.stats import StageMeter

DEFAULT_FILE = "penstock-quarantine.jsonl"
FRACTION_NEEDS = 100  # a fraction of fewer elements says nothing
_file_lock = threading.Lock()


class Quarantine:
    """The skipped elements of one operator in one iteration."""

    pass_ = 0
    """Which pass its stage is in; set when the stage is opened."""

    def __init__(
        self,
        policy: SkipErrors,
        operator: str,
        meter: StageMeter,
        *,
        number: int,
        epoch: int,
        seed: int,
        graph: Callable[[], bytes],
    ) -> None:
        self._policy = policy
        self._operator = operator
        self._number = number  # of this quarantine among those of the graph
        self._epoch = epoch
        self._seed = seed
        self._graph = graph
        self._graph_id: str | None = None
        self._lock = threading.Lock()
        self.path = Path(policy.quarantine or DEFAULT_FILE)
        self._meter = meter
        self._entered = 0
        self.skipped = 0  # the meter's own count is that of all operators fused into its stage

    def entered(self, count: int) -> None:
        """Count elements that a budget in fractions is a fraction of, before they are tried."""
        with self._lock:
            self._entered += count

    def admit(self, error: Exception, marks: Marks, k: int) -> Exception | None:
        """Write one failure down; the returned error says that it was one too many."""
        return self.record(error, marks.origin(k), marks.at(k))

    def record(self, error: Exception, origin: Origin | None, state: State) -> Exception | None:
        with self._lock:
            self.skipped += 1
            self._write(error, origin, state)
            return self._over_budget(error)

    def _over_budget(self, error: BaseException) -> ErrorBudgetExceededError | None:
        budget, skipped, seen = self._policy.budget, self.skipped, self._entered
        if isinstance(budget, float):
            over = seen >= FRACTION_NEEDS and skipped > budget * seen
            said = f"{skipped} of {seen} elements failed, over the budget of {budget:.3%}"
        else:
            over = skipped > budget
            said = f"{skipped} elements failed, over the budget of {budget}"
        if not over:
            return None
        exceeded = ErrorBudgetExceededError(f"{self._operator}: {said}; they are listed in {self.path}")
        exceeded.__cause__ = error
        return exceeded

    def _write(self, failure: BaseException, origin: Origin | None, state: State) -> None:
        lines: list[dict[str, Any]] = []
        if self._graph_id is None:
            lines.append(self._pipeline_line())
            self._graph_id = lines[0]["pipeline"]
        identity = repr((self._graph_id, self._number, self.pass_, state)).encode()
        lines.append(
            {
                "kind": "skipped",
                "id": hashlib.blake2b(identity, digest_size=5).hexdigest(),
                "operator": self._operator,
                "source": None if origin is None else origin.path,
                "split": None if origin is None else origin.split,
                "index": None if origin is None else origin.index,
                "offset": None if origin is None else origin.offset,
                "exception": f"{type(failure).__module__}.{type(failure).__qualname__}",
                "message": str(failure),
                "traceback": "".join(traceback.format_exception(failure)),
                "pipeline": self._graph_id,
                "number": self._number,
                "epoch": self._epoch,
                "pass": self.pass_,
                "seed": self._seed,
                "state": state,
            }
        )
        with _file_lock:
            self._meter.skipped += 1
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with open_private(self.path, "a") as file:
                    file.write("".join(json.dumps(line) + "\n" for line in lines))
            except OSError as error:
                remedy = "make room there, or give SkipErrors(quarantine=...) another path"
                raise CannotWriteError(self._operator, str(self.path), error, remedy) from error

    def _pipeline_line(self) -> dict[str, Any]:
        graph, missing = b"", ""
        try:
            graph = self._graph()
        except (FunctionShippingError, CodecError) as error:
            missing = str(error)  # what happened is written down all the same; only replaying it is not possible
        return {
            "kind": "pipeline",
            "pipeline": hashlib.blake2b(graph or missing.encode(), digest_size=6).hexdigest(),
            "graph": base64.b64encode(graph).decode(),
            "missing": missing,
            "folder": str(Path.cwd()),
        }


class Quarantined(msgspec.Struct, frozen=True, kw_only=True):
    """One skipped element, read back."""

    id: str
    operator: str
    exception: str
    message: str
    traceback: str
    graph: bytes
    missing: str
    """Why there is no graph."""
    folder: str
    """Relative paths in the graph begin here."""
    number: int
    epoch: int
    pass_: int
    seed: int
    state: State
    origin: Origin | None


def read_quarantine(path: str | Path) -> dict[str, Quarantined]:
    """Return the skipped elements by id; the same element, skipped in two runs, is one."""
    graphs: dict[str, tuple[bytes, str, str]] = {}
    found: dict[str, Quarantined] = {}
    with Path(path).open() as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
                if line["kind"] == "pipeline":
                    graphs[line["pipeline"]] = base64.b64decode(line["graph"]), line["missing"], line["folder"]
                    continue
                origin = None
                if line["split"] is not None:
                    origin = Origin(line["split"], line["index"], line["source"], line["offset"])
                graph, missing, folder = graphs[line["pipeline"]]
                found[line["id"]] = Quarantined(
                    id=line["id"],
                    operator=line["operator"],
                    exception=line["exception"],
                    message=line["message"],
                    traceback=line["traceback"],
                    graph=graph,
                    missing=missing,
                    folder=folder,
                    number=line["number"],
                    epoch=line["epoch"],
                    pass_=line["pass"],
                    seed=line["seed"],
                    state=line["state"],
                    origin=origin,
                )
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidArgumentError(
                    f"{path}, line {number}: not a quarantine file of Penstock ({error!r})"
                ) from None
    return found
