"""The page of one worker: its state, its running jobs, its stuck jobs and its leases."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from riverpy._dashboard.database import open_read_transaction
from riverpy._dashboard.errors import PageError
from riverpy._dashboard.page import Page
from riverpy._dashboard.paths import quote_name_for_sentence
from riverpy._dashboard.worker_health import (
    describe_leadership,
    explain_worker,
    find_led_domains,
    format_worker_state,
)
from riverpy._names import DEFAULT_DOMAIN, USER_LEASE_NAME_PREFIX
from riverpy._postgres.dashboard_reads import client_list_running_jobs
from riverpy._postgres.domains import domain_list_members
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._postgres.transactions import read_server_time
from riverpy._tools.domain_map import PRIVILEGE_MISSING_SQLSTATE, TABLE_MISSING_SQLSTATE
from riverpy._tools.reads import read_clients
from riverpy._tools.text import format_error
from riverpy._tools.top.lease_status import READ_LEASES_MAX
from riverpy._tools.top.statements import read_leases
from riverpy._tools.top.status import CLIENTS_MAX, JOB_COUNT_MAX, WorkerStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from riverpy._dashboard.page import PageRequest
    from riverpy._postgres.dashboard_reads import RunningJobs
    from riverpy._postgres.driver import Transaction
    from riverpy._tools.reads import ClientRow
    from riverpy._tools.top.statements import HeldOrExpiredLeaseRow
    from riverpy._tools.top.status import OverallStatus

JOBS_SHOWN_MAX = 50
LEASES_SHOWN_MAX = 50
STUCK_JOBS_SHOWN_MAX = 20


class WorkerPageData(NamedTuple):
    """The data about one worker that only its page reads. The status in `Site.statuses`, which all
    pages share, does not contain this data."""

    now: datetime
    client: ClientRow | None
    """The row of the worker in the table of clients. None: the worker is not registered."""
    jobs: RunningJobs
    leases: Sequence[str]
    """The names of the leases that the worker holds. Singletons are leases too."""
    domain: str | None
    """The leader domain of the worker. None: not known."""


async def load_worker_page(view: PageRequest) -> Mapping[str, object]:
    """Read the worker whose client id is in the query parameter `id`. Without the parameter, read
    the running jobs whose client is not known."""
    client_id = view.query.get("id", "")
    if "\0" in client_id:
        raise _make_not_found_error(client_id)
    fleet = await view.site.statuses.read()
    data = await _read_page_data(view, client_id, fleet)
    worker = next((one for one in fleet.workers if one.client_id == client_id), None)
    if worker is None:
        if not data.jobs.jobs:
            raise _make_not_found_error(client_id)
        worker = WorkerStatus(client_id, "unregistered", data.jobs.job_count)
    client = data.client
    return {
        "client_id": client_id,
        "now": data.now,
        "fleet": fleet,
        "worker": worker,
        "sentences": explain_worker(worker, fleet),
        "client": client,
        "heartbeat_at": None if client is None else _get_heartbeat_time(client, data.now),
        "queues": [] if client is None else _list_queue_slots(client),
        "running": data.jobs,
        "stuck_ids": client.stuck_job_ids if client is not None and client.is_alive else [],
        "stuck_shown_max": STUCK_JOBS_SHOWN_MAX,
        "skipped": None if client is None else client.skipped_rows,
        "format_error": format_error,
        "leases": data.leases[:LEASES_SHOWN_MAX],
        "leases_left_out": max(len(data.leases) - LEASES_SHOWN_MAX, 0),
        "domain": data.domain,
        "state": format_worker_state(worker),
        "leadership": describe_leadership(worker, find_led_domains(client_id, fleet)),
    }


PAGE = Page("worker", "/worker", "worker.html", load_worker_page)


def _make_not_found_error(client_id: str) -> PageError:
    return PageError(
        404,
        f"There is no worker {quote_name_for_sentence(client_id)}."
        if client_id
        else "This address names no worker, and no job runs in an unknown one.",
        "A worker that has stopped is not listed any more. The page Workers lists all.",
    )


async def _read_page_data(
    view: PageRequest, client_id: str, fleet: OverallStatus
) -> WorkerPageData:
    schema = view.site.client.config.schema
    async with open_read_transaction(view.site.client) as tx:
        clients: Sequence[ClientRow] = ()
        if fleet.candidates is not None:  # the table of clients exists
            clients = await read_clients(tx, schema, limit=CLIENTS_MAX)
        jobs = await client_list_running_jobs(
            tx,
            schema,
            client_id=client_id,
            searched_jobs_max=JOB_COUNT_MAX,
            limit=JOBS_SHOWN_MAX,
            damaged_job_ids=fleet.damaged,
        )
        domain: str | None = DEFAULT_DOMAIN
        if fleet.domains:
            members = {one.client_id: one for one in await domain_list_members(tx, schema)}
            domain = members[client_id].domain if client_id in members else None
        return WorkerPageData(
            await read_server_time(tx),
            next((one for one in clients if one.client_id == client_id), None),
            jobs,
            await _read_held_leases(tx, schema, client_id),
            domain,
        )


async def _read_held_leases(tx: Transaction, schema: str | None, client_id: str) -> list[str]:
    """Return the names of the leases that a client holds for user code or singletons. The list is
    empty if the table of leases is missing, or if the database role may not read it."""
    rows: Sequence[HeldOrExpiredLeaseRow] = ()
    try:
        async with tx.transaction():
            rows, _ = await read_leases(
                tx, schema, name_prefix=USER_LEASE_NAME_PREFIX, limit=READ_LEASES_MAX
            )
    except DATABASE_ERRORS as error:
        if getattr(error, "sqlstate", None) not in {
            PRIVILEGE_MISSING_SQLSTATE,
            TABLE_MISSING_SQLSTATE,
        }:
            raise
    held = [row for row in rows if row.is_held and row.holder == client_id]
    return [row.name.removeprefix(USER_LEASE_NAME_PREFIX) for row in held]


def _get_heartbeat_time(client: ClientRow, now: datetime) -> datetime:
    return now - timedelta(seconds=client.heartbeat_age)


def _list_queue_slots(client: ClientRow) -> list[tuple[str, int | None]]:
    """Return each queue of a client with its number of slots. None: the number is not known."""
    slots = dict(zip(client.queues, client.queue_slots or (), strict=False))
    return [(name, slots.get(name)) for name in client.queues]
