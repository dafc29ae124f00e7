"""Streams of what happens in a client, to those who asked: bounded, and never waited for."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from riverpy._log import get_logger

if TYPE_CHECKING:
    from types import TracebackType

ItemT = TypeVar("ItemT")
StreamT = TypeVar("StreamT", bound="Stream[Any]")


class Stream(Generic[ItemT]):
    """An async iterator: `async with` opens it, `async for` reads it.

    It ends when the client stops. What is done with an item where there is no room is for each kind
    of stream to say; `dropped` counts.
    """

    def __init__(self, owner: Streams[Any], size: int) -> None:
        self._owner, self._size = owner, size
        self._waiting: deque[ItemT] = deque()
        self._ready = asyncio.Event()
        self._closed = False
        self._log = get_logger()
        self.dropped = 0
        """How many items were dropped unread."""

    @property
    def _is_full(self) -> bool:
        return len(self._waiting) >= self._size

    def _append(self, item: ItemT) -> None:
        self._waiting.append(item)
        self._ready.set()

    def _drop(self, event: str) -> None:
        """Count a dropped item; the first one is logged as `event`."""
        if self.dropped == 0:
            self._log.warning(event, size=self._size)
        self.dropped += 1
        self._owner.dropped += 1

    def close(self) -> None:
        """End the iteration after the items that wait."""
        self._closed = True
        self._ready.set()

    async def __aenter__(self) -> Self:
        self._owner.add(self)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
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
    """The open streams of one kind of one client."""

    def __init__(self) -> None:
        self._open: list[StreamT] = []
        self.dropped = 0
        """How many items were dropped unread, by all there ever were."""

    def add(self, stream: StreamT) -> None:
        """Open a stream."""
        self._open.append(stream)

    def remove(self, stream: StreamT) -> None:
        """Forget it."""
        if stream in self._open:
            self._open.remove(stream)

    def close(self) -> None:
        """End them all: the client stopped."""
        for stream in self._open:
            stream.close()
        self._open = []
