"""SQL files: find them, parse their blocks, splice the schema, number the parameters.

A query file holds blocks that start with a line `-- name: job_insert`. In a block `@queue` is a
parameter and `/* schema */` stands before the name of each table, type and function of the River
schema, so that psql can read the file as it is. `/* schema of river_job */ current_schema()::text`
is the name of the schema in which that table is, as a value. Rendered for asyncpg, a parameter
becomes `$1`, `$2`, … in the order of its first use.

`/* finite */ (x)` is the timestamp `x` between the years 1 and 9999, or null. No arithmetic on it
fails, and Python can read it: a column may hold `infinity` or a year that Python lacks.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_BLOCK = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_COMMENT_LINE = re.compile(r"^\s*--.*\n", re.MULTILINE)
_PARAMETER = re.compile(r"(?<![\w@])@([a-z_]\w*)")
_SCHEMA_MARK = re.compile(r"/\* schema \*/\s*")
_SCHEMA_OF_MARK = re.compile(r"/\* schema of (\w+) \*/ current_schema\(\)::text")
_SCHEMA_OF_TABLE = (
    "coalesce((pg_identify_object_as_address('pg_catalog.pg_class'::regclass, "
    "to_regclass('{table}'), 0)).object_names[1], current_schema()::text)"
)
"""Where the search path finds a table. Functions of the catalog's caches cost microseconds; a query
of `pg_class` costs six times as much, and has to be planned."""
_FINITE_MARK = re.compile(r"/\* finite \*/ \(((?:[^()]|\([^()]*\))*)\)")
_FIRST = "timestamptz '0001-01-02 00:00:00+00'"
_LAST = "timestamptz '9999-12-30 00:00:00+00'"


class Query(NamedTuple):
    """One statement, ready for asyncpg."""

    text: str
    parameters: tuple[str, ...]

    def arguments(self, values: dict[str, object]) -> list[object]:
        """The values in the order of the statement's parameters. A missing or unknown name is a
        KeyError."""
        if len(values) != len(self.parameters):
            raise KeyError(f"expected {self.parameters}, got {tuple(values)}")
        return [values[name] for name in self.parameters]


def sql_directory() -> Traversable:
    """Where the SQL files are: inside the installed package, or at the top of a source tree."""
    packaged = files("riverpy").joinpath("sql")
    if packaged.is_dir():
        return packaged
    return Path(__file__).resolve().parents[2] / "sql"


def quote_identifier(name: str) -> str:
    """`name` as a double-quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def quote_literal(text: str) -> str:
    """`text` as a single-quoted SQL string. It holds no backslash."""
    return "'" + text.replace("'", "''") + "'"


def splice_schema(text: str, schema: str | None) -> str:
    """Put the schema at each mark. None: the search path decides."""
    prefix = f"{quote_identifier(schema)}." if schema else ""

    def schema_of(match: re.Match[str]) -> str:
        if schema:
            return f"{quote_literal(schema)}::text"
        return _SCHEMA_OF_TABLE.format(table=match[1])

    return _SCHEMA_OF_MARK.sub(schema_of, _SCHEMA_MARK.sub(lambda _: prefix, text))


@cache
def blocks(file: str) -> dict[str, str]:
    """The named blocks of `sql/queries/<file>.sql`, without their comment lines."""
    parts = _BLOCK.split(sql_directory().joinpath("queries", f"{file}.sql").read_text("utf-8"))
    return {
        name: _FINITE_MARK.sub(_finite, _COMMENT_LINE.sub("", body)).strip().rstrip(";")
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def _finite(match: re.Match[str]) -> str:
    x = match[1]
    return f"(case when {x} < {_FIRST} then {_FIRST} when {x} > {_LAST} then {_LAST} else {x} end)"


@cache
def query(file: str, name: str, schema: str | None) -> Query:
    """The block `name` of `sql/queries/<file>.sql`, rendered for asyncpg in this schema."""
    names: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        return f"${names.setdefault(match[1], len(names) + 1)}"

    text = _PARAMETER.sub(number, splice_schema(blocks(file)[name], schema))
    return Query(text, tuple(names))
