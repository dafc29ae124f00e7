"""Channels: LISTEN and UNLISTEN on a connection, and a function for each channel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from riverpy._postgres.driver import Connection


def watch_connection_end(connection: Connection, on_end: Callable[[], None]) -> None:
    """Call `on_end` when the connection ends. A half-open connection causes no such call."""
    connection.add_termination_listener(lambda _connection: on_end())


async def listen_on_channels(
    connection: Connection, channels: Mapping[str, Callable[[str], None]]
) -> None:
    """LISTEN on each channel, and call its function with each payload."""
    for channel, function in channels.items():
        await connection.add_listener(channel, _ChannelListener(channel, function))


async def stop_listening(connection: Connection, channels: Iterable[str]) -> None:
    """UNLISTEN each channel."""
    for channel in channels:
        await connection.remove_listener(channel, _ChannelListener(channel))


class _ChannelListener:
    """The function that asyncpg calls for a channel. asyncpg removes a function by equality."""

    def __init__(self, channel: str, deliver: Callable[[str], None] | None = None) -> None:
        self._channel, self._deliver = channel, deliver

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ChannelListener) and other._channel == self._channel

    def __hash__(self) -> int:
        return hash(self._channel)

    def __call__(self, _connection: Any, _pid: int, _channel: str, payload: object) -> None:
        if self._deliver is not None:
            self._deliver(str(payload))
