"""What computes over a run's Parquet: DuckDB where nothing is said, Polars, or Spark where one machine is outgrown.

Every query is written once, for Narwhals, which hands it to the engine in the engine's own terms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from deep500_timing._base.require import require

if TYPE_CHECKING:
    from collections.abc import Sequence

_CALLER = "Reading a run"


class Engine(Protocol):
    """Reads Parquet and answers SQL, without computing before it is asked for the result."""

    name: str

    def scan(self, files: Sequence[str]) -> Any:
        """A table of several files, in the engine's own terms."""
        ...

    def sql(self, query: str, tables: dict[str, list[str]]) -> Any:
        """The result of a query over tables, in the engine's own terms."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


class DuckDB:
    """An embedded engine: no server, no set-up, larger data than memory."""

    name = "duckdb"

    def __init__(self, memory: str | None, connection: Any = None) -> None:
        duckdb = require("duckdb", extra="runs", caller=_CALLER)
        self._is_own = connection is None
        self.connection = duckdb.connect() if connection is None else connection
        if self._is_own:
            # A progress bar in somebody's notebook or log is no part of an answer.
            self.connection.execute("set enable_progress_bar = false")
            if memory is not None:
                self.connection.execute(f"set memory_limit = '{memory}'")

    def scan(self, files: Sequence[str]) -> Any:
        """A relation over the files."""
        return self.connection.read_parquet(list(files), union_by_name=True)

    def sql(self, query: str, tables: dict[str, list[str]]) -> Any:
        """The relation of a query."""
        for name, files in tables.items():
            self.scan(files).create_view(name, replace=True)
        return self.connection.sql(query)

    def close(self) -> None:
        """Close the connection, unless it was handed in."""
        if self._is_own:
            self.connection.close()


class Polars:
    """In this process, lazily."""

    name = "polars"

    def __init__(self) -> None:
        require("polars", extra="runs", caller=_CALLER)

    def scan(self, files: Sequence[str]) -> Any:
        """A lazy frame over the files."""
        import polars as pl

        return pl.concat([pl.scan_parquet(file) for file in files], how="diagonal")

    def sql(self, query: str, tables: dict[str, list[str]]) -> Any:
        """The lazy frame of a query."""
        import polars as pl

        frames: Any = {name: self.scan(files) for name, files in tables.items()}
        return pl.SQLContext(frames).execute(query)

    def close(self) -> None:
        """Nothing is held."""


class Spark:
    """On a cluster, or in local mode."""

    name = "spark"

    def __init__(self, session: Any = None) -> None:
        sql = require("pyspark.sql", extra="spark", caller="Run.open(engine='spark')")
        self._is_own = session is None and sql.SparkSession.getActiveSession() is None
        self.session = session if session is not None else sql.SparkSession.builder.getOrCreate()

    def scan(self, files: Sequence[str]) -> Any:
        """A frame over the files."""
        return self.session.read.option("mergeSchema", "true").parquet(*files)

    def sql(self, query: str, tables: dict[str, list[str]]) -> Any:
        """The frame of a query."""
        for name, files in tables.items():
            self.scan(files).createOrReplaceTempView(name)
        return self.session.sql(query)

    def close(self) -> None:
        """Stop the session, if it was begun here."""
        if self._is_own:
            self.session.stop()


def engine_for(engine: str | Any, memory: str | None) -> Engine:
    """The engine of a name, or around a connection or session that is there already.

    Raises:
        ValueError: The name is unknown.
        MissingPackageError: Its package is not installed.
    """
    if engine == "duckdb":
        return DuckDB(memory)
    if engine == "polars":
        return Polars()
    if engine == "spark":
        return Spark()
    kind = type(engine).__module__.partition(".")[0]
    if kind in ("duckdb", "_duckdb"):
        return DuckDB(memory, engine)
    if kind == "pyspark":
        return Spark(engine)
    raise ValueError(
        f"Run.open(engine={engine!r}): use 'duckdb', 'polars' or 'spark', or hand in a connection of DuckDB or a "
        "session of Spark."
    )


class Relation:
    """A table that is computed when it is asked for: as pandas, as Arrow, or as rows.

    ``native`` is the engine's own object, for whoever wants to go on with it; ``frame`` the same in Narwhals' terms.
    """

    def __init__(self, native: Any, what: str) -> None:
        """Made by :class:`~deep500_timing.runs.Run`."""
        self.native = native
        self._what = what

    @property
    def frame(self) -> Any:
        """The relation as a lazy frame of Narwhals."""
        narwhals = require("narwhals", extra="runs", caller=_CALLER)
        return narwhals.from_native(self.native).lazy()

    @property
    def columns(self) -> list[str]:
        """The names of the columns, in order."""
        return list(self.frame.collect_schema().names())

    def arrow(self) -> Any:
        """As a ``pyarrow.Table``, its texts as plain strings whatever the engine."""
        pa = require("pyarrow", extra="runs", caller=_CALLER)
        table = self.native if isinstance(self.native, pa.Table) else self.frame.collect("pyarrow").to_native()
        fields = [
            field.with_type(pa.string())
            if pa.types.is_large_string(field.type) or pa.types.is_dictionary(field.type) or _is_view(field.type)
            else field
            for field in table.schema
        ]
        return table.cast(pa.schema([pa.field(field.name, field.type) for field in fields]))

    def df(self) -> Any:
        """As a ``pandas.DataFrame``."""
        require("pandas", extra="runs", caller=_CALLER)
        return self.arrow().to_pandas()

    def rows(self) -> list[dict[str, Any]]:
        """As dictionaries, a row each."""
        rows: list[dict[str, Any]] = self.arrow().to_pylist()
        return rows

    def __repr__(self) -> str:
        """What it is, and its columns; nothing is computed."""
        return f"<{self._what}: {', '.join(self.columns)}>"


def _is_view(kind: Any) -> bool:
    return str(kind) == "string_view"
