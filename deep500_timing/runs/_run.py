"""Reads a run as tables, by DuckDB, or by Spark for runs that one machine cannot hold.

Both take the same SQL: ANSI, with ``cast(sum(x) as bigint)`` for sums of integers.
"""

from __future__ import annotations

import glob as _glob
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from deep500_timing._base.names import BATCH, CPU
from deep500_timing._base.require import require
from deep500_timing._base.sql import literal, where
from deep500_timing.runs._compact import compact, find_logs
from deep500_timing.runs._format import parse_name
from deep500_timing.runs._tree import regions_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from os import PathLike

    from deep500_timing.runs._goodput import Goodput
    from deep500_timing.runs._why import Why


# A step is its BATCHes. For ranks and sessions without any BATCH it lasts from its mark to the next one.
_STEPS = f"""
with batches as (
    select rank, session, step, min(start_ns) as start_ns, min(unix_ns) as unix_ns,
        max(start_ns + dur_ns) - min(start_ns) as dur_ns, cast(count(*) as bigint) as batches
    from intervals{{where}} and region = '{BATCH}' and device = '{CPU}' and step is not null
    group by rank, session, step),
marked as (
    select rank, session, step, time_ns as start_ns, unix_ns,
        lead(time_ns) over (partition by rank, session order by time_ns, step) - time_ns as dur_ns,
        cast(0 as bigint) as batches
    from marks{{where}})
select * from batches
union all
select m.* from marked m left join (select distinct rank, session from batches) b
    on m.rank = b.rank and m.session = b.session where b.rank is null
order by rank, session, start_ns, step"""
_NEIGHBOURS = 200
_NAMED = 3
_CALLER = "Reading a run"
_LARGE_BYTES = 1 << 20
"""Of the Parquet of a table from which several threads read it faster than one."""


class DuckDB:
    """In this process. Data may be larger than memory."""

    name = "duckdb"

    def __init__(self, memory: str | None, connection: Any = None) -> None:
        self._duckdb, self._memory = require("duckdb", extra="runs", caller=_CALLER), memory
        self._is_own = connection is None
        self._views: dict[str, list[str]] = {}
        self._folders: set[str] | None = None
        self.connection: Any = connection  # None before the first query, which says the folders

    def _connect(self) -> None:
        self._views = {}
        self.connection = self._duckdb.connect()
        # It would print into notebooks and logs. In a notebook without ipywidgets there is none, and no setting of it.
        with suppress(self._duckdb.InvalidInputException):
            self.connection.execute("set enable_progress_bar = false")
        if self._memory is not None:
            self.connection.execute(f"set memory_limit = {literal(self._memory)}")
        if self._folders:
            # The files are of a run that someone else may have written: the engine opens no others.
            self.connection.execute(f"set allowed_directories = [{', '.join(map(literal, sorted(self._folders)))}]")
            self.connection.execute("set enable_external_access = false")
        self.connection.execute("set threads = 1")  # more cost more than they save, until a table is large

    def sql(self, query: str, tables: Mapping[str, Sequence[str]]) -> Any:
        folders = {os.path.dirname(file) for files in tables.values() for file in files}
        if self._is_own and (self._folders is None or not folders <= self._folders):
            self._folders = folders | (self._folders or set())
            self.close()
            self._connect()
        for name, files in tables.items():
            # Another run may have replaced the views of the user's connection.
            if not self._is_own or self._views.get(name) != list(files):
                self._views[name] = list(files)
                self.connection.read_parquet(list(files), union_by_name=True).create_view(name, replace=True)
                if self._is_own and sum(map(os.path.getsize, files)) >= _LARGE_BYTES:
                    self.connection.execute("reset threads")
        return self.connection.sql(query)

    def close(self) -> None:
        """Close the connection, unless the user passed it."""
        if self._is_own and self.connection is not None:
            self.connection.close()


class Spark:
    """On a cluster, or in local mode."""

    name = "spark"

    def __init__(self, session: Any = None) -> None:
        sql = require("pyspark.sql", extra="spark", caller="Run.open(engine='spark')")
        self._is_own = session is None and sql.SparkSession.getActiveSession() is None
        self.session = session if session is not None else sql.SparkSession.builder.getOrCreate()

    def sql(self, query: str, tables: Mapping[str, Sequence[str]]) -> Any:
        for name, files in tables.items():
            self.session.read.option("mergeSchema", "true").parquet(*files).createOrReplaceTempView(name)
        return self.session.sql(query)

    def close(self) -> None:
        """Stop the session if this object started it."""
        if self._is_own:
            self.session.stop()


