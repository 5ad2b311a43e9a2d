"""Converts logs, which survive crashes, to Parquet, which engines read fast.

The Parquet is in ``compacted/`` in the run's folder. It is made on first use and renewed for logs that have grown. It
may be deleted at any time. A ``compacted`` that another user owns or can write to, that is a link, or that holds other
files is neither read nor written: the Parquet is made in a temporary folder instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from deep500_timing._base import progress
from deep500_timing._base.files import file_mode, lock, remove_unfinished, whole_file
from deep500_timing._base.regular import is_ours, open_regular, read_bounded
from deep500_timing._base.warn import warn_once
from deep500_timing._summary.text import safe_name
from deep500_timing.runs._checks import MANIFEST_BYTES, RANKS, BadLogError, is_name, json_of
from deep500_timing.runs._format import NOT_READ, SUFFIX, TABLES, log_name, parse_name
from deep500_timing.runs._tables import CHUNK_ROWS, COLUMNS, LogTables, columns_of, peek, schema_of

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

FOLDER = "compacted"
MANIFEST = "manifest.json"
VERSION = 6
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


_PART = re.compile(r"(\w+)-[0-9a-f]{16}-\d+\.parquet", re.ASCII)
"""The names of Parquet files: table, digest of the logs, number of columns."""
_OURS = re.compile(rf"{re.escape(MANIFEST)}|\.lock|\..*\.unfinished|{_PART.pattern}", re.ASCII)
_READ_BYTES = 1 << 20
_REASON = 300
"""Letters of the reason why a log is not read."""


def find_logs(folder: str) -> list[LogFile]:
    """The logs in a folder, by name. Other files are ignored; one that ends as a log does is warned of."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            # A rank with `keep_bytes` may remove its oldest log meanwhile; a link may lead nowhere.
            with suppress(OSError):
                if entry.name.endswith(SUFFIX) and entry.is_file():
                    parsed = parse_name(entry.name)
                    if parsed is None or log_name(*parsed) != entry.name or parsed[0] >= RANKS:
                        warn_once(f"{safe_name(entry.path)} is not read: no log has such a name. Is it a copy?")
                        continue
                    status = entry.stat()
                    found.append(LogFile(entry.path, status.st_size, status.st_mtime_ns))
    return sorted(found)


def compact(folder: str) -> dict[str, list[str]]:
    """Write or renew the Parquet of a run, and return the files of each table."""
    target = os.path.join(folder, FOLDER)
    try:
        if _is_ours(target):
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


def _is_ours(target: str) -> bool:
    """Whether the folder for the Parquet can be believed and written to. It is made if it is not there."""
    with suppress(FileExistsError):
        os.mkdir(target, 0o700 if file_mode() == 0o600 else 0o755)
    found = os.lstat(target)
    if not stat.S_ISDIR(found.st_mode) or not is_ours(found):
        return False
    with tempfile.TemporaryFile(dir=target):
        pass
    with os.scandir(target) as entries:
        return all(
            _OURS.fullmatch(entry.name) and (entry.is_file(follow_symlinks=False) or entry.name.endswith(".unfinished"))
            for entry in entries
        )


