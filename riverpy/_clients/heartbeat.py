"""HeartbeatWriter: writes the heartbeats of one run of a client, and measures its contact with the
server.

If a client writes no heartbeat for `dead_after`, the leader treats it as dead and rescues its
running jobs. So a client that cannot write a heartbeat stops claiming jobs long before that.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import TYPE_CHECKING

import anyio

from riverpy._clients.client_id import ClientIdRegistration
from riverpy._lifecycle import TestSignal
from riverpy._log import RepeatedFailureLog, get_logger
from riverpy._log_events import (
    CLIENT_DEREGISTRATION_FAILED,
    CLIENT_ID_LOST,
    HEARTBEAT_FAILED,
    HEARTBEAT_LOST,
    HEARTBEAT_RESTORED,
    HEARTBEAT_TABLE_NOT_FOUND,
)
from riverpy._postgres.clients import (
    client_is_run_registered,
    client_register,
    client_unregister,
    client_write_heartbeat,
)
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    LockNotAvailableError,
    UndefinedColumnError,
    UndefinedTableError,
    describe_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anyio.abc import TaskStatus

    from riverpy._clock import Timer
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.clients import ClientRegistration
    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._postgres.driver import Connection
    from riverpy._postgres.lease_reports import LeaseReport
    from riverpy.config import Config

HEARTBEATS_WITHIN_DEAD_AFTER = 6
"""How many heartbeats a client writes within `dead_after`."""
STOP_CLAIMING_AT_SHARE_OF_DEAD_AFTER = 1 / 3
"""A client stops claiming jobs when its last heartbeat is older than this fraction of
`dead_after`."""
CONTACT_LOST_AT_SHARE_OF_DEAD_AFTER = 1 / 2
"""A client has lost contact with the server when its last heartbeat is older than this fraction of
`dead_after`."""
WRITE_TIMEOUT_SHARE_OF_DEAD_AFTER = 1 / 30
WRITE_TIMEOUT_MIN = 0.25
"""The minimum timeout for writing a heartbeat on one connection, in seconds. The timeout is
`WRITE_TIMEOUT_SHARE_OF_DEAD_AFTER` times `dead_after`, but not less than this."""
HEARTBEAT_RETRY_DELAY_MAX = 1.0
"""The maximum delay before the next attempt after a heartbeat failed on every connection, in
seconds."""
EARLY_HEARTBEAT_DELAY = 1.0
"""The time from a request for an early heartbeat until this heartbeat is written, in seconds.
Further requests during this time cause no further heartbeat."""
UNREGISTER_TIMEOUT = 1.0
"""The timeout for deleting the client's row when a run ends, in seconds."""


