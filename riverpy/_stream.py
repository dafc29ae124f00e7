"""Streams: async iterators over the events of a client. A stream buffers a limited number of
events. The client never waits for a reader."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Generic, Self, TypeVar

from riverpy._log import get_logger
from riverpy.errors import ClientStateError, ConfigError

ItemT = TypeVar("ItemT")
StreamT = TypeVar("StreamT", bound="Stream[Any]")


class Stream(Generic[ItemT]):
    """An async iterator: `async with` opens it, `async for` reads it.

    The iteration ends when the client stops. A full stream drops items and counts them in
    `dropped`. Each subclass decides whether it drops the newest or the oldest items.
    """

    def __init__(self, owner: StreamGroup[Any], size: int) -> None:
        self._owner, self._size = owner, size
        self._waiting_items: deque[ItemT] = deque()
        self._items_ready = asyncio.Event()
        self._was_opened = self._is_closed = False
        self._error: Exception | None = None
        """The error that the iteration raises at its end. None: it ends without an error."""
        self._log = get_logger()
        self.dropped: int = 0
        """The number of items that the full stream has dropped."""

    @property
    def _is_full(self) -> bool:
        return len(self._waiting_items) >= self._size

    def _append_item(self, item: ItemT) -> None:
        self._waiting_items.append(item)
        self._items_ready.set()

    def _count_dropped_item(self, log_event: str) -> None:
        """Count a dropped item. The first one is logged as `log_event`."""
        if self.dropped == 0:
            self._log.warning(log_event, size=self._size)
        self.dropped += 1
        self._owner.dropped_item_count += 1

    def close(self, error: Exception | None = None) -> None:
        """End the iteration when the reader has read the waiting items. If `error` is given, the
        iteration raises it at that point."""
        self._is_closed, self._error = True, self._error or error
        self._items_ready.set()

    async def __aenter__(self) -> Self:
        """Open the stream.

        Raises:
            ClientStateError: the stream was opened before.
        """
        if self._was_opened:  # it has ended, or may belong to another event loop
            raise ClientStateError("a subscription is opened once: call client.subscribe(…) again")
        self._owner.add_stream(self)
        self._was_opened = True
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._owner.remove_stream(self)
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ItemT:
        """Return the next item.

        Raises:
            ClientStateError: the stream was not opened.
            Exception: `close` was called with this error.
        """
        if not self._was_opened:  # no item would ever come
            raise ClientStateError(
                "open the subscription with `async with` before `async for` reads it, as in "
                "`async with client.subscribe(…) as events:`"
            )
        while not self._waiting_items:
            if self._error is not None:
                raise self._error
            if self._is_closed:
                raise StopAsyncIteration
            self._items_ready.clear()
            await self._items_ready.wait()
        return self._waiting_items.popleft()


def check_stream_size(size: int) -> None:
    """Check the size of a stream, i.e. the maximum number of items that wait for the reader.

    Raises:
        ConfigError: `size` is not an int of at least 1.
    """
    if type(size) is not int or size < 1:
        raise ConfigError(f"the size of a subscription is a whole number from 1, got {size!r}")


class StreamGroup(Generic[StreamT]):
    """The open streams of one kind in one client."""

    def __init__(self) -> None:
        self._open_streams: list[StreamT] = []
        self.dropped_item_count = 0
        """The number of items that full streams have dropped, including streams that are closed
        now."""

    def add_stream(self, stream: StreamT) -> None:
        """Add a stream that was opened."""
        self._open_streams.append(stream)

    def remove_stream(self, stream: StreamT) -> None:
        """Remove a stream. If it was removed before, do nothing."""
        if stream in self._open_streams:
            self._open_streams.remove(stream)

    def close(self) -> None:
        """End all streams, because the client has stopped."""
        for stream in self._open_streams:
            stream.close()
        self._open_streams = []
