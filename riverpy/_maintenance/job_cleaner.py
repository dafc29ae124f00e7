"""JobCleaner: deletes finished jobs whose retention has ended."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from riverpy._leading.queue_scope import NO_QUEUES
from riverpy._log_events import FINISHED_JOBS_DELETED
from riverpy._maintenance.base import READ_STATEMENT_TIMEOUT, MaintenanceService
from riverpy._maintenance.batch_runner import PAGE_ROWS_MIN, MaintenanceBatchRunner
from riverpy._postgres.job_maintenance import (
    EndedJobCursor,
    JobFilter,
    job_delete_ended,
    job_list_ended,
    job_list_states_to_clean,
)
from riverpy.job import JobState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import timedelta

    from riverpy._leading.queue_scope import QueueScope
    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.job_maintenance import DeletableJob
    from riverpy.config import Config, JobRetention

RUN_INTERVAL = 30.0
"""Seconds between two runs."""
READ_POSITION_RESET_INTERVAL = 3600.0
"""Seconds after which the cleaner reads the jobs of a `RetentionRule` from the beginning again, if
the last read reached the last job. An earlier run may have left out jobs that were locked, or that
another rule keeps longer."""
_FINISHED_STATES = (JobState.CANCELLED, JobState.COMPLETED, JobState.DISCARDED)


class RetentionRule(NamedTuple):
    """How long finished jobs of one state are kept. The rule may apply only to some queues or
    kinds."""

    state: JobState
    retention: timedelta
    job_filter: JobFilter | None
    """The queues and kinds of the jobs. None: all jobs of the state."""


def make_retention_rules(config: Config, queue_scope: QueueScope) -> list[RetentionRule]:
    """Return the retention rules of a configuration for the queues in `queue_scope`. Precedence:
    the retention of the job's kind, then the retention of its queue, then the default."""
    if queue_scope == NO_QUEUES:
        return []
    return [
        RetentionRule(state, retention, jobs)
        for state in _FINISHED_STATES
        for retention, jobs in _iterate_retentions(config, queue_scope, state)
    ]


def _iterate_retentions(
    config: Config, queue_scope: QueueScope, state: JobState
) -> Iterator[tuple[timedelta, JobFilter | None]]:
    """Yield each retention of jobs in this state, with the filter that selects the jobs."""
    kinds = tuple(config.retention_by_kind)
    for retention, names in _group_names_by_retention(config.retention_by_kind, state).items():
        yield (
            retention,
            JobFilter(*queue_scope.make_single_filter(), tuple(names), is_kind_allow_list=True),
        )
    for retention, names in _group_names_by_retention(config.retention_by_queue, state).items():
        if within := tuple(name for name in names if name in queue_scope):
            yield retention, JobFilter(within, True, kinds)
    retention: timedelta | None = getattr(config.retention, state.value)
    others = queue_scope.without_queues(config.retention_by_queue)
    if retention is None or others == NO_QUEUES:
        return
    jobs = JobFilter(*others.make_single_filter(), kinds)
    yield retention, None if jobs == JobFilter() else jobs


def _group_names_by_retention(
    retention_by_name: Mapping[str, JobRetention], state: JobState
) -> dict[timedelta, list[str]]:
    """Group the names of queues or kinds by their retention, because one statement handles all
    names with the same retention."""
    names: dict[timedelta, list[str]] = defaultdict(list)
    for name, kept in retention_by_name.items():
        retention: timedelta | None = getattr(kept, state.value)
        if retention is not None:
            names[retention].append(name)
    return names


class JobToDelete(NamedTuple):
    """A job to delete, and the rule that selects it."""

    retention_rule: RetentionRule
    job_id: int


