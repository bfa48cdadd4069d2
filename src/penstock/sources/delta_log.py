"""A Delta log, replayed: which files a table has at a version, without opening any of them.

The log is a folder of numbered commits (`_delta_log/00000000000000000007.json`: a line for each action) and, now and
then, a Parquet file with all that holds at one version. Rules: a snapshot depends on the log alone; a file's rows, size
and partition come from the log; what a reader would have to know to read the table right and does not (deletion
vectors, renamed columns) is refused by name.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from penstock.core.errors import CorruptRecordError, DataError, NoFilesError, SnapshotGoneError
from penstock.sources.storage import FoundFile, Options, normal_path, open_random, storage_for

LOG = "_delta_log"
PARTITION = "date"
_NAMES = re.compile(r"(\d{20})(\.json|\.checkpoint\.parquet|\.checkpoint\.(\d+)\.(\d+)\.parquet)$")
_HARMLESS_FEATURES = frozenset({"timestampNtz", "vacuumProtocolCheck", "v2Checkpoint"})
_PLAIN_READER_VERSION = 1
_CHECKPOINT_COLUMNS = ["add.path", "add.size", "add.partitionValues", "add.stats", "metaData", "protocol", "txn"]


class LoggedFile(NamedTuple):
    """A file of a table as its log has it; `path` is below the table's folder, `rows` is -1 where it is not said."""

    path: str
    size: int
    partition: str
    rows: int


class AddedFile(msgspec.Struct, rename="camel"):
    """The log's own record of a file that came."""

    path: str
    size: int
    partition_values: dict[str, str | None] = {}
    stats: str | None = None
    deletion_vector: Any = None
    data_change: bool = True
    """Whether rows came with it; False: they were in other files before."""


class RemovedFile(msgspec.Struct, rename="camel"):
    """The log's own record of a file that went."""

    path: str


class LogMetadata(msgspec.Struct, rename="camel"):
    """What the log says of the table as a whole."""

    schema_string: str
    partition_columns: list[str] = []
    configuration: dict[str, str] = {}


class LogProtocol(msgspec.Struct, rename="camel"):
    """What a reader must know."""

    min_reader_version: int = 1
    reader_features: list[str] | None = None


class LogProgress(msgspec.Struct, rename="camel"):
    """How far an application has come that appends by number."""

    app_id: str
    version: int


class LogAction(msgspec.Struct, rename="camel"):
    """One line of a commit; exactly one field is set, or none that matters here."""

    add: AddedFile | None = None
    remove: RemovedFile | None = None
    meta_data: LogMetadata | None = None
    protocol: LogProtocol | None = None
    txn: LogProgress | None = None


class _FileStats(msgspec.Struct, rename="camel"):
    num_records: int = -1


_lines = msgspec.json.Decoder(LogAction)
_stats = msgspec.json.Decoder(_FileStats)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSnapshot:
    """A table at one version."""

    url: str
    version: int
    files: tuple[LoggedFile, ...]
    """In the order of their paths, so that it depends on the data alone."""
    columns: Mapping[str, str] = field(repr=False)
    """Each column's type, as `float`, `long`, `array<long>` or `array<struct<id:long,score:float>>`."""
    configuration: Mapping[str, str] = field(repr=False)
    progress: Mapping[str, int] = field(repr=False)
    """Of each application that appends by number, how far it has come."""

    @property
    def partitions(self) -> list[str]:
        """The days that have files."""
        return sorted({file.partition for file in self.files})


def read_snapshot(url: str, version: int | None = None, options: Options = ()) -> TableSnapshot:
    """Return a table as it is at a version; None: the newest."""
    url = normal_path(url).rstrip("/")
    checkpoints, commits = _log_files(url, options)
    if not commits and not checkpoints:
        raise NoFilesError(url, f"no table is there: it has no {LOG}; ps.Table.create makes one")
    newest = max([*commits, *checkpoints])
    wanted = newest if version is None else version
    if wanted > newest or wanted < 0:
        raise DataError(url, f"the table has no version {wanted}; the newest is {newest}", remedy="name another")
    replay = _LogReplay(url)
    base = max((number for number in checkpoints if number <= wanted), default=-1)
    if base >= 0:
        for part in checkpoints[base]:
            replay.checkpoint(part, _content(part, options))
    for number in range(base + 1, wanted + 1):
        if number not in commits:
            raise SnapshotGoneError(
                url, f"version {wanted} is gone: commit {number} is no longer in the log", remedy=_NEWER
            )
        replay.commit(commits[number].path, _content(commits[number], options))
    return replay.snapshot(wanted)


