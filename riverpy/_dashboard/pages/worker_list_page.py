"""The page that lists all workers, i.e. clients that run jobs."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from riverpy._dashboard.database import open_read_transaction
from riverpy._dashboard.page import Page
from riverpy._dashboard.sentence import rank_health
from riverpy._dashboard.worker_health import (
    describe_leadership,
    describe_slots,
    explain_worker,
    find_led_domains,
    format_worker_state,
)
from riverpy._postgres.domains import domain_list_members
from riverpy._tools.top.status import CLIENTS_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from riverpy._dashboard.page import PageRequest
    from riverpy._dashboard.sentence import HealthSentence
    from riverpy._tools.top.status import OverallStatus, WorkerStatus

WORKERS_SHOWN_MAX = 200
"""The maximum number of workers in the table. Workers with the worst health come first."""
QUEUES_SHOWN_MAX = 5
"""The maximum number of queues that the row of a worker shows."""


class ListedWorker(NamedTuple):
    """One row of the table: a worker with the texts that the page shows."""

    status: WorkerStatus
    sentences: Sequence[HealthSentence]
    state: str
    leadership: str
    """Whether the worker is a leader, in words such as `leader of default`. If it is not: whether
    it can become leader."""
    is_leader: bool
    domain: str | None
    """The leader domain of the worker. None: not known."""
    heartbeat_at: datetime | None
    """The time of the last heartbeat. None: the worker is not registered."""


async def load_worker_list_page(view: PageRequest) -> Mapping[str, object]:
    """Read all workers and return the values of the page."""
    fleet = await view.site.statuses.read()
    domains = await _read_domain_by_client(view, fleet)
    found = [
        ListedWorker(
            worker,
            explain_worker(worker, fleet),
            format_worker_state(worker),
            describe_leadership(worker, led := find_led_domains(worker.client_id, fleet)),
            bool(led),
            domains.get(worker.client_id),
            None if worker.silent_for is None else fleet.at - timedelta(seconds=worker.silent_for),
        )
        for worker in fleet.workers
    ]
    found.sort(key=lambda one: (-rank_health(one.sentences[0].health), one.status.client_id))
    states = [one.state for one in found]
    return {
        "now": fleet.at,
        "fleet": fleet,
        "workers": found[:WORKERS_SHOWN_MAX],
        "workers_left_out": max(len(found) - WORKERS_SHOWN_MAX, 0),
        "counts": {state: states.count(state) for state in dict.fromkeys(states)},
        "slots_text": describe_slots(fleet.workers),
        "is_partial": len(fleet.workers) >= CLIENTS_MAX,
        "queues_shown_max": QUEUES_SHOWN_MAX,
        "has_domains": bool(fleet.domains),
    }


PAGE = Page("workers", "/workers", "workers.html", load_worker_list_page, "Workers")


async def _read_domain_by_client(view: PageRequest, fleet: OverallStatus) -> dict[str, str]:
    """Return the leader domains of the live workers, by client id. The result is empty if all
    workers are in the domain `default`."""
    if not fleet.domains:
        return {}
    async with open_read_transaction(view.site.client) as tx:
        members = await domain_list_members(tx, view.site.client.config.schema)
    return {member.client_id: member.domain for member in members}
