"""ClientMethods: the base class of the classes that implement the methods of `Client`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import asynccontextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

from riverpy._insert.errors import translate_notify_channel_error
from riverpy._lifecycle import run_despite_cancellation
from riverpy._postgres.driver import Pool  # noqa: TC001 (typing.get_type_hints reads it)
from riverpy._postgres.passwords import PasswordSource  # noqa: TC001 (the same)
from riverpy._postgres.transactions import savepoint, validate_and_adapt_tx
from riverpy._waiting.background_task import BackgroundTask
from riverpy.config import Config  # noqa: TC001 (the same)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from contextlib import AbstractAsyncContextManager

    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.sessions.protocols import CallerTransaction

TransactionIsolation: TypeAlias = Literal["read_committed", "repeatable_read", "autocommit"]


class ClientMethods(ABC):
    """The base class of the classes that implement the methods of `Client`.

    If the caller passes a transaction as `tx`, the method runs in a savepoint of it, so that the
    transaction stays usable after an error. The method raises TransactionError if `tx` is closed,
    aborted or not in a transaction.
    """

    _config: Config
    _database: str | Pool | None
    _password: PasswordSource | None

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether a call of `run` or a block `async with client.working()` is active on this
        client."""

    @property
    @abstractmethod
    def id(self) -> str:
        """The client's id."""

    @property
    @abstractmethod
    def database_url(self) -> str | None:
        """The URL of the database. None: the client was created without a URL."""

    @abstractmethod
    def _get_open_pool(self) -> Pool:
        """Return the client's pool. Raise ClientStateError if the client is not open in this
        process and event loop."""

    @abstractmethod
    def _transaction(
        self,
        tx: CallerTransaction | None,
        *,
        isolation: TransactionIsolation | None = "read_committed",
    ) -> AbstractAsyncContextManager[Transaction]:
        """Open a savepoint in `tx`. If `tx` is None, open a transaction on the client's pool.

        `isolation` applies only if `tx` is None. It is the isolation level of the new transaction;
        None means the default level of the session. With the value `autocommit`, no transaction is
        opened: this saves two round trips for a statement that only reads.
        """

    @cached_property
    def _background_tasks(self) -> set[BackgroundTask]:
        """The tasks that run while the client is open. Other parts of riverpy, such as the
        dashboard, add their tasks to this set."""
        return set()

    async def _close_background_tasks(self) -> None:
        """Cancel the background tasks and wait until they have ended. A cancellation of the caller
        does not interrupt this method."""
        tasks = list[BackgroundTask](vars(self).pop("_background_tasks", ()))

        async def close() -> None:
            for task in tasks:
                task.cancel()
            for task in tasks:
                await task.close()

        if tasks:
            await run_despite_cancellation(close)


@asynccontextmanager
async def open_savepoint(tx: CallerTransaction) -> AsyncGenerator[Transaction]:
    """Open a savepoint in the caller's transaction."""
    connection = validate_and_adapt_tx(tx)
    with translate_notify_channel_error():
        async with savepoint(connection):
            yield connection
