"""Text in queries, and numbers to and from Arrow without pandas, which takes a second to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray


def literal(text: str) -> str:
    """A text as it stands in a query, which DuckDB 1 reads to its first NUL."""
    return "'" + text.replace("'", "''").replace("\0", "' || chr(0) || '") + "'"


def where(**wanted: int | None) -> str:
    """The condition that columns have these values; None does not restrict."""
    conditions = [f"{name} = {int(value)}" for name, value in wanted.items() if value is not None]
    return f" where {' and '.join(conditions)}" if conditions else ""


def array_of(column: Any) -> NDArray[Any]:
    """A column of a result in Arrow as an array."""
    import numpy as np

    # pyarrow's own conversion imports pandas. It is left to columns with nulls.
    try:
        whole = column.combine_chunks() if len(column) and hasattr(column, "combine_chunks") else column
        found: NDArray[Any] = np.from_dlpack(whole) if len(column) else np.empty(0, np.int64)
    except TypeError:
        found = column.to_numpy()
    return found


def codes_of(column: Any) -> tuple[NDArray[np.int64], list[str]]:
    """A column of text as indices into its different values, which are in the order of their first rows."""
    import numpy as np

    if len(column) > 10_000:  # for fewer, the import of `pyarrow.compute` would take longer
        coded = column.combine_chunks().dictionary_encode()
        return array_of(coded.indices), coded.dictionary.to_pylist()
    places: dict[str, int] = {}
    numbers = (places.setdefault(text, len(places)) for text in column.to_pylist())
    return np.fromiter(numbers, np.int64, len(column)), list(places)


def arrow_of(values: Any, kind: Any) -> pa.Array:
    """An Arrow array from an array, a pair (array, which of it is no null), or a list."""
    import numpy as np
    import pyarrow as pa  # `pa.array` would import pandas, and a cast of Arrow's `pyarrow.compute`

    if isinstance(values, pa.Array):
        # Parquet stores a dictionary as text, at a tenth of the cost of converting it here.
        return values if pa.types.is_dictionary(values.type) else values.cast(kind)
    if isinstance(values, list):
        known = np.array([value is not None for value in values], dtype=bool)
        if kind == pa.string():
            encoded = [(value or "").encode() for value in values]
            ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
            buffers = [_bits(known), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
            return pa.Array.from_buffers(kind, len(values), buffers)
        values = np.array([value or 0 for value in values]), known
    given, nulls = (values[0], _bits(values[1])) if isinstance(values, tuple) else (values, None)
    data = given.astype(str(kind), copy=False)  # "int32", "int64", "double", "bool": numpy has them too
    if data is not given and (data != given).any():
        raise ValueError(f"Numbers from {given.min()} to {given.max()} do not fit into {kind}.")
    content = _bits(data) if data.dtype == bool else pa.py_buffer(np.ascontiguousarray(data))
    return pa.Array.from_buffers(kind, len(data), [nulls, content])


def _bits(flags: NDArray[Any]) -> pa.Buffer:
    import numpy as np
    import pyarrow as pa

    return pa.py_buffer(np.packbits(flags, bitorder="little"))
