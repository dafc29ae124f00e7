"""TermServicesRunner: runs the services of one term (a client's time as leader), and starts them
again when they fail."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import anyio

from riverpy._clock import Backoff
from riverpy._leases.lease_task import error_log_keys
from riverpy._lifecycle import ServiceGroup, unwrap_single_error
from riverpy._log import get_logger
from riverpy._log_events import (
    MAINTENANCE_FAILED,
    MAINTENANCE_FAILED_TOO_OFTEN,
    MAINTENANCE_FAILED_WHILE_STOPPING,
)
from riverpy._postgres.connection import close_connections
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy.errors import FencedOutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from riverpy._clock import Timer
    from riverpy._leading.term_context import TermContext
    from riverpy._leases.lease import Lease
    from riverpy._lifecycle import Service, StopScope

CONSECUTIVE_FAILURES_MAX = 3
"""After this number of consecutive failures of maintenance, the leader resigns."""
SERVICE_RESTART_DELAY_MIN = timedelta(seconds=1)
SERVICE_RESTART_DELAY_MAX = timedelta(seconds=2)
FAILURE_COUNT_RESET_AFTER = 60.0
"""If the services ran for this number of seconds before a failure, the earlier failures do not
count any more."""


class TermServicesRunner:
    """Runs the services of one term. Each start creates new services, so that an old service cannot
    affect a newer one."""

    def __init__(
        self,
        lease: Lease,
        make_services: Callable[[Lease], tuple[TermContext, Sequence[Service]]],
        *,
        timer: Timer,
        on_services_started: Callable[[], None],
        resign: Callable[[BaseException], bool],
    ) -> None:
        """Create the runner of one term.

        Args:
            make_services: creates the context of the term, and the services that share it.
            on_services_started: called each time that all services have started.
            resign: called once with the last error, when the services have failed too often.
                Returns False if the term had ended before.
        """
        self._lease, self._make_services, self._timer = lease, make_services, timer
        self._on_services_started, self._resign = on_services_started, resign
        self._services_started_at: float | None = None
        self._failure_count = 0
        self._restart_backoff = Backoff(SERVICE_RESTART_DELAY_MIN, SERVICE_RESTART_DELAY_MAX)
        self._log = get_logger(leader_id=lease.holder, elected_at=lease.acquired_at.isoformat())

    async def run(self, scope: StopScope) -> None:
        """Run the services until `scope` is stopped, or until they have failed too often."""
        while scope.cause is None and self._failure_count < CONSECUTIVE_FAILURES_MAX:
            self._services_started_at = None
            try:
                await self._run_services(scope)
            except Exception as error:
                await self._wait_or_resign_after_failure(scope, unwrap_single_error(error))

    async def _run_services(self, scope: StopScope) -> None:
        context, services = self._make_services(self._lease)
        try:
            async with ServiceGroup(scope) as group:
                for service in services:
                    await group.start(service)
                context.all_services_started.set()
                self._services_started_at = self._timer.seconds_since_boot()
                if scope.cause is None:
                    self._on_services_started()
                await anyio.sleep_forever()
        finally:
            await close_connections([context.connection, context.long_statement_connection])

    async def _wait_or_resign_after_failure(self, scope: StopScope, error: BaseException) -> None:
        """Log a failure of maintenance. Then wait until the services can start again. After too
        many failures, resign."""
        if scope.cause is not None:
            self._log.error(MAINTENANCE_FAILED_WHILE_STOPPING, **error_log_keys(error))
            return
        began = self._services_started_at
        if (
            began is not None
            and self._timer.seconds_since_boot() - began >= FAILURE_COUNT_RESET_AFTER
        ):
            self._failure_count = 0
            self._restart_backoff.reset()
        self._failure_count += 1
        keys = {
            "attempt": self._failure_count,
            "attempts": CONSECUTIVE_FAILURES_MAX,
            **error_log_keys(error),
        }
        if self._failure_count < CONSECUTIVE_FAILURES_MAX:
            delay = self._restart_backoff.next_delay()
            self._choose_log_method(error)(MAINTENANCE_FAILED, seconds=round(delay, 1), **keys)
            await self._timer.sleep(delay)
        else:
            is_resigned = self._resign(error)
            effect = "this client resigns" if is_resigned else "none: its term had ended"
            self._choose_log_method(error)(MAINTENANCE_FAILED_TOO_OFTEN, effect=effect, **keys)

    def _choose_log_method(self, error: BaseException) -> Callable[..., None]:
        """Return the log method for an error: `error` for a fault in riverpy, `warning` for an
        outage of the database, `info` for a lost term."""
        if isinstance(error, FencedOutError):
            return self._log.info
        return self._log.warning if isinstance(error, DATABASE_ERRORS) else self._log.error
