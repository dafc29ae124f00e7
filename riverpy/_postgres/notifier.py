"""Notifier: the one connection that listens. It passes notifications to subscribers.

The notifier sends probes to itself to check that notifications arrive. A probe is a notification on
a channel of its own. Another connection sends the first probe, and the listening connection sends
the next probes. Probes find two faults: a half-open connection raises no error, and a pooler in
transaction mode accepts LISTEN but delivers nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated

import anyio
import msgspec

from riverpy._clock import Backoff
from riverpy._lifecycle import TestSignal
from riverpy._log import NotificationQueueLog, get_logger
from riverpy._log_events import (
    INVALID_NOTIFICATION_RECEIVED,
    NOTIFICATION_HANDLER_FAILED,
    NOTIFICATIONS_NOT_RECEIVED,
)
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    close_connection,
    is_notification_queue_full,
    listen_on_channels,
)
from riverpy._postgres.leases import LEASE_TOPIC as LEASE_TOPIC
from riverpy._postgres.sql_files import get_query
from riverpy._postgres.tracing import suppress_tracing
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from anyio.abc import TaskStatus

    from riverpy._lifecycle import StopScope
    from riverpy._postgres.connection import ConnectionOutageTracker, DedicatedConnection
    from riverpy._postgres.driver import Connection

PROBE_TOPIC = "riverpy_probe"
PROBE_TIMEOUT = 2.0
"""Seconds within which a probe must arrive."""
PROBE_INTERVAL = 10.0
"""Seconds between two probes."""
FAILED_PROBE_INTERVAL = 60.0
"""Seconds from a probe that did not arrive to the next probe."""
UNSENT_PROBE_RETRY_DELAY = 2.0
"""Seconds until the retry of a first probe that could not be sent."""
LISTEN_TIMEOUT = 10.0
"""The timeout for connecting and LISTEN, in seconds."""
RECONNECT_DELAY_MIN = timedelta(milliseconds=50)
RECONNECT_DELAY_MAX = timedelta(seconds=2)


class Notifier:
    """Listens on topics of one schema. Callbacks run in the event loop and must not block. If one
    callback fails, the other callbacks run too."""

    name = "notifier"

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        *,
        schema: str | None,
        reserved: DedicatedConnection,
        outage: ConnectionOutageTracker,
        resync: Callable[[], None],
        quiet: float,
        trace_internal: bool,
    ) -> None:
        """Make no connection yet.

        Args:
            connect: makes the listening connection.
            schema: the schema of the topics. None: the first schema of the search path.
            reserved: another connection, which sends the first probe.
            outage: logs outages.
            resync: called after a reconnect, because notifications may have been missed before.
            quiet: the shortest interval between two probes in seconds.
            trace_internal: whether OpenTelemetry's instrumentation of the driver makes spans for
                the statements.
        """
        self._connect = connect
        self._schema = schema
        self._reserved_connection = reserved
        self._outage_tracker = outage
        self.probe_interval = max(PROBE_INTERVAL, quiet)
        """Seconds between two probes while they arrive."""
        self._trace_internal = trace_internal
        self._callbacks_by_topic: dict[str, list[Callable[[str], None]]] = {}
        self._resync = resync
        self._connection: Connection | None = None
        self._connection_lost = asyncio.Event()
        self._arrival_event_by_probe: dict[str, asyncio.Event] = {}
        self._backoff = Backoff(RECONNECT_DELAY_MIN, RECONNECT_DELAY_MAX)
        self._log = get_logger()
        self.is_delivery_proven = False
        """Whether notifications arrive: the last probe has arrived over the current connection."""
        self._is_first_probe_sent = False
        """Whether another connection has sent a probe since the listening connection was made."""
        self._is_delivery_failure_logged = False
        """Whether it was logged that no notifications arrive."""
        self._is_notification_queue_full = False
        """Whether the server's queue of notifications was too full for the last probe."""
        self._notification_queue_log = NotificationQueueLog()
        self.connected = TestSignal("Notifier.connected")

    @property
    def is_connected(self) -> bool:
        """Whether the listening connection exists, as far as we know."""
        return self._connection is not None and not self._connection.is_closed()

    def subscribe(self, topic: str, callback: Callable[[str], None]) -> None:
        """Call `callback` with the payload of each notification on a topic. Call this before the
        notifier starts."""
        self._callbacks_by_topic.setdefault(topic, []).append(callback)

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Listen until stopped. Raise if the first connection fails."""
        try:
            with suppress_tracing(trace_internal=self._trace_internal):
                await self._connect_and_listen()
                await self._check_delivery(is_first=True)
                task_status.started()
                while True:
                    was_proven = await self._watch_connection(scope)
                    await self._reconnect(scope, was_proven=was_proven)
        finally:
            if self._connection is not None:
                await close_connection(self._connection)

    async def _connect_and_listen(self) -> None:
        # Make a new event, because the callback of the last connection may still set the old event.
        lost = self._connection_lost = asyncio.Event()
        self._is_first_probe_sent = False
        reason = f"listening for notifications took longer than {LISTEN_TIMEOUT:g} s"
        with anyio.fail_after(LISTEN_TIMEOUT, reason=reason):
            self._connection = connection = await self._connect()
            await listen_on_channels(
                connection,
                await self._make_channel_callbacks(connection),
                partial(self._record_connection_end, lost),
            )
        self.connected.emit()

    async def _make_channel_callbacks(
        self, connection: Connection
    ) -> dict[str, Callable[[str], None]]:
        """Return the callback for each channel. The name of a channel starts with the schema that
        contains the topic's table. River in Go uses the first schema of the search path instead, so
        riverpy listens on a channel with that schema too."""
        statement = get_query("river_notification", "notification_schemas", self._schema)
        ((jobs, leases, first),) = await connection.fetch(statement.text)
        if jobs is None:
            raise ConfigError(
                "the search path of the listening connection names no schema: set Config(schema=…)"
            )
        channels: dict[str, Callable[[str], None]] = {}
        for topic, callbacks in self._callbacks_by_topic.items():
            deliver = self._make_callback(topic, callbacks)
            channels[f"{leases if topic == LEASE_TOPIC else jobs}.{topic}"] = deliver
            if self._schema is None and topic.startswith("river_"):
                channels[f"{first}.{topic}"] = deliver
        self._probe_channel = f"{jobs}.{PROBE_TOPIC}"
        channels[self._probe_channel] = self._receive_probe
        return channels

    def _make_callback(
        self, topic: str, callbacks: Sequence[Callable[[str], None]]
    ) -> Callable[[str], None]:
        def deliver(payload: str) -> None:
            for callback in callbacks:
                try:
                    callback(payload)
                except Exception:
                    self._log.exception(NOTIFICATION_HANDLER_FAILED, topic=topic)

        return deliver

    def _record_connection_end(self, lost: asyncio.Event) -> None:
        """Record the end of a connection. Code that waits for probes on it stops waiting."""
        lost.set()
        if lost is self._connection_lost:
            for arrived in self._arrival_event_by_probe.values():
                arrived.set()

    def _receive_probe(self, payload: str) -> None:
        if (event := self._arrival_event_by_probe.get(payload)) is not None:
            event.set()

    async def _watch_connection(self, scope: StopScope) -> bool:
        """Wait until the connection is lost, or a probe does not arrive. Return whether the probe
        before that arrived."""
        while True:
            was_proven = self.is_delivery_proven
            interval = (
                self.probe_interval
                if was_proven or self._is_notification_queue_full
                else FAILED_PROBE_INTERVAL
            )
            if not self._is_first_probe_sent:
                interval = UNSENT_PROBE_RETRY_DELAY
            scope.expect_progress(within=interval + PROBE_TIMEOUT)
            with anyio.move_on_after(interval):
                await self._connection_lost.wait()
                return was_proven
            if not self._is_first_probe_sent:
                await self._check_delivery(is_first=True)
            # If probes fail, only a new connection shows whether notifications arrive. Behind a
            # pooler, a probe may arrive only because the same session of the server listens and
            # sends.
            elif not (was_proven or self._is_notification_queue_full) or not (
                await self._check_delivery(is_first=False) or self._is_notification_queue_full
            ):
                return was_proven

    async def _check_delivery(self, *, is_first: bool) -> bool:
        """Send a probe, wait for its notification, and return whether it arrived. If `first` is
        True, another connection sends the probe. This finds a listener that is connected to a wrong
        database or to a pooler."""
        token = secrets.token_hex(8)
        arrived = self._arrival_event_by_probe[token] = asyncio.Event()
        is_sent = False
        try:
            with anyio.fail_after(PROBE_TIMEOUT):
                if is_first:
                    async with self._reserved_connection.acquire(
                        "sending a probe", PROBE_TIMEOUT
                    ) as connection:
                        is_sent = await self._send_probe(connection, token)
                    self._is_first_probe_sent = is_sent
                elif self._connection is not None:
                    is_sent = await self._send_probe(self._connection, token)
                else:
                    raise ConnectionError("there is no listening connection")
                self._record_queue_fullness(not is_sent)
                if is_sent:
                    await arrived.wait()
                if self._connection_lost.is_set():
                    raise ConnectionError("the listening connection is gone")
        except DATABASE_ERRORS as error:
            self._record_queue_fullness(is_notification_queue_full(error))
            if is_sent and is_first and not self._connection_lost.is_set():
                self._log_delivery_failure()
            self.is_delivery_proven = False
        else:
            self.is_delivery_proven = is_sent
            if is_sent:
                self._is_delivery_failure_logged = False
                self._backoff.reset()
        finally:
            del self._arrival_event_by_probe[token]
        return self.is_delivery_proven

    async def _send_probe(self, connection: Connection, token: str) -> bool:
        """Send a probe. Return False if nothing was sent, because the server's queue of
        notifications is full."""
        statement = get_query("river_notification", "notify", None)
        return bool(await connection.fetch(statement.text, self._probe_channel, token))

    def _record_queue_fullness(self, is_full: bool) -> None:
        self._is_notification_queue_full = is_full
        self._notification_queue_log.log_queue_state(is_full=is_full)

    def _log_delivery_failure(self) -> None:
        """Log that no notifications arrive. Log it only once, until a probe arrives again."""
        if self._is_delivery_failure_logged:
            return
        self._is_delivery_failure_logged = True
        self._log.warning(
            NOTIFICATIONS_NOT_RECEIVED,
            effect="jobs are found by polling",
            advice="behind a pooler in transaction mode set pooler=True, and a listen_url that "
            "bypasses the pooler or poll_only=True",
            seconds=PROBE_TIMEOUT,
        )

    async def _reconnect(self, scope: StopScope, *, was_proven: bool) -> None:
        """Connect again, with as many retries as needed, then call `resync`."""
        is_loss = self._connection_lost.is_set() and not self._is_delivery_failure_logged
        self.is_delivery_proven = False
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None
        if was_proven or is_loss:
            self._outage_tracker.record_loss(
                self.name, ConnectionError("the listening connection is gone")
            )
        if not was_proven:  # no probe arrived over the last connection, so wait
            await anyio.sleep(self._backoff.next_delay())
        while True:
            scope.expect_progress(
                within=LISTEN_TIMEOUT + 2 * RECONNECT_DELAY_MAX.total_seconds() + PROBE_TIMEOUT
            )
            try:
                await self._connect_and_listen()
            except (*DATABASE_ERRORS, ConfigError) as error:
                self._outage_tracker.record_loss(self.name, error)
                if self._connection is not None:
                    self._connection.terminate()
                await anyio.sleep(self._backoff.next_delay())
            else:
                break
        self._outage_tracker.record_success(self.name)
        await self._check_delivery(is_first=True)
        self._resync()


class NotificationMessage(msgspec.Struct):
    """The payload of a notification on one of River's or our topics."""

    action: str = ""
    queue: str = ""
    job_id: int = 0
    leader_id: str = ""
    lease: str = ""
    holder: str = ""
    epoch: int = 0
    """The epoch of the lease: a number that grows with each new holder."""
    seconds: list[Annotated[float, msgspec.Meta(gt=0, le=60)]] = []
    """Seconds until jobs become due."""


def decode_notification(payload: str) -> NotificationMessage | None:
    """Decode a payload. Return None, and log a warning, if it is not valid."""
    try:
        return msgspec.json.decode(payload, type=NotificationMessage)
    except (msgspec.DecodeError, RecursionError):  # any session can send any text
        get_logger().warning(INVALID_NOTIFICATION_RECEIVED, payload=payload[:100])
        return None
