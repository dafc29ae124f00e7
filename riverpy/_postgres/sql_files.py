"""SQL files: finds them, reads their statements, inserts the name of the schema, and numbers the
parameters.

A file in `sql/queries` has SQL statements, called blocks. A line such as `-- name: job_insert`
starts a block. A block may have these marks:

- `@queue` is a parameter. For asyncpg it becomes `$1`, `$2`, … in the order of first use.
- `/* schema */` before the name of a table, type or function is replaced with River's schema.
- `/* schema of river_job */ current_schema()::text` is a text value: the name of the schema that
  has the table `river_job`.
- `/* finite */ (x)` limits the timestamp `x` to the years 1 to 9999. A column may hold `infinity`
  or a year that Python lacks, and arithmetic on those fails.
- A line `-- include: FILE.BLOCK` is replaced with the text of another block.
- A line `-- queues: column` makes two more blocks. In `NAME_in_queues`, the line selects the queues
  of the parameter `@queues`. In `NAME_except_queues`, it selects all other queues. (With one text
  for all three blocks, a generic plan would not use the index on the queue.)
- A line `-- when NAME: SQL` is a conditional part. The statement has it only if the caller names
  this part. `-- when NAME, NAME: SQL` needs one of these names. So a statement has exactly the
  conditions that its caller needs, and PostgreSQL can use the indexes for these conditions.

A block without includes and conditional parts can be run in psql without changes.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from datetime import timedelta

    from asyncpg import Record

    from riverpy._postgres.driver import Transaction

_STATEMENT_NAME_PATTERN = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_INCLUDE_PATTERN = re.compile(r"^\s*-- include: (\w+)\.(\w+)$", re.MULTILINE)
_QUEUE_CONDITION_PATTERN = re.compile(r"^\s*-- queues: (\S+)$", re.MULTILINE)
_QUEUE_CONDITION_BY_SUFFIX = {
    "": "",
    "_in_queues": r"and \1 = any(@queues::text[])",
    "_except_queues": r"and \1 <> all(@queues::text[])",
}
_CONDITIONAL_LINE_PATTERN = re.compile(r"^\s*-- when ([\w, ]+): (.*)\n", re.MULTILINE)
_COMMENT_LINE_PATTERN = re.compile(r"^\s*--(?! when [\w, ]+: ).*\n", re.MULTILINE)
_PARAMETER_PATTERN = re.compile(r"(?<![\w@])@([a-z_]\w*)")
_SCHEMA_PATTERN = re.compile(r"/\* schema \*/\s*")
_TABLE_SCHEMA_PATTERN = re.compile(r"/\* schema of (\w+) \*/ current_schema\(\)::text")
_TABLE_SCHEMA_SQL = (
    "coalesce((pg_identify_object_as_address('pg_catalog.pg_class'::regclass, "
    "to_regclass('{table}'), 0)).object_names[1], current_schema()::text)"
)
"""An SQL expression for the schema in which the search path finds a table. Its functions read the
server's caches and take microseconds. A query of `pg_class` takes six times as long."""
_FINITE_TIME_PATTERN = re.compile(r"/\* finite \*/ \(((?:[^()]|\([^()]*\))*)\)")
_TIME_MIN_SQL = "timestamptz '0001-01-02 00:00:00+00'"
_TIME_MAX_SQL = "timestamptz '9999-12-30 00:00:00+00'"
_FINITE_TIME_SQL = (
    rf"(case when \1 < {_TIME_MIN_SQL} then {_TIME_MIN_SQL} "
    rf"when \1 > {_TIME_MAX_SQL} then {_TIME_MAX_SQL} else \1 end)"
)
"""The SQL expression that replaces the mark `/* finite */ (x)`. Its value is `x`, or the nearest
supported time if Python does not support the year of `x`."""


CACHED_QUERIES_MAX = 1_000
"""The maximum number of cached statements with conditional parts. The least recently used one is
dropped."""


class Query(NamedTuple):
    """One SQL statement for asyncpg. Its methods take the values of the parameters by name."""

    text: str
    parameters: tuple[str, ...]

    def order_arguments(self, values: dict[str, object]) -> list[object]:
        """Return the values in the order of the parameters. Raise KeyError for a missing or unknown
        name."""
        if len(values) != len(self.parameters):
            raise KeyError(f"expected {self.parameters}, got {tuple(values)}")
        return [values[name] for name in self.parameters]

    async def fetch(self, connection: Transaction, /, **values: object) -> list[Record]:
        """Run the statement and return all rows."""
        return await connection.fetch(self.text, *self.order_arguments(values))

    async def fetchrow(self, connection: Transaction, /, **values: object) -> Record | None:
        """Run the statement and return the first row, or None if there is no row."""
        return await connection.fetchrow(self.text, *self.order_arguments(values))

    async def fetchval(self, connection: Transaction, /, **values: object) -> Any:
        """Run the statement and return the first column of the first row, or None if there is no
        row."""
        return await connection.fetchval(self.text, *self.order_arguments(values))

    async def execute(self, connection: Transaction, /, **values: object) -> None:
        """Run the statement."""
        await connection.execute(self.text, *self.order_arguments(values))


