"""BlockingTestClient: the client that `riverpy.sync.current_client` returns to a blocking job while
a test works this job in its transaction."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

from riverpy._calls.base import open_savepoint
from riverpy.sync._calls import BlockingClientCoroutines
from riverpy.sync.client import Client

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy._calls.base import TransactionIsolation
    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.sessions.protocols import BlockingTransaction, CallerTransaction
    from riverpy.config import Config
    from riverpy.worker import Workers


class BlockingTestClient(Client):
    """A blocking client whose calls without `tx` run in the transaction of a test."""

    def __init__(self, tx: BlockingTransaction, workers: Workers | None, config: Config) -> None:
        super().__init__(workers=workers, config=config)
        self._calls = _BlockingTestClientCoroutines(tx, config, workers)


class _BlockingTestClientCoroutines(BlockingClientCoroutines):
    """The methods of a `BlockingTestClient`, as coroutines."""

    def __init__(self, tx: BlockingTransaction, config: Config, workers: Workers | None) -> None:
        super().__init__(None, config, workers)
        self._tx = cast("CallerTransaction", tx)

    @asynccontextmanager
    async def _transaction(
        self,
        tx: CallerTransaction | None,
        *,
        isolation: TransactionIsolation | None = "read_committed",
    ) -> AsyncGenerator[Transaction]:
        async with open_savepoint(self._tx if tx is None else tx) as connection:
            yield connection
