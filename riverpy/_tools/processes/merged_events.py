"""EventStreamMerger: merges the events of all workers into one stream of JSON lines."""

from __future__ import annotations

from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING

import anyio

from riverpy._lifecycle import unwrap_single_error
from riverpy._tools.health.http import HttpError
from riverpy._tools.health.http_client import LINE_BYTES_MAX
from riverpy._tools.health.worker_health import EVENT_STREAMS_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from anyio.abc import TaskGroup
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

    from riverpy._tools.processes.slot import ProcessSlot

BUFFERED_LINES_MAX = 100
"""The maximum number of lines that are buffered for a slow reader. While the buffer is full, the
supervisor reads no lines from the workers, and each worker drops events that its own buffer cannot
hold."""
WORKER_ANSWER_TIMEOUT = 3.0
"""Seconds within which a worker must answer the request for its events."""
RECONNECT_DELAY = 0.5
"""Seconds to wait before the next request to a worker that has ended its stream or did not
answer."""


class EventStreamMerger:
    """Merges the event streams of all workers of a supervisor, including workers that start
    later."""

    def __init__(self, slots: Sequence[ProcessSlot]) -> None:
        self._slots = slots
        self._tasks: TaskGroup | None = None
        self._open_stream_count = 0

    @asynccontextmanager
    async def run_stream_tasks(self) -> AsyncGenerator[None]:
        """Run a task group during the `async with` block. `open_stream` starts its tasks in this
        group. At the end of the block, the tasks are cancelled."""
        try:
            async with anyio.create_task_group() as self._tasks:
                yield
                self._tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise unwrap_single_error(group) from None

    async def open_stream(self, target: str) -> AsyncGenerator[bytes, None]:
        """Request `target` (the path and the query of a URL) from all workers. Return an iterator
        over the lines that they send.

        Raises:
            HttpError: there are too many readers already.
        """
        if self._tasks is None or self._open_stream_count >= EVENT_STREAMS_MAX:
            reason = f"{EVENT_STREAMS_MAX} readers already: try again later"
            raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, reason)
        sender, receiver = anyio.create_memory_object_stream[bytes](BUFFERED_LINES_MAX)
        reader_left = anyio.Event()
        lines = _yield_lines_until_reader_leaves(receiver, reader_left)
        # Start the generator. Otherwise its `finally`, which sets `reader_left`, might never run.
        await anext(lines)
        self._open_stream_count += 1
        self._tasks.start_soon(
            self._forward_events_to_reader, target, sender, reader_left, name="riverpy events"
        )
        return lines

    async def _forward_events_to_reader(
        self, target: str, sender: MemoryObjectSendStream[bytes], reader_left: anyio.Event
    ) -> None:
        """Forward the lines of all workers to one reader, until the reader disconnects."""
        try:
            async with sender, anyio.create_task_group() as tasks:
                for slot in self._slots:
                    tasks.start_soon(_forward_events_of_process_slot, slot, sender, target)
                await reader_left.wait()
                tasks.cancel_scope.cancel()
        finally:
            self._open_stream_count -= 1


async def _forward_events_of_process_slot(
    slot: ProcessSlot, sender: MemoryObjectSendStream[bytes], target: str
) -> None:
    while True:
        if slot.process is not None:
            try:
                async with slot.process.health.get(target, WORKER_ANSWER_TIMEOUT) as response:
                    while response.status == HTTPStatus.OK:
                        stream = response.body_stream
                        line = await stream.receive_until(b"\n", LINE_BYTES_MAX)
                        await sender.send(line + b"\n")
            except (OSError, anyio.IncompleteRead, anyio.DelimiterNotFound):
                pass  # the worker has ended, or does not answer
            except anyio.BrokenResourceError:
                pass  # the worker has ended, or the reader has left
        await anyio.sleep(RECONNECT_DELAY)


async def _yield_lines_until_reader_leaves(
    receiver: MemoryObjectReceiveStream[bytes], reader_left: anyio.Event
) -> AsyncGenerator[bytes, None]:
    """Yield the lines for one reader. Set `reader_left` when the generator ends.

    The first value is empty. The caller reads it to start the generator, because a generator that
    was never started would not set `reader_left`.
    """
    try:
        async with receiver:
            yield b""
            yield b"\n"  # this shows the reader that the connection works
            async for line in receiver:
                yield line
    finally:
        reader_left.set()
