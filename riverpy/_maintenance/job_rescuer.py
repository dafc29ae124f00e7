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
from riverpy._maintenance.batches import Batches
from riverpy._postgres.clients import client_heartbeats, client_lock_dead, client_registered
from riverpy._postgres.damaged_jobs import DamagedJobTracker
from riverpy._postgres.driver import UndefinedTableError, describe_error
from riverpy._postgres.job_maintenance import (
    Rescue,
    job_rescue,
    job_running_of,
    job_stuck,
    job_stuck_rows,
)
from riverpy._postgres.jobs import ClaimKey
from riverpy._timestamps import wire_timestamp
from riverpy.job import Job, JobColumn
from riverpy.retry import retry_delay

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from asyncpg import Record

    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.job_maintenance import RunningClaim
    from riverpy._postgres.sql_files import QueueFilter
    from riverpy.worker import WorkUnit

INTERVAL_MAX = 30.0
INTERVAL_SHARE_OF_DEAD_AFTER = 1 / 5
"""The time between two reads of all heartbeats is this fraction of `dead_after`, but at most
`INTERVAL_MAX` seconds. A dead client is found with at most this delay."""
TIMER_MARGIN = 0.01
"""Seconds by which a timer may end too early."""
STUCK_INTERVAL = 30.0
INTERVAL_SHARE_OF_RESCUE_AFTER = 1 / 12
"""The time between two searches for jobs that run for too long is `STUCK_INTERVAL` seconds, as in
River. It is shorter if this fraction of `rescue_after` is shorter."""
READ_SIZE = 1_000
"""The largest number of stuck jobs (jobs that run for too long) that are read at a time, with all
their columns."""
_RUNNING_STATES = ("running",)
REASON_CLIENT_DEAD = "its client is dead"
REASON_RAN_TOO_LONG = "it ran for too long"
"""Reasons for a rescue, for the log."""
_PURPOSE = "looking for jobs to rescue"


class _StuckJob(Job[Any]):
    """A job that has been running for too long. The job's worker class gets this object."""

    __slots__ = ("running_seconds",)

    def __init__(self, row: Record) -> None:
        self._row = row
        self._updates = None
        self.running_seconds: float = row[-1]
        """Seconds since the job was claimed."""

    @property
    def claim_key(self) -> ClaimKey:
        at = wire_timestamp(self._row[JobColumn.ATTEMPTED_AT])
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

    def decode(self, unit: WorkUnit) -> None:
        self._args = unit.decode(self.encoded_args)


class LostAttempt(NamedTuple):
    """A job's attempt that must be ended, because its client is dead or the job runs for too
    long."""

    rescue: Rescue
    heartbeat: bytes | None
    """The last heartbeat of the attempt's client, if the client is dead. None: the job runs for too
    long."""