def engine_for(engine: str | Any, memory: str | None) -> DuckDB | Spark:
    """The engine of a name, or around the user's connection or session."""
    if engine == "duckdb":
        return DuckDB(memory)
    if engine == "spark":
        return Spark()
    kind = type(engine).__module__.partition(".")[0]
    if kind in ("duckdb", "_duckdb"):
        return DuckDB(memory, engine)
    if kind == "pyspark":
        return Spark(engine)
    raise ValueError(
        f"Run.open(engine={engine!r}): use 'duckdb' or 'spark', or pass a DuckDB connection or a Spark session."
    )


class Relation:
    """A table that is computed when it is read: as pandas, Arrow, or rows.

    ``native`` is the engine's own object, for further queries.
    """

    def __init__(self, native: Any, what: str) -> None:
        self.native = native
        self._what = what

    @property
    def columns(self) -> list[str]:
        """The names of the columns, in order."""
        return list(getattr(self.native, "column_names", None) or self.native.columns)

    def arrow(self) -> Any:
        """As a ``pyarrow.Table`` with the same types for every engine."""
        import pyarrow as pa

        table = self.native
        if not isinstance(table, pa.Table):
            table = table.to_arrow_table() if hasattr(table, "to_arrow_table") else table.toArrow()
        of_text = ("large_string", "dictionary", "string_view")
        kinds = [pa.string() if str(kind).startswith(of_text) else kind for kind in table.schema.types]
        schema = pa.schema(zip(table.schema.names, kinds, strict=True))
        return table if table.schema.equals(schema) else table.cast(schema)  # A cast imports pyarrow.compute.

    def batches(self, rows: int = 1 << 16) -> Iterator[Any]:
        """As Arrow record batches, one after the other, so that the whole table is never in memory."""
        if hasattr(self.native, "to_arrow_reader"):
            yield from self.native.to_arrow_reader(rows)
        else:
            yield from self.arrow().to_batches(rows)

    def df(self) -> Any:
        """As a ``pandas.DataFrame``."""
        require("pandas", extra="runs", caller=_CALLER)
        return self.arrow().to_pandas()

    def rows(self) -> list[dict[str, Any]]:
        """As one dictionary for each row."""
        rows: list[dict[str, Any]] = self.arrow().to_pylist()
        return rows

    def __repr__(self) -> str:
        return f"<{self._what}: {', '.join(self.columns)}>"


