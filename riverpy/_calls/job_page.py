"""PagePlan: the SQL statement for one page of a list of jobs, and the order of its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from riverpy._calls.job_cursor import (
    CursorSqlParameters,
    JobPosition,
    decode_cursor,
    encode_cursor,
    format_postgres_time,
)
from riverpy._names import validate_literal_value
from riverpy._postgres.job_lists import PageStatement
from riverpy._postgres.jobs import FINAL_STATES
from riverpy._timestamps import decode_wire_microseconds
from riverpy.errors import ConfigError
from riverpy.job import JobColumn, JobRow
from riverpy.job_list import JobOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._calls.job_filters import CheckedFilters
    from riverpy._postgres.job_lists import PageSortOrder

JOB_LIMIT_DEFAULT = 100
JOB_LIMIT_MAX = 10_000
"""The maximum number of jobs of a page. River has the same limit."""

_INDEXED_FILTERS = {"ids", "kinds", "states"}
"""The filters that an index supports. For these the query planner can estimate the number of
jobs."""
_COLUMN_BY_TIME_FIELD = {
    "scheduled_at": JobColumn.SCHEDULED_AT,
    "attempted_at": JobColumn.ATTEMPTED_AT,
    "finalized_at": JobColumn.FINALIZED_AT,
}


class PagePlan(NamedTuple):
    """The plan for one page of a list of jobs: its order and its SQL statement."""

    order: JobOrder
    descending: bool
    time_field: str | None
    """The time column by which the list is ordered. None: the order is by id."""
    statement: PageStatement

    def sort_rows(self, rows: list[Any]) -> list[Any]:
        """Return the rows in the order of the list. Each row must contain all columns."""
        return sorted(rows, key=self._sort_key, reverse=self.descending)

    def _sort_key(self, row: Sequence[Any]) -> tuple[bool, int, int]:
        time = self.get_sort_time(row)
        return time is None, time or 0, row[JobColumn.ID]

    def get_sort_time(self, row: Sequence[Any]) -> int | None:
        """Return the time by which a row is sorted, in microseconds since 2000. None: the row has
        no such time, or the list is ordered by id."""
        raw = None if self.time_field is None else row[_COLUMN_BY_TIME_FIELD[self.time_field]]
        return None if raw is None else decode_wire_microseconds(raw)

    def make_row_cursor(self, row: Sequence[Any]) -> str:
        """Return the cursor for the position of a row. The row must contain all columns."""
        kind, queue = row[JobColumn.KIND], row[JobColumn.QUEUE]
        return self.make_cursor(row[JobColumn.ID], kind, queue, self.get_sort_time(row))

    def make_cursor(self, job_id: int, kind: str, queue: str, time: int | None) -> str:
        """Return the cursor for the position of a job."""
        return encode_cursor(JobPosition(self.order, job_id, kind, queue, time))


def check_limit(limit: int, name: str = "limit") -> None:
    """Raise ConfigError unless the limit is a whole number from 1 to 10,000."""
    check_whole_number(limit, name, JOB_LIMIT_MAX)


def check_whole_number(value: int, name: str, maximum: int) -> None:
    """Raise ConfigError unless the value is a whole number from 1 to `maximum`."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_integer or not 1 <= value <= maximum:
        raise ConfigError(f"{name} must be a whole number from 1 to {maximum:,}, got {value!r}")


def check_job_id(job_id: int) -> None:
    """Raise ConfigError if the job id is not an integer of 64 bits."""
    is_integer = isinstance(job_id, int) and not isinstance(job_id, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_integer or not -(2**63) <= job_id < 2**63:
        raise ConfigError(f"job_id must be a whole number of 64 bits, got {job_id!r}")


def plan_page(
    filters: CheckedFilters,
    order: JobOrder,
    *,
    descending: bool,
    limit: int,
    after: str | JobRow | None,
) -> PagePlan:
    """Return the plan for the page that starts behind `after`, a cursor or a job. If `after` is
    None, return the plan for the first page.

    Raises:
        ConfigError: the order, the limit or the cursor is not allowed.
    """
    validate_literal_value("order_by", order, JobOrder)
    check_limit(limit)
    states = filters.states
    field = _choose_time_field(order, states)
    values = {**filters.values, "limit": limit}
    direction = "descending" if descending else "ascending"
    parts = {*filters.values, direction}
    block: PageSortOrder = "by_id" if field is None else "by_time"
    if field == "finalized_at" and FINAL_STATES.issuperset(states):
        block = "by_finalized_at"
        values["states"] = states or sorted(FINAL_STATES)
        parts.discard("states")
    elif field is not None:
        parts.add(f"by_{field}")
    if _should_hide_limit_from_planner(
        filters, is_first_by_id=field is None and not descending and after is None
    ):
        parts.add("fenced")
    if after is not None:
        cursor = _get_start_position(after, order, field)
        values |= {"after_id": cursor.id, "after_time": cursor.sort_time}
        may_lack_time = field == "attempted_at" or (field, block) == ("finalized_at", "by_time")
        if field is not None and cursor.sort_time is not None:
            parts.add(f"after_time_{direction}")
        else:
            parts.add(f"after_{'empty' if may_lack_time else 'id'}_{direction}")
    return PagePlan(order, descending, field, PageStatement(block, frozenset(parts), values))


def _get_start_position(
    after: str | JobRow, order: JobOrder, time_field: str | None
) -> CursorSqlParameters:
    """Return the position of `after`, a cursor or a job. The page starts behind this position."""
    if not isinstance(after, JobRow):
        return decode_cursor(after, order)
    raw = (
        None
        if time_field is None
        else after.get_encoded_values()[_COLUMN_BY_TIME_FIELD[time_field]]
    )
    return CursorSqlParameters(
        after.id, None if raw is None else format_postgres_time(decode_wire_microseconds(raw))
    )


def _should_hide_limit_from_planner(filters: CheckedFilters, *, is_first_by_id: bool) -> bool:
    """Return whether the statement must hide the limit of the page from the query planner.

    If the planner sees the limit, it may scan all old jobs first, because of two wrong estimates.
    The planner has no statistics on the content of metadata, args and errors, so it expects that
    many jobs pass a filter on this content. It also expects that the jobs of each state are spread
    over the whole table, but jobs that wait or run are among the newest. The second estimate does
    no harm on a page behind a cursor.
    """
    given = filters.values
    if not given.keys().isdisjoint({"metadata", "args"}):
        return True
    if "error" in given and not given.keys().isdisjoint(_INDEXED_FILTERS):
        return True
    return is_first_by_id and bool(filters.states) and FINAL_STATES.isdisjoint(filters.states)


def _choose_time_field(order: JobOrder, states: Sequence[str]) -> str | None:
    """Return the time column by which a list is ordered. None: the list is ordered by id. For the
    order `time`, the column depends on the first state of the filter `states`. Without this filter,
    the column is `scheduled_at`.

    Raises:
        ConfigError: the order is `finalized_at`, and one of `states` is not a final state.
    """
    if order == "id":
        return None
    if order == "finalized_at":
        if unfinished := [state for state in states if state not in FINAL_STATES]:
            raise ConfigError(
                "order_by='finalized_at' takes only the states cancelled, completed and discarded, "
                f"got {', '.join(unfinished)}: such jobs have not ended; use order_by='time'"
            )
        return order
    if order == "scheduled_at" or not states:
        return "scheduled_at"
    if states[0] in FINAL_STATES:
        return "finalized_at"
    return "attempted_at" if states[0] == "running" else "scheduled_at"