def _compact_to(target: str, folder: str) -> dict[str, list[str]]:
    flags = os.O_RDONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with os.fdopen(os.open(os.path.join(target, ".lock"), flags, file_mode()), "rb", buffering=0) as alone:
        lock(alone.fileno())  # Other processes make or remove parts.
        manifest = _read_manifest(target)
        known = {json.dumps(part["logs"]): part for part in manifest["parts"]}
        groups = list(_groups(find_logs(folder), manifest))
        parts = []
        done, of = 0, sum(log.size for group in groups for log in group)
        for group in groups:
            part = known.get(json.dumps([log.key for log in group]))
            written = [] if part is None else [one for of in part["files"].values() for one in of.items()]
            # The engine looks at no checksum.
            if part is None or any(_checksum(os.path.join(target, name)) != crc for name, crc in written):
                part = _make_part(group, target, done, of)
            parts.append(part)
            done += sum(log.size for log in group)
        # Another reader may use the parts of the manifest before this one. When they are removed, it reads the run
        # again.
        current, last = (
            {name for part in of for names in part["files"].values() for name in names}
            for of in (parts, manifest["parts"])
        )
        for name in {*manifest["removed"]} - current - last:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(target, name))
        manifest = {"version": VERSION, "parts": parts, "removed": sorted(last - current)}
        with whole_file(os.path.join(target, MANIFEST)) as file:
            file.write(json.dumps(manifest | {"crc": _crc_of(manifest)}).encode())
        remove_unfinished(target, ".")
    files: dict[str, list[str]] = {}
    for fault in (fault for part in parts for fault in part["faults"]):
        warn_once(f"Reading a log failed: {fault}. The other logs of the run are read.")
    for part in parts:
        for table, names in part["files"].items():
            files.setdefault(table, []).extend(os.path.join(target, name) for name in names)
    return files


def _checksum(path: str) -> int | None:
    with suppress(OSError), open_regular(path, follow=False) as file:
        status = os.fstat(file.fileno())
        identity = path, status.st_ino, status.st_size, status.st_mtime_ns
        if identity not in _checksums:
            crc = 0
            while data := file.read(_READ_BYTES):
                crc = zlib.crc32(data, crc)
            _checksums[identity] = crc
        return _checksums[identity]
    return None


_checksums: dict[tuple[str, int, int, int], int] = {}
"""Checksums of files, for readers that look at a run again and again."""


def _crc_of(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest).encode())


