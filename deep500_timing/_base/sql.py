"""Text in queries, and numbers in their results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def where(**wanted: int | None) -> str:
    """The condition that columns have these values; None does not restrict."""
    conditions = [f"{name} = {int(value)}" for name, value in wanted.items() if value is not None]
    return f" where {' and '.join(conditions)}" if conditions else ""


def array_of(column: Any) -> NDArray[Any]:
    """A column of a result in Arrow as an array."""
    import numpy as np

    # pyarrow's own conversion imports pandas, which takes a second. It is left to columns with nulls.
    try:
        whole = column.combine_chunks() if len(column) and hasattr(column, "combine_chunks") else column
        found: NDArray[Any] = np.from_dlpack(whole) if len(column) else np.empty(0, np.int64)
    except TypeError:
        found = column.to_numpy()
    return found
