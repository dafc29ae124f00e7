"""JobListMethods: the methods of a client that list and count jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from riverpy._calls.base import ClientMethods
from riverpy._calls.job_filters import check_filters
from riverpy._calls.job_page import JOB_LIMIT_DEFAULT, check_limit, plan_page
from riverpy._postgres import job_lists, jobs
from riverpy._postgres.damaged_jobs import make_damaged_jobs_error, read_jobs_in_parts
from riverpy._postgres.driver import (
    PostgresError,
    describe_error,
    is_damaged_or_untranslatable_error,
)
from riverpy._timestamps import decode_wire_microseconds
from riverpy.errors import JobDamagedError
from riverpy.job import JobColumn, JobRow
from riverpy.job_list import JobPage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from riverpy._calls.job_page import PagePlan
    from riverpy._postgres.sessions.protocols import CallerTransaction
    from riverpy.job_list import JobFilters, JobOrder

PAGE_SIZE_DEFAULT = 1_000
"""The default number of jobs that `Client.jobs` reads at a time."""
REPORTED_DAMAGED_JOBS_MAX = 100
"""The maximum number of damaged jobs that the error of `Client.jobs` contains. A damaged job is one
that the server cannot read."""


class JobListMethods(ClientMethods):
    """The methods of a client that list and count jobs."""

    async def job_list(
        self,
        *,
        order_by: JobOrder = "id",
        descending: bool = False,
        limit: int = JOB_LIMIT_DEFAULT,
        after: str | JobRow | None = None,
        tx: CallerTransaction | None = None,
        **filters: Unpack[JobFilters],
    ) -> JobPage:
        """Return one page of the jobs that pass all filters. Without a filter, the list contains
        all jobs.

        Args:
            order_by: the order, see `riverpy.JobOrder`. Default: by id.
            descending: whether the order is reversed. Default False.
            limit: the maximum number of jobs, from 1 to 10,000. Default 100.
            after: the `cursor` of an earlier page, or a job. The page starts behind this position.
                Use the same filters and order as for the earlier page. Cursors of River in Go are
                accepted too.
            tx: as for `insert`.
            filters: see `riverpy.JobFilters`.

        Raises:
            ConfigError: a filter, the order, the limit or the cursor is not allowed.
            JobDamagedError: the server cannot read the metadata or errors of a job, and a filter
                needs them. Without such a filter, the page contains the readable jobs, and its
                `damaged` contains the jobs that the server cannot read.
        """
        plan = plan_page(
            check_filters(filters),
            order_by,
            descending=descending,
            limit=limit,
            after=after,
        )
        return await self._read_page(plan, tx)

    def jobs(
        self,
        *,
        order_by: JobOrder = "id",
        descending: bool = False,
        page_size: int = PAGE_SIZE_DEFAULT,
        after: str | JobRow | None = None,
        tx: CallerTransaction | None = None,
        **filters: Unpack[JobFilters],
    ) -> AsyncGenerator[JobRow]:
        """Iterate over all jobs that pass all filters: `async for job in client.jobs(…): …`.

        The jobs are read in pages. Without `tx`, each page has its own transaction. If a job
        changes between two pages and its position in the order changes, the job may be left out or
        returned twice. With the order by id, no job is returned twice.

        Args:
            page_size: the number of jobs to read at a time, from 1 to 10,000. Default 1,000.
            order_by, descending, after, tx, filters: as for `job_list`.

        Raises:
            ConfigError: as `job_list`. It is raised by this call, before the first job.
            JobDamagedError: the server cannot read some of the jobs. It is raised after the last
                readable job.
        """
        checked = check_filters(filters)
        check_limit(page_size, "page_size")

        def plan(position: str | JobRow | None) -> PagePlan:
            return plan_page(
                checked, order_by, descending=descending, limit=page_size, after=position
            )

        return self._iterate_pages(plan(after), plan, page_size, tx)

    async def _iterate_pages(
        self,
        first: PagePlan,
        plan: Callable[[str | None], PagePlan],
        page_size: int,
        tx: CallerTransaction | None,
    ) -> AsyncGenerator[JobRow]:
        damaged: dict[int, str] = {}
        page = await self._read_page(first, tx)
        while True:
            for job in page.jobs:
                yield job
            for job_id, error in page.damaged.items():
                if len(damaged) < REPORTED_DAMAGED_JOBS_MAX:
                    damaged[job_id] = error
            if len(page.jobs) + len(page.damaged) < page_size:
                break
            page = await self._read_page(plan(page.cursor), tx)
        if damaged:
            raise make_damaged_jobs_error(damaged)

    async def job_count(
        self, *, tx: CallerTransaction | None = None, **filters: Unpack[JobFilters]
    ) -> int:
        """Return the number of jobs that pass all filters. The server reads all these jobs.

        Raises:
            ConfigError: a filter is not allowed.
        """
        checked = check_filters(filters)
        async with self._transaction(tx) as connection:
            return await job_lists.job_count(connection, self._config.schema, checked.values)

    async def _read_page(self, plan: PagePlan, tx: CallerTransaction | None) -> JobPage:
        schema = self._config.schema
        try:
            async with self._transaction(tx) as connection:
                rows = plan.sort_rows(await job_lists.job_list(connection, schema, plan.statement))
        except PostgresError as error:
            if not is_damaged_or_untranslatable_error(error):
                raise
            return await self._read_page_with_damaged_jobs(plan, tx)
        return JobPage(
            [JobRow(tuple(row)) for row in rows], plan.make_row_cursor(rows[-1]) if rows else None
        )

    async def _read_page_with_damaged_jobs(
        self, plan: PagePlan, tx: CallerTransaction | None
    ) -> JobPage:
        """Read a page that contains a damaged job, i.e. one that the server cannot read. Read the
        ids of the page first, then the jobs in smaller and smaller parts."""
        schema = self._config.schema
        try:
            async with self._transaction(tx, isolation="repeatable_read") as connection:
                places = await job_lists.job_list_positions(connection, schema, plan.statement)
                parts, damaged = await read_jobs_in_parts(
                    connection,
                    [place[0] for place in places],
                    lambda part: jobs.job_get_many(connection, schema, part),
                )
        except PostgresError as error:
            if not is_damaged_or_untranslatable_error(error):
                raise
            raise JobDamagedError(
                "the server cannot read a value that a filter on metadata or errors needs "
                f"({describe_error(error)}): leave out this filter to find the damaged job"
            ) from error
        rows = {row[JobColumn.ID]: JobRow(tuple(row)) for part in parts for row in part}
        job_id, kind, queue, time = places[-1]
        cursor = plan.make_cursor(
            job_id, kind, queue, None if time is None else decode_wire_microseconds(time)
        )
        return JobPage([rows[one[0]] for one in places if one[0] in rows], cursor, damaged)
