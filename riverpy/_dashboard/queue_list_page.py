"""The page with all queues: which is behind, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._dashboard.database import open_read
from riverpy._dashboard.page import Page
from riverpy._dashboard.queue_health import (
    LONG_WAIT_SECONDS,
    explain_queue,
    gather_facts,
    read_kinds_without_worker,
)
from riverpy._dashboard.sentence import rank_health
from riverpy._postgres.queues import queue_list
from riverpy._postgres.transactions import read_server_time
from riverpy._tools.top.status import QUEUES_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from riverpy._dashboard.page import PageView
    from riverpy._dashboard.queue_health import QueueFacts
    from riverpy._dashboard.sentence import Sentence
    from riverpy._tools.top.status import FleetStatus

QUEUES_SHOWN_MAX = 200
"""The maximum number of queues in the table. Those with the worst state come first."""

SAMPLED_QUEUES_MAX = 20
"""The maximum number of queues whose waiting jobs are read, to find kinds without a worker."""


async def load_queues(view: PageView) -> Mapping[str, object]:
    """Read all queues. With the parameter `find`, show only those with this text in the name."""
    client = view.site.client
    fleet = await view.site.statuses.read()
    schema = client.config.schema
    async with open_read(client) as tx:
        now = await read_server_time(tx)
        rows = {row.name: row for row in await queue_list(tx, schema, QUEUES_MAX)}
        missing = await read_kinds_without_worker(tx, schema, fleet, _choose_slow_queues(fleet))
    text = view.query.get("find", "").strip()
    found = [
        (facts, explain_queue(facts))
        for facts in gather_facts(fleet, rows, missing, now)
        if text in facts.status.name
    ]
    found.sort(key=_get_urgency)
    return {
        "now": now,
        "fleet": fleet,
        "find": text,
        "queues": found[:QUEUES_SHOWN_MAX],
        "queues_left_out": max(len(found) - QUEUES_SHOWN_MAX, 0),
        "is_partial": len(fleet.queues) >= QUEUES_MAX,
        "paused_count": sum(queue.paused for queue in fleet.queues),
        "has_domains": bool(fleet.domains),
    }


PAGE = Page("queues", "/queues", "queues.html", load_queues, "Queues")


def _choose_slow_queues(fleet: FleetStatus) -> list[str]:
    """Return the queues whose jobs wait long although workers work them, the longest wait first."""
    slow = [
        queue
        for queue in fleet.queues
        if queue.workers and not queue.paused and (queue.due_for or 0) > LONG_WAIT_SECONDS
    ]
    slow.sort(key=lambda queue: -(queue.due_for or 0))
    return [queue.name for queue in slow[:SAMPLED_QUEUES_MAX]]


def _get_urgency(found: tuple[QueueFacts, Sequence[Sentence]]) -> tuple[int, float, str]:
    """Return the sort key of a queue: the worst state first, then the longest wait. Queues that are
    not behind are in the order of their names, so that rows do not move under the pointer."""
    facts, sentences = found
    rank = rank_health(sentences[0].health)
    return -rank, -(facts.status.due_for or 0) if rank else 0.0, facts.status.name
