"""The riverpy client of a Django project. It inserts and changes jobs over Django's connections."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.core.signals import setting_changed
from django.db import connections
from django.utils.asyncio import async_unsafe

from riverpy.django.settings import SETTING_NAME, read_settings
from riverpy.errors import TransactionError
from riverpy.sync import Client
from riverpy.sync._calls import BlockingClientCoroutines

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from riverpy._calls.base import TransactionIsolation
    from riverpy._insert.inserter import Args, Inserter
    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.sessions.protocols import CallerTransaction
    from riverpy.config import Config
    from riverpy.insert_opts import InsertManyParams, InsertOpts, InsertResult
    from riverpy.job import JobArgs, RawArgs


@async_unsafe(
    "a wait blocks its thread, and an event loop runs in this thread: in an async view use `await "
    "sync_to_async(client.insert_and_wait)(…)`, outside of transaction.atomic()"
)
def _require_no_event_loop() -> None:
    """Raise SynchronousOnlyOperation if an event loop is running in this thread. With the
    environment variable DJANGO_ALLOW_ASYNC_UNSAFE, this never raises."""


_client_by_alias: dict[str, DjangoClient] = {}


class DjangoClient(Client):
    """A `riverpy.sync.Client` that uses Django's connections to one database.

    Without `tx`, a call uses Django's connection of the calling thread. If `transaction.atomic()`
    is open, the call is part of its transaction, otherwise it commits by itself. Calls also work in
    threads of `sync_to_async`, but not in a thread in which an event loop is running.
    """

    def __init__(self, alias: str, config: Config) -> None:
        """Create a client for the database with this alias."""
        super().__init__(config=config)
        self.alias = alias
        """The alias of the database in the setting DATABASES."""
        self._calls = _DjangoClientCoroutines(alias, config)


class _DjangoClientCoroutines(BlockingClientCoroutines):
    """Makes the calls of a DjangoClient. Without `tx`, they use Django's connection to the
    database."""

    def __init__(self, alias: str, config: Config) -> None:
        super().__init__(None, config, None)
        self._alias = alias

    def get_tx(self, tx: CallerTransaction | None) -> CallerTransaction:
        """Return `tx` or, if it is None, Django's connection of this thread."""
        return cast("CallerTransaction", connections[self._alias]) if tx is None else tx

    def require_no_open_transaction(self) -> None:
        try:
            _require_no_event_loop()
        except SynchronousOnlyOperation as error:
            raise TransactionError(str(error)) from None
        if connections[self._alias].in_atomic_block:
            raise TransactionError(
                "a wait inside transaction.atomic() would keep the transaction open, and would not "
                "see the end of a job that it has inserted: wait after the block. With "
                "ATOMIC_REQUESTS the whole view is such a block: decorate it with "
                "django.db.transaction.non_atomic_requests"
            )

    def close_lost_connection(self) -> None:
        connections[self._alias].close_if_unusable_or_obsolete()

    @asynccontextmanager
    async def _transaction(
        self,
        tx: CallerTransaction | None,
        *,
        isolation: TransactionIsolation | None = "read_committed",
    ) -> AsyncGenerator[Transaction]:
        async with super()._transaction(self.get_tx(tx), isolation=isolation) as connection:
            yield connection

    @cached_property
    def inserter(self) -> Inserter:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The inserter that uses Django's connection if a call has no `tx`."""
        return cast("Inserter", _DjangoInserter(self, super().inserter))


class _DjangoInserter:
    """Has the methods of an inserter. Without `tx`, they use Django's connection instead of a
    pool."""

    def __init__(self, calls: _DjangoClientCoroutines, inserter: Inserter) -> None:
        self._calls, self._inserter = calls, inserter

    async def insert(
        self, args: Args, opts: InsertOpts | None, *, tx: CallerTransaction | None
    ) -> InsertResult:
        return await self._inserter.insert(args, opts, tx=self._calls.get_tx(tx))

    async def insert_many(
        self, params: Sequence[InsertManyParams], *, tx: CallerTransaction | None
    ) -> list[InsertResult]:
        return await self._inserter.insert_many(params, tx=self._calls.get_tx(tx))

    async def insert_many_fast(
        self, params: Sequence[InsertManyParams], *, tx: CallerTransaction | None
    ) -> int:
        return await self._inserter.insert_many_fast(params, tx=self._calls.get_tx(tx))


def client(using: str | None = None) -> DjangoClient:
    """Return the client for a database.

    Args:
        using: the alias of the database. The database must have River's tables. Default None: the
            database of `RIVERPY["DATABASE"]`.

    Raises:
        ImproperlyConfigured: the setting `RIVERPY` is wrong.
    """
    if using is not None and using in _client_by_alias:
        return _client_by_alias[using]
    settings = read_settings()
    alias = using or settings.database
    if alias not in _client_by_alias:
        _client_by_alias[alias] = DjangoClient(alias, settings.config)
    return _client_by_alias[alias]


def insert(
    args: JobArgs | RawArgs, opts: InsertOpts | None = None, *, using: str | None = None
) -> InsertResult:
    """Insert a job over Django's connection of this thread. In `transaction.atomic()`, the job
    exists after the commit, so `on_commit` is not needed. Otherwise the job exists when the call
    returns.

    Args:
        args: the args of the job.
        opts: the options of this insert.
        using: the alias of the database. Default None: the database of `RIVERPY["DATABASE"]`.

    Raises:
        InsertError: the job is not allowed. Nothing was sent.
        TransactionError: the transaction is aborted, the connection is closed, or the calling code
            is async.
        SchemaMissingError: the database has no River tables.
    """
    return client(using).insert(args, opts)


async def ainsert(
    args: JobArgs | RawArgs, opts: InsertOpts | None = None, *, using: str | None = None
) -> InsertResult:
    """Insert a job from async code; see `insert`. The insert runs in Django's thread for queries.
    The job exists when the call returns, because Django has no transactions for async code."""
    return await sync_to_async(insert, thread_sensitive=True)(args, opts, using=using)


def _forget_clients(*, setting: str, **_: Any) -> None:
    """Forget all clients when a test changes one of the settings that they use."""
    if setting in (SETTING_NAME, "DATABASES"):
        _client_by_alias.clear()


setting_changed.connect(_forget_clients)
