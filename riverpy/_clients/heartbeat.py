"""HeartbeatWriter: writes the heartbeats of one run, and measures its contact with the server.

If a client writes no heartbeat for `dead_after`, the leader treats it as dead and rescues its
running jobs. So a client that cannot write a heartbeat stops claiming long before that.
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
"""The number of heartbeats within `dead_after`."""
STOP_CLAIMING_AT_SHARE_OF_DEAD_AFTER = 1 / 3
"""A client stops claiming jobs when its last heartbeat is older than this fraction of
`dead_after`."""
CONTACT_LOST_AT_SHARE_OF_DEAD_AFTER = 1 / 2
"""The contact counts as broken when the last heartbeat is older than this fraction of
`dead_after`."""
WRITE_TIMEOUT_SHARE_OF_DEAD_AFTER = 1 / 30
WRITE_TIMEOUT_MIN = 0.25
"""The timeout for writing a heartbeat on one connection: this fraction of `dead_after`, but at
least `WRITE_TIMEOUT_MIN` seconds."""
HEARTBEAT_RETRY_DELAY_MAX = 1.0
"""The longest delay before the next heartbeat after every connection failed, in seconds."""
EARLY_HEARTBEAT_DELAY = 1.0
"""Seconds from a request for an early heartbeat until the heartbeat. Further requests during this
time cause no further heartbeat."""
UNREGISTER_TIMEOUT = 1.0
"""The timeout for deleting the client's row at the end of a run, in seconds."""


class HeartbeatWriter:
    """Writes heartbeats while a client runs, also while it stops.

    Until the first heartbeat is written, claiming jobs is allowed and `contact_duration` returns 0.
    In a database without the tables of the migration line `riverpy`, no heartbeat is ever written.
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
        """Create the heartbeat writer.

        Args:
            connections: the connections for heartbeats. Each one is used only if those before it in
                the list fail. The first one should have a short `lock_timeout`. Otherwise a wait
                for a locked table would reach the heartbeat's timeout, which closes the connection.
                The last one registers the run.
            on_client_id_lost: called once when another run has registered under the client's id.
                After that, no heartbeat is written, and no job is claimed.
            get_lease_report: returns what a heartbeat writes about leases. None: the column for it
                is missing.
        """
        self._registration, self._config = registration, config
        self._connections, self._timer = connections, timer
        self._on_client_id_lost, self._get_lease_report = on_client_id_lost, get_lease_report
        self._has_lease_column = True
        """False: a heartbeat has failed because the column for lease reports was removed."""
        self._early_heartbeat_event = asyncio.Event()
        self._id_registration = ClientIdRegistration(
            registration, config.schema, connections[-1], timer
        )
        self._dead_after = config.dead_after.total_seconds()
        self._interval = self._dead_after / HEARTBEATS_WITHIN_DEAD_AFTER
        self._timeout = max(self._dead_after * WRITE_TIMEOUT_SHARE_OF_DEAD_AFTER, WRITE_TIMEOUT_MIN)
        self._claims_allowed_event = asyncio.Event()
        """An event that is set when claiming is allowed again."""
        self._last_heartbeat_at = -math.inf
        """The time at which the last successful heartbeat started, by
        `Timer.seconds_since_boot`."""
        self._contact_started_at = 0.0
        self.contact_start_count = 0
        """How often contact with the server began. After a break, the client may have another
        row."""
        self._claims_allowed_until = math.inf
        self.registered_at: int | None = None
        """The server's time of the registration of this run, in microseconds since 2000. None: not
        registered yet."""
        self.has_lost_client_id = False
        """Whether another run has registered under the client's id."""
        self._log = get_logger()
        self._failure_log = RepeatedFailureLog(self._log)
        self.heartbeat_written = TestSignal("HeartbeatWriter.heartbeat_written")
        self.heartbeat_failed = TestSignal("HeartbeatWriter.heartbeat_failed")

    @property
    def can_claim_jobs(self) -> bool:
        """Whether claiming is allowed: the last heartbeat is recent."""
        return self._timer.seconds_since_boot() < self._claims_allowed_until

    async def wait_until_can_claim_jobs(self) -> None:
        """Wait until claiming is allowed."""
        while not self.can_claim_jobs:
            self._claims_allowed_event.clear()
            await self._claims_allowed_event.wait()

    @property
    def seconds_since_last_heartbeat(self) -> float | None:
        """Seconds since the last heartbeat. None: no heartbeat was written yet."""
        written_at = self._last_heartbeat_at
        return None if written_at == -math.inf else self._timer.seconds_since_boot() - written_at

    def contact_duration(self) -> float:
        """Return how long the contact with the server has lasted without a break, in seconds; 0
        during a break. Without contact this process cannot know whether other clients are dead."""
        now = self._timer.seconds_since_boot()
        if now - self._last_heartbeat_at > self._dead_after * CONTACT_LOST_AT_SHARE_OF_DEAD_AFTER:
            return 0.0
        return now - self._contact_started_at

    async def register(self) -> None:
        """Register the run. This comes before everything else that the run does.

        Raises:
            ClientIdInUseError: another client has the id.
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
        """Write heartbeats until the service is stopped. Call `register` first."""
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
            scope.expect_progress(within=delay + self._timeout * len(self._connections))
            await self._wait_until_next_heartbeat(delay)
            began = self._timer.seconds_since_boot()
            await self._try_to_write_heartbeat()
        scope.clear_progress_deadline()
        await anyio.sleep_forever()

    def request_early_heartbeat(self) -> None:
        """Write the next heartbeat soon, because it reports something new."""
        self._early_heartbeat_event.set()

    async def _wait_until_next_heartbeat(self, delay: float) -> None:
        due_at = self._timer.seconds_since_boot() + delay
        early = self._early_heartbeat_event
        if await self._timer.wait_for_event(early, delay - EARLY_HEARTBEAT_DELAY):
            due_at = min(due_at, self._timer.seconds_since_boot() + EARLY_HEARTBEAT_DELAY)
        await self._timer.sleep(max(due_at - self._timer.seconds_since_boot(), 0.0))
        early.clear()

    async def is_run_still_registered(self, connection: Connection) -> bool:
        """Return whether this run still has the client's id. Call this after reading the rows of
        claimed jobs. If it returns True, this run has claimed them, not another run with the same
        id.

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

    def forget_registered_run(self) -> None:
        """Record that the run has ended in this process. Its row may stay in the table."""
        self._id_registration.forget_registered_run()

    async def delete_client_row(self) -> None:
        """Delete the client's row. Call this after the run has ended and no job runs any more."""
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
        except DATABASE_ERRORS as error:  # a leader deletes the row later
            self._log.debug(CLIENT_DEREGISTRATION_FAILED, error=describe_error(error))

    async def _try_to_write_heartbeat(self) -> None:
        """Write one heartbeat over the first connection that works."""
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
        """Write one heartbeat. Return whether this run still has the client's id."""
        async with connection.acquire("writing a heartbeat", self._timeout) as opened:
            if self.registered_at is None:  # the table was missing at the start: register now
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
            except UndefinedColumnError:  # `migrate down` ran: a heartbeat matters more
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
        """Allow claims while the table of clients is missing, because without the table no leader
        can treat a client as dead."""
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