_NEWER = "read a newer version"


def newest_version(url: str, options: Options = ()) -> int:
    """Return the number of the last commit; -1 where there is no table."""
    checkpoints, commits = _log_files(normal_path(url).rstrip("/"), options)
    return max([*commits, *checkpoints], default=-1)


def read_commit(url: str, version: int, options: Options = ()) -> list[LogAction]:
    """Return the actions of one commit."""
    path = commit_path(url, version)
    found = storage_for(path, options).stat([path])[0]
    if found is None:
        raise NoFilesError(path, "the commit is not there")
    return _parsed(path, _content(found, options))


def has_commit(url: str, version: int, options: Options = ()) -> bool:
    """Return whether that version is there, without looking through the log."""
    path = commit_path(url, version)
    return storage_for(path, options).stat([path])[0] is not None


def appended_files(url: str, version: int, options: Options = ()) -> list[LoggedFile]:
    """Return the files with which a commit brought new rows: none if it only wrote again what was there."""
    actions = read_commit(url, version, options)
    if any(action.remove is not None for action in actions):
        return []
    replay = _LogReplay(url)
    replay.partitioned_by = (PARTITION,)
    for action in actions:
        if action.add is not None and action.add.data_change:
            replay.add(action.add)
    return sorted(replay.files.values())


def commit_path(url: str, version: int) -> str:
    """
    >>> commit_path("/data/t", 7)
    '/data/t/_delta_log/00000000000000000007.json'
    """
    return f"{normal_path(url).rstrip('/')}/{LOG}/{version:020d}.json"


def _log_files(url: str, options: Options) -> tuple[dict[int, list[FoundFile]], dict[int, FoundFile]]:
    """Return the whole checkpoints and the commits, by version."""
    parts: dict[tuple[int, int], list[FoundFile]] = {}
    commits: dict[int, FoundFile] = {}
    _, files = storage_for(url, options).scan(f"{url}/{LOG}")
    for found in files:
        match = _NAMES.search(found.path)
        if match is None:
            continue
        version = int(match[1])
        if match[2] == ".json":
            commits[version] = found
        else:
            parts.setdefault((version, int(match[4] or 1)), []).append(found)
    return {version: sorted(files) for (version, count), files in parts.items() if len(files) == count}, commits


def _content(found: FoundFile, options: Options) -> bytes:
    with open_random(found.path, found.size, options, etag=found.etag) as file:
        return file.read()


def _parsed(path: str, content: bytes) -> list[LogAction]:
    try:
        return [_lines.decode(line) for line in content.splitlines() if line.strip()]
    except msgspec.DecodeError as error:
        raise CorruptRecordError(path, f"a line of the log cannot be read: {error}") from error


