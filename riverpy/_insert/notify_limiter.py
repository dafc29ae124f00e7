"""NotifyLimiter: decides which queues an insert notifies if the caller passes no transaction
(`tx`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.inserts import QueuesToNotify

if TYPE_CHECKING:
    from collections.abc import Iterable

    from riverpy._clock import Clock

NOTIFY_INTERVAL_MIN = 0.002
"""The minimum number of seconds between two notifications of one queue. The limit applies to the
inserts of one client without `tx`."""
NOTIFICATION_COVERAGE_SECONDS = 0.004
"""For this number of seconds after the start of a statement with a notification, other statements
may end without a notification. A client that receives the notification claims jobs again 5 ms
later, and finds all jobs that were stored by then. If a statement without a notification ends
later, a notification is overdue (see `NotifyLimiter`)."""
_REMEMBERED_QUEUES_MAX = 1000
"""The maximum number of queues that a `NotifyLimiter` remembers."""


class NotifySelection(NamedTuple):
    """The queues of one insert statement: those that it notifies, and those that it does not."""

    notified_queues: list[str]
    """The queues that the statement notifies."""
    skipped_queues: list[str]
    """The queues that the statement does not notify, because another one has just notified them."""
    overdue_queues: list[str]
    """Those of `notified_queues` whose notification was overdue (see `NotifyLimiter`)."""
    started_at: float
    """The monotonic time just before the statement is sent, in seconds."""

    @property
    def queues_to_notify(self) -> QueuesToNotify:
        """The queues that the statement notifies, and `NOTIFY_INTERVAL_MIN` in milliseconds, which
        is sent with each notification."""
        return QueuesToNotify(self.notified_queues, round(NOTIFY_INTERVAL_MIN * 1000))


class NotifyLimiter:
    """Limits the notifications of each queue to one per `NOTIFY_INTERVAL_MIN`.

    A transaction that notifies takes a lock at its commit, so two such transactions cannot commit
    at the same time. One notification is enough for several inserts: its payload contains
    `NOTIFY_INTERVAL_MIN`. A client that receives the notification claims jobs at once, and claims
    again some milliseconds after this interval. The second claim finds the jobs that were stored
    after the notification.

    A statement that did not notify may end too late for the second claim, for example because the
    disk is slow. Then a notification is overdue: another statement must notify the queues of the
    late statement.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._selected_at_by_queue: dict[str, float] = {}
        """For each queue, the start time of the last statement that was chosen to notify it."""
        self._sent_at_by_queue: dict[str, float] = {}
        """For each queue, the start time of the last successful statement that notified it."""
        self.overdue_queues: dict[str, None] = {}
        """The queues whose notification is overdue. These queues must be notified even if no
        further job is inserted."""

    def select_queues(
        self, queues: Iterable[str], *, counts_running_statements: bool = True
    ) -> NotifySelection:
        """Choose the queues that a statement notifies.

        `counts_running_statements`: True: leave out the queues that a running statement will
        notify. Pass False if the running statement may wait for a lock, because its notification
        may then come too late.
        """
        now = self._clock.monotonic()
        times = self._sent_at_by_queue
        if counts_running_statements:
            times = self._selected_at_by_queue
        overdue = list(self.overdue_queues)
        self.overdue_queues.clear()
        notified, skipped = overdue.copy(), list[str]()
        for queue in queues:
            if now - times.get(queue, -1e9) > NOTIFY_INTERVAL_MIN:
                if queue not in overdue:
                    notified.append(queue)
            elif queue not in overdue:
                skipped.append(queue)
        self._record_queue_times(self._selected_at_by_queue, notified, now)
        return NotifySelection(notified, skipped, overdue, now)

    def record_statement_end(self, selection: NotifySelection, *, is_stored: bool) -> None:
        """Record that a statement has ended. `is_stored`: whether it has succeeded. A failed
        statement has notified no queue."""
        if is_stored:
            self._record_queue_times(
                self._sent_at_by_queue, selection.notified_queues, selection.started_at
            )
            for queue in selection.notified_queues:
                self.overdue_queues.pop(queue, None)
        else:
            for queue in selection.notified_queues:
                if self._selected_at_by_queue.get(queue) == selection.started_at:
                    del self._selected_at_by_queue[queue]
            for queue in selection.overdue_queues:
                self._add_overdue_queue(queue)
        if selection.skipped_queues:
            now, sent_at = self._clock.monotonic(), self._sent_at_by_queue
            for queue in selection.skipped_queues:
                if now - sent_at.get(queue, -1e9) > NOTIFICATION_COVERAGE_SECONDS:
                    self._add_overdue_queue(queue)

    def _add_overdue_queue(self, queue: str) -> None:
        if len(self.overdue_queues) < _REMEMBERED_QUEUES_MAX:  # otherwise polling finds the jobs
            self.overdue_queues[queue] = None

    def _record_queue_times(self, times: dict[str, float], queues: list[str], now: float) -> None:
        if len(times) > _REMEMBERED_QUEUES_MAX:
            times.clear()
        for queue in queues:
            times[queue] = now