class Run:
    """The tables of a run. ``docs/runs.md`` lists their columns.

    Tables are computed when they are read: ``run.regions().df()``.
    """

    def __init__(self, folders: list[str], engine: Any, memory: str | None) -> None:
        self.folders = folders
        self._engine = engine_for(engine, memory)
        require("pyarrow", extra="runs", caller=_CALLER)
        self.compact()

    @classmethod
    def open(cls, folder: str | PathLike[str], *, engine: Any = "duckdb", memory: str | None = None) -> Run:
        """Open a run, or several as one.

        On first use the logs are converted to Parquet, and again when they have grown. A run can be read while it is
        being written.

        Args:
            folder: The run's folder, or a pattern for several folders of one run (``"nodes/*/run"``).
            engine: ``"duckdb"``, ``"spark"``, a DuckDB connection or a Spark session.
            memory: Memory limit of DuckDB, such as ``"2GB"``.

        Raises:
            FileNotFoundError: The folder does not exist or has no log.
            ValueError: The engine is unknown, or the folder's name is not valid in this locale.
            MissingPackageError: A package of the engine is not installed.
        """
        path = os.fspath(folder)
        try:
            path.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"Opening the run {path!r}: the folder's name is not valid in this locale; DuckDB needs UTF-8. "
                "Set PYTHONUTF8=1 or LC_ALL=C.UTF-8, or rename the folder."
            ) from None
        # A path that is there is no pattern, with any characters in its name; two links to one folder are one.
        matches = [path] if os.path.lexists(path) else _glob.glob(path)
        found = sorted({os.path.realpath(match): match for match in matches if os.path.isdir(match)}.values())
        folders = [match for match in found if find_logs(match)]
        if not folders:
            what = "holds no log (*.d5log)" if found else "is no folder"
            remedy = _names_of_runs_in(found[0]) if found else ""
            remedy = remedy or f"`deep500-timing run --run {path!r} SCRIPT` writes one."
            raise FileNotFoundError(f"Opening the run {path!r}: it {what}. {remedy}")
        return cls(folders, engine, memory)

    def compact(self) -> None:
        """Read the intervals logged since the run was opened."""
        self.tables: dict[str, list[str]] = {}
        """The Parquet files of each table."""
        for folder in self.folders:
            for table, found in compact(folder).items():
                self.tables.setdefault(table, []).extend(found)

    def table(self, name: str) -> Relation:
        """A table by name: ``intervals``, ``marks``, ``samples``, ``collectives``, ``events``, ``logs`` and others.

        Raises:
            LookupError: No log has such a table.
        """
        if name not in self.tables:
            raise LookupError(f"The run has no table {name!r}; it has {', '.join(sorted(self.tables))}.")
        return Relation(self._query(f"select * from {name}"), f"table {name}")

    def sql(self, query: str) -> Relation:
        """The result of an SQL query over the run's tables."""
        return Relation(self._query(query), "query")

    def _query(self, query: str) -> Any:
        # Only tables in the query: the engine opens the files of each table it gets.
        names = [name for name in self.tables if name.lower() in query.lower()]
        if not all(os.path.exists(file) for name in names for file in self.tables[name]):
            self.compact()  # Another reader has renewed the files of a run that grows.
        return self._engine.sql(query, {name: self.tables[name] for name in names if name in self.tables})

    def intervals(
        self, *, rank: int | None = None, session: int | None = None, steps: tuple[int, int] | None = None
    ) -> Relation:
        """Every interval, unordered.

        Args:
            rank: Of this rank only.
            session: Of this session only; 0 is a rank's first start.
            steps: Of these steps only: first and last.
        """
        query = "select * from intervals" + (where(rank=rank, session=session) or " where true")
        if steps is not None:
            query += f" and step between {int(steps[0])} and {int(steps[1])}"
        return Relation(self._query(query), "intervals")

    def regions(self, *, rank: int | None = None, session: int | None = None, by_rank: bool = False) -> Relation:
        """The tree of regions with counts, times and shares of the parent.

        Quantiles are from histograms, within 1 %. Everything else is exact.

        Args:
            rank: Of this rank only.
            session: Of this session only.
            by_rank: One row for each rank.
        """
        return Relation(regions_table(self, rank, session, by_rank), "regions")

    def steps(self, *, rank: int | None = None, session: int | None = None) -> Relation:
        """The steps of every rank in order, with start and length.

        A step lasts from the start of its first BATCH to the end of its last one. Without any BATCH it lasts from its
        mark to the next mark; the length of the last step is then unknown.
        """
        return self.sql(_STEPS.format(where=where(rank=rank, session=session) or " where true"))

    def why(self, step: int | None = None, *, session: int | None = None, neighbours: int = _NEIGHBOURS) -> Why:
        """Say why a step took longer than the steps around it.

        A step includes the time since the BATCH before it: a checkpoint between two BATCHes is found.

        Args:
            step: Its number; the slowest step if None, a session's first left out.
            session: Of this session; the last one that has the step if None.
            neighbours: How many steps to compare with, half before and half after.

        Raises:
            LookupError: The run has no such step.
        """
        from deep500_timing.runs._why import why

        return why(self, step, session, neighbours)

    def goodput(self, *, buckets: Mapping[str, str] | None = None, mfu: float | None = None) -> Goodput:
        """Account for the wall clock of the whole job, restarts included. The parts add up to 100 %.

        Args:
            buckets: Buckets of regions by name, besides the defaults of ``docs/goodput.md``: ``productive``, ``data``,
                ``communication``, ``evaluation``, ``checkpoint``, ``restore`` or ``compilation``.
            mfu: The MFU of the steps; that of the run's samples if None.

        Raises:
            LookupError: No log can be read.
            ValueError: A bucket is unknown.
        """
        from deep500_timing.runs._goodput import goodput_of

        return goodput_of(self, buckets=buckets, mfu=mfu)

    def close(self) -> None:
        """Close the engine and release the files."""
        self._engine.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Run {', '.join(self.folders)}, read by {self._engine.name}>"


def runs_in(folder: str) -> list[str]:
    """The folders of the runs in a folder, the one that was written last first; none without such a folder."""
    found = []
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        inside = os.path.join(folder, name)
        try:
            logs = [os.path.join(inside, log) for log in os.listdir(inside) if parse_name(log)]
            if logs:
                found.append((-max(os.stat(log).st_mtime for log in logs), inside))
        except OSError:  # a file, or a folder that may not be read
            continue
    return [inside for _, inside in sorted(found)]


def _names_of_runs_in(folder: str) -> str:
    # A remedy for the folder of several runs.
    names = [*map(repr, runs_in(folder))]
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"Name one of the runs in it: {', '.join(names[:_NAMED])}{more}."
