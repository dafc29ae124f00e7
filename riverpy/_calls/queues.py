"""QueueMethods: the methods of a client that read and change queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from riverpy._calls.base import ClientMethods
from riverpy._insert.json_text import encode_metadata_with_any_keys, utf8_size
from riverpy._names import validate_queue_name
from riverpy._postgres import queues
from riverpy.errors import ArgsError, ConfigError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from datetime import timedelta

    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.sessions.protocols import CallerTransaction
    from riverpy.queue import Queue

QUEUE_LIST_LIMIT_DEFAULT = 100
"""The default maximum number of queues in a list."""
NOTIFICATION_PAYLOAD_SIZE_MAX = 7_999
"""PostgreSQL's limit for the payload of a notification, in bytes."""


class QueueMethods(ClientMethods):
    """The methods of a client that read and change queues."""

    async def queue_get(self, name: str, *, tx: CallerTransaction | None = None) -> Queue:
        """Return one queue, as stored in the table `river_queue`.

        Raises:
            NotFoundError: no client has worked a queue with this name.
        """
        async with self._transaction(tx) as connection:
            found = await queues.queue_get(connection, self._config.schema, name)
        if found is None:
            raise _make_queue_not_found_error(name)
        return found

    async def queue_list(
        self, *, limit: int = QUEUE_LIST_LIMIT_DEFAULT, tx: CallerTransaction | None = None
    ) -> list[Queue]:
        """Return the queues in the table `river_queue`, sorted by name. A client writes the row of
        each queue that it works. The leader deletes a row that no client has updated for a day.

        Args:
            limit: the maximum number of queues. Default 100.
            tx: as for `insert`.

        Raises:
            ConfigError: `limit` is below 1.
        """
        if limit < 1:
            raise ConfigError(f"limit must be 1 or more, got {limit}")
        async with self._transaction(tx) as connection:
            return await queues.queue_list(connection, self._config.schema, limit)

    async def queue_lags(
        self, names: Sequence[str], *, tx: CallerTransaction | None = None
    ) -> dict[str, timedelta]:
        """Return for each queue how long its oldest due job has been waiting. Zero: no job is
        waiting.

        The query is fast even for long queues. Use it for metrics and autoscaling.

        Raises:
            ConfigError: a queue name is not allowed.
        """
        for name in names:
            validate_queue_name(name)
        async with self._transaction(tx) as connection:
            return await queues.queue_get_lags(connection, self._config.schema, list(names))

    async def queue_update(
        self, name: str, *, metadata: Mapping[str, object], tx: CallerTransaction | None = None
    ) -> Queue:
        """Replace the metadata of a queue and notify all clients. Return the queue.

        Raises:
            ArgsError: the metadata is not a JSON object, or does not fit into a notification of
                7,999 bytes.
            NotFoundError: no client has worked a queue with this name.
        """
        text = encode_metadata_with_any_keys(metadata)
        payload = msgspec.json.encode(
            {"action": "metadata_changed", "metadata": msgspec.Raw(text.encode()), "queue": name}
        ).decode()
        if len(payload.encode()) > NOTIFICATION_PAYLOAD_SIZE_MAX:
            raise ArgsError(
                f"the metadata have {utf8_size(text):,} bytes as JSON, but one notification with "
                f"them has at most {NOTIFICATION_PAYLOAD_SIZE_MAX:,}: store the data elsewhere and "
                "put a reference to it here"
            )
        async with self._transaction(tx) as connection:
            found = await queues.queue_update_metadata(connection, self._config.schema, name, text)
            if found is None:
                raise _make_queue_not_found_error(name)
            await queues.send_control_message(connection, self._config.schema, payload)
        return found

    async def queue_pause(self, name: str, *, tx: CallerTransaction | None = None) -> None:
        """Stop all clients from claiming jobs of a queue. The name `*` pauses all queues. Running
        jobs continue.

        Raises:
            NotFoundError: no client has worked a queue with this name.
        """
        await self._pause_or_resume_queue(queues.queue_pause, "pause", name, tx)

    async def queue_resume(self, name: str, *, tx: CallerTransaction | None = None) -> None:
        """Let all clients claim jobs of a paused queue again. The name `*` resumes all queues.

        Raises:
            NotFoundError: no client has worked a queue with this name.
        """
        await self._pause_or_resume_queue(queues.queue_resume, "resume", name, tx)

    async def _pause_or_resume_queue(
        self,
        statement: Callable[[Transaction, str | None, str], Awaitable[list[str]]],
        action: str,
        name: str,
        tx: CallerTransaction | None,
    ) -> None:
        async with self._transaction(tx) as connection:
            found = await statement(connection, self._config.schema, name)
            if not found and name != "*":
                raise _make_queue_not_found_error(name)
            payload = msgspec.json.encode({"action": action, "queue": name}).decode()
            await queues.send_control_message(connection, self._config.schema, payload)


def _make_queue_not_found_error(name: str) -> NotFoundError:
    return NotFoundError(f"there is no queue {name!r}: a queue exists after a client has worked it")
