"""The page of one queue: why its jobs wait, the kinds of the waiting jobs, and its workers."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from riverpy._dashboard.database import open_read_transaction
from riverpy._dashboard.errors import PageError
from riverpy._dashboard.page import Page
from riverpy._dashboard.paths import quote_name_for_sentence
from riverpy._dashboard.plots import load_plots
from riverpy._dashboard.queue_health import (
    SAMPLED_JOBS_MAX,
    add_queue_to_status,
    explain_queue,
    make_queue_facts,
    read_kinds_without_worker,
)
from riverpy._postgres.dashboard_reads import queue_sample_kinds
from riverpy._postgres.queues import queue_get
from riverpy._postgres.transactions import read_server_time
from riverpy._tools.reads import read_clients
from riverpy._tools.top.status import CLIENTS_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from riverpy._dashboard.page import PageRequest
    from riverpy._postgres.dashboard_reads import QueueKindSample
    from riverpy._postgres.driver import Transaction
    from riverpy._tools.reads import ClientRow
    from riverpy._tools.top.status import OverallStatus, QueueStatus
    from riverpy.queue import Queue

KINDS_SHOWN_MAX = 20
WORKERS_SHOWN_MAX = 100


class QueueWorker(NamedTuple):
    """A client that works the queue. It runs at most one job in each of its slots."""

    client: ClientRow
    slots: int | None
    """The number of slots for this queue. None: not known."""
    heartbeat_at: datetime


class QueuePageData(NamedTuple):
    """The data about one queue that only its page reads. The status in `Site.statuses`, which all
    pages share, does not contain this data."""

    row: Queue | None
    clients: Sequence[ClientRow]
    """The clients that work the queue, with or without a recent heartbeat."""
    sample: QueueKindSample


async def load_queue_page(view: PageRequest) -> Mapping[str, object]:
    """Read the queue whose name is in the query parameter `name`."""
    name = view.query.get("name", "")
    if not name or "\0" in name:
        raise _make_not_found_error(name)
    site = view.site
    fleet = await site.statuses.read()
    async with open_read_transaction(site.client) as tx:
        now = await read_server_time(tx)
        schema = site.client.config.schema
        data = await _read_page_data(tx, schema, name, fleet)
        fleet = await add_queue_to_status(tx, schema, fleet, name, data.clients)
        missing = await read_kinds_without_worker(tx, schema, fleet, [name])
    known = {name: data.row} if data.row is not None else {}
    facts = next(
        one for one in make_queue_facts(fleet, known, missing, now) if one.status.name == name
    )
    if not (data.row or data.clients or _has_jobs(facts.status)):
        raise _make_not_found_error(name)
    return {
        "name": name,
        "now": now,
        "fleet": fleet,
        "facts": facts,
        "silent_ids": {one.client_id for one in facts.silent_workers},
        "queue": facts.status,
        "sentences": explain_queue(facts),
        "plots": await load_plots(view, fleet, PAGE.path, queue=name),
        "sample": data.sample,
        "has_whole_sample": data.sample.sampled_jobs < SAMPLED_JOBS_MAX,
        "workers": _list_workers(data.clients, name, now)[:WORKERS_SHOWN_MAX],
        "workers_left_out": max(len(data.clients) - WORKERS_SHOWN_MAX, 0),
        "metadata_json": msgspec.json.encode(data.row.metadata if data.row else {}).decode(),
        "others": [one for one in fleet.workers if one.state == "unregistered"],
    }


PAGE = Page("queue", "/queue", "queue.html", load_queue_page)


def _make_not_found_error(name: str) -> PageError:
    return PageError(
        404,
        f"There is no queue {quote_name_for_sentence(name)}."
        if name
        else "This address names no queue.",
        "A queue exists as long as it has jobs or a worker works it, and a day longer. The page "
        "Queues lists all.",
    )


async def _read_page_data(
    tx: Transaction, schema: str | None, name: str, fleet: OverallStatus
) -> QueuePageData:
    clients: list[ClientRow] = []
    if fleet.candidates is not None:  # the table of clients exists
        clients = await read_clients(tx, schema, limit=CLIENTS_MAX)
    return QueuePageData(
        await queue_get(tx, schema, name),
        [client for client in clients if name in client.queues],
        await queue_sample_kinds(
            tx,
            schema,
            queue=name,
            state="available",
            jobs_max=SAMPLED_JOBS_MAX,
            kinds_max=KINDS_SHOWN_MAX,
        ),
    )


def _has_jobs(queue: QueueStatus) -> bool:
    return bool(queue.available or queue.running or queue.scheduled or queue.retryable)


def _list_workers(clients: Sequence[ClientRow], name: str, now: datetime) -> list[QueueWorker]:
    """Return the clients of a queue with their slots for this queue."""
    found: list[QueueWorker] = []
    for client in clients:
        slots = dict(zip(client.queues, client.queue_slots or (), strict=False))
        heartbeat_at = now - timedelta(seconds=client.heartbeat_age)
        found.append(QueueWorker(client, slots.get(name), heartbeat_at))
    return found
