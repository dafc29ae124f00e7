"""Lists of jobs: their filters, orders and pages, and the result of a change of many jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, TypedDict

import msgspec

from riverpy.job import JobRow, JobState

JobOrder: TypeAlias = Literal["id", "time", "scheduled_at", "finalized_at"]
"""The order of a list of jobs. Jobs with the same time are in the order of their ids.

- `id`: the order of the inserts.
- `scheduled_at`: when the jobs are due.
- `finalized_at`: when the jobs ended. Only jobs in final states are listed.
- `time`: the first of the listed states decides. It is `attempted_at` for `running`, `finalized_at`
  for a final state, and otherwise, or without states, `scheduled_at`.
"""


class JobFilters(TypedDict, total=False):
    """The filters of a list of jobs. A job must pass all given filters. In a filter with several
    values, except `tags_all`, one of them is enough.

    An index serves `ids`, `kinds`, `states` (with `queues` and `priorities`), `metadata` and
    `args`. With only `queues`, `priorities`, `tags_all`, `tags_any` or `error`, the server may read
    the whole table.
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
    """The job's metadata contain these keys and values. Objects and arrays may contain more."""
    args: Mapping[str, object]
    """The same of the job's args."""
    error: str
    """The job's last error contains this text. Case matters."""


class JobPage(msgspec.Struct, frozen=True):
    """One page of a list of jobs."""

    jobs: list[JobRow]
    """The jobs, in the order of the list."""
    cursor: str | None
    """The position of the last job of the page, for `after`. None: the page is empty. River in Go
    reads the same text, and writes the same text for the same job."""
    damaged: dict[int, str] = {}
    """The jobs of this page that the server cannot read: the server's errors by id. They are not in
    `jobs`."""


class JobChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The result so far of a call that changes many jobs. Each job is counted once, but running
    jobs also in `running`."""

    changed: int = 0
    """Jobs that were changed."""
    running: int = 0
    """Running jobs. `job_cancel_many` counts them in `changed`: their workers were notified. The
    other methods count them in `unchanged`."""
    unchanged: int = 0
    """Jobs that needed no change, or did not pass the filters any more."""
    missing: int = 0
    """Jobs that do not exist, or were deleted in the meantime."""
    refused: int = 0
    """Jobs that could not be changed: another job has the same unique key, another session has
    locked the job, or the server refused the change."""
    reasons: dict[int, str] = {}
    """Why jobs were refused, by id. At most 100 jobs are listed."""

    @property
    def done(self) -> int:
        """The number of jobs that were handled so far."""
        return self.changed + self.unchanged + self.missing + self.refused
