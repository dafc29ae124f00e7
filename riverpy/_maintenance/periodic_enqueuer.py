"""PeriodicEnqueuer: inserts the due jobs of this client's periodic jobs.

A due time is a time of a schedule. The server's clock decides which due times have come. The row of
a periodic job stores its next due time. The transaction that inserts the job of a due time also
moves the row to the next due time, if no other session has changed the row. So no due time is lost,
and none gets two jobs. A periodic job that fails keeps its due time and is retried later. Its
retries do not delay other periodic jobs.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.lowlevel
import msgspec

from riverpy._lifecycle import convert_base_exceptions
from riverpy._log_events import (
    MISSED_PERIODIC_DUE_TIMES_DROPPED,
    PERIODIC_DUE_TIME_SKIPPED,
    PERIODIC_JOB_INSERT_FAILED,
    PERIODIC_JOB_INSERTED_AGAIN,
    PERIODIC_JOB_REGISTRATION_FAILED,
    PERIODIC_JOBS_DISABLED,
    UNUSED_PERIODIC_JOBS_DELETED,
)
from riverpy._maintenance.base import MaintenanceService
from riverpy._maintenance.batch_runner import CONSECUTIVE_FAILURES_MAX, MaintenanceBatchRunner
from riverpy._maintenance.due_times import find_due_times, has_due_times
from riverpy._names import DEFAULT_DOMAIN, PERIODIC_RUN_METADATA_KEY
from riverpy._plugins import PluginLists
from riverpy._postgres.batch_sender import (
    AdaptiveBatchSize,
    BatchSender,
    BatchStatement,
    RepeatedErrorDetector,
)
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy._postgres.periodic import (
    PERIODIC_TABLE_MISSING_MESSAGE,
    NextRunUpdate,
    PeriodicInsertReason,
    PeriodicRegistration,
    PeriodicRow,
    periodic_delete_unused,
    periodic_list,
    periodic_list_scheduled,
    periodic_list_unused,
    periodic_mark_used,
    periodic_register,
    periodic_store_last_runs,
    periodic_store_next_runs,
    periodic_table_exists,
)
from riverpy._postgres.skipped_rows import SkippedRows
from riverpy._postgres.transactions import read_server_time
from riverpy.errors import InsertError, TransactionError
from riverpy.periodic import PeriodicJobsStart
from riverpy.schedules import find_next_due_time

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from riverpy._insert.inserter import Inserter
    from riverpy._insert.row import PreparedJob
    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.driver import Connection
    from riverpy.insert_opts import InsertResult
    from riverpy.job import JobRow
    from riverpy.periodic import PeriodicJob, PeriodicJobs, PeriodicJobState

PERIODIC_TABLE_READ_INTERVAL = 5.0
"""Seconds between two reads of the table of periodic jobs, if no job is due earlier."""
LOCKED_ROW_RETRY_DELAY = 1.0
"""Seconds until the retry of a row that another transaction has locked or changed."""
MISSING_TABLE_CHECK_INTERVAL = 60.0
"""Seconds between two checks whether the table of periodic jobs exists, while it is missing."""
START_HOOKS_TIMEOUT = 30.0
"""The timeout of all hooks `periodic_jobs_start` together, in seconds."""
PLANS_PER_TRANSACTION_MAX = 100
"""The maximum number of periodic jobs for which one transaction inserts jobs."""
INSERTS_PER_TRANSACTION_MAX = 1000
"""When a transaction has this number of jobs, no other periodic job is added to it."""
PLANNING_TIME_MAX = 0.05
"""When planning has taken this number of seconds, the jobs that are planned so far are inserted.
Then planning continues."""
MARK_USED_INTERVAL = 3600.0
"""Seconds between two updates that mark the rows of this client's periodic jobs as used."""
UNUSED_ROW_RETENTION = timedelta(days=30)
"""If no leader has used the row of a periodic job for this time, the row is deleted."""
RETRY_DELAY_MIN, RETRY_DELAY_MAX = 1.0, 30.0
"""The shortest and the longest delay before a periodic job that failed is retried, in seconds. The
delay doubles with each failure."""
UNIQUE_KEY_CONFLICT_ADVICE = (
    "the finished job keeps the unique key: leave completed out of UniqueOpts(by_state=…), so that "
    "a job is inserted whenever none is waiting or running"
)