class JobCleaner(MaintenanceService):
    """Deletes finished jobs in batches. If a job cannot be deleted, for example because a foreign
    key refers to it, the cleaner skips the job and retries it later in a statement of its own."""

    name = "job cleaner"

    def __init__(self, context: TermContext) -> None:
        super().__init__(context)
        self.batch_runner: MaintenanceBatchRunner[JobToDelete] = MaintenanceBatchRunner(
            self,
            "deleting ended jobs",
            self._delete_finished_jobs,
            row_key=lambda job: job.job_id,
            connection=context.long_statement_connection,
        )
        self._read_positions: dict[RetentionRule, EndedJobCursor | None] = {}
        """For each rule, the position up to which its jobs were read. A new rule starts at the
        beginning, because it may match jobs that other rules left out."""
        self._unfinished_rules: set[RetentionRule] = set()
        """The rules that may have unread jobs, because their last read did not reach the last
        job."""
        self._positions_reset_at = context.timer.seconds_since_boot()
        """The time (by `Timer.seconds_since_boot`) of the last hourly reset of the positions."""
        self._deleted_job_count = 0
        """The number of jobs that this run has deleted for the current rule."""

    async def run_once(self, scope: StopScope) -> float:
        """Delete all jobs whose retention has ended."""
        rules = make_retention_rules(self.context.config, await self.context.read_queue_scope())
        self.batch_runner.set_queue_scope(rules)
        self._reset_read_positions_hourly(rules)
        states = await self._read_states_with_expired_jobs(rules)
        for rule in rules:
            if rule.state.value in states:
                await self._delete_jobs_of_rule(rule)
        await self.batch_runner.send_in_batches(())  # sends skipped rows whose retry is due
        return self.batch_runner.seconds_until_next_run(RUN_INTERVAL)

    def _reset_read_positions_hourly(self, rules: Sequence[RetentionRule]) -> None:
        """Once an hour, set the positions to the beginning, except those of `_unfinished_rules`. In
        each run, add the positions of new rules, and remove those of rules that no longer exist."""
        now = self.context.timer.seconds_since_boot()
        cursors = self._read_positions
        if now - self._positions_reset_at >= READ_POSITION_RESET_INTERVAL:
            cursors = {rule: cursors.get(rule) for rule in self._unfinished_rules}
            self._positions_reset_at = now
        self._read_positions = {rule: cursors.get(rule) for rule in rules}
        self._unfinished_rules.intersection_update(rules)

    async def _read_states_with_expired_jobs(self, rules: Sequence[RetentionRule]) -> set[str]:
        """Return the states that may have jobs to delete. The run skips the rules of all other
        states."""
        shortest: dict[str, timedelta] = {}
        for rule in rules:
            known = shortest.get(rule.state.value, rule.retention)
            shortest[rule.state.value] = min(known, rule.retention)
        if not shortest:
            return set()
        async with self.acquire_read_connection("looking for jobs to delete") as connection:
            return await job_list_states_to_clean(connection, self.schema, shortest)

    async def _delete_jobs_of_rule(self, rule: RetentionRule) -> None:
        """Read the jobs of a rule page by page, and delete them. Reading continues at the stored
        position of the rule. But if the rule has no `job_filter` and the list of skipped jobs is
        not full, reading starts at the beginning, because nearly all jobs before the position have
        been deleted."""
        if rule.job_filter is None and not self.batch_runner.skipped_rows.is_full:
            self._read_positions[rule] = None
        self._unfinished_rules.add(rule)
        self._deleted_job_count = 0
        try:
            while True:
                limit = max(self.batch_runner.next_batch_rows_max, PAGE_ROWS_MIN)
                jobs = await self._read_finished_jobs(rule, limit)
                in_scope = [
                    JobToDelete(rule, job.cursor.job_id) for job in jobs if job.matches_filter
                ]
                if not await self.batch_runner.send_in_batches(in_scope):
                    return
                if jobs:
                    self._read_positions[rule] = jobs[-1].cursor
                if len(jobs) < limit:
                    self._unfinished_rules.discard(rule)
                    return
        finally:
            if self._deleted_job_count:
                self.log.info(
                    FINISHED_JOBS_DELETED, state=rule.state.value, count=self._deleted_job_count
                )

    async def _read_finished_jobs(self, rule: RetentionRule, limit: int) -> list[DeletableJob]:
        self.context.fence.expect_held()
        async with self.context.long_statement_connection.acquire(
            "reading ended jobs", READ_STATEMENT_TIMEOUT
        ) as connection:
            return await job_list_ended(
                connection,
                self.schema,
                state=rule.state,
                retention=rule.retention,
                job_filter=rule.job_filter or JobFilter(),
                after_cursor=self._read_positions[rule],
                limit=limit,
            )

    async def _delete_finished_jobs(self, jobs: list[JobToDelete]) -> None:
        """Delete these jobs, which all belong to the same rule."""
        rule = jobs[0].retention_rule
        async with self.batch_runner.open_transaction() as connection:
            deleted = await job_delete_ended(
                connection,
                self.schema,
                ids=[job.job_id for job in jobs],
                state=rule.state,
                retention=rule.retention,
            )
        self._deleted_job_count += len(deleted)
