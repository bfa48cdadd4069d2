"""`Dataset.save`: a job whose outputs are the records of files that workers wrote.

The user's pipeline, then groups of its elements, then a map that writes a group and returns the file's record. Records
are delivered exactly once, whatever dies; so every element is in exactly one file that counts. A file whose record was
never delivered is listed nowhere, and removed at the end. Where the pipeline ends in batches, each is a file: grouped
again, their rests could not be joined at the end of all streams, and every stream would leave a short batch.

The caller keeps records and the loader's state together in `_progress.json`: killed, it goes on from there. At the end
a worker publishes the manifest.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any

import msgspec

from penstock.api.dataset import Dataset
from penstock.api.loader import Destination
from penstock.api.readers import from_items
from penstock.api.services import LocalService
from penstock.core.checks import check_whole
from penstock.core.element import Element
from penstock.core.errors import DataError, InvalidArgumentError, InvalidPipelineError, SaveMismatchError
from penstock.graph.length import endless_operator
from penstock.graph.parameters import short_label
from penstock.graph.regrouping import last_regrouping
from penstock.passes import canonicalize
from penstock.sources.saved_files import (
    FAILURE,
    MANIFEST,
    PROGRESS,
    Manifest,
    SavedPart,
    encode_manifest,
    forget_failure,
    load_manifest,
    note_failure,
    part_of,
    publish_manifest,
    remove_leftovers,
    sync_folder,
    write_atomically,
    write_part,
)
from penstock.sources.storage import is_remote, normal_path
from penstock.submission.options import Limits
from penstock.wire.neighbours import process_name

PROGRESS_EVERY_S = 0.2
PROGRESS_SHARE = 20  # writing it, which takes longer the more files there are, takes at most 1/20 of the time


class SavedDataset(msgspec.Struct, frozen=True, kw_only=True):
    """What `Dataset.save` wrote."""

    path: str
    elements: int
    files: int
    bytes: int


def save_dataset(
    dataset: Dataset,
    to: Destination,
    path: str,
    *,
    rows_per_file: int,
    job: str | None,
    timeout_s: float | None,
    progress: bool,
) -> SavedDataset:
    """See `Dataset.save`."""
    check_whole("rows_per_file", rows_per_file, 1)
    if is_remote(path):
        raise InvalidArgumentError(
            f"path={path!r}: save writes to a folder that the workers and this process share; copy it from there"
        )
    endless = endless_operator(dataset.node)
    if endless is not None:
        raise InvalidPipelineError(
            f"{short_label(endless)} makes a dataset that never ends, so that saving it would not either; save it "
            "without, and repeat or mix what read_saved() gives"
        )
    folder = normal_path(path)
    writing = _writing(dataset, folder, rows_per_file)
    # Of the whole pipeline: other files of the same elements are another dataset to whoever goes on.
    fingerprint = writing.fingerprint()
    begun = _begun(folder, fingerprint)
    if begun is not None and begun.complete:
        remove_leftovers(folder, begun)
        return _summary(folder, begun)
    name = job or f"save-{fingerprint[:8]}-{hashlib.blake2b(folder.encode(), digest_size=4).hexdigest()}"
    forget_failure(folder)
    try:
        with _service(to) as service:
            saved = _write(writing, service, folder, fingerprint, begun, name, timeout_s, progress)
            _publish(service, folder, saved, name, timeout_s)
    except BaseException as error:
        _tell_readers(folder, error)
        raise
    remove_leftovers(folder, saved)
    return _summary(folder, saved)


def _tell_readers(folder: str, error: BaseException) -> None:
    try:
        note_failure(folder, f"{type(error).__name__}: {error}")
    except DataError:
        pass  # the folder itself may be what fails: readers find out by waiting


def _writing(dataset: Dataset, folder: str, rows_per_file: int) -> Dataset:
    """Return the pipeline of records."""
    if last_regrouping(canonicalize(dataset.node)) is not None:
        return dataset.map(partial(_write_one, folder))
    most = max(rows_per_file, 65_536)
    groups = dataset.group_by_window(_same, size=rows_per_file, max_pending=most)
    return groups.map(partial(write_part, folder))


def _same(element: Element) -> int:
    return 0


def _write_one(folder: str, element: Element) -> dict[str, Any]:
    return write_part(folder, [element])


def _begun(folder: str, fingerprint: str) -> Manifest | None:
    """Return how far an earlier call came with the same pipeline; refuse a folder with anything else."""
    os.makedirs(folder, exist_ok=True)
    begun = load_manifest(folder)
    if begun is None:
        foreign = sorted(name for name in os.listdir(folder) if not name.startswith(".") and name != FAILURE)
        if foreign:
            raise SaveMismatchError(folder, f"it holds {foreign[0]!r} and no saved dataset")
        return None
    if begun.fingerprint != fingerprint:
        raise SaveMismatchError(
            folder, f"another pipeline was saved there (fingerprint {begun.fingerprint}, this one has {fingerprint})"
        )
    return begun


@contextmanager
def _service(to: Destination) -> Iterator[Destination]:
    """Two jobs run one after the other: processes of our own are started once."""
    if isinstance(to, int) and not isinstance(to, bool) and to > 0:
        with LocalService(to) as own:
            yield own
    else:
        yield to


def _write(
    writing: Dataset,
    service: Destination,
    folder: str,
    fingerprint: str,
    begun: Manifest | None,
    job: str,
    timeout_s: float | None,
    shown: bool,
) -> Manifest:
    """Read records until there are no more, and return the manifest that is left to publish."""
    with writing.distribute(service, job=job, limits=Limits(timeout_s=timeout_s)) as loader:
        book = _Book(folder, fingerprint, begun.parts if begun is not None else [], _ProgressLine(folder, shown))
        if begun is not None:
            if begun.state is None:
                return Manifest(fingerprint=fingerprint, parts=begun.parts, complete=True)  # all but published
            loader.load_state_dict(begun.state)
        book.keep(loader.state_dict())
        for record in loader:
            book.add(part_of(record))
            if book.is_due:
                book.keep(loader.state_dict())
    book.keep(None)
    book.line.end()
    return Manifest(fingerprint=fingerprint, parts=book.parts, complete=True)


class _Book:
    """The records so far, and when they were last written down."""

    def __init__(self, folder: str, fingerprint: str, parts: list[SavedPart], line: _ProgressLine) -> None:
        self._folder, self._fingerprint = folder, fingerprint
        self.parts = list(parts)
        self.line = line
        self._due_at = 0.0

    def add(self, part: SavedPart) -> None:
        self.parts.append(part)

    @property
    def is_due(self) -> bool:
        return monotonic() >= self._due_at

    def keep(self, state: dict[str, Any] | None) -> None:
        """Write down the records together with the state that follows them; None: there are no more."""
        began = monotonic()
        manifest = Manifest(fingerprint=self._fingerprint, parts=self.parts, state=state, writer=process_name())
        sync_folder(self._folder)
        write_atomically(os.path.join(self._folder, PROGRESS), encode_manifest(manifest))
        self.line.show(manifest)
        now = monotonic()
        self._due_at = now + max(PROGRESS_EVERY_S, PROGRESS_SHARE * (now - began))


class _ProgressLine:
    """One line on a terminal, written over; nothing where nobody looks."""

    def __init__(self, folder: str, wanted: bool) -> None:
        self._folder = folder
        self._shown = wanted and sys.stderr is not None and sys.stderr.isatty()

    def show(self, manifest: Manifest) -> None:
        if self._shown:
            text = f"{manifest.elements:,} elements in {len(manifest.parts):,} files saved to {self._folder}"
            print(f"\r{text}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._shown:
            print(file=sys.stderr)


def _publish(service: Destination, folder: str, manifest: Manifest, job: str, timeout_s: float | None) -> None:
    content = encode_manifest(manifest)
    name = f"{job}-publish-{hashlib.blake2b(content, digest_size=4).hexdigest()}"
    publishing = from_items([content]).map(partial(publish_manifest, folder))
    with publishing.distribute(service, job=name, limits=Limits(timeout_s=timeout_s)) as loader:
        for _ in loader:
            pass
    if not os.path.exists(os.path.join(folder, MANIFEST)):
        raise SaveMismatchError(folder, "a worker has published it where this process does not see it")


def _summary(folder: str, manifest: Manifest) -> SavedDataset:
    sizes = manifest.sizes
    return SavedDataset(path=folder, elements=manifest.elements, files=len(sizes), bytes=sum(sizes.values()))