class _LogReplay:
    """What holds after the commits so far."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.files: dict[str, LoggedFile] = {}
        self.partitioned_by: Sequence[str] = ()
        self._metadata: LogMetadata | None = None
        self._progress: dict[str, int] = {}

    def commit(self, path: str, content: bytes) -> None:
        for action in _parsed(path, content):
            if action.add is not None:
                self.add(action.add)
            elif action.remove is not None:
                self.files.pop(unquote(action.remove.path), None)
            elif action.meta_data is not None:
                self._take(action.meta_data)
            elif action.protocol is not None:
                self._check(action.protocol)
            elif action.txn is not None:
                self._progress[action.txn.app_id] = action.txn.version

    def checkpoint(self, found: FoundFile, content: bytes) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            file = pq.ParquetFile(io.BytesIO(content))
            table = file.read(columns=_CHECKPOINT_COLUMNS)
        except (pa.ArrowException, OSError) as error:
            raise CorruptRecordError(found.path, f"not a whole checkpoint: {error}") from error
        for name, take in (
            ("protocol", self._take_protocol),
            ("metaData", self._take_metadata),
            ("txn", self._take_txn),
        ):
            if name in table.column_names:
                for row in table[name].drop_null().to_pylist():
                    take(row)
        adds = table["add"].combine_chunks().drop_null()
        paths, sizes = adds.field("path").to_pylist(), adds.field("size").to_pylist()
        partitions = [dict(pairs) for pairs in adds.field("partitionValues").to_pylist()]
        for path, size, values, stats in zip(paths, sizes, partitions, adds.field("stats").to_pylist()):
            self.files[unquote(path)] = LoggedFile(
                unquote(path), size, _partition(values, self.partitioned_by), _rows(stats)
            )

    def _take_protocol(self, row: dict[str, Any]) -> None:
        self._check(LogProtocol(row["minReaderVersion"], row.get("readerFeatures")))

    def _take_metadata(self, row: dict[str, Any]) -> None:
        self._take(LogMetadata(row["schemaString"], row["partitionColumns"] or [], dict(row["configuration"] or [])))

    def _take(self, metadata: LogMetadata) -> None:
        self._metadata, self.partitioned_by = metadata, metadata.partition_columns

    def _take_txn(self, row: dict[str, Any]) -> None:
        self._progress[row["appId"]] = row["version"]

    def add(self, add: AddedFile) -> None:
        if add.deletion_vector is not None:
            raise DataError(self._url, f"{add.path} has a deletion vector, which is not read", remedy=_REWRITE)
        path = unquote(add.path)
        self.files[path] = LoggedFile(
            path, add.size, _partition(add.partition_values, self.partitioned_by), _rows(add.stats)
        )

    def _check(self, protocol: LogProtocol) -> None:
        unknown = set(protocol.reader_features or ()) - _HARMLESS_FEATURES
        if unknown or (protocol.reader_features is None and protocol.min_reader_version > _PLAIN_READER_VERSION):
            told = ", ".join(sorted(unknown)) or f"version {protocol.min_reader_version} of the protocol"
            raise DataError(self._url, f"reading this table takes {told}, which is not known here", remedy=_REWRITE)

    def snapshot(self, version: int) -> TableSnapshot:
        if self._metadata is None:
            raise CorruptRecordError(self._url, f"the log up to version {version} does not say what the table is")
        return TableSnapshot(
            url=self._url,
            version=version,
            files=tuple(sorted(self.files.values())),
            columns=_columns(self._metadata.schema_string),
            configuration=self._metadata.configuration,
            progress=self._progress,
        )


_REWRITE = "have the engine that wrote it rewrite it without"


def _partition(values: Mapping[str, str | None], keys: Sequence[str]) -> str:
    return values.get(keys[0]) or "" if keys else ""


def _rows(stats: str | None) -> int:
    return _stats.decode(stats).num_records if stats else -1


class _SchemaField(msgspec.Struct):
    name: str
    type: Any


class _SchemaFields(msgspec.Struct):
    fields: list[_SchemaField]


def _columns(schema: str) -> dict[str, str]:
    return {each.name: _type_name(each.type) for each in _schemas.decode(schema).fields}


def _type_name(kind: Any) -> str:
    """
    >>> _type_name({"type": "array", "elementType": "long", "containsNull": True})
    'array<long>'
    """
    if not isinstance(kind, dict):
        return str(kind)
    match kind["type"]:
        case "array":
            return f"array<{_type_name(kind['elementType'])}>"
        case "map":
            return f"map<{_type_name(kind['keyType'])},{_type_name(kind['valueType'])}>"
        case "struct":
            return "struct<" + ",".join(f"{f['name']}:{_type_name(f['type'])}" for f in kind["fields"]) + ">"
        case other:
            return str(other)


_schemas = msgspec.json.Decoder(_SchemaFields)
