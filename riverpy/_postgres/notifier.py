"""Notifier: listens for notifications on one connection, and passes them to subscribers.

The notifier sends probes to itself to check that notifications arrive. A probe is a notification on
a channel of its own. Another connection sends the first probe, and the listening connection sends
the next probes. Probes find two faults that raise no error: a half-open connection, and a pooler in
transaction mode, which accepts LISTEN but delivers nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Protocol

import anyio
import msgspec

from riverpy._clock import Backoff
from riverpy._lifecycle import TestSignal
from riverpy._log import ServerNotificationQueueLog, get_logger
from riverpy._log_events import (
    INVALID_NOTIFICATION_RECEIVED,
    NOTIFICATION_HANDLER_FAILED,
    NOTIFICATIONS_NOT_RECEIVED,
)
from riverpy._postgres.channels import listen_on_channels, stop_listening, watch_connection_end
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    close_connection,
    is_notification_queue_full,
)
from riverpy._postgres.leases import LEASE_TOPIC as LEASE_TOPIC
from riverpy._postgres.sql_files import get_query
from riverpy._postgres.tracing import suppress_tracing
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from contextlib import AbstractAsyncContextManager

    from anyio.abc import TaskStatus

    from riverpy._lifecycle import StopScope
    from riverpy._postgres.connection import ConnectionOutageTracker
    from riverpy._postgres.driver import Connection, Transaction

PROBE_TOPIC = "riverpy_probe"
PROBE_TIMEOUT = 2.0
"""Seconds within which a probe (a test notification) must arrive."""
PROBE_INTERVAL = 10.0
"""Seconds between two probes."""
FAILED_PROBE_INTERVAL = 60.0
"""Seconds until the next probe after a probe that did not arrive."""
UNSENT_PROBE_RETRY_DELAY = 2.0
"""Seconds until the notifier tries again to send a first probe that could not be sent."""
LISTEN_TIMEOUT = 10.0
"""The timeout for connecting and LISTEN, in seconds."""
RECONNECT_DELAY_MIN = timedelta(milliseconds=50)
RECONNECT_DELAY_MAX = timedelta(seconds=2)


class ConnectionProvider(Protocol):
    """An object that lends a connection, such as a `DedicatedConnection`."""

    def acquire(self, purpose: str, timeout: float) -> AbstractAsyncContextManager[Transaction]:
        """Lend a connection for the `async with` block. Connecting and the block together take at
        most `timeout` seconds. Error texts name `purpose`."""
        ...


class Notifier:
    """Listens on the notification topics of one schema. Callbacks run in the event loop and must
    not block. If one callback fails, the other callbacks still run."""

    name = "notifier"

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        *,
        schema: str | None,
        reserved: ConnectionProvider,
        outage: ConnectionOutageTracker,
        resync: Callable[[], None],
        probe_interval_min: float,
        trace_internal: bool,
    ) -> None:
        """Store the arguments, and make no connection yet.

        Args:
            connect: makes the listening connection.
            schema: the schema of River's tables. None: the search path decides.
            reserved: another connection, which sends the first probe.
            outage: logs outages.
            resync: called after a reconnect, because notifications may have been missed before.
            probe_interval_min: the shortest interval between two probes in seconds.
            trace_internal: whether OpenTelemetry's driver instrumentation traces the statements.
        """
        self._connect = connect
        self._schema = schema
        self._reserved_connection = reserved
        self._outage_tracker = outage
        self.probe_interval = max(PROBE_INTERVAL, probe_interval_min)
        """Seconds between two probes as long as probes arrive."""
        self._trace_internal = trace_internal
        self._callbacks_by_topic: dict[str, list[Callable[[str], None]]] = {}
        self._on_listening_by_topic: dict[str, list[Callable[[], None]]] = {}
        """The functions to call after each start of LISTEN on a topic."""
        self._pending_on_listening: list[tuple[str, Callable[[], None]]] = []
        """The `on_listening` functions that have not been called yet, each after its topic."""
        self._listened_topics: set[str] = set()
        """The topics on which the current connection listens."""
        self._schemas: tuple[str, str, str] = ("", "", "")
        """The schemas with which names of channels start: the schema of the jobs, the schema of the
        leases, and the first schema of the search path."""
        self._woken = asyncio.Event()
        """Set when the connection is lost, or the topics have changed."""
        self.on_running_changed: Callable[[], None] | None = None
        """Called when the notifier has started, and when it ends."""
        self.is_running = False
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
        self._notification_queue_log = ServerNotificationQueueLog()
        self.connected = TestSignal("Notifier.connected")

    @property
    def is_connected(self) -> bool:
        """Whether there is a listening connection that is not known to be lost."""
        return self._connection is not None and not self._connection.is_closed()

    def is_listening_on(self, topic: str) -> bool:
        """Return whether notifications on this topic arrive now: the connection listens on the
        topic, and the last probe has arrived."""
        return self.is_running and self.is_delivery_proven and topic in self._listened_topics

    def subscribe(
        self,
        topic: str,
        callback: Callable[[str], None],
        on_listening: Callable[[], None] | None = None,
    ) -> None:
        """Call `callback` with the payload of each notification on a topic. Call `on_listening`
        when LISTEN has started on the topic, and again after each reconnect. Notifications that
        were sent before LISTEN started, or while there was no connection, do not arrive. The
        notifier may be running already."""
        self._callbacks_by_topic.setdefault(topic, []).append(callback)
        if on_listening is not None:
            self._on_listening_by_topic.setdefault(topic, []).append(on_listening)
            self._pending_on_listening.append((topic, on_listening))
        self._woken.set()

    def unsubscribe(
        self, topic: str, callback: Callable[[str], None], on_listening: Callable[[], None]
    ) -> None:
        """Remove a callback and its `on_listening` function. The connection still listens on the
        topic, because another subscriber may follow soon. Call `unlisten_unused_topics` to stop
        listening."""
        self._callbacks_by_topic[topic].remove(callback)
        self._on_listening_by_topic[topic].remove(on_listening)
        if (start := (topic, on_listening)) in self._pending_on_listening:
            self._pending_on_listening.remove(start)

    def unlisten_unused_topics(self) -> None:
        """Stop listening on topics without subscribers."""
        for topic in [topic for topic, called in self._callbacks_by_topic.items() if not called]:
            del self._callbacks_by_topic[topic]
        self._woken.set()

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Listen until the notifier is stopped, and reconnect after each loss of the connection. If
        the first connection fails, raise its error."""
        try:
            with suppress_tracing(trace_internal=self._trace_internal):
                await self._connect_and_listen()
                self._outage_tracker.record_success(self.name)
                await self._check_delivery(is_first=True)
                self._set_running(is_running=True)
                task_status.started()
                self._call_on_listening()
                while True:
                    was_proven = await self._watch_connection(scope)
                    await self._reconnect(scope, was_proven=was_proven)
        finally:
            self._set_running(is_running=False)
            if self._connection is not None:
                await close_connection(self._connection)

    def _set_running(self, *, is_running: bool) -> None:
        self.is_running = is_running
        if self.on_running_changed is not None:
            self.on_running_changed()

    async def _connect_and_listen(self) -> None:
        # Make a new event, because the callback of the last connection may still set the old event.
        lost = self._connection_lost = asyncio.Event()
        self._is_first_probe_sent = False
        reason = f"listening for notifications took longer than {LISTEN_TIMEOUT:g} s"
        with anyio.fail_after(LISTEN_TIMEOUT, reason=reason):
            self._connection = connection = await self._connect()
            watch_connection_end(connection, partial(self._record_connection_end, lost))
            await self._read_channel_schemas(connection)
            self._probe_channel = f"{self._schemas[0]}.{PROBE_TOPIC}"
            topics = list(self._callbacks_by_topic)
            channels = self._make_channel_callbacks(topics)
            channels[self._probe_channel] = self._receive_probe
            await listen_on_channels(connection, channels)
            self._listened_topics = set(topics)
        self.connected.emit()

    async def _read_channel_schemas(self, connection: Connection) -> None:
        statement = get_query("river_notification", "notification_schemas", self._schema)
        ((jobs, leases, first),) = await connection.fetch(statement.text)
        if jobs is None:
            raise ConfigError(
                "the search path of the listening connection names no schema: set Config(schema=…)"
            )
        self._schemas = (jobs, leases, first)

    def _make_channel_callbacks(self, topics: Iterable[str]) -> dict[str, Callable[[str], None]]:
        """Return the callback for each channel. The name of a channel starts with a schema: the
        schema of the leases for LEASE_TOPIC, or the schema of the jobs for other topics. River in
        Go uses the first schema of the search path instead. So riverpy also listens on a channel
        with that schema for River's topics, if no schema is configured."""
        jobs, leases, first = self._schemas
        channels: dict[str, Callable[[str], None]] = {}
        for topic in topics:
            deliver = partial(self._deliver_notification, topic)
            channels[f"{leases if topic == LEASE_TOPIC else jobs}.{topic}"] = deliver
            if self._schema is None and topic.startswith("river_"):
                channels[f"{first}.{topic}"] = deliver
        return channels

    def _deliver_notification(self, topic: str, payload: str) -> None:
        for callback in list(self._callbacks_by_topic.get(topic, ())):
            self._call_subscriber(topic, partial(callback, payload))

    def _call_subscriber(self, topic: str, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception:
            self._log.exception(NOTIFICATION_HANDLER_FAILED, topic=topic)

    def _call_on_listening(self) -> None:
        """Call the `on_listening` functions for all topics on which the connection listens."""
        self._pending_on_listening = [
            (topic, _)
            for topic, _ in self._pending_on_listening
            if topic not in self._listened_topics
        ]
        for topic in self._listened_topics:
            for function in list(self._on_listening_by_topic.get(topic, ())):
                self._call_subscriber(topic, function)

    async def _listen_on_changed_topics(self) -> None:
        """LISTEN on the topics that were added since the connection was made, and UNLISTEN the
        topics that no subscriber needs. If that fails, terminate the connection, so that the
        notifier reconnects."""
        added = [topic for topic in self._callbacks_by_topic if topic not in self._listened_topics]
        removed = self._listened_topics - self._callbacks_by_topic.keys()
        connection = self._connection
        if connection is None:
            return
        try:
            with anyio.fail_after(LISTEN_TIMEOUT):
                if added:
                    await listen_on_channels(connection, self._make_channel_callbacks(added))
                if removed:
                    await stop_listening(connection, self._make_channel_callbacks(removed))
        except DATABASE_ERRORS:
            connection.terminate()
            return
        self._listened_topics.update(added)
        self._listened_topics.difference_update(removed)
        starts, self._pending_on_listening = self._pending_on_listening, []
        for topic, function in starts:
            self._call_subscriber(topic, function)

    def _record_connection_end(self, lost: asyncio.Event) -> None:
        """Record that a connection has ended. `lost` is the event of that connection. If it is the
        event of the current connection, stop waiting for probes."""
        lost.set()
        self._woken.set()
        if lost is self._connection_lost:
            for arrived in self._arrival_event_by_probe.values():
                arrived.set()

    def _receive_probe(self, payload: str) -> None:
        if (event := self._arrival_event_by_probe.get(payload)) is not None:
            event.set()

    async def _watch_connection(self, scope: StopScope) -> bool:
        """Send probes until the connection is lost or a probe does not arrive. Return whether
        notifications arrived over the connection until then."""
        while True:
            was_proven = self.is_delivery_proven
            interval = (
                self.probe_interval
                if was_proven or self._is_notification_queue_full
                else FAILED_PROBE_INTERVAL
            )
            if not self._is_first_probe_sent:
                interval = UNSENT_PROBE_RETRY_DELAY
            scope.set_progress_deadline(within=interval + PROBE_TIMEOUT)
            if await self._wait_for_connection_loss(interval):
                return was_proven
            if not self._is_first_probe_sent:
                await self._check_delivery(is_first=True)
            # After a failed probe, return, so that the notifier reconnects. If a later probe over
            # this connection arrived, that would prove nothing: behind a pooler, the same session
            # of the server may listen and send.
            elif not (was_proven or self._is_notification_queue_full) or not (
                await self._check_delivery(is_first=False) or self._is_notification_queue_full
            ):
                return was_proven

    async def _wait_for_connection_loss(self, seconds: float) -> bool:
        """Wait for at most `seconds` until the connection is lost, and return whether it is lost.
        During this time, listen on added topics, and stop listening on removed topics."""
        deadline = anyio.current_time() + seconds
        while not self._connection_lost.is_set():
            self._woken.clear()
            await self._listen_on_changed_topics()
            with anyio.CancelScope(deadline=deadline) as scope:
                await self._woken.wait()
            if scope.cancelled_caught:
                return self._connection_lost.is_set()
        return True

    async def _check_delivery(self, *, is_first: bool) -> bool:
        """Send a probe, and return whether its notification arrived. If `is_first` is True, another
        connection sends the probe. A probe from another connection does not arrive if the listening
        connection goes to a wrong database, or to a pooler in transaction mode."""
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
                self._record_notification_queue_state(not is_sent)
                if is_sent:
                    await arrived.wait()
                if self._connection_lost.is_set():
                    raise ConnectionError("the listening connection is gone")
        except DATABASE_ERRORS as error:
            self._record_notification_queue_state(is_notification_queue_full(error))
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

    async def _send_probe(self, connection: Transaction, token: str) -> bool:
        """Send a probe. Return False if nothing was sent, because the server's queue of
        notifications is full."""
        statement = get_query("river_notification", "notify", None)
        return bool(await connection.fetch(statement.text, self._probe_channel, token))

    def _record_notification_queue_state(self, is_full: bool) -> None:
        self._is_notification_queue_full = is_full
        self._notification_queue_log.log_queue_state(is_full=is_full)

    def _log_delivery_failure(self) -> None:
        """Log that no notifications arrive. Do nothing if this was logged before and no probe has
        arrived since then."""
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
        """Reconnect, and retry with delays until a connect succeeds. Then call `resync`.
        `was_proven` is the result of `_watch_connection`: whether notifications arrived over the
        old connection until it was lost, or until a probe (a test notification) did not arrive. If
        `was_proven` is False, wait before the first try."""
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
            scope.set_progress_deadline(
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
        self._call_on_listening()


class NotificationMessage(msgspec.Struct):
    """The payload of a notification on one of River's or riverpy's topics."""

    action: str = ""
    queue: str = ""
    job_id: int = 0
    leader_id: str = ""
    lease: str = ""
    holder: str = ""
    notify_interval_ms: Annotated[float, msgspec.Meta(ge=0, le=60_000)] | None = None
    """In a notification of inserted jobs: the milliseconds during which the sender may insert more
    jobs into the queue without another notification. 0: the sender notifies of each insert. None:
    the sender may be River in Go, whose interval is 100 ms."""
    epoch: int = 0
    """The epoch of the lease: a number that grows with each new holder."""
    seconds: list[Annotated[float, msgspec.Meta(gt=0, le=60)]] = []
    """The times until jobs become due, in seconds."""


def decode_notification(payload: str) -> NotificationMessage | None:
    """Decode a payload. Return None, and log a warning, if it is not valid."""
    try:
        return msgspec.json.decode(payload, type=NotificationMessage)
    except (msgspec.DecodeError, RecursionError):  # any session can send any text
        get_logger().warning(INVALID_NOTIFICATION_RECEIVED, payload=payload[:100])
        return None
