"""How a saved dataset lies in a folder: parts, and a manifest that says which of them count.

A part is an Arrow IPC file: each record batch is a run of elements (`wire.runs`), its layout and its buffers. A part is
named by a hash of its bytes, written under another name, synced and renamed; so writing it twice is writing it once,
and a part is whole or not there. Only the manifest says what belongs to the dataset: while it is being written that is
`_progress.json`, to which parts are only ever added, and in the end `_manifest.json`. Where saving has failed, and has
not been begun again, `_failure.txt` says why.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.core.element import Element, element_bytes
from penstock.core.errors import CorruptRecordError, DataError
from penstock.sources.storage import Options, is_remote, open_file, storage_for
from penstock.wire.runs import decode_run, encode_run

MANIFEST, PROGRESS, FAILURE = "_manifest.json", "_progress.json", "_failure.txt"
PART_PREFIX, PART_SUFFIX = "part-", ".arrow"
TEMPORARY_PREFIX = ".writing-"
VERSION = 1
RUN_BYTES = 1 << 20  # what is decoded at a time
RUN_ELEMENTS = 1024
FORMAT = {b"penstock": b"elements 1"}
SCHEMA = pa.schema(
    [("elements", pa.int64()), ("layout", pa.binary()), ("buffers", pa.list_(pa.large_binary()))], metadata=FORMAT
)


class SavedPart(msgspec.Struct, frozen=True, array_like=True):
    """A file of a saved dataset."""

    file: str
    elements: int
    nbytes: int
    checksum: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What belongs to a saved dataset, in the order in which it is read."""

    version: int = VERSION
    fingerprint: str = ""
    """The fingerprint of the pipeline that is saved: another one does not go on where this stopped."""
    parts: list[SavedPart] = []
    complete: bool = False
    state: dict[str, Any] | None = None
    """The state of the loader that reads what is saved, while it is being written."""
    writer: str = ""
    """The process that writes it (see `wire.neighbours`), while it is being written."""

    @property
    def elements(self) -> int:
        return sum(part.elements for part in self.parts)

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each file; equal parts are one file."""
        return {part.file: part.nbytes for part in self.parts}


def write_part(folder: str, elements: Sequence[Element]) -> dict[str, Any]:
    """Write elements to a file of their own and return its record."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA) as writer:
        for run in _runs(elements):
            layout, buffers = encode_run(run)
            columns = [[len(run)], [layout], [[bytes(buffer) for buffer in buffers]]]
            arrays = [pa.array(column, kind) for column, kind in zip(columns, SCHEMA.types)]
            writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))
    content = sink.getvalue()
    checksum = _checksum(content)
    name = f"{PART_PREFIX}{checksum}{PART_SUFFIX}"
    write_atomically(os.path.join(folder, name), content)
    return {"file": name, "elements": len(elements), "bytes": content.size, "checksum": checksum}


def part_of(record: dict[str, Any]) -> SavedPart:
    return SavedPart(str(record["file"]), int(record["elements"]), int(record["bytes"]), str(record["checksum"]))


def publish_manifest(folder: str, content: bytes) -> int:
    """Make the dataset complete, at once for all readers, and for good: after all of its files."""
    sync_folder(folder)
    write_atomically(os.path.join(folder, MANIFEST), content)
    sync_folder(folder)
    return len(content)


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest)


def load_manifest(folder: str, options: Options = ()) -> Manifest | None:
    """Return what is in the folder so far; None: nothing was saved there."""
    for name in (MANIFEST, PROGRESS, MANIFEST):  # the third: it was published, and the progress removed, meanwhile
        path = f"{folder.rstrip('/')}/{name}"
        content = _content(path, options)
        if content is not None:
            return _parsed(path, content)
    return None


def note_failure(folder: str, reason: str) -> None:
    """Tell readers that wait for more that none will come."""
    write_atomically(os.path.join(folder, FAILURE), reason.encode("utf-8", "backslashreplace"))


def forget_failure(folder: str) -> None:
    Path(folder, FAILURE).unlink(missing_ok=True)


def load_failure(folder: str, options: Options = ()) -> str | None:
    """Return why saving has failed; None: nobody says that it has."""
    content = _content(f"{folder.rstrip('/')}/{FAILURE}", options)
    return None if content is None else content.decode("utf-8", "replace")


def read_part(path: str, size: int, checksum: str, options: Options = ()) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield each run's number of elements and its record batch; `decode` makes the elements."""
    with open_file(path, size, options) as file:
        content = file.read(size + 1)
    if len(content) != size or _checksum(content) != checksum:
        raise CorruptRecordError(
            path, f"{len(content)} bytes that are not those that were saved", offset=0, remedy="save the dataset anew"
        )
    reader = pa.ipc.open_file(pa.py_buffer(content))
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number)
        yield batch.column(0)[0].as_py(), batch


def decode(batch: pa.RecordBatch) -> Sequence[Element]:
    """Return a run's elements, in memory of their own; what is of a class not known here can be passed on."""
    buffers = [np.frombuffer(value.as_buffer(), np.uint8).copy() for value in batch.column(2)[0].values]
    return decode_run(batch.column(1)[0].as_py(), buffers, stand_ins=True)


def write_atomically(path: str, content: Any) -> None:
    """Write a file under another name, have it on disk, then give it its name."""
    folder, _ = os.path.split(path)
    temporary = os.path.join(folder, f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise DataError(
            path, f"cannot be written: {error.strerror or error}", remedy="give a folder that all workers can write to"
        ) from error


def sync_folder(folder: str) -> None:
    """Have on disk which files there are."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: str, manifest: Manifest) -> int:
    """Remove files that nobody was told of: their writers died, or their records were made a second time."""
    listed = manifest.sizes
    removed = 0
    for name in os.listdir(folder):
        is_part = name.startswith(PART_PREFIX) and name.endswith(PART_SUFFIX)
        if name.startswith(TEMPORARY_PREFIX) or name in (PROGRESS, FAILURE) or (is_part and name not in listed):
            Path(folder, name).unlink(missing_ok=True)
            removed += 1
    return removed


def _runs(elements: Sequence[Element]) -> Iterator[Sequence[Element]]:
    start = run_bytes = 0
    for index, element in enumerate(elements):
        size = element_bytes(element)
        if index > start and (run_bytes + size > RUN_BYTES or index - start == RUN_ELEMENTS):
            yield elements[start:index]
            start, run_bytes = index, 0
        run_bytes += size
    if start < len(elements):
        yield elements[start:]


def _checksum(content: Any) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _content(path: str, options: Options) -> bytes | None:
    if not is_remote(path):
        try:
            return Path(path).read_bytes()  # whole: one that is being written is renamed over, by a longer one
        except (FileNotFoundError, NotADirectoryError):
            return None
    found = storage_for(path, options).stat([path])[0]
    if found is None:
        return None
    with open_file(path, found.size, options) as file:
        return file.read(found.size)


def _parsed(path: str, content: bytes) -> Manifest:
    try:
        manifest = _manifests.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptRecordError(path, f"not a manifest: {error}", remedy="save the dataset anew") from error
    if manifest.version != VERSION:
        raise DataError(path, f"a manifest of version {manifest.version}; this release reads version {VERSION}")
    return manifest


_manifests = msgspec.json.Decoder(Manifest)
