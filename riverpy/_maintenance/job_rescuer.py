"""JobRescuer: rescues running jobs of dead clients, so that other clients can work them."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import UNSET

from riverpy._clients.observer import HeartbeatObserver
from riverpy._lifecycle import convert_base_exceptions
from riverpy._log_events import (
    JOBS_OF_UNKNOWN_KIND_SKIPPED,
    JOBS_RESCUED,
    STUCK_JOB_DECODING_FAILED,
)
from riverpy._maintenance.base import MaintenanceService
from riverpy._maintenance.batch_runner import MaintenanceBatchRunner
from riverpy._postgres.clients import (
    client_find_registered,
    client_list_heartbeats,
    client_lock_dead,
)
from riverpy._postgres.damaged_jobs import DamagedJobTracker
from riverpy._postgres.driver import UndefinedTableError, describe_error
from riverpy._postgres.job_maintenance import (
    JobRescue,
    job_get_stuck,
    job_list_running_of_clients,
    job_list_stuck_ids,
    job_rescue,
)
from riverpy._postgres.jobs import ClaimKey
from riverpy._timestamps import decode_wire_microseconds
from riverpy.job import Job, JobColumn
from riverpy.retry import choose_retry_delay

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from asyncpg import Record

    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.job_maintenance import RunningAttempt
    from riverpy._postgres.sql_files import QueueFilter
    from riverpy.worker import RegisteredWorker

HEARTBEAT_READ_INTERVAL_MAX = 30.0
HEARTBEAT_READS_PER_DEAD_AFTER = 5
"""The rescuer reads all heartbeats this number of times within `Config.dead_after`, but at least
once in `HEARTBEAT_READ_INTERVAL_MAX` seconds."""
TIMER_INACCURACY_MAX = 0.01
"""Seconds by which a timer may end too early."""
STUCK_JOB_SEARCH_INTERVAL_MAX = 30.0
STUCK_JOB_SEARCHES_PER_RESCUE_AFTER = 12
"""The rescuer searches for stuck jobs (jobs that run for too long) this number of times within
`Config.rescue_after`, but at least once in `STUCK_JOB_SEARCH_INTERVAL_MAX` seconds, which is
River's interval."""
STUCK_JOBS_PER_READ_MAX = 1_000
"""The maximum number of stuck jobs that one statement reads with all their columns."""
_RUNNING_STATES = ("running",)
RESCUE_REASON_CLIENT_DEAD = "its client is dead"
RESCUE_REASON_RAN_TOO_LONG = "it ran for too long"
"""The reason in the log for the rescue of a job whose client is not known to be dead."""
_READ_PURPOSE = "looking for jobs to rescue"


class _StuckJob(Job[Any]):
    """A job that has been running for too long. The methods of the job's worker receive this
    object."""

    __slots__ = ("running_seconds",)

    def __init__(self, row: Record) -> None:
        self._row = row
        self._metadata_updates = None
        self.running_seconds: float = row[-1]
        """Seconds since the job was claimed."""

    @property
    def claim_key(self) -> ClaimKey:
        at = decode_wire_microseconds(self._row[JobColumn.ATTEMPTED_AT])
        return ClaimKey(self.id, self.attempt, at)

    @property
    def client_id(self) -> str | None:
        return next(reversed(self.attempted_by), None)

    @property
    def is_cancelled(self) -> bool:
        """Whether `job_cancel` was called for the job."""
        try:
            return "cancel_attempted_at" in self.metadata
        except (ValueError, RecursionError):  # SQL can store metadata that Python cannot read
            return False

    def decode_args(self, worker: RegisteredWorker) -> None:
        self._args = worker.decode_args(self.encoded_args)


class RescuableAttempt(NamedTuple):
    """A job's attempt that must be ended: its client is dead, or the job runs for too long."""

    rescue: JobRescue
    dead_client_heartbeat: bytes | None
    """The last heartbeat of the attempt's client, if the client is dead. None: the job runs for too
    long."""


