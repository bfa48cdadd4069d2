"""The next epoch, opened while this one ends: its streams are at work when the trainer comes to it.

- Who has read an epoch to its end and reads the one after it is taken to go on: from the second epoch on.
- It is opened when the first stream of this epoch has ended. Nothing is left to be granted then, and the worker that
  had it would be idle.
- A thread asks the dispatcher, which may say "not yet". All else happens in the trainer's thread, inside `next()`.
- It is read if just that epoch is asked for next. Where another one is, or none for a while after this one's end, it is
  closed, and the dispatcher forgets that it was opened: nothing of it was given to anybody.
"""

from __future__ import annotations

import threading
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING
from weakref import ReferenceType

from msgspec.structs import replace

from penstock.client.link import Patience
from penstock.client.reader import EpochReader
from penstock.client.session import Beginning, EpochSession
from penstock.core.errors import PenstockError, WaitTimeoutError

if TYPE_CHECKING:
    from penstock.client.backend import ServiceBackend

CLOSE_S = 1.0  # that an opening under way is waited for
LINGER_S = 3.0  # as long as the dispatcher keeps processes of a job that nobody reads
LOOK_S = 0.5
TRIAL_S = 1.0  # of asking for it: then it is seen whether it is still wanted


class NextEpoch:
    """What one loader has of the epoch after the one it reads. See the module."""

    def __init__(self, maker: ReferenceType[ServiceBackend]) -> None:
        """`maker` opens epochs and is not held: a loader that nobody has any more ends, and this with it."""
        self._maker = maker
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        """Over who may close what was opened: the trainer's thread, or the one that finds that it is not wanted."""
        self._finished: int | None = None
        """The epoch that was read to its end last."""
        self._wanted: tuple[Beginning, int | None] | None = None
        """Where the next one begins, and by which number its identities go; None: nobody is taken to go on."""
        self._opening: threading.Event | None = None
        """Set when what is being opened, or was, is not wanted here any more; None: nothing is."""
        self._session: EpochSession | None = None
        self._reader: EpochReader | None = None
        self._idle_since: float | None = None

    # The trainer's thread

    def begun(self, beginning: Beginning, identities: int | None) -> None:
        """An epoch is read from here on."""
        following = replace(beginning, epoch=beginning.epoch + 1, checkpoint=None, rejoin=None, ahead=True)
        goes_on = self._finished is not None and self._finished == beginning.epoch - 1
        self._wanted = (replace(following, may_rejoin=True), identities) if goes_on else None
        self._idle_since = None

    def prepare(self, now: float) -> None:
        """This epoch is about to end: open the next one, or go on with it."""
        if self._opening is None and self._wanted is not None:
            self._opening = threading.Event()
            task = partial(self._open, *self._wanted, self._opening)
            self._thread = threading.Thread(target=task, name="penstock-ahead", daemon=True)
            self._thread.start()
        with self._lock:
            session, self._session = self._session, None
            maker = self._maker()
            if session is not None and maker is not None:
                self._reader = maker.reader_of(session)
            if self._reader is None or self._reader.get_ready(now):
                return
        self.drop()

    def finished(self, epoch: int) -> None:
        """This epoch was read to its end."""
        self._finished, self._idle_since = epoch, monotonic()

    def take(self, beginning: Beginning, identities: int | None) -> EpochReader | None:
        """Return the reader of an epoch that is asked for; None: it is to be opened."""
        wanted, ahead = self._wanted, replace(beginning, ahead=True)
        reader: EpochReader | None = None
        with self._lock:
            fits = wanted == (ahead, identities) and self._opening is not None
            if fits and self._opening is not None and self._reader is not None and self._reader.get_ready(monotonic()):
                self._opening.set()
                reader, self._reader, self._opening = self._reader, None, None
        if reader is None:
            self.drop()
        return reader

    def drop(self) -> None:
        """It is not wanted, whatever was opened."""
        with self._lock:
            self._wanted = None
            if self._opening is not None:
                self._opening.set()
            self._opening = None
            session, self._session = self._session, None
            reader, self._reader = self._reader, None
        if session is not None:
            session.close(finished=False)
        if reader is not None:
            reader.close()

    def close(self) -> None:
        """Drop it; what is being opened is closed again, while the dispatcher can still be told."""
        self.drop()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    # A thread of its own

    def _open(self, beginning: Beginning, identities: int | None, over: threading.Event) -> None:
        while not over.is_set():
            maker = self._maker()
            if maker is None:
                return
            try:
                patience = Patience(TRIAL_S, f"epoch {beginning.epoch}, ahead")
                session = maker.open_session(beginning, identities, patience=patience)
            except WaitTimeoutError:
                continue
            except PenstockError:
                return  # whoever asks for that epoch will be told
            finally:
                del maker
            with self._lock:
                late = over.is_set()
                self._session = self._session if late else session
            if late:
                session.close(finished=False)
            self._watch(over)

    def _watch(self, over: threading.Event) -> None:
        """Drop it when nobody has come for a while, or nobody can come any more."""
        while not over.wait(LOOK_S):
            idle_since = self._idle_since
            if self._maker() is None or (idle_since is not None and monotonic() - idle_since > LINGER_S):
                self.drop()
