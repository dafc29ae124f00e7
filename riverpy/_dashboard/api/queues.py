"""The endpoints of the dashboard's JSON API for queues. The inputs and answers have the fields of
River UI's API."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from riverpy._dashboard.api.endpoint import Endpoint, SuccessAnswer
from riverpy._dashboard.change import log_change
from riverpy._dashboard.database import acquire_connection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._dashboard.api.endpoint import ApiCall
    from riverpy.queue import Queue

QUEUES_PER_LIST_DEFAULT = 100
QUEUES_PER_LIST_MAX = 1_000
_CONCURRENCY_KEY = "concurrency"
"""The key in a queue's metadata under which River Pro stores the limits for running jobs."""

_ConcurrencyLimit = Annotated[int, msgspec.Meta(ge=0, lt=2**31, description="0: no limit.")]
_JobCount = Annotated[
    int, msgspec.Meta(description="At most 10,000. Then there may be more. It is seconds old.")
]


class ConcurrencyPartition(msgspec.Struct):
    """How River Pro groups the running jobs of a queue: by their args, by kind, or both.
    `global_limit` and `local_limit` limit the number of running jobs in each group."""

    by_args: list[str] | None = None
    by_kind: bool = False


class ConcurrencyLimits(msgspec.Struct):
    """The limits of River Pro for the running jobs of a queue. riverpy's workers do not read
    them."""

    global_limit: _ConcurrencyLimit = 0
    local_limit: _ConcurrencyLimit = 0
    partition: ConcurrencyPartition = msgspec.field(default_factory=ConcurrencyPartition)


class QueueDetails(msgspec.Struct):
    """One queue, with the number of its available jobs and of its running jobs."""

    count_available: _JobCount
    count_running: _JobCount
    created_at: datetime
    concurrency: ConcurrencyLimits | None
    name: str
    paused_at: datetime | None
    updated_at: datetime


class QueueList(msgspec.Struct):
    """The queues, sorted by name."""

    data: list[QueueDetails]


class ListQueuesInput(msgspec.Struct):
    """The maximum number of queues to list."""

    limit: Annotated[int, msgspec.Meta(ge=0, le=QUEUES_PER_LIST_MAX)] = QUEUES_PER_LIST_DEFAULT


class QueueInput(msgspec.Struct):
    """The name of the queue."""

    name: str


class UpdateQueueInput(msgspec.Struct):
    """The name of the queue, and its new limits."""

    name: str
    concurrency: Annotated[
        ConcurrencyLimits | msgspec.UnsetType | None,
        msgspec.Meta(
            description="It is stored in the queue's metadata for River Pro. riverpy's workers do "
            "not read it. Null removes it. Other metadata stay as they are."
        ),
    ] = msgspec.UNSET


async def list_queues(call: ApiCall, given: ListQueuesInput) -> QueueList:
    """Return the queues, sorted by name, up to the limit."""
    if given.limit == 0:
        return QueueList([])
    return QueueList(
        await _make_queue_details(call, await call.site.client.queue_list(limit=given.limit))
    )


async def get_queue(call: ApiCall, given: QueueInput) -> QueueDetails:
    """Return one queue."""
    (details,) = await _make_queue_details(call, [await call.site.client.queue_get(given.name)])
    return details


async def _make_queue_details(call: ApiCall, queues: Sequence[Queue]) -> list[QueueDetails]:
    status = await call.site.statuses.read()
    counts = {one.name: (one.available, one.running) for one in status.queues}
    return [
        QueueDetails(
            *counts.get(queue.name, (0, 0)),
            queue.created_at,
            _read_concurrency(queue),
            queue.name,
            queue.paused_at,
            queue.updated_at,
        )
        for queue in queues
    ]


def _read_concurrency(queue: Queue) -> ConcurrencyLimits | None:
    """Return the limits of River Pro in a queue's metadata. Return None if the metadata has no
    limits, or has limits in an unknown format."""
    found = queue.metadata.get(_CONCURRENCY_KEY)
    if not found:
        return None
    try:
        return msgspec.convert(found, ConcurrencyLimits)
    except msgspec.ValidationError:
        return None


async def pause_queue(call: ApiCall, given: QueueInput) -> SuccessAnswer:
    """Stop all clients from claiming jobs of a queue."""
    await call.site.client.queue_pause(given.name)
    log_change(call.access, "pause queue", given.name)
    return SuccessAnswer()


async def resume_queue(call: ApiCall, given: QueueInput) -> SuccessAnswer:
    """Let all clients claim jobs of a queue again."""
    await call.site.client.queue_resume(given.name)
    log_change(call.access, "resume queue", given.name)
    return SuccessAnswer()


async def update_queue(call: ApiCall, given: UpdateQueueInput) -> QueueDetails:
    """Change the limits of River Pro in a queue's metadata. Return the queue."""
    client = call.site.client
    if given.concurrency is msgspec.UNSET:
        return await get_queue(call, QueueInput(given.name))
    async with (
        acquire_connection(client) as connection,
        # The update fails if another session has changed the queue after this read.
        connection.transaction(isolation="repeatable_read"),
    ):
        metadata = dict((await client.queue_get(given.name, tx=connection)).metadata)
        metadata.pop(_CONCURRENCY_KEY, None)
        if given.concurrency is not None:
            metadata[_CONCURRENCY_KEY] = msgspec.to_builtins(given.concurrency)
        queue = await client.queue_update(given.name, metadata=metadata, tx=connection)
    log_change(call.access, "change queue", given.name)
    (details,) = await _make_queue_details(call, [queue])
    return details


_NOT_FOUND_REASON = {404: "No client has worked a queue with this name."}
ENDPOINTS: tuple[Endpoint[Any], ...] = (
    Endpoint("GET", "/queues", "List queues", ListQueuesInput, QueueList, list_queues),
    Endpoint(
        "PUT",
        "/queues/{name:path}/pause",
        "Pause a queue",
        QueueInput,
        SuccessAnswer,
        pause_queue,
        _NOT_FOUND_REASON,
    ),
    Endpoint(
        "PUT",
        "/queues/{name:path}/resume",
        "Resume a queue",
        QueueInput,
        SuccessAnswer,
        resume_queue,
        _NOT_FOUND_REASON,
    ),
    Endpoint(
        "GET",
        "/queues/{name:path}",
        "Read one queue",
        QueueInput,
        QueueDetails,
        get_queue,
        _NOT_FOUND_REASON,
    ),
    Endpoint(
        "PATCH",
        "/queues/{name:path}",
        "Store a limit of River Pro for a queue",
        UpdateQueueInput,
        QueueDetails,
        update_queue,
        _NOT_FOUND_REASON,
    ),
)
