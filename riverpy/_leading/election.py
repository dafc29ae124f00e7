"""Election: one client's attempts to become the leader, and its work as the leader.

A term is the client's time as leader. A term always ends in this order: the client publishes that
it is not the leader any more, its services stop, and the lease is released. So the services of two
leaders do not run at the same time. If a service does not stop, the lease is not released but
expires.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from riverpy._leases.lease_task import LeaseTask
from riverpy._lifecycle import StopCause, TestSignal
from riverpy._log import get_logger
from riverpy._log_events import (
    LEADER_ELECTED,
    LEADER_TERM_FAILED,
    LEADERSHIP_CALLBACK_FAILED,
    LEADERSHIP_ENDED,
    LEADERSHIP_LOST,
)
from riverpy._names import DEFAULT_DOMAIN
from riverpy._postgres.notifier import decode_notification
from riverpy.events import LeadershipChange, LeaseEventKind, LeaseUse

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskStatus

    from riverpy._leases.engine import LeaseEngine
    from riverpy._leases.lease import Lease
    from riverpy._lifecycle import StopScope

ELECTION_PAUSE_MAX = 60.0
"""The maximum number of seconds for which a client takes no part in the election after its
maintenance has failed. If the interval between attempts is longer, the interval is the maximum."""


class Election:
    """Acquires the lease of a leader, and runs the leader's work until the term (the time as
    leader) ends. Then the client takes part in the election again."""

    name = "leader election"

    def __init__(
        self,
        engine: LeaseEngine,
        lease_name: str,
        run_term: Callable[[Lease, StopScope], Awaitable[None]],
        *,
        domain: str = DEFAULT_DOMAIN,
        on_leadership_change: Callable[[LeadershipChange], None] | None = None,
    ) -> None:
        """Create the election. The client that holds the lease `lease_name` is the leader.
        `run_term` runs the leader's work until its `StopScope` is stopped. `on_leadership_change`
        is called at once when a term begins or ends."""
        self._engine, self._lease_name, self._run_term = engine, lease_name, run_term
        self._domain, self._on_leadership_change = domain, on_leadership_change
        self._lease: Lease | None = None
        self._lease_task: LeaseTask | None = None
        self._failed_term_count = 0
        """The number of consecutive terms that ended because maintenance failed."""
        self._term_error: BaseException | None = None
        """The error with which the maintenance of the current term failed."""
        self._log = get_logger(client_id=engine.holder)
        if domain != DEFAULT_DOMAIN:
            self._log = self._log.bind(domain=domain)
        self.elected = TestSignal("Election.elected")

    @property
    def lease(self) -> Lease | None:
        """The lease of the current term, or None if this client may not act as the leader now."""
        return self._lease if self._lease is not None and self._lease.is_held else None

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Take part in the election until the client stops this service."""
        task_status.started()
        while True:
            lease = await self._engine.acquire(self._lease_name, scope=scope, use=LeaseUse.LEADER)
            task = self._lease_task = self._begin_term(lease)
            try:
                await task.lease_released.wait()
            except BaseException:
                await task.stop_and_wait(scope.cause or StopCause.CLIENT_STOP)
                raise

    async def close(self, timeout: float) -> bool:
        """Stop the work of the last term, and wait for at most `timeout` seconds. Return whether
        the work has ended."""
        task = self._lease_task
        if task is None:
            return True
        task.stop_work(StopCause.CLIENT_STOP)
        return await self._engine.timer.wait_for_event(task.lease_released, timeout)

    def _begin_term(self, lease: Lease) -> LeaseTask:
        self._lease, self._term_error = lease, None
        self._log.info(LEADER_ELECTED, elected_at=lease.acquired_at.isoformat())
        self._publish_leadership_change(lease, None)
        lease.call_at_end(partial(self._log_and_publish_term_end, lease))
        work = partial(self._run_maintenance, lease)
        task = LeaseTask(lease, self._engine, work, loss_cause=StopCause.LEADERSHIP_LOST)
        task.start("maintenance")
        self.elected.emit()
        return task

    async def _run_maintenance(self, lease: Lease, scope: StopScope) -> None:
        try:
            await self._run_term(lease, scope)
        except Exception as error:
            self._log.exception(LEADER_TERM_FAILED)
            self.resign_after_failure(lease, error)

    def _log_and_publish_term_end(self, lease: Lease) -> None:
        elected_at = lease.acquired_at.isoformat()
        if lease.is_lost:
            self._log.warning(LEADERSHIP_LOST, reason=lease.end_reason, elected_at=elected_at)
        else:
            self._log.info(LEADERSHIP_ENDED, reason=lease.end_reason, elected_at=elected_at)
        is_stop = lease.cause is StopCause.CLIENT_STOP
        cause = StopCause.CLIENT_STOP if is_stop else StopCause.LEADERSHIP_LOST
        self._publish_leadership_change(lease, cause)

    def _publish_leadership_change(self, lease: Lease, cause: StopCause | None) -> None:
        if self._on_leadership_change is None:
            return
        change = LeadershipChange(
            cause is None,
            lease.holder,
            lease.acquired_at,
            cause,
            domain=self._domain,
            epoch=None if self._domain == DEFAULT_DOMAIN else lease.epoch,
            event=(event := self._choose_leadership_event(lease)),
            reason=None if cause is None else lease.end_reason,
            error=self._term_error if event is LeaseEventKind.FAILED else None,
        )
        try:
            self._on_leadership_change(change)
        except Exception:  # a subscriber's error must not end the term
            self._log.exception(LEADERSHIP_CALLBACK_FAILED)

    def _choose_leadership_event(self, lease: Lease) -> LeaseEventKind:
        if lease.cause is None:
            return LeaseEventKind.ACQUIRED
        if lease.is_lost:
            return LeaseEventKind.LOST
        return LeaseEventKind.RELEASED if self._term_error is None else LeaseEventKind.FAILED

    # -- maintenance

    def reset_failed_term_count(self) -> None:
        """Count failed terms from zero again, because maintenance has started."""
        self._failed_term_count = 0

    def resign_after_failure(self, lease: Lease, error: BaseException) -> bool:
        """End the term because of an error, so that another client can become leader. Then this
        client takes no part in the election for a while. This pause doubles with each consecutive
        failure. Return False if the term had ended before."""
        interval = self._engine.timing.attempt_interval
        pause_max = max(ELECTION_PAUSE_MAX, interval)
        pause = min(interval * 2.0 ** min(self._failed_term_count, 30), pause_max)
        if lease.cause is None:
            self._term_error = error
        self._engine.events.publish_work_failure(lease, error)
        if not self._engine.resign(lease, "its maintenance failed", pause=pause):
            return False
        self._failed_term_count += 1
        return True


def receive_leadership_notification(engine: LeaseEngine, payload: str) -> None:
    """Handle a notification on River's topic `river_leadership`. Notifications on this topic are
    about the leader of the domain `default`."""
    message = decode_notification(payload)
    if message is None:
        return
    match message.action:
        case "resigned":
            engine.wake_callers_after_release(DEFAULT_DOMAIN, message.leader_id)
        case "request_resign":
            engine.resign_on_request(DEFAULT_DOMAIN)
        case _:
            pass