class JobRescuer(MaintenanceService):
    """Rescues jobs of clients whose heartbeat has stopped. If a client writes no heartbeats, the
    rescuer rescues those of its jobs that run for too long, as River does."""

    name = "job rescuer"

    def __init__(self, context: TermContext, contact_duration: Callable[[], float] | None) -> None:
        """Create the job rescuer. `contact_duration` is a function that returns for how many
        seconds this process has had contact with the server without a break. None: this client is
        not registered, because the database has no table of clients."""
        super().__init__(context)
        self._heartbeat_observer = (
            None if contact_duration is None else HeartbeatObserver(context.timer, contact_duration)
        )
        self._config = context.config
        self._dead_after_seconds = self._config.dead_after.total_seconds()
        interval = self._dead_after_seconds / HEARTBEAT_READS_PER_DEAD_AFTER
        self._heartbeat_read_interval = min(HEARTBEAT_READ_INTERVAL_MAX, interval)
        interval = self._config.rescue_age.total_seconds() / STUCK_JOB_SEARCHES_PER_RESCUE_AFTER
        self._stuck_job_search_interval = min(STUCK_JOB_SEARCH_INTERVAL_MAX, interval)
        self._next_stuck_job_search_at = 0.0
        """The time (by `Timer.seconds_since_boot`) of the next search for stuck jobs."""
        self.batch_runner: MaintenanceBatchRunner[RescuableAttempt] = MaintenanceBatchRunner(
            self,
            "rescuing jobs",
            self._rescue_attempts,
            row_key=lambda attempt: attempt.rescue.claim_key,
            row_name=lambda attempt: attempt.rescue.claim_key.id,
        )
        self.stuck_job_read_runner: MaintenanceBatchRunner[int] = MaintenanceBatchRunner(
            self,
            "reading stuck jobs",
            self._collect_stuck_attempts,
            row_key=int,
            rows_max=STUCK_JOBS_PER_READ_MAX,
        )
        self._damaged_jobs = DamagedJobTracker("finding jobs of dead clients", self.log)
        self.skipped_row_reporters.append(lambda: self._damaged_jobs.skipped_job_reports)
        self._stuck_attempts: list[RescuableAttempt] = []
        """The attempts of stuck jobs that this run has read and will end."""
        self._job_count_by_unknown_kind: Counter[str] = Counter()
        """The number of stuck jobs that this run has read, for each kind without a worker in this
        client."""
        self._logged_unknown_kinds: set[str] = set()
        """The kinds without a worker for which a warning was logged."""
        self._limited_log = self.log.with_rate_limit()

    async def run_once(self, scope: StopScope) -> float:
        """Rescue jobs of dead clients, and at a longer interval also stuck jobs. Return the seconds
        until the next run."""
        now = self.context.timer.seconds_since_boot()
        filters = (await self.context.read_queue_scope()).make_statement_filters()
        self.batch_runner.set_queue_scope(filters)
        self.stuck_job_read_runner.set_queue_scope(filters)
        seconds_until_next = await self._rescue_jobs_of_dead_clients(filters)
        if now >= self._next_stuck_job_search_at:
            await self._rescue_stuck_jobs(filters)
            self._next_stuck_job_search_at = now + self._stuck_job_search_interval
        await self.batch_runner.send_in_batches(())  # sends skipped rows whose retry is due
        return min(seconds_until_next, self._next_stuck_job_search_at - now)

    # -- jobs of dead clients, found by their heartbeats

    async def _rescue_jobs_of_dead_clients(self, filters: Sequence[QueueFilter | None]) -> float:
        """Rescue the jobs of dead clients. Return the seconds until the next read of heartbeats."""
        if self._heartbeat_observer is None or not filters:
            return self._heartbeat_read_interval
        async with self.acquire_read_connection(_READ_PURPOSE) as connection:
            self._heartbeat_observer.observe(*await client_list_heartbeats(connection, self.schema))
        stopped = self._heartbeat_observer.find_stopped_heartbeats(self._dead_after_seconds)
        if stopped.heartbeats:
            for within in filters:
                await self.batch_runner.read_and_send_pages(
                    partial(self._read_attempts_of_dead_clients, stopped.heartbeats, within)
                )
        return min(
            self._heartbeat_read_interval, stopped.seconds_until_next_stop + TIMER_INACCURACY_MAX
        )

    async def _read_attempts_of_dead_clients(
        self,
        heartbeats: Mapping[str, bytes],
        queue_filter: QueueFilter | None,
        after: RescuableAttempt | None,
        limit: int,
    ) -> list[RescuableAttempt]:
        """Read a page of running attempts of dead clients. `heartbeats` has the last heartbeat of
        each dead client."""
        async with self.acquire_read_connection(_READ_PURPOSE) as connection:

            async def read(skipped: list[int]) -> list[RunningAttempt]:
                return await job_list_running_of_clients(
                    connection,
                    self.schema,
                    client_ids=list(heartbeats),
                    queue_filter=queue_filter,
                    after_id=0 if after is None else after.rescue.claim_key.id,
                    limit=limit,
                    skipped_ids=skipped,
                )

            claims = await self._damaged_jobs.read_jobs(
                connection, self.schema, _RUNNING_STATES, read
            )
        return [
            RescuableAttempt(
                JobRescue(claim.claim_key, claim.client_id), heartbeats[claim.client_id]
            )
            for claim in claims
        ]

    # -- jobs that run for too long

    async def _rescue_stuck_jobs(self, filters: Sequence[QueueFilter | None]) -> None:
        self._job_count_by_unknown_kind.clear()
        for within in filters:
            self._stuck_attempts.clear()
            await self.stuck_job_read_runner.read_and_send_pages(
                partial(self._read_stuck_job_ids, within)
            )
            await self.batch_runner.send_in_batches(self._stuck_attempts)
        for kind, count in sorted(self._job_count_by_unknown_kind.items()):
            if kind not in self._logged_unknown_kinds:
                self._logged_unknown_kinds.add(kind)
                self.log.warning(JOBS_OF_UNKNOWN_KIND_SKIPPED, kind=kind, count=count)

    async def _read_stuck_job_ids(
        self, queue_filter: QueueFilter | None, after: int | None, limit: int
    ) -> list[int]:
        async with self.acquire_read_connection(_READ_PURPOSE) as connection:
            return await job_list_stuck_ids(
                connection,
                self.schema,
                running_longer_than=self._config.rescue_age,
                queue_filter=queue_filter,
                after_id=after or 0,
                limit=limit,
            )

    async def _collect_stuck_attempts(self, job_ids: list[int]) -> None:
        """Read all columns of stuck jobs, and add the attempts to end to `_stuck_attempts`. After
        an error, `stuck_job_read_runner` calls this method again with fewer ids, so that a damaged
        job does not prevent the read of the other jobs."""
        async with self.acquire_read_connection(_READ_PURPOSE) as connection:
            rows = await job_get_stuck(
                connection, self.schema, ids=job_ids, running_longer_than=self._config.rescue_age
            )
        jobs = await self._select_jobs_of_unregistered_clients([_StuckJob(row) for row in rows])
        for job in jobs:
            delay = self._compute_rescue_delay(job)
            if delay is not None:
                rescue = JobRescue(job.claim_key, job.client_id, delay.total_seconds())
                self._stuck_attempts.append(RescuableAttempt(rescue, None))

    async def _select_jobs_of_unregistered_clients(self, jobs: list[_StuckJob]) -> list[_StuckJob]:
        """Return the jobs of clients that are not registered. Jobs of a registered client are
        rescued only if the client is dead."""
        ids = {job.client_id for job in jobs}
        if self._heartbeat_observer is None or not ids:
            return jobs
        try:
            async with self.acquire_read_connection(_READ_PURPOSE) as connection:
                registered = await client_find_registered(
                    connection, self.schema, client_ids=list(filter(None, ids))
                )
        except UndefinedTableError:  # the table was dropped, so no client is registered
            return jobs
        return [job for job in jobs if job.client_id not in registered]

    def _compute_rescue_delay(self, job: _StuckJob) -> timedelta | None:
        """Return the delay until the job runs again, or None if the job is not rescued."""
        if job.is_cancelled:
            return timedelta(0)
        unit = self.context.workers.get(job.kind)
        if unit is None:
            self._job_count_by_unknown_kind[job.kind] += 1
            return None
        try:
            with convert_base_exceptions(f"code of the worker of {job.kind!r}"):
                job.decode_args(unit)
                own_timeout = UNSET if unit.get_job_timeout is None else unit.get_job_timeout(job)
        except Exception as error:  # the args do not fit the args class, or user code has failed
            self.log.debug(STUCK_JOB_DECODING_FAILED, job_id=job.id, error=describe_error(error))
            return self._compute_retry_delay(job, None)
        timeout = unit.resolve_timeout(self._config.job_timeout, own_timeout)
        if timeout is None or job.running_seconds < timeout.total_seconds():
            return None
        return self._compute_retry_delay(job, unit)

    def _compute_retry_delay(self, job: _StuckJob, worker: RegisteredWorker | None) -> timedelta:
        return choose_retry_delay(job, worker, self._config.retry_policy, self._limited_log)

    # -- the rescue of jobs of dead clients and of stuck jobs

    async def _rescue_attempts(self, attempts: list[RescuableAttempt]) -> None:
        """Rescue the jobs of these attempts. A job of a dead client is rescued only if the client
        has written no heartbeat after `dead_client_heartbeat`."""
        heartbeats = {
            attempt.rescue.client_id or "": attempt.dead_client_heartbeat
            for attempt in attempts
            if attempt.dead_client_heartbeat is not None
        }
        dead: Container[str | None] = ()
        async with self.batch_runner.open_transaction() as connection:
            if heartbeats and self._heartbeat_observer is not None:
                dead = await client_lock_dead(
                    connection,
                    self.schema,
                    dict(sorted(heartbeats.items())),
                    raw_server_start_time=self._heartbeat_observer.server_start,
                )
            rescues = [
                attempt.rescue
                for attempt in attempts
                if attempt.dead_client_heartbeat is None or attempt.rescue.client_id in dead
            ]
            states = await job_rescue(connection, self.schema, rescues) if rescues else {}
        if states:
            clients = {rescue.client_id for rescue in rescues if rescue.claim_key.id in states}
            self.log.warning(
                JOBS_RESCUED,
                count=len(states),
                reason=RESCUE_REASON_CLIENT_DEAD if heartbeats else RESCUE_REASON_RAN_TOO_LONG,
                states=dict(Counter(states.values())),
                client_ids=sorted(filter(None, clients)),
            )
            await self.publish_ended_jobs(states)
