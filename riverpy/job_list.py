"""Types for lists of jobs (filters, orders, pages), and for the result of a call that changes many
jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, TypedDict

import msgspec

from riverpy.job import JobRow, JobState

JobOrder: TypeAlias = Literal["id", "time", "scheduled_at", "finalized_at"]
"""The column by which a list of jobs is ordered. Jobs with the same time are ordered by id.

- `id`: the order of the inserts.
- `scheduled_at`: the time at which the jobs are due.
- `finalized_at`: the time at which the jobs ended. Only jobs in final states are listed.
- `time`: depends on the first state in the filter `states`. It is `attempted_at` for `running`,
  `finalized_at` for a final state, and `scheduled_at` for other states or without that filter.
"""


class JobFilters(TypedDict, total=False):
    """Selects the jobs of a list. A job must match all filters that are set. If a filter is a list
    of values, the job must have one of these values; for `tags_all` it must have all of them.

    The server uses an index if one of the filters `ids`, `kinds`, `states`, `metadata` and `args`
    is set. The index for `states` also helps with `queues` and `priorities`. If only other filters
    are set, for example only `queues`, the server may read the whole table.
    """

    ids: Sequence[int]
    kinds: Sequence[str]
    queues: Sequence[str]
    priorities: Sequence[int]
    """Numbers from 1 to 4."""
    states: Sequence[JobState | str]
    tags_all: Sequence[str]
    """The job has all of these tags."""
    tags_any: Sequence[str]
    """The job has at least one of these tags."""
    metadata: Mapping[str, object]
    """The job's metadata contain these keys and values. The metadata, and the objects and arrays in
    them, may contain more."""
    args: Mapping[str, object]
    """The job's args contain these keys and values. The args, and the objects and arrays in them,
    may contain more."""
    error: str
    """The job's last error contains this text. Case matters."""


class JobPage(msgspec.Struct, frozen=True):
    """One page of a list of jobs."""

    jobs: list[JobRow]
    """The jobs, in the order of the list."""
    cursor: str | None
    """The position of the last job of the page. Pass it as `after` to get the next page. None: the
    page is empty. River in Go creates the same cursor for the same job."""
    damaged: dict[int, str] = {}
    """The jobs of this page that PostgreSQL cannot read, because their data is damaged:
    PostgreSQL's error text for each job, by job id. These jobs are not in `jobs`."""


class JobChanges(msgspec.Struct, frozen=True, kw_only=True):
    """How many jobs a call such as `job_cancel_many` has changed. The call passes the numbers so
    far to `on_progress`, and returns the final numbers.

    Each handled job is counted in one of `changed`, `unchanged`, `missing` and `refused`. Running
    jobs are also counted in `running`."""

    changed: int = 0
    """Jobs that were changed."""
    running: int = 0
    """Jobs that were running. `job_cancel_many` also counts them in `changed`, because it notifies
    their clients. Other calls also count them in `unchanged`."""
    unchanged: int = 0
    """Jobs that needed no change, or did not match the filters any more."""
    missing: int = 0
    """Jobs that do not exist, or were deleted during the call."""
    refused: int = 0
    """Jobs that could not be changed: another job has the same unique key, another session has
    locked the job, or the server refused the change."""
    reasons: dict[int, str] = {}
    """The reason for each job in `refused`, by job id. At most 100 jobs are listed."""

    @property
    def done(self) -> int:
        """The number of jobs that the call has handled: changed or not."""
        return self.changed + self.unchanged + self.missing + self.refused
