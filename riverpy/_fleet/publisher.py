"""FleetPublisher: sends the events of a running client to its followers, i.e. the clients that want
to receive them.

While there is no follower, no events are collected or sent. The publisher has its own connection,
because PostgreSQL commits the notifications of all sessions one after another: on a shared
connection, this could delay leases, heartbeats, claims and results. The connection is opened for
the first event, and closed 30 seconds after the last follower has ended. An event that cannot be
sent is dropped and counted.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

import anyio

from riverpy._fleet.filters import merge_filters
from riverpy._fleet.messages import EventPayloadBuilder, decode_announcement
from riverpy._fleet.outbox import FleetOutbox
from riverpy._log import get_logger
from riverpy._log_events import FLEET_EVENTS_NOT_SENT
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy._postgres.fleet import FLEET_TOPIC, FOLLOW_TOPIC, fleet_notify

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskStatus

    from riverpy._fleet.messages import WantedEventsAnnouncement
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._postgres.notifier import Notifier

ANNOUNCEMENT_VALIDITY = 30.0
"""How long the announcement of a follower is valid, in seconds of this client's monotonic clock."""
SEND_INTERVAL = 0.02
"""How long events are collected before one statement sends them, in seconds."""
EVENTS_PER_SECOND_MAX = 2_000
"""The maximum number of events that a client sends per second."""
SEND_TIMEOUT = 2.0
"""The timeout of a statement that sends events, in seconds. If this timeout expires, the events are
dropped."""
SEND_RETRY_DELAY = 1.0
"""The delay in seconds before the client sends events again after a failed statement."""
LAST_SEND_TIMEOUT = 0.5
"""The timeout of the last statement that sends events when the client stops, in seconds."""
UNUSED_CONNECTION_TIMEOUT = 30.0
"""How long the publisher's connection stays open after the last follower has ended, in seconds."""
ANNOUNCEMENTS_KEPT_MAX = 2_000
"""The maximum number of valid announcements. Further announcements are ignored."""


class OutboxOwner(Protocol):
    """The object that adds the events of a client to the outbox. `fleet_outbox` is None while there
    is no follower."""

    fleet_outbox: FleetOutbox | None


