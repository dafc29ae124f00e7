"""Chooses the maintenance services that a client runs during a term. A term is the time for which a
client is the leader of a domain, or holds the schema lease. If you add a service, add it to a list
in this module, and add its module to the layers of `_maintenance` in pyproject.toml."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from riverpy._lifecycle import await_in_separate_task
from riverpy._log_events import LEADER_FUNCTION_ENDED
from riverpy._maintenance.base import MaintenanceService
from riverpy._maintenance.client_cleaner import ClientCleaner
from riverpy._maintenance.execution_cleaner import RunOnceKeyCleaner
from riverpy._maintenance.job_cleaner import JobCleaner
from riverpy._maintenance.job_count_cleaner import JobCountCleaner
from riverpy._maintenance.job_expirer import JobExpirer
from riverpy._maintenance.job_rescuer import JobRescuer
from riverpy._maintenance.job_scheduler import JobScheduler
from riverpy._maintenance.periodic_enqueuer import PeriodicEnqueuer
from riverpy._maintenance.queue_cleaner import QueueCleaner
from riverpy._maintenance.reindexer import make_reindexers
from riverpy._names import DEFAULT_DOMAIN
from riverpy._postgres.domains import default_leader_get_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._clients.heartbeat import HeartbeatWriter
    from riverpy._insert.inserter import Inserter
    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope
    from riverpy.periodic import PeriodicJobs
    from riverpy.singletons import LeaderFunction


class LeaderFunctionService(MaintenanceService):
    """Runs a user's function while this client is the leader. If the function returns, it runs
    again only when this client becomes leader again. If the function raises an error, it runs again
    after a delay."""

    def __init__(self, context: TermContext, function: LeaderFunction) -> None:
        self.name = f"leader function {function.name}"
        super().__init__(context)
        self._function = function

    async def run_once(self, scope: StopScope) -> float:
        """Run the function to its end. Raise what the function raises."""
        await await_in_separate_task(self.name, lambda: self._function.fn(self.context.fence))
        self.log.info(LEADER_FUNCTION_ENDED)
        return math.inf


class DefaultLeaderChangeCheck(MaintenanceService):
    """Checks at the interval of lease renewals whether the leader of the domain `default` has
    changed since this client acquired the schema lease. If so, the client gives up the lease."""

    name = "default leader check"

    def __init__(
        self, context: TermContext, resign: Callable[[str], object], *, has_foreign_leader: bool
    ) -> None:
        """Create the check.

        Args:
            context: the objects that the services of the term share.
            resign: ends the term of the schema lease. Its argument is the reason.
            has_foreign_leader: whether a client of River in Go was the leader of `default` when
                the term began. If False, `default` had no leader.
        """
        super().__init__(context)
        self._resign, self._has_foreign_leader = resign, has_foreign_leader

    async def run_once(self, scope: StopScope) -> float:
        """Read whether the domain `default` has a leader. End the term in three cases: the leader
        is a riverpy client; there is a leader now, but there was none when the term began; or there
        is no leader now, but there was one."""
        async with self.acquire_read_connection("reading the leader of `default`") as connection:
            lead = await default_leader_get_status(connection, self.schema)
        if lead.is_leader_riverpy or lead.has_leader is not self._has_foreign_leader:
            self._resign("the leader of `default` has changed")
        return self.context.config.elect_interval.total_seconds()


def make_domain_services(
    context: TermContext, heartbeat: HeartbeatWriter, jobs: PeriodicJobs, inserter: Inserter
) -> list[MaintenanceService]:
    """Return the maintenance services that the client runs while it is leader of its domain, in
    their start order."""
    services = _make_queue_services(context, heartbeat)
    services.append(PeriodicEnqueuer(context, jobs, inserter))
    if context.config.domain != DEFAULT_DOMAIN:
        return services
    return [*services, *_make_cleaner_services(context, heartbeat), *make_reindexers(context)]


def make_schema_services(
    context: TermContext, heartbeat: HeartbeatWriter, *, should_reindex: bool
) -> list[MaintenanceService]:
    """Return the services of a client that holds the schema lease. `should_reindex`: whether the
    list includes the reindexers."""
    return [
        *_make_queue_services(context, heartbeat),
        *_make_cleaner_services(context, heartbeat),
        *(make_reindexers(context) if should_reindex else []),
    ]


def _make_queue_services(
    context: TermContext, heartbeat: HeartbeatWriter
) -> list[MaintenanceService]:
    return [
        JobScheduler(context),
        JobRescuer(context, _get_unbroken_contact_function(heartbeat)),
        JobCleaner(context),
        JobExpirer(context),
        QueueCleaner(context),
    ]


def _make_cleaner_services(
    context: TermContext, heartbeat: HeartbeatWriter
) -> list[MaintenanceService]:
    """Return the services that delete old rows from riverpy's own tables. If this client is not
    registered, the service that deletes dead clients is left out."""
    contact_duration = _get_unbroken_contact_function(heartbeat)
    cleaners = [] if contact_duration is None else [ClientCleaner(context, contact_duration)]
    return [RunOnceKeyCleaner(context), JobCountCleaner(context), *cleaners]


def _get_unbroken_contact_function(heartbeat: HeartbeatWriter) -> Callable[[], float] | None:
    """Return the function that measures for how many seconds this client has had contact with the
    server without a break. None: this client is not registered."""
    return None if heartbeat.registered_at is None else heartbeat.unbroken_contact_seconds