class JobRescuer(MaintenanceService):
    """Rescues jobs of clients whose heartbeat has stopped. For clients without heartbeats, rescues
    jobs that run for too long, as River does."""

    name = "job rescuer"

    def __init__(self, context: TermContext, contact_seconds: Callable[[], float] | None) -> None:
        """Create the job rescuer. `contact_seconds` returns how long this process has had
        contact with the server without a break. None: the database has no table of clients."""
        super().__init__(context)
        self._observer = (
            None if contact_seconds is None else HeartbeatObserver(context.timer, contact_seconds)
        )
        self._config = context.config
        self._dead_after = self._config.dead_after.total_seconds()
        self._interval = min(INTERVAL_MAX, self._dead_after * INTERVAL_SHARE_OF_DEAD_AFTER)
        rescue_age = self._config.rescue_age.total_seconds()
        self._stuck_interval = min(STUCK_INTERVAL, rescue_age * INTERVAL_SHARE_OF_RESCUE_AFTER)
        self._next_stuck_search = 0.0
        """The time (by `Timer.seconds_since_boot`) of the next search for stuck jobs."""
        self.batches: Batches[LostAttempt] = Batches(
            self,
            "rescuing jobs",
            self._end_attempts,
            key=lambda attempt: attempt.rescue.claim_key,
            name=lambda attempt: attempt.rescue.claim_key.id,
        )
        self.stuck_job_reads: Batches[int] = Batches(
            self, "reading stuck jobs", self._read_stuck_jobs, key=int, size=READ_SIZE
        )
        self._damaged = DamagedJobTracker("finding jobs of dead clients", self.log)
        self.set_aside_reporters.append(lambda: self._damaged.report_skipped_jobs)
        self._stuck_attempts: list[LostAttempt] = []
        """The attempts of stuck jobs that this pass has read and will end."""
        self._unknown_kinds: Counter[str] = Counter()
        """The kinds of stuck jobs for which this client has no worker, with the number of jobs that
        this pass has read."""
        self._logged_kinds: set[str] = set()
        """The kinds without a worker for which a warning was logged."""
        self._limited_log = self.log.with_rate_limit()

    async def run_once(self, scope: StopScope) -> float:
        """Make one pass. Return the seconds until the next one."""
        now = self.context.timer.seconds_since_boot()
        filters = (await self.context.read_queue_scope()).make_statement_filters()
        self.batches.begin_pass(filters)
        self.stuck_job_reads.begin_pass(filters)
        seconds_until_next = await self._rescue_jobs_of_dead_clients(filters)
        if now >= self._next_stuck_search:
            await self._rescue_stuck_jobs(filters)
            self._next_stuck_search = now + self._stuck_interval
        await self.batches.handle_rows(())  # retries rows that failed before
        return min(seconds_until_next, self._next_stuck_search - now)

    # -- by heartbeat

    async def _rescue_jobs_of_dead_clients(self, filters: Sequence[QueueFilter | None]) -> float:
        """Rescue the jobs of dead clients. Return the seconds until another client may count as
        dead."""
        if self._observer is None or not filters:
            return self._interval
        async with self.read_connection(_PURPOSE) as connection:
            self._observer.observe(*await client_heartbeats(connection, self.schema))
        stopped = self._observer.find_stopped_heartbeats(self._dead_after)
        if stopped.heartbeats:
            for within in filters:
                await self.batches.handle_pages(
                    partial(self._read_lost_attempts, stopped.heartbeats, within)
                )
        return min(self._interval, stopped.seconds_until_next_stop + TIMER_MARGIN)

    async def _read_lost_attempts(
        self,
        heartbeats: Mapping[str, bytes],
        within: QueueFilter | None,
        after: LostAttempt | None,
        limit: int,
    ) -> list[LostAttempt]:
        """Read a page of running attempts of dead clients. `heartbeats` has the last heartbeat of
        each one."""
        async with self.read_connection(_PURPOSE) as connection:

            async def read(skipped: list[int]) -> list[RunningClaim]:
                return await job_running_of(
                    connection,
                    self.schema,
                    client_ids=list(heartbeats),
                    within=within,
                    after=0 if after is None else after.rescue.claim_key.id,
                    limit=limit,
                    skipped=skipped,
                )

            claims = await self._damaged.read_jobs(connection, self.schema, _RUNNING_STATES, read)
        return [
            LostAttempt(Rescue(claim.claim_key, claim.client_id), heartbeats[claim.client_id])
            for claim in claims
        ]

    # -- by age

    async def _rescue_stuck_jobs(self, filters: Sequence[QueueFilter | None]) -> None:
        self._unknown_kinds.clear()
        for within in filters:
            self._stuck_attempts.clear()
            await self.stuck_job_reads.handle_pages(partial(self._read_stuck_ids, within))
            await self.batches.handle_rows(self._stuck_attempts)
        for kind, count in sorted(self._unknown_kinds.items()):
            if kind not in self._logged_kinds:
                self._logged_kinds.add(kind)
                self.log.warning(JOBS_OF_UNKNOWN_KIND_SKIPPED, kind=kind, count=count)

    async def _read_stuck_ids(
        self, within: QueueFilter | None, after: int | None, limit: int
    ) -> list[int]:
        async with self.read_connection(_PURPOSE) as connection:
            return await job_stuck(
                connection,
                self.schema,
                age=self._config.rescue_age,
                within=within,
                after=after or 0,
                limit=limit,
            )

    async def _read_stuck_jobs(self, ids: list[int]) -> None:
        """Read all columns of stuck jobs, and choose the jobs to rescue. After an error,
        `stuck_job_reads` calls this again with fewer ids, so that the other jobs are read despite a
        damaged job."""
        async with self.read_connection(_PURPOSE) as connection:
            rows = await job_stuck_rows(
                connection, self.schema, ids=ids, age=self._config.rescue_age
            )
        for job in await self._jobs_of_unregistered_clients([_StuckJob(row) for row in rows]):
            delay = self._rescue_delay(job)
            if delay is not None:
                rescue = Rescue(job.claim_key, job.client_id, delay.total_seconds())
                self._stuck_attempts.append(LostAttempt(rescue, None))

    async def _jobs_of_unregistered_clients(self, jobs: list[_StuckJob]) -> list[_StuckJob]:
        """Return the jobs of clients that are not registered. Jobs of a registered client are
        rescued only if the client is dead."""
        ids = {job.client_id for job in jobs}
        if self._observer is None or not ids:
            return jobs
        try:
            async with self.read_connection(_PURPOSE) as connection:
                registered = await client_registered(
                    connection, self.schema, client_ids=list(filter(None, ids))
                )
        except UndefinedTableError:  # the table was dropped, so no client is registered
            return jobs
        return [job for job in jobs if job.client_id not in registered]

    def _rescue_delay(self, job: _StuckJob) -> timedelta | None:
        """Return the delay until the job runs again, or None if the job is not rescued."""
        if job.is_cancelled:
            return timedelta(0)
        unit = self.context.workers.get(job.kind)
        if unit is None:
            self._unknown_kinds[job.kind] += 1
            return None
        try:
            with convert_base_exceptions(f"code of the worker of {job.kind!r}"):
                job.decode(unit)
                own_timeout = UNSET if unit.job_timeout is None else unit.job_timeout(job)
        except Exception as error:  # the args do not fit the class, or the user's code has failed
            self.log.debug(STUCK_JOB_DECODING_FAILED, job_id=job.id, error=describe_error(error))
            return self._retry_delay(job, None)
        timeout = unit.resolve_timeout(self._config.job_timeout, own_timeout)
        if timeout is None or job.running_seconds < timeout.total_seconds():
            return None
        return self._retry_delay(job, unit)

    def _retry_delay(self, job: _StuckJob, unit: WorkUnit | None) -> timedelta:
        return retry_delay(job, unit, self._config.retry_policy, self._limited_log)

    # -- by heartbeat or by age

    async def _end_attempts(self, attempts: list[LostAttempt]) -> None:
        """End attempts. An attempt of a dead client is ended only if the client has written no
        heartbeat after the one in `LostAttempt`."""
        heartbeats = {
            attempt.rescue.client_id or "": attempt.heartbeat
            for attempt in attempts
            if attempt.heartbeat is not None
        }
        dead: Container[str | None] = ()
        async with self.batches.transaction() as connection:
            if heartbeats and self._observer is not None:
                dead = await client_lock_dead(
                    connection,
                    self.schema,
                    dict(sorted(heartbeats.items())),
                    server_start=self._observer.server_start,
                )
            rescues = [
                attempt.rescue
                for attempt in attempts
                if attempt.heartbeat is None or attempt.rescue.client_id in dead
            ]
            states = await job_rescue(connection, self.schema, rescues)
        if states:
            clients = {rescue.client_id for rescue in rescues if rescue.claim_key.id in states}
            self.log.warning(
                JOBS_RESCUED,
                count=len(states),
                reason=REASON_CLIENT_DEAD if heartbeats else REASON_RAN_TOO_LONG,
                states=dict(Counter(states.values())),
                client_ids=sorted(filter(None, clients)),
            )