class FleetPublisher:
    """Sends the events of one client while it has followers. The client itself may be one of
    them."""

    name = "fleet publisher"

    def __init__(
        self,
        client_id: str,
        owner: OutboxOwner,
        make_connection: Callable[[], DedicatedConnection],
        schema: str | None,
    ) -> None:
        """Create the publisher without opening a connection. While there are followers, the
        publisher sets `owner.fleet_outbox` to its outbox."""
        self._owner, self._make_connection, self._schema = owner, make_connection, schema
        self._connection: DedicatedConnection | None = None
        self._announcements: dict[tuple[str, int], tuple[float, WantedEventsAnnouncement]] = {}
        """The valid announcements, with the monotonic times at which they expire. The key is the
        follower's id and the number of the announcement."""
        self._outbox = FleetOutbox(self._wake)
        self._messages = EventPayloadBuilder(client_id)
        self._woken = asyncio.Event()
        self._allowance, self._allowance_at = float(EVENTS_PER_SECOND_MAX), time.monotonic()
        """`_allowance` is the number of events that the rate limit allowed at the monotonic time
        `_allowance_at`."""
        self._log = get_logger().with_rate_limit()

    def _wake(self) -> None:
        """Wake the task that sends events."""
        self._woken.set()

    def subscribe_to(self, notifier: Notifier) -> None:
        """Make a notifier pass the announcements of followers to `receive_announcement`."""
        notifier.subscribe(FOLLOW_TOPIC, self.receive_announcement)

    def receive_announcement(self, payload: str) -> None:
        """Handle an announcement of a follower. Invalid announcements are ignored."""
        announcement = decode_announcement(payload)
        if announcement is None:
            return
        key = announcement.follower, announcement.part
        if announcement.is_end:
            for known in [one for one in self._announcements if one[0] == announcement.follower]:
                del self._announcements[known]
            self._update_outbox_filters()
            return
        until = time.monotonic() + ANNOUNCEMENT_VALIDITY
        before = self._announcements.get(key)
        if before is None and len(self._announcements) >= ANNOUNCEMENTS_KEPT_MAX:
            return
        self._announcements[key] = until, announcement
        if before is None or before[1].filters != announcement.filters:
            self._update_outbox_filters()

    def _drop_expired_announcements(self) -> None:
        now = time.monotonic()
        expired = [key for key, (until, _) in self._announcements.items() if until <= now]
        for key in expired:
            del self._announcements[key]
        if expired:
            self._update_outbox_filters()

    def _update_outbox_filters(self) -> None:
        """Make the outbox collect the events that match a valid announcement. If there is no valid
        announcement, stop collecting events."""
        self._outbox.filters = merge_filters(
            one for _, announcement in self._announcements.values() for one in announcement.filters
        )
        if not self._announcements:
            self._owner.fleet_outbox = None
            self._outbox.clear()
        elif self._owner.fleet_outbox is None:
            self._owner.fleet_outbox = self._outbox
            self._wake()  # `run` must notice when announcements expire

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Send events until the client stops this service. Then send the remaining events if the
        connection is open."""
        task_status.started()
        try:
            while True:
                scope.clear_progress_deadline()
                await self._wait_for_events()
                scope.set_progress_deadline(within=SEND_INTERVAL + SEND_TIMEOUT + SEND_RETRY_DELAY)
                self._drop_expired_announcements()
                if self._outbox or self._outbox.dropped_count:
                    await anyio.sleep(SEND_INTERVAL)
                    if not await self._send_events(SEND_TIMEOUT):
                        await anyio.sleep(SEND_RETRY_DELAY)
        finally:
            self._owner.fleet_outbox = None
            with anyio.CancelScope(shield=True):
                if self._outbox and self._connection is not None:
                    await self._send_events(LAST_SEND_TIMEOUT)
                await self._close_connection()

    async def _wait_for_events(self) -> None:
        """Wait until there is an event to send or an announcement expires. Close the connection if
        there was no follower for `UNUSED_CONNECTION_TIMEOUT`."""
        while not self._outbox and not self._outbox.dropped_count:
            self._woken.clear()
            timeout: float | None = None
            if self._announcements:
                first_end = min(until for until, _ in self._announcements.values())
                timeout = max(first_end - time.monotonic(), 0.0)
            elif self._connection is not None:
                timeout = UNUSED_CONNECTION_TIMEOUT
            with anyio.move_on_after(timeout) as waiting:
                await self._woken.wait()
            if waiting.cancelled_caught:
                if not self._announcements:
                    await self._close_connection()
                self._drop_expired_announcements()

    async def _send_events(self, timeout: float) -> bool:
        """Send as many events from the outbox as the rate limit allows. Return whether the server
        accepted them."""
        now = time.monotonic()
        self._allowance = min(
            self._allowance + (now - self._allowance_at) * EVENTS_PER_SECOND_MAX,
            float(EVENTS_PER_SECOND_MAX),
        )
        self._allowance_at = now
        lines = self._outbox.take_encoded_events(
            int(self._allowance), self._messages.line_length_max
        )
        self._allowance -= len(lines)
        dropped, self._outbox.dropped_count = self._outbox.dropped_count, 0
        if not lines and not dropped:
            return True
        is_sent = False
        try:
            is_sent = await self._send_payloads(
                self._messages.build_payloads(lines, dropped), timeout
            )
            if not is_sent:
                self._log.warning(
                    FLEET_EVENTS_NOT_SENT,
                    events=len(lines),
                    reason="the server's queue of notifications is nearly full",
                )
        except DATABASE_ERRORS as error:
            self._log.debug(FLEET_EVENTS_NOT_SENT, events=len(lines), reason=describe_error(error))
        except Exception:  # a bug in riverpy must not stop the client
            self._log.exception(FLEET_EVENTS_NOT_SENT, events=len(lines), reason="a fault")
        if not is_sent:
            self._outbox.dropped_count += dropped + len(lines)
        return is_sent

    async def _send_payloads(self, payloads: list[str], timeout: float) -> bool:
        if self._connection is None:
            self._connection = self._make_connection()
        async with self._connection.acquire("sending events", timeout) as connection:
            return await fleet_notify(connection, self._schema, FLEET_TOPIC, payloads)

    async def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
