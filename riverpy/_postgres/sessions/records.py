"""Record: a row of a result that has the methods of asyncpg's Record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from collections.abc import Iterator, KeysView, Mapping


class Record:
    """A row of a result. Its values are read by position, by slice, or by the name of a column."""

    __slots__ = ("_positions", "_values")

    def __init__(self, values: tuple[Any, ...], positions: Mapping[str, int]) -> None:
        """Create a row. `positions` maps column names to positions, and all rows share it."""
        self._values = values
        self._positions = positions

    @overload
    def __getitem__(self, key: int | str) -> Any: ...

    @overload
    def __getitem__(self, key: slice) -> tuple[Any, ...]: ...

    def __getitem__(self, key: int | str | slice) -> Any:
        return self._values[self._positions[key] if isinstance(key, str) else key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={self._values[at]!r}" for name, at in self._positions.items())
        return f"<Record {values}>"

    def keys(self) -> KeysView[str]:
        """Return the names of the columns. This method makes `**record` possible."""
        return self._positions.keys()


def make_records(columns: list[str], rows: list[tuple[Any, ...]]) -> list[Record]:
    """Return the rows of a result as records. `columns` has the names of the columns."""
    positions = {name: at for at, name in enumerate(columns)}
    return [Record(row, positions) for row in rows]
