"""The last errors of jobs: their first lines, and groups of jobs with the same kind and first
line."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlencode

from riverpy._attempt_errors import iterate_error_entries, parse_error_entry
from riverpy._dsn import mask_passwords
from riverpy._postgres.job_search import job_count_last_errors
from riverpy._tools.text import shorten_line
from riverpy.job import JobColumn, JobState, get_raw_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._dashboard.job_search import JobSearch
    from riverpy._postgres.driver import Transaction
    from riverpy.job import JobRow

ERROR_LINE_LENGTH_MAX = 120
"""The maximum number of characters of an error's first line in a list."""
ERROR_LENGTH_READ_MAX = 1_000
"""The maximum number of characters to read of an error. The dashboard masks passwords in this text,
and then shortens the first line to `ERROR_LINE_LENGTH_MAX`. If fewer characters were read, the text
could end before the character that shows where a password is, such as the `@` in a URL."""
ERRORS_BYTES_MAX = 16 * 1024
"""The maximum size in bytes of a job's column `errors`. When jobs are grouped by their last error,
jobs with a larger column are not read."""
GROUPED_JOBS_MAX = 1_000
"""The maximum number of jobs to group."""
GROUPS_SHOWN_MAX = 10
STATES_WITH_ERRORS = (JobState.RETRYABLE, JobState.CANCELLED, JobState.DISCARDED)
"""The states whose job lists show the last error of each job."""
STATES_WITH_ERROR_GROUPS = (JobState.RETRYABLE, JobState.DISCARDED)
"""The states whose job lists show groups of jobs with the same error."""


class ErrorGroup(NamedTuple):
    """A group of jobs with the same kind and the same first line of the last error."""

    kind: str
    line: str
    """The first line of the error, shortened. Empty: the error has no text."""
    job_count: int
    path: str
    """The path of the page that lists the jobs of this group, relative to the dashboard's mount
    path."""


class ErrorGroups(NamedTuple):
    """The result of grouping jobs by kind and last error. Only the jobs at the start of a list are
    grouped."""

    groups: list[ErrorGroup]
    """The largest groups, sorted by size."""
    left_out: int
    """The number of groups that are not in `groups`."""
    unread: int
    """The number of jobs that were not grouped, because their errors are missing or too large."""
    jobs: int
    """The number of jobs that were grouped."""


def get_last_error_line(job: JobRow) -> str:
    """Return one line for a job list: the first line of the newest error of a job, shortened and
    with masked passwords. Return an empty text if the job has no error, or if its state is not one
    of `STATES_WITH_ERRORS`."""
    if get_raw_state(job) not in STATES_WITH_ERRORS:
        return ""
    entries = list(iterate_error_entries(job.get_encoded_values()[JobColumn.ERRORS]))
    if not entries:
        return ""
    text = parse_error_entry(entries[-1]).error[:ERROR_LENGTH_READ_MAX]
    return shorten_line(_get_first_line(mask_passwords(text)), ERROR_LINE_LENGTH_MAX)


async def read_error_groups(
    tx: Transaction, schema: str | None, search: JobSearch, ids: Sequence[int]
) -> ErrorGroups:
    """Group the jobs with these ids by their kind and their last error. Jobs that the PostgreSQL
    server cannot read are left out."""
    rows = await job_count_last_errors(
        tx, schema, ids, length_max=ERROR_LENGTH_READ_MAX, bytes_max=ERRORS_BYTES_MAX
    )
    counts: dict[tuple[str, str, str], int] = {}
    for kind, error, count in rows:
        if error is not None:
            line = shorten_line(_get_first_line(mask_passwords(error)), ERROR_LINE_LENGTH_MAX)
            key = (kind, line, _find_common_prefix(line, _get_first_line(error)))
            counts[key] = counts.get(key, 0) + count
    groups = [
        ErrorGroup(kind, line, count, _make_group_path(search, kind, start))
        for (kind, line, start), count in sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    ]
    total, read = sum(row[2] for row in rows), sum(counts.values())
    left_out = max(len(groups) - GROUPS_SHOWN_MAX, 0)
    return ErrorGroups(groups[:GROUPS_SHOWN_MAX], left_out, total - read, read)


def _get_first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip()


def _find_common_prefix(line: str, whole: str) -> str:
    """Return the start that `line` and `whole` have in common. `whole` is the first line of a
    stored error. `line` is the same text as a page shows it: shortened, and with masked
    passwords."""
    length = 0
    for shown, stored in zip(line, whole, strict=False):
        if shown != stored:
            break
        length += 1
    return line[:length].strip()


def _make_group_path(search: JobSearch, kind: str, error: str) -> str:
    values = {**search.texts, "kind": kind, "error": error or search.texts.get("error", "")}
    return "/jobs?" + urlencode({key: value for key, value in values.items() if value})
