"""Converts logs, which survive crashes, to Parquet, which engines read fast.

The Parquet is in ``compacted/`` in the run's folder. It is made on first use and renewed for logs that have grown. It
may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from typing import TYPE_CHECKING, Any, NamedTuple

from deep500_timing._base.files import lock, whole_file
from deep500_timing._base.warn import warn_once
from deep500_timing.runs._format import NOT_READ, SUFFIX, TABLES, parse_name
from deep500_timing.runs._tables import CHUNK_ROWS, COLUMNS, LogTables, NewerSchemaError, columns_of, peek, schema_of

if TYPE_CHECKING:
    from collections.abc import Iterator


FOLDER = "compacted"
MANIFEST = "manifest.json"
VERSION = 5
"""Version of the Parquet files; files of another version are replaced."""
PART_BYTES = 64 << 20
"""Size of the logs that share one Parquet file, so that 10 000 ranks do not make 10 000 files."""


class LogFile(NamedTuple):
    """A log in the folder."""

    path: str
    size: int
    mtime_ns: int

    @property
    def key(self) -> list[Any]:
        return [os.path.basename(self.path), self.size, self.mtime_ns]


def find_logs(folder: str) -> list[LogFile]:
    """The logs in a folder, by name. Other files are ignored."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            # A rank with `keep_bytes` may remove its oldest log meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if entry.name.endswith(SUFFIX) and entry.is_file():
                    status = entry.stat()
                    found.append(LogFile(entry.path, status.st_size, status.st_mtime_ns))
    return sorted(found)


def compact(folder: str) -> dict[str, list[str]]:
    """Write or renew the Parquet of a run, and return the files of each table."""
    target = os.path.join(folder, FOLDER)
    try:
        os.makedirs(target, exist_ok=True)
        with tempfile.TemporaryFile(dir=target):
            pass
        return _compact_to(target, folder)
    except OSError:
        if not os.path.isdir(folder):
            raise
    # The folder is read-only, or its disk is full.
    if folder not in _temporary:
        _temporary[folder] = tempfile.TemporaryDirectory(prefix="deep500-timing-run-", ignore_cleanup_errors=True)
    try:
        return _compact_to(_temporary[folder].name, folder)
    except OSError as error:
        raise OSError(
            error.errno,
            f"Reading the run {folder!r}: neither it nor the folder for temporary files can be written to: {error}. "
            "Set TMPDIR to a folder with free space.",
        ) from error


def _compact_to(target: str, folder: str) -> dict[str, list[str]]:
    with os.fdopen(os.open(os.path.join(target, ".lock"), os.O_RDONLY | os.O_CREAT, 0o666)) as alone:
        lock(alone.fileno())  # Other processes make or remove parts.
        manifest = _read_manifest(target)
        known = {json.dumps(part["logs"]): part for part in manifest["parts"]}
        parts = []
        for group in _groups(find_logs(folder), manifest):
            part = known.get(json.dumps([log.key for log in group]))
            if part is None or not all(os.path.exists(os.path.join(target, name)) for name in _files_of(part)):
                part = _make_part(folder, group, target)
            parts.append(part)
        with whole_file(os.path.join(target, MANIFEST)) as file:
            file.write(json.dumps({"version": VERSION, "parts": parts}).encode())
        # Another reader may use the parts before these. When they are removed, it reads the run again.
        named = {name for part in (*parts, *manifest["parts"]) for name in _files_of(part)}
        for name in os.listdir(target):
            if name.endswith(".parquet") and name not in named:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(target, name))
    files: dict[str, list[str]] = {}
    for part in parts:
        for table, names in part["files"].items():
            files.setdefault(table, []).extend(os.path.join(target, name) for name in names)
    return files


def _files_of(part: dict[str, Any]) -> list[str]:
    return [name for names in part["files"].values() for name in names]


def _read_manifest(target: str) -> dict[str, Any]:
    try:
        with open(os.path.join(target, MANIFEST), encoding="utf-8") as file:
            manifest: dict[str, Any] = json.load(file)
        if manifest["version"] == VERSION:
            return manifest
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return {"version": VERSION, "parts": []}


