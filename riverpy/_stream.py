"""Streams: async iterators over the events of a client. Each has a limited buffer, and the client
never waits for a reader."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Generic, Self, TypeVar

from riverpy._log import get_logger

ItemT = TypeVar("ItemT")
StreamT = TypeVar("StreamT", bound="Stream[Any]")


class Stream(Generic[ItemT]):
    """An async iterator: `async with` opens it, `async for` reads it.

    The iteration ends when the client stops. A full stream drops items and counts them in
    `dropped`. The class of the stream decides whether it drops the newest or the oldest items."""

    def __init__(self, owner: Streams[Any], size: int) -> None:
        self._owner, self._size = owner, size
        self._waiting: deque[ItemT] = deque()
        self._ready = asyncio.Event()
        self._closed = False
        self._log = get_logger()
        self.dropped = 0
        """The number of items that the full stream has dropped."""

    @property
    def _is_full(self) -> bool:
        return len(self._waiting) >= self._size

    def _append(self, item: ItemT) -> None:
        self._waiting.append(item)
        self._ready.set()

    def _drop(self, event: str) -> None:
        """Count a dropped item. The first one is logged as `event`."""
        if self.dropped == 0:
            self._log.warning(event, size=self._size)
        self.dropped += 1
        self._owner.dropped += 1

    def close(self) -> None:
        """End the iteration after the waiting items."""
        self._closed = True
        self._ready.set()

    async def __aenter__(self) -> Self:
        self._owner.add(self)
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._owner.remove(self)
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ItemT:
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return self._waiting.popleft()


class Streams(Generic[StreamT]):
    """The open streams of one kind in one client."""

    def __init__(self) -> None:
        self._open: list[StreamT] = []
        self.dropped = 0
        """The number of items that all streams so far have dropped because they were full."""

    def add(self, stream: StreamT) -> None:
        """Add a stream that was opened."""
        self._open.append(stream)

    def remove(self, stream: StreamT) -> None:
        """Remove a stream, if it is still open."""
        if stream in self._open:
            self._open.remove(stream)

    def close(self) -> None:
        """End all streams, because the client has stopped."""
        for stream in self._open:
            stream.close()
        self._open = []
