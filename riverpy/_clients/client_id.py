"""ClientIdRegistration: makes sure that at most one live run uses a client id. A run begins when a
client starts, and ends when the client stops.

A run writes a row with its client id in the table of clients. If the table has a row of another run
with this id, the row is replaced only if the other run is dead: its process has certainly ended, or
its heartbeat has not changed for `dead_after`, measured by this process's clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._clients.observer import HeartbeatObserver
from riverpy._clients.process import (
    get_own_process_name,
    has_process_ended,
    is_process_on_this_machine,
)
from riverpy._log import get_logger
from riverpy._log_events import CLIENT_ID_ALREADY_REGISTERED
from riverpy._postgres.clients import client_delete_dead, client_get_registered_run, client_register
from riverpy.errors import ClientIdInUseError

if TYPE_CHECKING:
    from riverpy._clock import Timer
    from riverpy._postgres.clients import ClientRegistration, RegisteredClientRun
    from riverpy._postgres.connection import DedicatedConnection

REGISTRATION_STATEMENT_TIMEOUT = 10.0
"""The timeout of each statement that registers a run or reads the heartbeat of another run, in
seconds."""
HEARTBEAT_READS_WITHIN_DEAD_AFTER = 12
"""How often a client reads another client's heartbeat within `dead_after`, at least. It reads the
heartbeat to find out whether the other client is dead, before it takes over the other client's id,
or a queue that the other client's domain owns."""
HEARTBEAT_READ_INTERVAL_MAX = 5.0
"""The maximum time between two reads of another client's heartbeat, in seconds."""

_registered_client_runs: set[tuple[str | None, str, int]] = set()
"""The registered runs of this process. Each entry contains the result of `get_own_process_name`,
the client id, and the time of the registration in microseconds since 2000. A forked process
inherits the entries, but has another process name."""


class ClientIdRegistration:
    """Registers one run of a client under the client's id."""

    def __init__(
        self,
        registration: ClientRegistration,
        schema: str | None,
        connection: DedicatedConnection,
        timer: Timer,
    ) -> None:
        """Create the registration without sending a statement. `registration` is the row to write
        for this client."""
        self._registration, self._schema = registration, schema
        self._connection, self._timer = connection, timer
        self._client_id = registration.client_id
        self._registered_run: tuple[str | None, str, int] | None = None
        self._log = get_logger()

    async def register(self) -> int:
        """Register the run under the client id. Return the time of the registration in microseconds
        since 2000.

        Raises:
            ClientIdInUseError: a live run has this client id.
            Exception: one of DATABASE_ERRORS.
        """
        dead: bytes | None = None
        while True:
            registered_at, holder = await self._try_to_register(dead)
            if registered_at is not None:
                self._registered_run = get_own_process_name(), self._client_id, registered_at
                _registered_client_runs.add(self._registered_run)
                return registered_at
            dead = None if holder is None else await self._wait_until_dead(holder)

    def record_run_end(self) -> None:
        """Record in this process that the run has ended."""
        if self._registered_run is not None:
            _registered_client_runs.discard(self._registered_run)

    async def _wait_until_dead(self, other_run: RegisteredClientRun) -> bytes | None:
        """Wait until the other run with this client id is dead. Return its last heartbeat, or None
        if its row was deleted.

        Raises:
            ClientIdInUseError: the other run is alive.
        """
        if self._has_process_ended(other_run):
            return other_run.last_heartbeat.raw_timestamp
        limit = max(
            self._registration.dead_after.total_seconds(),
            other_run.last_heartbeat.dead_after_seconds,
        )
        self._log.warning(
            CLIENT_ID_ALREADY_REGISTERED,
            client_id=self._client_id,
            registered_at=other_run.registered_at_text,
            seconds=limit,
        )
        observer = HeartbeatObserver(self._timer)
        now: RegisteredClientRun | None = other_run
        while now is not None:
            if now.last_heartbeat != other_run.last_heartbeat:
                raise ClientIdInUseError(self._client_id, now.registered_at_text)
            observer.observe([now.last_heartbeat], now.raw_server_start_time)
            stopped = observer.find_stopped_heartbeats(limit)
            if stopped.heartbeats:
                return now.last_heartbeat.raw_timestamp
            step = min(
                HEARTBEAT_READ_INTERVAL_MAX,
                other_run.last_heartbeat.dead_after_seconds / HEARTBEAT_READS_WITHIN_DEAD_AFTER,
            )
            await self._timer.sleep(min(step, stopped.seconds_until_next_stop))
            async with self._connection.acquire(
                "reading a heartbeat", REGISTRATION_STATEMENT_TIMEOUT
            ) as connection:
                now = await client_get_registered_run(
                    connection, self._schema, client_id=self._client_id
                )
        return None

    def _has_process_ended(self, other_run: RegisteredClientRun) -> bool:
        """Return whether the process of the other run has certainly ended.

        Raises:
            ClientIdInUseError: the process of the other run is alive, and the heartbeat is recent.
        """
        process = get_own_process_name()
        is_running = (process, self._client_id, other_run.registered_at) in _registered_client_runs
        if not is_running and other_run.process_name is not None:
            if other_run.process_name == process or has_process_ended(other_run.process_name):
                return True
            is_running = other_run.is_heartbeat_recent and is_process_on_this_machine(
                other_run.process_name
            )
        if is_running:
            raise ClientIdInUseError(self._client_id, other_run.registered_at_text)
        return False

    async def _try_to_register(
        self, dead_heartbeat: bytes | None
    ) -> tuple[int | None, RegisteredClientRun | None]:
        """Try to register the run once. First, delete the row of the dead run whose last heartbeat
        is `dead_heartbeat`. None: delete no row.

        If the run is registered, return the time of the registration in microseconds since 2000,
        and None. If another run has the client id, return None and the other run. If the row of the
        other run was deleted before this method could read the row, return None and None.
        """
        async with (
            self._connection.acquire("registering", REGISTRATION_STATEMENT_TIMEOUT) as connection,
            connection.transaction(isolation="read_committed"),
        ):
            if dead_heartbeat is not None:
                await client_delete_dead(
                    connection,
                    self._schema,
                    client_id=self._client_id,
                    last_heartbeat=dead_heartbeat,
                )
            registered_at = await client_register(connection, self._schema, self._registration)
            if registered_at is not None:
                return registered_at, None
            return None, await client_get_registered_run(
                connection, self._schema, client_id=self._client_id
            )
