"""A session that is being read: it holds its version of the table, and goes on with what is committed after it.

A session that follows is a sequence of *parts*: all rows of its first version, then the rows of each commit that
brings some, one commit a part. Which parts there are depends on the log alone, so that ranks and resumed readers agree
on them, and each is an epoch of its own, exactly once as any epoch. A state is the part's version and the loader's own
state in it. Commits that only write rows again (reorder, compaction, filling in, reaping) bring none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from penstock.api.loader import Loader
from penstock.api.services import LocalService, OwnedService
from penstock.core.element import Element
from penstock.core.errors import InvalidArgumentError, SnapshotGoneError, StateMismatchError
from penstock.sources.delta_log import LoggedFile, appended_files, has_commit, newest_version
from penstock.warehouse.leases import SnapshotLease
from penstock.warehouse.read_log import ReadLog

if TYPE_CHECKING:
    from penstock.warehouse.session import Session, SessionPlan

POLL_S = 1.0
_STATE_VERSION = 1


class SessionPart(NamedTuple):
    """What is read at a time: a version of the table, all of it or only the rows that came with its commit."""

    version: int
    appended: bool


class SessionReader:
    """Yields the batches of a session, once; made by `Session.open`. A context manager.

    While it is open the table's `vacuum` spares what it has still to read. `state_dict()` says what was received, and
    a reader of the same session goes on from there after `load_state_dict()`.
    """

    def __init__(
        self,
        session: Session,
        to: Any,
        options: Mapping[str, Any],
        *,
        idle_s: float | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        self._session = session
        self._options = dict(options)
        self._idle_s, self._poll_s = idle_s, poll_s
        ranks = self._options.get("ranks")
        if session.version is None and ranks is not None and ranks.count > 1:
            raise InvalidArgumentError(
                "the ranks of a session read the same version: name it, as session.pinned() does"
            )
        self._table = session.opened_table
        self._part = SessionPart(session.pinned().version or 0, appended=False)
        self._loaded: Mapping[str, Any] | None = None
        self._loader: Loader | None = None
        self._batches: Iterator[Element] | None = None
        self._finished = False
        """Whether all of the part was received."""
        self._lease: SnapshotLease | None = None
        own = isinstance(to, int) and not isinstance(to, bool)
        self._service: OwnedService | None = LocalService(workers=to) if own else None
        self._to = self._service if own else to

    @property
    def version(self) -> int:
        """The version of the table that is read."""
        return self._part.version

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Element:
        while True:
            if self._finished and not self._next_part():
                raise StopIteration
            if self._batches is None and not self._open_part():
                self._finished = True
                continue
            assert self._batches is not None
            try:
                return next(self._batches)
            except StopIteration:
                self._close_part()
                self._finished = True

    # Parts

    def _open_part(self) -> bool:
        """Begin with the part; False: it has no rows."""
        from penstock.warehouse.session import dataset_of, plan_at

        self._hold(self._part.version)
        plan = plan_at(self._session, self._part.version)
        files = self._files(plan)
        if not files:
            return False
        self._check_files(plan, files)
        if not self._part.appended and not self._table.is_remote:
            ReadLog(self._table.own_folder).add(plan.feature_ids, self._session.partitions, session="session")
        options = dict(self._options)
        if options.get("job") is not None:
            options["job"] = f"{options['job']}-{self._part.version}"
        dataset = dataset_of(self._session, plan, appended=self._part.appended)
        self._loader = dataset.distribute(self._to, **options)
        if self._loaded is not None:
            self._loader.load_state_dict(self._loaded)
            self._loaded = None
        self._batches = iter(self._loader)
        return True

    def _files(self, plan: SessionPlan) -> list[LoggedFile]:
        if self._part.appended:
            return appended_files(self._table.url, self._part.version, self._table.storage_options)
        days = self._session.partitions
        return [file for file in plan.snapshot.files if days is None or file.partition in days]

    def _check_files(self, plan: SessionPlan, files: list[LoggedFile]) -> None:
        """Refuse to begin where files are gone: better now than in the middle."""
        if self._table.is_remote:
            return
        gone = sorted({file.partition for file in files if not Path(self._table.folder, file.path).exists()})
        if gone:
            raise SnapshotGoneError(
                self._table.url,
                f"version {self._part.version}: {plan.told} of {', '.join(gone)} were removed for good",
                remedy="read the table's newest version",
            )

    def _next_part(self) -> bool:
        """Wait for the next commit; False: the session ends here."""
        if not self._session.follow:
            return False
        number, options = self._part.version + 1, self._table.storage_options
        waited_from = time.monotonic()
        while not has_commit(self._table.url, number, options):
            if newest_version(self._table.url, options) > number:
                raise SnapshotGoneError(
                    self._table.url,
                    f"commit {number} is no longer in the log, and this session has not read its rows",
                    remedy="begin the session anew at the table's newest version",
                )
            if self._idle_s is not None and time.monotonic() - waited_from >= self._idle_s:
                return False
            time.sleep(self._poll_s)
        self._part, self._finished = SessionPart(number, appended=True), False
        return True

    def _hold(self, version: int) -> None:
        if self._table.is_remote:
            return
        if self._lease is None:
            self._lease = SnapshotLease(self._table.own_folder, version, onward=self._session.follow)
        else:
            self._lease.move(version)

    def _close_part(self) -> None:
        self._batches = None
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return what was received: small, JSON-able, self-contained."""
        data: Any = None
        if not self._finished:
            data = self._loader.state_dict() if self._loader is not None else self._loaded
        return {
            "session": _STATE_VERSION,
            "version": self._part.version,
            "appended": self._part.appended,
            "finished": self._finished,
            "data": data,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, before the first batch was."""
        if self._batches is not None or self._finished:
            raise InvalidArgumentError("a state is loaded before the first batch is read; open the session again")
        if state.get("session") != _STATE_VERSION:
            raise StateMismatchError("this is no state of a session's reader; Session.open(...).state_dict() makes one")
        if state["appended"] and not self._session.follow:
            raise StateMismatchError("the state is of a session that follows its table; open it with follow=True")
        self._part = SessionPart(int(state["version"]), bool(state["appended"]))
        self._finished, self._loaded = bool(state["finished"]), state["data"]

    # The end

    def close(self) -> None:
        """Let go of the version, and of everything else."""
        self._close_part()
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        if self._service is not None:
            self._service.close()
            self._service = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