def _read_manifest(target: str) -> dict[str, Any]:
    """The manifest, or an empty one where it is missing, damaged, of another version or of another form."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        manifest: dict[str, Any] = json_of(read_bounded(os.path.join(target, MANIFEST), MANIFEST_BYTES, follow=False))
        crc = manifest.pop("crc")
        removed, parts = manifest["removed"], manifest["parts"]
        files = [(table, name) for part in parts for table, of in part["files"].items() for name in of]
        keys = [key for part in parts for key in part["logs"]]
        if (
            (manifest["version"], _crc_of(manifest)) == (VERSION, crc)
            and all(_PART.fullmatch(name) for name in removed)
            and all(isinstance(fault, str) for part in parts for fault in part["faults"])
            and all(is_name(table) and (found := _PART.fullmatch(name)) and found[1] == table for table, name in files)
            and all(parse_name(name) is not None and {type(size), type(time)} == {int} for name, size, time in keys)
        ):
            return manifest
    return {"version": VERSION, "parts": [], "removed": []}


def _groups(logs: list[LogFile], manifest: dict[str, Any]) -> Iterator[list[LogFile]]:
    # A log stays in its part, so that a log that grows costs only its own part. The logs of a session stay together:
    # they share a clock and its anchor.
    by_session: dict[tuple[int, ...], list[LogFile]] = {}
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


def _session_of(path: str) -> tuple[int, ...]:
    return (parse_name(os.path.basename(path)) or (0, 0))[:2]  # rank and session


def _make_part(group: list[LogFile], target: str, done: int, whole: int) -> dict[str, Any]:
    # `done`, `whole`: bytes that were read before, and of all logs.
    from concurrent.futures import ThreadPoolExecutor

    wanted = [log.key for log in group]
    name = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:16]
    writers: dict[str, _TableWriter] = {}
    files: dict[str, dict[str, int | None]] = {}
    with (
        tempfile.TemporaryDirectory(".unfinished", ".new-", target, ignore_cleanup_errors=True) as scratch,
        ThreadPoolExecutor(1) as pool,
    ):

        def writer_of(table: str, schema: Any) -> _TableWriter:
            # Logs may declare the same table with different columns: a file for each.
            file = f"{table}-{name}-{len(schema)}.parquet"
            if file not in writers:
                writers[file] = _TableWriter(os.path.join(scratch, file), schema, pool)
                files.setdefault(table, {})[file] = None
            return writers[file]

        for table in sorted({*COLUMNS, *TABLES} - {*NOT_READ}):
            writer_of(table, schema_of(columns_of(table)))  # Without rows, queries of it work.
        faults: list[str] = []
        for table, batch in _tables_of(group, faults, done, whole):
            writer_of(table, batch.schema).add(batch)
        for writer in writers.values():
            writer.close()
        for of in files.values():
            for file in of:
                os.replace(os.path.join(scratch, file), os.path.join(target, file))
                of[file] = _checksum(os.path.join(target, file))
    return {"logs": wanted, "files": files, "faults": faults}


class _TableWriter:
    """Writes one table, the parts of a large one on a thread while the caller reads on. Small batches share a part."""

    def __init__(self, path: str, schema: Any, pool: Executor) -> None:
        self._path = path
        self._schema = schema
        self._pool = pool
        self._writer: Any = None
        self._waiting: list[Any] = []
        self._rows = 0
        self._written: Future[None] | None = None

    def add(self, batch: Any) -> None:
        self._waiting.append(batch)
        self._rows += len(batch)
        if self._rows >= 4 * CHUNK_ROWS:
            self._finish()
            part, self._waiting, self._rows = self._waiting, [], 0
            try:
                self._written = self._pool.submit(self._write, part)
            except RuntimeError:  # The interpreter is shutting down.
                self._write(part)

    def close(self) -> None:
        import pyarrow as pa

        self._finish()
        if not (self._writer or self._waiting):
            self._waiting.append(pa.Table.from_batches([], self._schema))  # empty_table() imports pandas
        if self._waiting:
            self._write(self._waiting)
        self._writer.close()

    def _finish(self) -> None:
        # One part at a time waits, and its error is raised here.
        if self._written is not None:
            self._written.result()

    def _write(self, part: list[Any]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as parquet

        table = pa.concat_tables(part)
        if len(part) > 1:
            table = table.unify_dictionaries().combine_chunks()
        if self._writer is None:
            self._writer = parquet.ParquetWriter(self._path, table.schema, **_how_to_write(table.schema))
        self._writer.write_table(table)


def _how_to_write(schema: Any) -> dict[str, Any]:
    texts = [field.name for field in schema if str(field.type) not in ("int64", "int32", "double", "bool")]
    small = [name for name in ("rank", "session", "thread", "depth", "bin") if name in schema.names]
    # By their ranges a reader passes over row groups; a range of the others is in each.
    ranged = [name for name in ("rank", "session", "step", "start_ns", "time_ns", "unix_ns") if name in schema.names]
    numbers = [field.name for field in schema if str(field.type) == "int64" and field.name not in small]
    return {
        "compression": "zstd",
        "write_statistics": ranged,
        "use_dictionary": texts + small,
        "column_encoding": dict.fromkeys(numbers, "DELTA_BINARY_PACKED"),
        "write_page_checksum": True,
    }


def _tables_of(group: list[LogFile], faults: list[str], done: int, whole: int) -> Iterator[tuple[str, Any]]:
    sessions: dict[tuple[int, ...], list[LogFile]] = {}
    for log in group:
        sessions.setdefault(_session_of(log.path), []).append(log)
    for logs in sessions.values():
        # By path, ".0001.d5log" would come before ".d5log".
        logs.sort(key=lambda log: (parse_name(os.path.basename(log.path)) or (0, 0, -1))[2])
        offset, first_mark = peek([log.path for log in logs])
        for log in logs:
            tables = LogTables(log.path, offset, first_mark)
            try:
                for table in tables.tables():
                    yield table
                    progress.show(done + tables.log.read_bytes, whole)
            except Exception as error:
                # A fault of the log, or of this program: it costs this log, and not the others.
                reason = str(error) if isinstance(error, BadLogError) else f"{type(error).__name__}: {error}"
                faults.append(safe_name(f"{log.path}: {reason[:_REASON]}"))
                yield "logs", tables.unread(reason[:_REASON])
            done += log.size


_temporary: dict[str, tempfile.TemporaryDirectory[str]] = {}
"""Temporary folders by run, for folders that cannot be written to. They are removed at exit."""
