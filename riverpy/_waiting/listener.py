"""SharedListener: the connection on which all waits and subscriptions of a client listen."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import anyio

from riverpy._clock import Backoff
from riverpy._lifecycle import StopScope
from riverpy._log import get_logger
from riverpy._log_events import SHARED_LISTENER_FAILED
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._waiting.background_task import BackgroundTask
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from riverpy._postgres.connection import ConnectionOutageTracker
    from riverpy._postgres.notifier import Notifier

UNUSED_LISTENER_TIMEOUT = 10.0
"""The listener closes its own connection this many seconds after its last subscriber has left, i.e.
after the last `with` block of `listening` has ended."""
RECONNECT_DELAY_MIN = timedelta(milliseconds=100)
RECONNECT_DELAY_MAX = timedelta(seconds=5)


class _Subscriber(NamedTuple):
    """One subscriber of a topic. Each call of `SharedListener.listening` makes one."""

    topic: str
    callback: Callable[[str], None]
    on_resync: Callable[[], None]


class SharedListener:
    """The connection on which all waits and subscriptions of one client listen.

    While the client works jobs, the listener uses the connection on which the client listens for
    its work. Otherwise it opens its own connection for the first subscriber, and closes it
    `UNUSED_LISTENER_TIMEOUT` seconds after the last subscriber has left.

    The listener replaces a lost connection. While there is no connection, and with `poll_only`,
    `is_listening_on` returns False, and the subscribers poll the database.
    """

    def __init__(
        self,
        make_notifier: Callable[[], Notifier | None],
        outage_tracker: ConnectionOutageTracker,
    ) -> None:
        """Create a listener without a connection.

        Args:
            make_notifier: makes the listener's own notifier (the object that listens on a
                connection). The listener uses its own notifier while the client works no jobs. The
                function returns None if the client's settings forbid LISTEN.
            outage_tracker: records that the listener's own notifier could not connect.
        """
        self._make_notifier = make_notifier
        self._outage_tracker = outage_tracker
        self._subscribers: list[_Subscriber] = []
        self._own_notifier: Notifier | None = None
        self._run_notifier: Notifier | None = None
        """The notifier that the client uses while it works jobs. None while the client works no
        jobs."""
        self._subscribed_notifier: Notifier | None = None
        """The notifier on which the subscribers listen now."""
        self._own_task = BackgroundTask(
            "shared listener", self._run_own_notifier, self._forget_own_notifier
        )
        self._unused_timer: asyncio.TimerHandle | None = None
        self._log = get_logger()

    def is_listening_on(self, topic: str) -> bool:
        """Return whether notifications on this topic arrive now. If not, the caller must poll the
        database."""
        notifier = self._subscribed_notifier
        return notifier is not None and notifier.is_listening_on(topic)

    @property
    def is_listening_or_connecting(self) -> bool:
        """Whether a connection is listening or being opened."""
        return self._subscribed_notifier is not None

    @contextmanager
    def listening(
        self, topic: str, callback: Callable[[str], None], on_resync: Callable[[], None]
    ) -> Generator[None]:
        """Listen on a topic during the `with` block. Call this in the client's event loop.

        Args:
            topic: the topic, without the schema.
            callback: called with the payload of each notification.
            on_resync: called when LISTEN has started, and after each reconnect. Notifications that
                were sent before may be lost, so `on_resync` must cause a read of the database.
        """
        subscriber = _Subscriber(topic, callback, on_resync)
        self._subscribers.append(subscriber)
        self._stop_unused_listener_timer()
        if self._subscribed_notifier is None:
            self._switch_notifier()
        else:
            self._subscribed_notifier.subscribe(*subscriber)
        try:
            yield
        finally:
            if subscriber in self._subscribers:  # not if `close` has removed all subscribers
                self._subscribers.remove(subscriber)
                if self._subscribed_notifier is not None:
                    self._subscribed_notifier.unsubscribe(*subscriber)
                if not self._subscribers:
                    self._start_unused_listener_timer()

    def use_notifier_of_working_client(self, notifier: Notifier) -> None:
        """Set the notifier that the client uses while it works jobs. While this notifier runs, all
        subscribers listen on it."""

        def update_run_notifier() -> None:
            """Listen on `notifier` while it runs, and otherwise on the listener's own notifier."""
            self._run_notifier = notifier if notifier.is_running else None
            self._switch_notifier()

        notifier.on_running_changed = update_run_notifier

    def _switch_notifier(self) -> None:
        """Move the subscribers to the notifier that the client uses while it works jobs. If the
        client works no jobs, move them to the listener's own notifier, and make it if needed."""
        wanted, before = self._run_notifier, self._subscribed_notifier
        if wanted is None and self._subscribers:
            self._own_notifier = wanted = self._own_notifier or self._make_notifier()
        if wanted is before:
            return
        if before is not None:
            for subscriber in self._subscribers:
                before.unsubscribe(*subscriber)
            before.unlisten_unused_topics()
        self._subscribed_notifier = wanted
        if wanted is not None:
            for subscriber in self._subscribers:
                wanted.subscribe(*subscriber)
        if wanted is not None and wanted is self._own_notifier:
            self._own_task.start()
        else:
            self._own_task.cancel()
            self._own_notifier = None

    async def _run_own_notifier(self) -> None:
        notifier, backoff = self._own_notifier, Backoff(RECONNECT_DELAY_MIN, RECONNECT_DELAY_MAX)
        while notifier is not None:
            try:
                with StopScope() as scope:
                    await notifier.run(scope, task_status=anyio.TASK_STATUS_IGNORED)
            # the notifier could not open its first connection
            except (*DATABASE_ERRORS, ConfigError) as error:
                self._outage_tracker.record_loss(notifier.name, error)
            except Exception:  # a bug of riverpy: until the next try, the subscribers poll
                self._log.exception(SHARED_LISTENER_FAILED)
            await anyio.sleep(backoff.next_delay())

    def _forget_own_notifier(self, _error: Exception) -> None:
        """Forget the listener's own notifier, because its task has failed or other code has
        cancelled the task. The subscribers poll until a new subscriber starts another task."""
        self._own_notifier = self._subscribed_notifier = None

    # -- stop listening

    def _start_unused_listener_timer(self) -> None:
        self._stop_unused_listener_timer()
        loop = asyncio.get_running_loop()
        self._unused_timer = loop.call_later(UNUSED_LISTENER_TIMEOUT, self._stop_listening)

    def _stop_unused_listener_timer(self) -> None:
        if self._unused_timer is not None:
            self._unused_timer.cancel()
            self._unused_timer = None

    def _stop_listening(self) -> None:
        """Stop listening. Close the connection if it is the listener's own."""
        self._unused_timer = None
        notifier, self._subscribed_notifier = self._subscribed_notifier, None
        if notifier is not None:
            notifier.unlisten_unused_topics()
        self._own_task.cancel()
        self._own_notifier = None

    async def close(self) -> None:
        """Close the connection. The remaining subscribers receive no further notifications."""
        self._stop_unused_listener_timer()
        for subscriber in self._subscribers:
            if self._subscribed_notifier is not None:
                self._subscribed_notifier.unsubscribe(*subscriber)
        self._subscribers.clear()
        self._stop_listening()
        await self._own_task.close()
