"""When local files were written last, as this process has seen them: a file of the same size may be another one.

A listing says nothing of times: a job's is used on other hosts, where the same files have others, and a state is loaded
where files were copied. So a time counts within a process only, from when a file was listed or opened there first. Who
lists it again, as a dataset that is made anew does, takes it as it is.
"""

from __future__ import annotations

import os
import threading

MOST_FILES = 1 << 14  # a few megabytes; of more files those that were met last count


class FileTimes:
    """The times of some files. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written_ns: dict[str, int] = {}

    def listed(self, path: str, status: os.stat_result) -> None:
        """Take a file as it is."""
        with self._lock:
            self._written_ns[path] = status.st_mtime_ns
            self._forget()

    def is_same(self, path: str, status: os.stat_result) -> bool:
        """Say whether a file has the time it was seen with before; one that was not is taken as it is."""
        with self._lock:
            written_ns = self._written_ns.setdefault(path, status.st_mtime_ns)
            self._forget()
        return written_ns == status.st_mtime_ns

    def _forget(self) -> None:
        if len(self._written_ns) > MOST_FILES:
            del self._written_ns[next(iter(self._written_ns))]
