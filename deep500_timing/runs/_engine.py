"""The engine that queries a run's Parquet: DuckDB, or Spark for runs that one machine cannot hold.

Both take the same SQL: ANSI, with ``cast(sum(x) as bigint)`` for sums of integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing._base.require import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_CALLER = "Reading a run"


class DuckDB:
    """In this process. Data may be larger than memory."""

    name = "duckdb"

    def __init__(self, memory: str | None, connection: Any = None) -> None:
        duckdb = require("duckdb", extra="runs", caller=_CALLER)
        self._is_own = connection is None
        self._views: dict[str, list[str]] = {}
        self.connection = duckdb.connect() if connection is None else connection
        if self._is_own:
            # It would print into notebooks and logs.
            self.connection.execute("set enable_progress_bar = false")
            if memory is not None:
                self.connection.execute(f"set memory_limit = '{memory}'")

    def sql(self, query: str, tables: Mapping[str, Sequence[str]]) -> Any:
        for name, files in tables.items():
            # Another run may have replaced the views of the user's connection.
            if not self._is_own or self._views.get(name) != list(files):
                self._views[name] = list(files)
                self.connection.read_parquet(list(files), union_by_name=True).create_view(name, replace=True)
        return self.connection.sql(query)

    def close(self) -> None:
        """Close the connection, unless the user passed it."""
        if self._is_own:
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


def where(**wanted: int | None) -> str:
    """The SQL condition that columns have these values; None does not restrict."""
    conditions = [f"{name} = {int(value)}" for name, value in wanted.items() if value is not None]
    return f" where {' and '.join(conditions)}" if conditions else ""


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
        pa = require("pyarrow", extra="runs", caller=_CALLER)
        table = self.native
        if not isinstance(table, pa.Table):
            table = table.to_arrow_table() if hasattr(table, "to_arrow_table") else table.toArrow()
        is_text = [
            pa.types.is_large_string(kind) or pa.types.is_dictionary(kind) or str(kind) == "string_view"
            for kind in table.schema.types
        ]
        fields = [
            pa.field(field.name, pa.string() if text else field.type)
            for field, text in zip(table.schema, is_text, strict=True)
        ]
        return table.cast(pa.schema(fields))

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