class PlannedJob(NamedTuple):
    """A job to insert for a periodic job, and the time at which it is due."""

    row_id: str
    """The id of the periodic job's row."""
    due_at: datetime
    """The time in the schedule at which the job is due. If the run was requested: the time of the
    request."""
    prepared_job: PreparedJob


class PeriodicJobPlan(NamedTuple):
    """The plan for one periodic job: the jobs to insert, and the change of its row."""

    row_change: NextRunUpdate
    jobs: list[PlannedJob]
    next_job_error: Exception | None = None
    """Why the job of the next due time cannot be inserted. None: there was no error."""


class NewPeriodicJob(NamedTuple):
    """A periodic job to register, and its row."""

    row: PeriodicRegistration
    periodic_job: PeriodicJob


class PeriodicEnqueuer(MaintenanceService):
    """Inserts jobs at the due times of the client's periodic jobs, during one term (the client's
    time as leader)."""

    name = "periodic enqueuer"

    def __init__(self, context: TermContext, jobs: PeriodicJobs, inserter: Inserter) -> None:
        super().__init__(context)
        self._jobs, self._inserter = jobs, inserter
        config = context.config
        self._row_id_suffix = "" if config.domain == DEFAULT_DOMAIN else f"@{config.domain}"
        self._start_hooks = PluginLists(config.plugins, config.hooks).periodic_jobs_start_hooks
        jobs.wake = self.wake
        self._registered_jobs: dict[str, PeriodicJob] = {}
        """The periodic jobs by the id of their row. The row's id contains the domain, since two
        domains may use the same id for a periodic job."""
        self._postponed_rows: SkippedRows[str] = SkippedRows(
            retry_delay_min=RETRY_DELAY_MIN,
            retry_delay_max=RETRY_DELAY_MAX,
            read_clock=context.timer.seconds_since_boot,
        )
        """The periodic jobs that failed and wait for a retry, by the id of their row."""
        self._row_ids_with_skip_warning: set[str] = set()
        """The row ids of the periodic jobs for which `periodic due time skipped` was logged as a
        warning in this term. Each row gets only one such warning."""
        self._moved_row_count = 0
        """The number of rows that this run has changed. If there are any, the next run starts at
        once."""
        self._error_detector = RepeatedErrorDetector()
        self._plan_sender: BatchSender[PeriodicJobPlan] = BatchSender(
            BatchStatement(
                self._execute_plans,
                get_row_id=lambda plan: plan.row_change.id,
                is_row_error=self._is_caused_by_row,
            ),
            batch_size=AdaptiveBatchSize(
                PLANS_PER_TRANSACTION_MAX, context.fence.transaction_timeout.total_seconds()
            ),
            skipped_rows=None,
            on_row_skipped=lambda plan, error: self._postpone_row(plan.row_change.id, error),
            failures_before_pause=CONSECUTIVE_FAILURES_MAX,
        )
        self._registration_runner: MaintenanceBatchRunner[NewPeriodicJob] = MaintenanceBatchRunner(
            self, "registering periodic jobs", self._register_rows, row_key=lambda new: new.row.id
        )
        self._mark_used_runner: MaintenanceBatchRunner[str] = MaintenanceBatchRunner(
            self, "marking periodic jobs as used", self._mark_rows_used, row_key=str
        )
        self._deletion_runner: MaintenanceBatchRunner[str] = MaintenanceBatchRunner(
            self, "deleting unused periodic jobs", self._delete_unused_rows, row_key=str
        )
        self._has_periodic_table = False
        self._is_missing_table_logged = False
        self._marked_used_at: float | None = None

    async def prepare(self) -> None:
        """Call the hooks `periodic_jobs_start`, and register the periodic jobs. Raise an error if a
        hook fails, if the hooks take longer than 30 s, or if the table of periodic jobs cannot be
        read."""
        await self._find_periodic_table_or_log_missing()
        if self._start_hooks:
            states = await self._read_periodic_job_states() if self._has_periodic_table else {}
            start = PeriodicJobsStart(jobs=self._jobs, states=states)
            reason = f"the hook periodic_jobs_start took longer than {START_HOOKS_TIMEOUT:g} s"
            with (
                anyio.fail_after(START_HOOKS_TIMEOUT, reason=reason),
                convert_base_exceptions("the hook periodic_jobs_start", is_awaited=True),
            ):
                for hook in self._start_hooks:
                    await hook.periodic_jobs_start(start)
        if self._has_periodic_table:
            try:
                await self._register_new_jobs()
            except DATABASE_ERRORS as error:  # the next run registers the jobs
                self.log.debug(PERIODIC_JOB_REGISTRATION_FAILED, error=describe_error(error))

    async def run_once(self, scope: StopScope) -> float:
        """Insert the jobs that are due. Return the seconds until the next run."""
        if not await self._find_periodic_table_or_log_missing():
            return MISSING_TABLE_CHECK_INTERVAL
        await self._register_new_jobs()
        await self._mark_used_and_delete_unused_rows_hourly()
        if not self._registered_jobs:
            return PERIODIC_TABLE_READ_INTERVAL
        async with self.acquire_read_connection("looking for due periodic jobs") as connection:
            rows = await periodic_list_scheduled(
                connection, self.schema, list(self._registered_jobs)
            )
        self._moved_row_count = 0
        self._plan_sender.discard_unsent_rows()
        await self._insert_due_jobs(rows)
        return 0.0 if self._moved_row_count else self._seconds_until_next_run(rows)

    async def _insert_due_jobs(self, rows: Sequence[PeriodicRow]) -> None:
        """Plan and insert the due jobs in small parts, so that planning does not block the event
        loop and no transaction stays open for long. Periodic jobs that failed before come last."""
        count, began = 0, self.context.timer.seconds_since_boot()
        for row in sorted(rows, key=lambda row: row.id in self._postponed_rows):
            if (plan := self._make_plan(row)) is not None:
                self._plan_sender.add_row(plan)
                count += len(plan.jobs)
            is_long = self.context.timer.seconds_since_boot() - began >= PLANNING_TIME_MAX
            is_full = len(self._plan_sender) >= PLANS_PER_TRANSACTION_MAX
            if is_long or is_full or count >= INSERTS_PER_TRANSACTION_MAX:
                await self._plan_sender.send_all_due_rows()
                await anyio.lowlevel.checkpoint()
                count, began = 0, self.context.timer.seconds_since_boot()
        await self._plan_sender.send_all_due_rows()

    def _seconds_until_next_run(self, rows: Sequence[PeriodicRow]) -> float:
        seconds = [PERIODIC_TABLE_READ_INTERVAL]
        for row in rows:
            if held := self._postponed_rows.seconds_until_retry(row.id):
                seconds.append(held)
            elif row.run_requested_at is not None:
                seconds.append(LOCKED_ROW_RETRY_DELAY)
            elif row.seconds_until_next_run is not None:
                seconds.append(
                    row.seconds_until_next_run
                    if row.seconds_until_next_run > 0
                    else LOCKED_ROW_RETRY_DELAY
                )
        return min(seconds)

    # -- the table of periodic jobs

    async def _find_periodic_table_or_log_missing(self) -> bool:
        if not self._has_periodic_table:
            async with self.acquire_read_connection(
                "looking for the table of periodic jobs"
            ) as connection:
                self._has_periodic_table = await periodic_table_exists(connection, self.schema)
        if not self._has_periodic_table and self._jobs and not self._is_missing_table_logged:
            self._is_missing_table_logged = True
            self.log.error(
                PERIODIC_JOBS_DISABLED,
                reason=PERIODIC_TABLE_MISSING_MESSAGE,
                periodic_job_ids=[j.id for j in self._jobs],
            )
        return self._has_periodic_table

    async def _read_periodic_job_states(self) -> dict[str, PeriodicJobState]:
        """Return the stored states of this domain's periodic jobs, by the id of the job."""
        async with self.acquire_read_connection("reading the periodic jobs") as connection:
            states = await periodic_list(connection, self.schema)
        own_states: dict[str, PeriodicJobState] = {}
        for state in states:
            job_id, _, domain = state.id.partition("@")
            if (domain or DEFAULT_DOMAIN) == self.context.config.domain:
                own_states[job_id] = msgspec.structs.replace(state, id=job_id)
        return own_states

    @property
    def error_by_row_id(self) -> dict[str, str]:
        """The errors of the periodic jobs that failed and wait for a retry, by the id of the
        row."""
        return {entry.row: entry.error for entry in self._postponed_rows.rows}

    def _make_row_id(self, periodic_job_id: str) -> str:
        return periodic_job_id + self._row_id_suffix

    async def _register_new_jobs(self) -> None:
        """Store rows for new periodic jobs, and forget periodic jobs that the program has
        removed."""
        jobs = self._registered_jobs.items()
        self._registered_jobs = {key: job for key, job in jobs if self._jobs.get(job.id) is job}
        new = [
            job
            for job in self._jobs
            if (row_id := self._make_row_id(job.id)) not in self._registered_jobs
            and not self._postponed_rows.seconds_until_retry(row_id)
        ]
        if not new:
            return
        async with self.acquire_read_connection("registering periodic jobs") as connection:
            now = await read_server_time(connection)
        await self._registration_runner.send_in_batches(
            NewPeriodicJob(registration, job)
            for job in new
            if (registration := self._make_registration(job, now)) is not None
        )

    def _make_registration(self, job: PeriodicJob, now: datetime) -> PeriodicRegistration | None:
        row_id = self._make_row_id(job.id)
        try:
            return PeriodicRegistration(
                row_id, job.schedule_text, find_next_due_time(job.schedule, now)
            )
        except Exception as error:  # a user's schedule may raise any error
            self._postpone_row(row_id, error)
            return None

    async def _register_rows(self, new_jobs: list[NewPeriodicJob]) -> None:
        jobs = {row.id: job for row, job in new_jobs}

        def select_row_ids(run_on_start: str) -> list[str]:
            return [row_id for row_id, job in jobs.items() if job.run_on_start == run_on_start]

        async with self._registration_runner.open_transaction() as connection:
            done = await periodic_register(
                connection,
                self.schema,
                [row for row, _ in new_jobs],
                run_if_new_ids=select_row_ids("first_registration"),
                run_now_ids=select_row_ids("each_term"),
            )
        self._registered_jobs.update({row_id: jobs[row_id] for row_id in done})

    async def _mark_used_and_delete_unused_rows_hourly(self) -> None:
        """Once an hour, mark the rows of this client's periodic jobs as used, and delete unused
        rows."""
        now = self.context.timer.seconds_since_boot()
        if self._marked_used_at is not None and now - self._marked_used_at < MARK_USED_INTERVAL:
            return
        await self._mark_used_runner.send_in_batches(list(self._registered_jobs))
        await self._deletion_runner.read_and_send_pages(self._read_unused_row_ids)
        self._marked_used_at = now

    async def _mark_rows_used(self, row_ids: list[str]) -> None:
        async with self._mark_used_runner.open_transaction() as connection:
            await periodic_mark_used(connection, self.schema, row_ids)

    async def _read_unused_row_ids(self, after: str | None, limit: int) -> list[str]:
        async with self.acquire_read_connection("looking for unused periodic jobs") as connection:
            return await periodic_list_unused(
                connection,
                self.schema,
                used_ids=list(self._registered_jobs),
                unused_for=UNUSED_ROW_RETENTION,
                after_id=after or "",
                limit=limit,
            )

    async def _delete_unused_rows(self, row_ids: list[str]) -> None:
        async with self._deletion_runner.open_transaction() as connection:
            deleted = await periodic_delete_unused(
                connection, self.schema, ids=row_ids, unused_for=UNUSED_ROW_RETENTION
            )
        if deleted:
            self.log.info(UNUSED_PERIODIC_JOBS_DELETED, periodic_job_ids=sorted(deleted))

    # -- planning the jobs that are due

    def _make_plan(self, row: PeriodicRow) -> PeriodicJobPlan | None:
        """Return the plan for a periodic job, and call the user's code for it. None: no job is due
        and no run was requested, or the periodic job has failed and waits for a retry."""
        job, due_at = self._registered_jobs[row.id], row.next_run_at
        if self._postponed_rows.seconds_until_retry(row.id):
            return None
        try:
            if row.run_requested_at is not None:
                plan = self._plan_requested_run(job, row, row.run_requested_at)
            elif due_at is not None and due_at <= row.read_at:
                plan = self._plan_jobs_of_due_times(job, row, due_at)
            else:
                return None
        except Exception as error:
            self._postpone_row(row.id, error)
            return None
        if plan.next_job_error is not None and plan.row_change.new_next_run_at == row.next_run_at:
            self._postpone_row(row.id, plan.next_job_error)
            return None
        return plan

    def _plan_requested_run(
        self, job: PeriodicJob, row: PeriodicRow, time: datetime
    ) -> PeriodicJobPlan:
        """Plan a run that an operator or `run_on_start` requested. The due times until now are
        planned in the next call of `run_once`."""
        run = row.find_reason_of_requested_run(time)
        jobs = self._make_planned_jobs(job, row, time, run)
        return PeriodicJobPlan(_make_next_run_update(row, row.next_run_at), jobs)

    def _plan_jobs_of_due_times(
        self, job: PeriodicJob, row: PeriodicRow, due_at: datetime
    ) -> PeriodicJobPlan:
        """Plan the jobs to insert for the due times of a periodic job, and the change of its row.
        Stop at the first due time whose job cannot be made. The row stays at this due time, and
        the plan contains the error."""
        due = find_due_times(job.schedule, job.missed, due_at, row.read_at)
        if row.is_paused:
            return PeriodicJobPlan(_make_next_run_update(row, due.next_time), [])
        if due.has_dropped_times:
            self.log.warning(MISSED_PERIODIC_DUE_TIMES_DROPPED, periodic_job_id=job.id)
        jobs: list[PlannedJob] = []
        for due_at in due.times_with_job:
            if row.resumed_at is not None and due_at <= row.resumed_at:
                continue
            try:
                jobs += self._make_planned_jobs(
                    job, row, due_at, PeriodicInsertReason("schedule", due_at)
                )
            except Exception as error:
                return PeriodicJobPlan(_make_next_run_update(row, due_at), jobs, error)
        return PeriodicJobPlan(_make_next_run_update(row, due.next_time), jobs)

    def _make_planned_jobs(
        self, job: PeriodicJob, row: PeriodicRow, due_at: datetime, run: PeriodicInsertReason | None
    ) -> list[PlannedJob]:
        """Return a list with one job, for a due time or a requested run. The list is empty if the
        user's function `constructor` (see `PeriodicJob`) returns None. `run` says why the job is
        inserted. It is stored in the job's metadata. None: the reason is not known."""
        constructed = job.construct()
        if constructed is None:
            return []
        args, opts = constructed
        metadata = {**(opts.metadata or {}), "periodic": True, "river:periodic_job_id": job.id}
        if run is not None:
            metadata[PERIODIC_RUN_METADATA_KEY] = msgspec.to_builtins(run)
        opts = msgspec.structs.replace(opts, metadata=metadata)
        prepared = self._inserter.prepare_periodic_job(args, opts, due_at=due_at)
        return [PlannedJob(row.id, due_at, prepared)]

    def _postpone_row(self, row_id: str, error: Exception) -> None:
        """Postpone the retry of a periodic job that failed, and log the failure. The first failure
        is logged at level error, later ones at level debug. An error of the database is logged
        without a traceback."""
        is_first = row_id not in self._postponed_rows
        self._postponed_rows.add_failure(row_id, row_id, error, 0.0)
        log = self.log.error if is_first else self.log.debug
        log(
            PERIODIC_JOB_INSERT_FAILED,
            periodic_job_id=row_id,
            error=describe_error(error),
            retry_in=round(self._postponed_rows.seconds_until_retry(row_id), 3),
            exc_info=error if is_first and not isinstance(error, DATABASE_ERRORS) else None,
        )

    # -- the transactions that insert jobs

    def _is_caused_by_row(self, error: Exception) -> bool:
        """Return whether a row may have caused the error. This is always so for an InsertError. Any
        other error is recorded and checked by the `RepeatedErrorDetector`."""
        return isinstance(
            error, InsertError
        ) or self._error_detector.record_and_check_if_caused_by_row(error)

    async def _execute_plans(self, plans: list[PeriodicJobPlan]) -> None:
        done = await self._update_rows_and_insert_jobs(plans)
        self._moved_row_count += len(done)
        for plan in plans:
            row_id = plan.row_change.id
            if row_id not in done:
                continue
            if plan.next_job_error is not None:
                self._postpone_row(row_id, plan.next_job_error)
            elif row_id in self._postponed_rows:
                self._postponed_rows.remove_row(row_id)
                self.log.info(PERIODIC_JOB_INSERTED_AGAIN, periodic_job_id=row_id)

    async def _update_rows_and_insert_jobs(self, plans: Sequence[PeriodicJobPlan]) -> set[str]:
        """Execute plans in one transaction: store the next due time in the row of each periodic
        job, and insert the jobs that are due. Return the ids of the rows that were changed. If
        another session has changed or locked a row, the plan for this row is left out."""
        changes = [plan.row_change for plan in plans]
        async with self.context.fence.transaction(
            self.context.connection, "inserting periodic jobs"
        ) as connection:
            done = await periodic_store_next_runs(connection, self.schema, changes)
            jobs = [job for plan in plans if plan.row_change.id in done for job in plan.jobs]
            prepared = [job.prepared_job for job in jobs]
            results = await self._insert_prepared_jobs(prepared, connection) if prepared else []
            inserted = {
                job.row_id: job.due_at
                for job, result in zip(jobs, results, strict=True)
                if not result.unique_skipped_as_duplicate
            }
            if inserted:
                await periodic_store_last_runs(connection, self.schema, inserted)
        for job, result in zip(jobs, results, strict=True):
            if result.unique_skipped_as_duplicate:
                self._log_skipped_due_time(job.row_id, job.due_at, result.job)
        return done

    def _log_skipped_due_time(self, row_id: str, due_at: datetime, existing: JobRow) -> None:
        """Log that no job was inserted for a due time, because the job `existing` has the same
        unique key. The level is debug. But if `existing` has finished and belongs to an earlier due
        time, no job is inserted until `existing` is deleted from the table. Then the first entry
        for the row is a warning."""
        job = self._registered_jobs[row_id]
        has_ended = existing.finalized_at is not None
        is_lost = has_ended and _has_due_time_between(job, existing.scheduled_at, due_at)
        log = self.log.debug
        if is_lost and row_id not in self._row_ids_with_skip_warning:
            self._row_ids_with_skip_warning.add(row_id)
            log = self.log.warning
        log(
            PERIODIC_DUE_TIME_SKIPPED,
            periodic_job_id=job.id,
            due_at=due_at.isoformat(),
            job_id=existing.id,
            state=existing.state.value,
            advice=UNIQUE_KEY_CONFLICT_ADVICE if is_lost else None,
        )

    async def _insert_prepared_jobs(
        self, jobs: list[PreparedJob], connection: Connection
    ) -> list[InsertResult]:
        try:
            return await self._inserter.insert_prepared_jobs(jobs, tx=connection)
        except TransactionError as error:
            # The transaction is not open any more. No user code can have ended it, so the
            # connection was lost.
            raise ConnectionError(describe_error(error.__cause__ or error)) from error


def _make_next_run_update(row: PeriodicRow, next_run_at: datetime | None) -> NextRunUpdate:
    return NextRunUpdate(row.id, row.next_run_at, row.run_requested_at, row.is_paused, next_run_at)


def _has_due_time_between(job: PeriodicJob, after: datetime, until: datetime) -> bool:
    """Return whether the schedule has a due time that is later than `after` and not later than
    `until`."""
    try:
        return has_due_times(job.schedule, after, until, 1)
    except Exception:  # a user's schedule may raise an error if it gets a past time
        return False