class HeartbeatWriter:
    """Writes heartbeats while a client runs and while it stops.

    Until the first heartbeat is written, the client may claim jobs, and `unbroken_contact_seconds`
    returns 0. If the database does not have the tables of the migration line `riverpy`, no
    heartbeat is written.
    """

    name = "heartbeat"

    def __init__(
        self,
        registration: ClientRegistration,
        config: Config,
        connections: Sequence[DedicatedConnection],
        timer: Timer,
        on_client_id_lost: Callable[[], None],
        get_lease_report: Callable[[], LeaseReport | None] = lambda: None,
    ) -> None:
        """Create the heartbeat writer without sending a statement.

        Args:
            connections: the connections for heartbeats, in the order in which they are tried. A
                connection is tried only after the earlier ones have failed. The first connection
                should have a short `lock_timeout`. Otherwise, if the table is locked, the heartbeat
                reaches its timeout, and the timeout closes the connection. The last connection is
                also used to register the run.
            on_client_id_lost: called once when another run has registered under the client id.
                After that, this run writes no heartbeats and claims no jobs.
            get_lease_report: returns what a heartbeat reports about leases. It returns None if the
                database has no column for this report.
        """
        self._registration, self._config = registration, config
        self._connections, self._timer = connections, timer
        self._on_client_id_lost, self._get_lease_report = on_client_id_lost, get_lease_report
        self._has_lease_column = True
        """False after a heartbeat has failed because the column for lease reports was removed."""
        self._early_heartbeat_event = asyncio.Event()
        self._id_registration = ClientIdRegistration(
            registration, config.schema, connections[-1], timer
        )
        self._dead_after = config.dead_after.total_seconds()
        self._interval = self._dead_after / HEARTBEATS_WITHIN_DEAD_AFTER
        self._timeout = max(self._dead_after * WRITE_TIMEOUT_SHARE_OF_DEAD_AFTER, WRITE_TIMEOUT_MIN)
        self._claims_allowed_event = asyncio.Event()
        """Set when the client may claim jobs again."""
        self._last_heartbeat_at = -math.inf
        """The start time of the last successful heartbeat, by `Timer.seconds_since_boot`."""
        self._contact_started_at = 0.0
        self.contact_start_count = 0
        """The number of times that contact with the server has begun: with the first heartbeat, and
        with the first one after each loss of contact. During a loss, the leader may delete the
        client's row, and the next heartbeat inserts a new row."""
        self._claims_allowed_until = math.inf
        self.registered_at: int | None = None
        """The time at which the server registered this run, in microseconds since 2000. None: not
        registered yet."""
        self.has_lost_client_id = False
        """Whether another run has registered under the client id."""
        self._log = get_logger()
        self._failure_log = RepeatedFailureLog(self._log)
        self.heartbeat_written = TestSignal("HeartbeatWriter.heartbeat_written")
        self.heartbeat_failed = TestSignal("HeartbeatWriter.heartbeat_failed")

    @property
    def can_claim_jobs(self) -> bool:
        """Whether the client may claim jobs, i.e. its last heartbeat is recent."""
        return self._timer.seconds_since_boot() < self._claims_allowed_until

    async def wait_until_can_claim_jobs(self) -> None:
        """Wait until the client may claim jobs."""
        while not self.can_claim_jobs:
            self._claims_allowed_event.clear()
            await self._claims_allowed_event.wait()

    @property
    def seconds_since_last_heartbeat(self) -> float | None:
        """Seconds since the last successful heartbeat. None: no heartbeat was written yet."""
        written_at = self._last_heartbeat_at
        return None if written_at == -math.inf else self._timer.seconds_since_boot() - written_at

    def unbroken_contact_seconds(self) -> float:
        """Return for how many seconds this client has had contact with the server without a break.
        Return 0 during a break. Without contact, this process cannot know whether other clients are
        dead."""
        now = self._timer.seconds_since_boot()
        if now - self._last_heartbeat_at > self._dead_after * CONTACT_LOST_AT_SHARE_OF_DEAD_AFTER:
            return 0.0
        return now - self._contact_started_at

    async def register(self) -> None:
        """Register the run under the client id. Call this method before `run`, and before the run
        claims jobs.

        Raises:
            ClientIdInUseError: another run has the client id.
            Exception: one of DATABASE_ERRORS.
        """
        began = self._timer.seconds_since_boot()
        try:
            self.registered_at = await self._id_registration.register()
        except UndefinedTableError as error:
            self._record_missing_table(error)
        else:
            self._record_success(began)

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Write heartbeats until this method is cancelled or the client id is lost. Call `register`
        first."""
        began = (
            self._timer.seconds_since_boot()
            if self.registered_at is None
            else self._last_heartbeat_at
        )
        task_status.started()
        while not self.has_lost_client_id:
            delay = (
                self._interval
                if self._last_heartbeat_at >= began
                else min(self._interval, HEARTBEAT_RETRY_DELAY_MAX)
            )
            scope.set_progress_deadline(within=delay + self._timeout * len(self._connections))
            await self._wait_until_next_heartbeat(delay)
            began = self._timer.seconds_since_boot()
            await self._try_to_write_heartbeat()
        scope.clear_progress_deadline()
        await anyio.sleep_forever()

    def request_early_heartbeat(self) -> None:
        """Request that the next heartbeat is written soon, because the client has something new to
        report."""
        self._early_heartbeat_event.set()

    async def _wait_until_next_heartbeat(self, delay: float) -> None:
        due_at = self._timer.seconds_since_boot() + delay
        early = self._early_heartbeat_event
        if await self._timer.wait_for_event(early, delay - EARLY_HEARTBEAT_DELAY):
            due_at = min(due_at, self._timer.seconds_since_boot() + EARLY_HEARTBEAT_DELAY)
        await self._timer.sleep(max(due_at - self._timer.seconds_since_boot(), 0.0))
        early.clear()

    async def is_run_still_registered(self, connection: Connection) -> bool:
        """Return whether this run still has the client id. Call this method after reading the rows
        of claimed jobs. If the result is True, this run has claimed the jobs. If the result is
        False, another run with the same client id may have claimed them.

        Raises:
            Exception: one of DATABASE_ERRORS.
        """
        if self.registered_at is None:
            return True
        return await client_is_run_registered(
            connection,
            self._config.schema,
            client_id=self._registration.client_id,
            registered_at=self.registered_at,
        )

    def record_run_end(self) -> None:
        """Record in this process that the run has ended. The client's row may stay in the table."""
        self._id_registration.record_run_end()

    async def delete_client_row(self) -> None:
        """Delete the client's row. Call this when the run has ended and none of its jobs is
        running."""
        if self.registered_at is None:
            return
        try:
            async with self._connections[0].acquire("leaving", UNREGISTER_TIMEOUT) as connection:
                await client_unregister(
                    connection,
                    self._config.schema,
                    client_id=self._registration.client_id,
                    registered_at=self.registered_at,
                )
        except DATABASE_ERRORS as error:  # the leader deletes the row later
            self._log.debug(CLIENT_DEREGISTRATION_FAILED, error=describe_error(error))

    async def _try_to_write_heartbeat(self) -> None:
        """Write one heartbeat on the first connection that works. Record the result."""
        error: Exception | None = None
        for connection in self._connections:
            began = self._timer.seconds_since_boot()
            try:
                has_id = await self._write_heartbeat(connection)
            except UndefinedTableError as missing:
                self._record_missing_table(missing)
                return
            except (
                LockNotAvailableError
            ) as locked:  # another connection would wait for the lock too
                error = locked
                break
            except DATABASE_ERRORS as raised:
                error = raised
                self._log.debug(
                    HEARTBEAT_FAILED, connection=connection.name, error=describe_error(error)
                )
            else:
                if has_id:
                    self._record_success(began)
                else:
                    self._record_lost_client_id()
                return
        self._record_failure(error)

    async def _write_heartbeat(self, connection: DedicatedConnection) -> bool:
        """Write one heartbeat. Return whether this run still has the client id."""
        async with connection.acquire("writing a heartbeat", self._timeout) as opened:
            if self.registered_at is None:  # the table was missing before: register now
                self.registered_at = await client_register(
                    opened, self._config.schema, self._registration
                )
                return self.registered_at is not None
            report = self._get_lease_report() if self._has_lease_column else None
            write = partial(
                client_write_heartbeat,
                opened,
                self._config.schema,
                self._registration,
                registered_at=self.registered_at,
            )
            try:
                return await write(lease_report=report)
            except UndefinedColumnError:  # `migrate down` has removed the column: retry without it
                if report is None:
                    raise
                self._has_lease_column = False
                return await write(lease_report=None)

    def _record_lost_client_id(self) -> None:
        self.has_lost_client_id = True
        self._claims_allowed_until = -math.inf
        client_id = self._registration.client_id
        self._log.error(CLIENT_ID_LOST, effect="this client stops", client_id=client_id)
        self._on_client_id_lost()

    def _record_success(self, started_at: float) -> None:
        now = self._timer.seconds_since_boot()
        limit = self._dead_after * CONTACT_LOST_AT_SHARE_OF_DEAD_AFTER
        if started_at - self._last_heartbeat_at > limit:
            self._contact_started_at = now
            self.contact_start_count += 1
        self._last_heartbeat_at = started_at
        claim_limit = self._dead_after * STOP_CLAIMING_AT_SHARE_OF_DEAD_AFTER
        self._claims_allowed_until = started_at + claim_limit
        self._claims_allowed_event.set()
        self._failure_log.log_recovery(HEARTBEAT_RESTORED)
        self.heartbeat_written.emit()

    def _record_missing_table(self, error: Exception) -> None:
        """Allow the client to claim jobs while the table of clients is missing. Without this table,
        no leader can treat a client as dead."""
        self._claims_allowed_until = math.inf
        self._claims_allowed_event.set()
        self._failure_log.log_failure(
            HEARTBEAT_TABLE_NOT_FOUND,
            level="error",
            effect="heartbeats, and the rescue of dead clients' jobs, are off",
            error=describe_error(error),
        )
        self.heartbeat_failed.emit()

    def _record_failure(self, error: Exception | None) -> None:
        age = self._timer.seconds_since_boot() - self._last_heartbeat_at
        if age > self._dead_after * CONTACT_LOST_AT_SHARE_OF_DEAD_AFTER:
            self._failure_log.log_failure(
                HEARTBEAT_LOST,
                effect="the client claims no jobs, and its running jobs will be rescued",
                seconds_since_last=round(age, 3),
                dead_after=self._dead_after,
                error=error and describe_error(error),
            )
        self.heartbeat_failed.emit()
