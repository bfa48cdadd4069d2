"""Runs `ours/trainer.py` as a process that may be killed and started again, and checks what it received.

The check knows nothing of the service: it reads the file of ids the trainer wrote.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import HERE, BenchError

PYTHON = sys.executable


class Trainer:
    """A trainer's process. `prefix` goes before the command, to put it into a network namespace, say."""

    def __init__(
        self, folder: Path, arguments: dict[str, Any], prefix: Sequence[str] = (), module: str = "ours.trainer"
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        given = json.dumps(arguments | {"folder": str(folder)})
        self._command = [*prefix, PYTHON, "-m", module, given]
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        self.starts += 1
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=HERE, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def progress(self) -> int:
        """Return how many elements it has received, as of now."""
        try:
            return (self.folder / "received").stat().st_size // 8
        except FileNotFoundError:
            return 0

    def finished(self) -> bool:
        return (self.folder / "finished").exists()

    def look(self) -> None:
        """Raise if it ended by itself without having finished."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None and not self.finished():
            tail = "\n    ".join((self.folder / "log").read_text(errors="replace").splitlines()[-25:])
            raise BenchError(f"the trainer ended with {code} after {self.progress()} elements:\n    {tail}")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def received(self) -> np.ndarray[Any, Any]:
        return np.fromfile(self.folder / "received", np.int64)


def exactly_once(ids: np.ndarray[Any, Any], elements: int) -> tuple[int, int, int]:
    """Return how many of 0 .. elements - 1 came exactly once, never, and more than once. Others are an error."""
    if len(ids) and (ids.min() < 0 or ids.max() >= elements):
        raise BenchError(f"an id that was never sent: {ids.min()} or {ids.max()}")
    counts = np.bincount(ids, minlength=elements)
    return int((counts == 1).sum()), int((counts == 0).sum()), int((counts > 1).sum())