def _groups(logs: list[LogFile], manifest: dict[str, Any]) -> Iterator[list[LogFile]]:
    # A log stays in its part, so that a log that grows costs only its own part. The logs of a session stay together:
    # they share a clock and its anchor.
    by_session: dict[str, list[LogFile]] = {}
    for log in sorted(logs):
        by_session.setdefault(_session_of(log.path), []).append(log)
    names = {os.path.basename(log.path) for log in logs}
    for part in manifest["parts"]:
        sessions = dict.fromkeys(_session_of(key[0]) for key in part["logs"] if key[0] in names)
        kept = [log for session in sessions for log in by_session.pop(session, ())]
        if kept:
            yield sorted(kept)
    group: list[LogFile] = []
    size = 0
    for of_session in by_session.values():
        if size >= PART_BYTES:
            yield sorted(group)
            group, size = [], 0
        group += of_session
        size += sum(log.size for log in of_session)
    if group:
        yield sorted(group)


def _session_of(path: str) -> str:
    # "rank-00003.s1.0002.d5log" and "rank-00003.s1.d5log" are of one session.
    parts = os.path.basename(path).split(".")
    return ".".join(part for part in parts[:2] if not part.isdecimal() and part != "d5log")


def _make_part(folder: str, group: list[LogFile], target: str) -> dict[str, Any]:
    wanted = [log.key for log in group]
    name = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:16]
    writers: dict[str, _TableWriter] = {}
    files: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix=".new-", dir=target, ignore_cleanup_errors=True) as scratch:

        def writer_of(table: str, schema: Any) -> _TableWriter:
            # Logs may declare the same table with different columns: a file for each.
            file = f"{table}-{name}-{len(schema)}.parquet"
            if file not in writers:
                writers[file] = _TableWriter(os.path.join(scratch, file), schema)
                files.setdefault(table, []).append(file)
            return writers[file]

        for table in sorted({*COLUMNS, *TABLES} - {*NOT_READ}):
            writer_of(table, schema_of(columns_of(table)))  # Without rows, queries of it work.
        for table, batch in _tables_of(group):
            writer_of(table, batch.schema).add(batch)
        for file, writer in writers.items():
            writer.close()
            os.replace(os.path.join(scratch, file), os.path.join(target, file))
    return {"logs": wanted, "files": files}


class _TableWriter:
    """Writes one table. Small batches share a row group."""

    def __init__(self, path: str, schema: Any) -> None:
        self._path = path
        self._schema = schema
        self._writer: Any = None
        self._waiting: list[Any] = []
        self._rows = 0

    def add(self, batch: Any) -> None:
        self._waiting.append(batch)
        self._rows += len(batch)
        if self._rows >= CHUNK_ROWS:
            self._write()

    def close(self) -> None:
        import pyarrow as pa

        if not (self._writer or self._waiting):
            self._waiting.append(pa.Table.from_batches([], self._schema))  # empty_table() imports pandas
        if self._waiting:
            self._write()
        self._writer.close()

    def _write(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as parquet

        table = pa.concat_tables(self._waiting)
        if len(self._waiting) > 1:
            table = table.unify_dictionaries().combine_chunks()
        if self._writer is None:
            self._writer = parquet.ParquetWriter(self._path, table.schema, **_how_to_write(table.schema))
        self._writer.write_table(table)
        self._waiting, self._rows = [], 0


def _how_to_write(schema: Any) -> dict[str, Any]:
    texts = [field.name for field in schema if str(field.type) not in ("int64", "int32", "double", "bool")]
    small = [name for name in ("rank", "session", "thread", "depth", "bin") if name in schema.names]
    numbers = [field.name for field in schema if str(field.type) == "int64" and field.name not in small]
    return {
        "compression": "zstd",
        "use_dictionary": texts + small,
        "column_encoding": dict.fromkeys(numbers, "DELTA_BINARY_PACKED"),
        "write_page_checksum": True,
    }


def _tables_of(group: list[LogFile]) -> Iterator[tuple[str, Any]]:
    sessions: dict[str, list[LogFile]] = {}
    for log in group:
        sessions.setdefault(_session_of(log.path), []).append(log)
    for logs in sessions.values():
        # By path, ".0001.d5log" would come before ".d5log".
        logs.sort(key=lambda log: (parse_name(os.path.basename(log.path)) or (0, 0, -1))[2])
        offset, first_mark = peek([log.path for log in logs])
        for log in logs:
            try:
                yield from LogTables(log.path, offset, first_mark).tables()
            except NewerSchemaError as error:
                warn_once(f"{error} The other logs of the run are read.", key=f"newer schema {log.path}")
            except OSError as error:
                warn_once(f"Reading {log.path}: {error}. The other logs of the run are read.")


_temporary: dict[str, tempfile.TemporaryDirectory[str]] = {}
"""Temporary folders by run, for folders that cannot be written to. They are removed at exit."""
