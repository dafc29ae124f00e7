"""The page that lists all queues, with the reasons why jobs wait too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._dashboard.page import Page
from riverpy._dashboard.queue_health import explain_queue, read_queue_facts
from riverpy._dashboard.sentence import rank_health
from riverpy._tools.top.status import QUEUES_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from riverpy._dashboard.page import PageRequest
    from riverpy._dashboard.queue_health import QueueFacts
    from riverpy._dashboard.sentence import HealthSentence

QUEUES_SHOWN_MAX = 200
"""The maximum number of queues in the table. Queues with the worst health come first."""


async def load_queue_list_page(view: PageRequest) -> Mapping[str, object]:
    """Read all queues. With the query parameter `find`, return only queues whose name contains this
    text."""
    fleet = await view.site.statuses.read()
    text = view.query.get("find", "").strip()
    found = [
        (facts, explain_queue(facts))
        for facts in await read_queue_facts(view.site.client, fleet)
        if text in facts.status.name
    ]
    found.sort(key=_get_queue_sort_key)
    return {
        "fleet": fleet,
        "find": text,
        "queues": found[:QUEUES_SHOWN_MAX],
        "queues_left_out": max(len(found) - QUEUES_SHOWN_MAX, 0),
        "is_partial": len(fleet.queues) >= QUEUES_MAX,
        "paused_count": sum(queue.paused for queue in fleet.queues),
        "has_domains": bool(fleet.domains),
    }


PAGE = Page("queues", "/queues", "queues.html", load_queue_list_page, "Queues")


def _get_queue_sort_key(
    found: tuple[QueueFacts, Sequence[HealthSentence]],
) -> tuple[int, float, str]:
    """Return the sort key of a queue. Queues with the worst health come first, then those with the
    longest waits. Queues without a problem are sorted by name, so that rows do not move under the
    mouse pointer."""
    facts, sentences = found
    rank = rank_health(sentences[0].health)
    return -rank, -(facts.status.due_for or 0) if rank else 0.0, facts.status.name
