"""A worker process of riverpy: `riverpy worker tests.interop.python_worker:client`.

It reads its settings from the environment and the jobs to release from standard input, and prints
the same lines as Go's verb `work`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from riverpy import Client, EventKind, QueueConfig, StopReport, Workers
from tests.interop.conform import ConformWorker
from tests.interop.stepping import StepWorker
from tests.interop.working import SETTINGS_VARIABLE, Settings, event_line, insert_effect

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from contextlib import AbstractAsyncContextManager

    from anyio.abc import TaskStatus

    from tests.interop.river_go import Row


def emit(line: Row) -> None:
    """Print one line."""
    print(msgspec.json.encode(line).decode(), flush=True)


class Started:
    """Reports that the client works, and prints it."""

    def __init__(self, client: Client, task_status: TaskStatus[None]) -> None:
        self._client = client
        self._task_status = task_status

    def started(self, value: None = None) -> None:
        self._task_status.started(value)
        emit({"event": "started", "client_id": self._client.id})


class PrintingClient(Client):
    """A client that prints when it works."""

    async def run(
        self,
        *,
        drain: bool = False,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> StopReport:
        return await super().run(drain=drain, task_status=Started(self, task_status))


async def read_releases(conform: ConformWorker) -> None:
    """Release the jobs that standard input names, until it ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async for line in reader:
        conform.release(msgspec.json.decode(line)["release"])


async def print_events(client: Client) -> None:
    """Print each event."""
    async with client.subscribe(*EventKind) as events:
        async for event in events:
            emit(event_line(event))


@asynccontextmanager
async def client() -> AsyncGenerator[Client]:
    """Yield the client that the environment describes."""
    schema, settings = msgspec.json.decode(os.environ[SETTINGS_VARIABLE], type=tuple[str, Settings])

    async def effect(job_id: int, attempt: int) -> None:
        async with made._get_open_pool().acquire() as connection:
            await insert_effect(connection, f'"{schema}".effects', job_id, attempt)

    def connect() -> AbstractAsyncContextManager[Any]:
        return made._get_open_pool().acquire()

    conform = ConformWorker(emit, effect, connect)
    steps = StepWorker(emit, conform.signal, connect)
    made = PrintingClient(
        workers=Workers().add(conform).add(steps),
        queues={name: QueueConfig(max_workers=n) for name, n in settings.queues.items()},
        config=settings.config(schema, emit),
        periodic_jobs=[periodic.job() for periodic in settings.periodic],
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read_releases, conform)
        tasks.start_soon(print_events, made)
        yield made
        tasks.cancel_scope.cancel()
