"""Listens on the notification channels of a connection, and calls a function for each
notification."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from riverpy._postgres.driver import Connection


def watch_connection_end(connection: Connection, on_end: Callable[[], None]) -> None:
    """Call `on_end` when asyncpg notices that the connection has ended. asyncpg does not notice a
    half-open connection."""
    connection.add_termination_listener(lambda _connection: on_end())


async def listen_on_channels(
    connection: Connection, channels: Mapping[str, Callable[[str], None]]
) -> None:
    """Send LISTEN for each channel. `channels` maps the name of a channel to the function that
    receives the payload of each notification."""
    for channel, function in channels.items():
        await connection.add_listener(channel, _ChannelListener(channel, function))


async def stop_listening(connection: Connection, channels: Iterable[str]) -> None:
    """Send UNLISTEN for each channel."""
    for channel in channels:
        await connection.remove_listener(channel, _ChannelListener(channel))


class _ChannelListener:
    """The callback that asyncpg calls for each notification of a channel. All callbacks of one
    channel are equal, so that `stop_listening` can remove a callback by its channel."""

    def __init__(self, channel: str, deliver: Callable[[str], None] | None = None) -> None:
        self._channel, self._deliver = channel, deliver

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ChannelListener) and other._channel == self._channel

    def __hash__(self) -> int:
        return hash(self._channel)

    def __call__(self, _connection: Any, _pid: int, _channel: str, payload: object) -> None:
        if self._deliver is not None:
            self._deliver(str(payload))