def sql_directory() -> Path:
    """Return the directory of the SQL files: in the installed package, or in the source tree."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "sql"
    return packaged if packaged.is_dir() else package.with_name("sql")


@contextmanager
def explain_unreadable_files() -> Generator[None]:
    """Raise ConfigError if an SQL file cannot be read in the `with` block. An OSError would be
    taken for a lost connection to the database."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"riverpy cannot read its own SQL file {error.filename}: {error.strerror}. "
            "Install riverpy again, as files and not as a zip file."
        ) from error


def quote_identifier(name: str) -> str:
    """Return `name` as a double-quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def quote_literal(text: str) -> str:
    """Return `text` as a single-quoted SQL string. The text must have no backslash."""
    return "'" + text.replace("'", "''") + "'"


def to_milliseconds(duration: timedelta) -> int:
    """Return a duration in milliseconds, the unit of the server's timeout settings."""
    return round(duration.total_seconds() * 1000)


def lists_by_field(rows: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the values of named tuples as one list for each field. `rows` must not be empty."""
    values = map(list, zip(*rows, strict=True))
    return dict(zip(rows[0]._fields, values, strict=True))


def splice_schema(text: str, schema: str | None) -> str:
    """Replace the schema marks (`/* schema */` and `/* schema of TABLE */ …`) in SQL code with the
    name of the schema. If `schema` is None, table names get no schema, so PostgreSQL uses its
    search path."""
    prefix = f"{quote_identifier(schema)}." if schema else ""

    def schema_of(match: re.Match[str]) -> str:
        if schema:
            return f"{quote_literal(schema)}::text"
        return _TABLE_SCHEMA_SQL.format(table=match[1])

    return _TABLE_SCHEMA_PATTERN.sub(schema_of, _SCHEMA_PATTERN.sub(lambda _: prefix, text))


@cache
def load_statements(file: str) -> dict[str, str]:
    """Return the blocks of `sql/queries/<file>.sql` by their names. Comment lines are left out,
    except the `-- when` lines.

    A block NAME with a line `-- queues: column` has three entries:

    - `NAME` has no condition on the queue.
    - `NAME_in_queues` selects only the queues in the parameter `queues`.
    - `NAME_except_queues` selects all queues except those in the parameter `queues`.
    """
    with explain_unreadable_files():
        text = sql_directory().joinpath("queries", f"{file}.sql").read_text("utf-8")
    parts = _STATEMENT_NAME_PATTERN.split(text)
    found: dict[str, str] = {}
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        for suffix, condition in _QUEUE_CONDITION_BY_SUFFIX.items():
            if not suffix or _QUEUE_CONDITION_PATTERN.search(body):
                found[name + suffix] = _replace_marks_and_drop_comments(
                    _QUEUE_CONDITION_PATTERN.sub(condition, body)
                )
    return found


def _replace_marks_and_drop_comments(body: str) -> str:
    """Insert the included blocks, replace the `/* finite */` marks with SQL, and drop comment lines
    and the semicolon. The schema marks and the conditional parts stay, because they depend on the
    caller."""
    body = _INCLUDE_PATTERN.sub(lambda match: load_statements(match[1])[match[2]], body)
    body = _COMMENT_LINE_PATTERN.sub("", body)
    return _FINITE_TIME_PATTERN.sub(_FINITE_TIME_SQL, body).strip().rstrip(";")


@cache
def get_query(file: str, name: str, schema: str | None) -> Query:
    """Return the block `name` of `sql/queries/<file>.sql` for this schema."""
    return _number_parameters(splice_schema(load_statements(file)[name], schema))


@lru_cache(maxsize=CACHED_QUERIES_MAX)
def get_query_with_conditional_parts(
    file: str, name: str, schema: str | None, parts: frozenset[str]
) -> Query:
    """Return the block `name` of `sql/queries/<file>.sql` for this schema. The result includes a
    conditional part of the block only if `parts` contains one of the part's names."""

    def choose(match: re.Match[str]) -> str:
        is_chosen = not parts.isdisjoint(match[1].split(", "))
        return f"{match[2]}\n" if is_chosen else ""

    # The pattern needs a line end, and the last line of a block has none.
    text = _CONDITIONAL_LINE_PATTERN.sub(choose, f"{load_statements(file)[name]}\n").strip()
    return _number_parameters(splice_schema(text, schema))


def _number_parameters(text: str) -> Query:
    """Replace the names of parameters in an SQL statement with numbers, and return the query."""
    names: dict[str, int] = {}

    def replace_with_number(match: re.Match[str]) -> str:
        return f"${names.setdefault(match[1], len(names) + 1)}"

    return Query(_PARAMETER_PATTERN.sub(replace_with_number, text), tuple(names))


class QueueFilter(NamedTuple):
    """The queues that a statement handles."""

    queues: tuple[str, ...]
    is_allow_list: bool
    """True: the statement handles `queues`. False: it handles all other queues."""


async def fetch_with_queue_filter(
    connection: Transaction,
    file: str,
    name: str,
    schema: str | None,
    queue_filter: QueueFilter | None,
    /,
    **values: object,
) -> list[Record]:
    """Run the block `name` for the queues of `queue_filter`, and return all rows. If `queue_filter`
    is None, the statement handles all queues. The block must have a line `-- queues: column`."""
    if queue_filter is not None:
        name += "_in_queues" if queue_filter.is_allow_list else "_except_queues"
        values["queues"] = queue_filter.queues
    return await get_query(file, name, schema).fetch(connection, **values)
