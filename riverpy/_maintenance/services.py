"""The maintenance services of each kind of term. A new service is added to a list in this
module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._maintenance.client_cleaner import ClientCleaner
from riverpy._maintenance.execution_cleaner import ExecutionCleaner
from riverpy._maintenance.job_cleaner import JobCleaner
from riverpy._maintenance.job_rescuer import JobRescuer
from riverpy._maintenance.job_scheduler import JobScheduler
from riverpy._maintenance.periodic_enqueuer import PeriodicEnqueuer
from riverpy._maintenance.queue_cleaner import QueueCleaner
from riverpy._maintenance.reindexer import reindexers
from riverpy._names import DEFAULT_DOMAIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._clients.heartbeat import Heartbeat
    from riverpy._insert.inserter import Inserter
    from riverpy._leading.term_context import TermContext
    from riverpy._maintenance.base import MaintenanceService
    from riverpy.periodic import PeriodicJobs


def domain_services(
    context: TermContext, heartbeat: Heartbeat, periodic_jobs: PeriodicJobs, inserter: Inserter
) -> list[MaintenanceService]:
    """Return the services of a leader of the client's domain, in the order of their starts."""
    own = [*_queue_services(context, heartbeat), PeriodicEnqueuer(context, periodic_jobs, inserter)]
    if context.config.domain != DEFAULT_DOMAIN:
        return own
    return [*own, *_own_table_services(context, heartbeat), *reindexers(context)]


def schema_services(
    context: TermContext, heartbeat: Heartbeat, *, may_reindex: bool
) -> list[MaintenanceService]:
    """Return the services of a client that holds the schema lease."""
    return [
        *_queue_services(context, heartbeat),
        *_own_table_services(context, heartbeat),
        *(reindexers(context) if may_reindex else []),
    ]


def _queue_services(context: TermContext, heartbeat: Heartbeat) -> list[MaintenanceService]:
    return [
        JobScheduler(context),
        JobRescuer(context, _contact(heartbeat)),
        JobCleaner(context),
        QueueCleaner(context),
    ]


def _own_table_services(context: TermContext, heartbeat: Heartbeat) -> list[MaintenanceService]:
    """Return the services for the tables of line `riverpy`, which River does not have."""
    contact = _contact(heartbeat)
    cleaners = [] if contact is None else [ClientCleaner(context, contact)]
    return [ExecutionCleaner(context), *cleaners]


def _contact(heartbeat: Heartbeat) -> Callable[[], float] | None:
    return None if heartbeat.registered_at is None else heartbeat.contact
