"""Heartbeat: the signs of life of one run, and what this process knows of its own contact with the
server.

A client that gives none for `dead_after` is dead to the leader, which gives its running jobs to
others. So one that cannot beat stops claiming long before that.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import anyio

from riverpy._clients.client_id import IdClaim
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
    client_heartbeat,
    client_is_current,
    client_register,
    client_unregister,
)
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    LockNotAvailableError,
    UndefinedTableError,
    describe,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anyio.abc import TaskStatus

    from riverpy._clock import Timer
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.clients import Registration
    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._postgres.driver import Connection
    from riverpy.config import Config

BEATS = 6
"""Signs of life within `dead_after`."""
CLAIM_SHARE = 1 / 3
"""Of `dead_after`: how old the last sign may be until claiming stops."""
GAP_SHARE = 1 / 2
"""Of `dead_after`: without a sign for this long the contact counts as broken."""
BOUND_SHARE = 1 / 30
BOUND_MIN = 0.25
"""Seconds that one connection has for a sign of life: a share of `dead_after`, and not less."""
RETRY_MOST = 1.0
"""Seconds until the next try after every connection failed, at most."""
LEAVE_TIMEOUT = 1.0
"""Seconds for the last statement of a run."""


class Heartbeat:
    """Beats while a client runs, also through its drain.

    Until the service runs, as in a database without our tables, claiming is always allowed and the
    contact is 0.
    """

    name = "heartbeat"

    def __init__(
        self,
        registration: Registration,
        config: Config,
        connections: Sequence[DedicatedConnection],
        timer: Timer,
        displaced: Callable[[], None],
    ) -> None:
        """Make it.

        Args:
            registration: what others may know of the client.
            config: the client's.
            connections: the one to beat on, whose session should give up locks before a sign of
                life must be given, or a locked table would have it cut; and those to try when it
                does not answer, the last of which is the one to register on.
            timer: what time is measured by, suspended time included.
            displaced: called once when another run has registered under the client's id. No
                heartbeat is written after that, and nothing is claimed.
        """
        self._registration, self._config = registration, config
        self._connections, self._timer = connections, timer
        self._displaced = displaced
        self._id_claim = IdClaim(registration, config.schema, connections[-1], timer)
        self._dead_after = config.dead_after.total_seconds()
        self._interval = self._dead_after / BEATS
        self._bound = max(self._dead_after * BOUND_SHARE, BOUND_MIN)
        self._beaten = asyncio.Event()
        self._last = -math.inf
        """When the last attempt that succeeded began."""
        self._contact_since = 0.0
        self.contacts = 0
        """How often the contact was made. When it was, the client's row may be a new one."""
        self._claims_end = math.inf
        self.registered_at: int | None = None
        """When the server registered this run, raw; None while it has not."""
        self.is_displaced = False
        """Whether another run has registered under the client's id."""
        self._log = get_logger()
        self._failures = RepeatedFailureLog(self._log)
        self.beaten = TestSignal("Heartbeat.beaten")
        self.failed = TestSignal("Heartbeat.failed")

    @property
    def may_claim(self) -> bool:
        """Whether others still take this client for alive, and will for a while."""
        return self._timer.boottime() < self._claims_end

    async def until_may_claim(self) -> None:
        """Return when claiming is allowed."""
        while not self.may_claim:
            self._beaten.clear()
            await self._beaten.wait()

    @property
    def age(self) -> float | None:
        """Seconds since the last sign of life; None: there was none."""
        return None if self._last == -math.inf else self._timer.boottime() - self._last

    def contact(self) -> float:
        """Seconds of unbroken contact with the server. 0 while it is broken: who cannot beat does
        not know who else cannot."""
        now = self._timer.boottime()
        if now - self._last > self._dead_after * GAP_SHARE:
            return 0.0
        return now - self._contact_since

    async def register(self) -> None:
        """Register the run, before anything else is done in the name of the client.

        Raises:
            ClientIdInUseError: another client has the id.
            Exception: one of DATABASE_ERRORS.
        """
        began = self._timer.boottime()
        try:
            self.registered_at = await self._id_claim.register()
        except UndefinedTableError as error:
            self._unregister(error)
        else:
            self._succeeded(began)

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Write heartbeats until stopped; for after `register`."""
        began = self._timer.boottime() if self.registered_at is None else self._last
        task_status.started()
        while not self.is_displaced:
            delay = self._interval if self._last >= began else min(self._interval, RETRY_MOST)
            scope.turns(within=delay + self._bound * len(self._connections))
            await self._timer.sleep(delay)
            began = self._timer.boottime()
            await self._beat_somewhere()
        scope.rests()
        await anyio.sleep_forever()

    async def is_current(self, connection: Connection) -> bool:
        """Whether what was claimed in the client's name until now was claimed by this run. Ask
        after reading it: another run that registers in between claims later.

        Raises:
            Exception: one of DATABASE_ERRORS.
        """
        if self.registered_at is None:
            return True
        return await client_is_current(
            connection,
            self._config.schema,
            client_id=self._registration.client_id,
            registered_at=self.registered_at,
        )

    def end(self) -> None:
        """The run has ended, whether its row stays or not."""
        self._id_claim.end()

    async def leave(self) -> None:
        """Take the registration back: the run has ended and left nothing behind."""
        if self.registered_at is None:
            return
        try:
            async with self._connections[0].use("leaving", LEAVE_TIMEOUT) as connection:
                await client_unregister(
                    connection,
                    self._config.schema,
                    client_id=self._registration.client_id,
                    registered_at=self.registered_at,
                )
        except DATABASE_ERRORS as error:  # the row lapses
            self._log.debug(CLIENT_DEREGISTRATION_FAILED, error=describe(error))

    async def _beat_somewhere(self) -> None:
        """One sign of life, over the first connection that answers."""
        error: Exception | None = None
        for connection in self._connections:
            began = self._timer.boottime()
            try:
                has_id = await self._beat(connection, self._bound)
            except UndefinedTableError as missing:
                self._unregister(missing)
                return
            except LockNotAvailableError as locked:  # and so it is for every connection
                error = locked
                break
            except DATABASE_ERRORS as raised:
                error = raised
                self._log.debug(
                    HEARTBEAT_FAILED,
                    connection=connection.name,
                    error=describe(error),
                )
            else:
                if has_id:
                    self._succeeded(began)
                else:
                    self._lose_id()
                return
        self._failed(error)

    async def _beat(self, connection: DedicatedConnection, bound: float) -> bool:
        async with connection.use("giving a sign of life", bound) as opened:
            if self.registered_at is None:  # the table was not there at the start
                self.registered_at = await client_register(
                    opened, self._config.schema, self._registration
                )
                return self.registered_at is not None
            return await client_heartbeat(
                opened,
                self._config.schema,
                self._registration,
                registered_at=self.registered_at,
            )

    def _lose_id(self) -> None:
        self.is_displaced = True
        self._claims_end = -math.inf
        self._log.error(
            CLIENT_ID_LOST,
            effect="this client stops",
            client_id=self._registration.client_id,
        )
        self._displaced()

    def _succeeded(self, began: float) -> None:
        now = self._timer.boottime()
        if began - self._last > self._dead_after * GAP_SHARE:
            self._contact_since = now
            self.contacts += 1
        self._last = began
        self._claims_end = began + self._dead_after * CLAIM_SHARE
        self._beaten.set()
        self._failures.recovered(HEARTBEAT_RESTORED)
        self.beaten.emit()

    def _unregister(self, error: Exception) -> None:
        """The table is gone. Nobody can be taken for dead then, so claiming goes on, as in a
        database that never had it."""
        self._claims_end = math.inf
        self._beaten.set()
        self._failures.failed(
            HEARTBEAT_TABLE_NOT_FOUND,
            level="error",
            effect="heartbeats, and the rescue of dead clients' jobs, are off",
            error=describe(error),
        )
        self.failed.emit()

    def _failed(self, error: Exception | None) -> None:
        age = self._timer.boottime() - self._last
        if age > self._dead_after * GAP_SHARE:
            self._failures.failed(
                HEARTBEAT_LOST,
                effect="the client claims no jobs, and its running jobs will be rescued",
                seconds_since_last=round(age, 3),
                dead_after=self._dead_after,
                error=error and describe(error),
            )
        self.failed.emit()
