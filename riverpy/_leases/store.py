"""LeaseStore: the interface of objects that keep leases. LeaseTable keeps leases in the table
`riverpy_lease`, and its caller provides the connections. UserLeaseTable keeps leases of user code
in the same table, and can open its own connections."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Protocol

from riverpy._names import USER_LEASE_NAME_PREFIX, validate_schema_name_length
from riverpy._postgres.connection import (
    CallerDatabase,
    ConnectionOutageTracker,
    DedicatedConnection,
    close_connections,
    connect_with_statement_timeout,
)
from riverpy._postgres.driver import (
    LockNotAvailableError,
    SerializationError,
    is_asyncpg_connection,
    is_closed_for_good,
    is_in_transaction,
    is_pool,
)
from riverpy._postgres.leases import (
    lease_acquire,
    lease_fence_transaction,
    lease_release,
    lease_renew,
    make_lease_fence_sql,
)
from riverpy._postgres.schema import LEASES_MIGRATION, read_schema_state, require_migration_version
from riverpy._postgres.transactions import (
    make_wrong_database_error,
    validate_and_adapt_fence_connection,
)
from riverpy.errors import ConfigError, TransactionError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractAsyncContextManager

    from riverpy._postgres.driver import Connection, Pool, Transaction
    from riverpy._postgres.leases import LeaseAcquireResult
    from riverpy._postgres.passwords import PasswordSource

LEASE_STATEMENT_TIMEOUT = timedelta(seconds=12)
"""The server's `statement_timeout` on connections that riverpy opens for leases."""
ACQUIRE_LOCK_TIMEOUT = timedelta(milliseconds=500)
"""How long an attempt to acquire a lease waits for a locked row. The last holder of the lease may
still have a fenced transaction, which locks the row until the transaction ends. The limit is short
because releases and other attempts need the same connection."""
TABLE_CHECK_TIMEOUT = 15.0
"""The timeout of the check whether the table `riverpy_lease` exists, in seconds."""
LEASE_OUTAGE_EFFECT = "leases that cannot be renewed end in time, and the process keeps connecting"


class LeaseStore(ABC):
    """Keeps leases, in a table or in memory. A term lasts from the acquisition of a lease to its
    end.

    `acquire`, `renew` and `release` take at most `timeout` seconds. They raise one of
    DATABASE_ERRORS if the result is unknown, and TransactionError if the caller's connection is in
    a transaction.
    """

    lease_name_prefix = ""
    """The prefix of lease names in the table and in notifications."""
    should_log_terms = True
    """Whether the engine logs acquired and ended leases. False for leases of leaders, because an
    election has log events of its own."""

    async def open(self) -> None:  # noqa: B027 (most stores need nothing)
        """Check that the store can keep leases.

        Raises:
            SchemaMissingError: there is no table. The error text contains the command that creates
                the table.
        """

    async def close(self) -> None:  # noqa: B027 (most stores own nothing)
        """Close the connections that the store owns."""

    @property
    def is_caller_database_closed(self) -> bool:
        """Whether the store uses a pool or connection of the caller, and the caller has closed
        it."""
        return False

    outage_tracker: ConnectionOutageTracker | None = None
    """Logs the outages of the store's connections. None: the store logs no outages."""

    @property
    def is_outage_logged(self) -> bool:
        """Whether the store's connections are in an outage, and this outage was already logged."""
        return self.outage_tracker is not None and self.outage_tracker.is_outage_logged

    def mark_connections_idle(self, *, acquiring: bool = False, renewing: bool = False) -> None:  # noqa: B027
        """Mark connections as not needed now. The loss of an idle connection does not count as an
        outage.

        Args:
            acquiring: mark the connection for attempts, because no caller waits for a lease.
            renewing: mark the connection for renewals, because there is no lease to renew.
        """

    @abstractmethod
    async def acquire(
        self, name: str, holder: str, ttl: timedelta, *, timeout: float
    ) -> LeaseAcquireResult | None:
        """Try to acquire a lease. The result says whether the lease was granted. Return None if
        another session acquired the lease at the same time, or if a fenced transaction of the last
        term has not ended."""

    @abstractmethod
    async def renew(
        self, holder: str, terms: Iterable[tuple[str, int]], *, timeout: float
    ) -> dict[str, bool]:
        """Renew leases. `terms` has the name and the epoch (the number of the term) of each lease.
        Return a dict by lease name, with only the leases whose term has not ended. True: the lease
        was renewed. False: the lease was not renewed, because another session has locked its
        row."""

    @abstractmethod
    async def release(self, name: str, epoch: int, holder: str, *, timeout: float) -> bool:
        """Release a lease. Return False if the term had ended before."""

    @abstractmethod
    async def fence(
        self,
        transaction: object,
        name: str,
        epoch: int,
        *,
        timeout: timedelta,
        lock_timeout: timedelta,
    ) -> bool:
        """Bind an open transaction to a term. The transaction may take `timeout`, and each wait for
        a lock may take `lock_timeout`. Return False if the term has ended.

        Raises:
            TransactionError: `transaction` is not an open transaction of this store.
        """

    async def make_wrong_database_error(self, transaction: object, name: str) -> TransactionError:
        """Return the error to raise if a transaction is not in the database and schema of the held
        lease."""
        return await make_wrong_database_error(
            validate_and_adapt_fence_connection(transaction), f"lease {name!r}"
        )

    def fence_statement(self, name: str, epoch: int, *, timeout: timedelta) -> str:
        """Return a SQL statement without parameters that does the same as `fence`.

        Raises:
            ConfigError: the store has no such statement.
        """
        raise ConfigError(f"lease {name!r} has no fence statement")


class _ConnectionProvider(Protocol):
    """An object that provides a connection for each statement."""

    def acquire(
        self, purpose: str, timeout: float, /
    ) -> AbstractAsyncContextManager[Transaction]: ...


class LeaseTable(LeaseStore):
    """Keeps leases in the table `riverpy_lease`. The caller provides the connections."""

    def __init__(
        self,
        renewal_connection: _ConnectionProvider,
        request_connection: _ConnectionProvider,
        schema: str | None,
        *,
        prefix: str = "",
    ) -> None:
        """Create the lease table.

        Args:
            renewal_connection: the connection for renewals, which never wait for a lock.
            request_connection: the connection for the other statements. An attempt to acquire may
                wait for a transaction of the last holder, and a release may wait for a locked row.
            schema: the schema of River's tables; None: the search path decides.
            prefix: the prefix of the lease names in the table.
        """
        self._renewal_connection = renewal_connection
        self._request_connection = request_connection
        self._schema = schema
        self.lease_name_prefix = prefix

    async def acquire(
        self, name: str, holder: str, ttl: timedelta, *, timeout: float
    ) -> LeaseAcquireResult | None:
        with suppress(LockNotAvailableError, SerializationError):
            async with self._request_connection.acquire("acquiring a lease", timeout) as connection:
                return await self._send_acquire_statement(connection, name, holder, ttl)
        return None

    async def _send_acquire_statement(
        self, connection: Transaction, name: str, holder: str, ttl: timedelta
    ) -> LeaseAcquireResult | None:
        _require_no_transaction(connection)
        return await lease_acquire(
            connection,
            self._schema,
            name=self.lease_name_prefix + name,
            holder=holder,
            ttl=ttl,
            lock_timeout=ACQUIRE_LOCK_TIMEOUT,
        )

    async def renew(
        self, holder: str, terms: Iterable[tuple[str, int]], *, timeout: float
    ) -> dict[str, bool]:
        rows = [(self.lease_name_prefix + name, epoch) for name, epoch in terms]
        async with self._renewal_connection.acquire("renewing leases", timeout) as connection:
            _require_no_transaction(connection)
            held = await lease_renew(connection, self._schema, holder=holder, names_and_epochs=rows)
        return {
            row.removeprefix(self.lease_name_prefix): is_renewed for row, is_renewed in held.items()
        }

    async def release(self, name: str, epoch: int, holder: str, *, timeout: float) -> bool:
        async with self._request_connection.acquire("releasing a lease", timeout) as connection:
            _require_no_transaction(connection)
            return await lease_release(
                connection,
                self._schema,
                name=self.lease_name_prefix + name,
                epoch=epoch,
                holder=holder,
            )

    async def fence(
        self,
        transaction: object,
        name: str,
        epoch: int,
        *,
        timeout: timedelta,
        lock_timeout: timedelta,
    ) -> bool:
        return await lease_fence_transaction(
            validate_and_adapt_fence_connection(transaction),
            self._schema,
            name=self.lease_name_prefix + name,
            epoch=epoch,
            transaction_timeout=timeout,
            lock_timeout=lock_timeout,
        )

    def fence_statement(self, name: str, epoch: int, *, timeout: timedelta) -> str:
        return make_lease_fence_sql(
            self._schema,
            name=self.lease_name_prefix + name,
            epoch=epoch,
            transaction_timeout=timeout,
            lock_timeout=timeout,
        )


class UserLeaseTable(LeaseTable):
    """Keeps leases of user code in the table `riverpy_lease`. Their names have the prefix `s:` in
    the table."""

    def __init__(
        self,
        database: str | Pool | Transaction,
        *,
        schema: str | None,
        holder: str,
        pooler: bool = False,
        password: PasswordSource | None = None,
    ) -> None:
        """Create the user lease table. It opens no connection.

        Args:
            database, schema, pooler: as for `LeaseManager`.
            holder: the name of this process, for log lines about the connections.
            password: returns the password for each connection to a URL.

        Raises:
            ConfigError: `database` is not a URL, an asyncpg pool or an asyncpg connection.
        """
        self._url: str | None = None
        self._own_connections: list[DedicatedConnection] = []
        self._caller_database: Pool | Transaction | None = None
        self.outage_tracker = ConnectionOutageTracker(
            holder=holder, outage_effect=LEASE_OUTAGE_EFFECT
        )
        renewals: _ConnectionProvider
        others: _ConnectionProvider
        if isinstance(database, str):
            self._url = database
            renewals, others = self._own_connections = [
                DedicatedConnection(
                    name, partial(_connect, database, name, pooler, password), self.outage_tracker
                )
                for name in ("leases", "lease requests")
            ]
        elif is_pool(database) or is_asyncpg_connection(database):
            self._caller_database = database
            renewals = others = CallerDatabase(database)
        else:
            raise ConfigError(
                "leases take a database URL, an asyncpg pool or connection, or MemoryLeases(), got "
                f"{type(database).__name__}"
            )
        super().__init__(renewals, others, schema, prefix=USER_LEASE_NAME_PREFIX)

    async def open(self) -> None:
        if self._own_connections:
            await self._own_connections[0].open()
        async with self._renewal_connection.acquire(
            "checking for the table of leases", TABLE_CHECK_TIMEOUT
        ) as connection:
            state = await read_schema_state(connection, self._schema)
        validate_schema_name_length(state.schema)
        require_migration_version(state, LEASES_MIGRATION, self._schema, url=self._url)

    @property
    def is_caller_database_closed(self) -> bool:
        return self._caller_database is not None and is_closed_for_good(self._caller_database)

    def mark_connections_idle(self, *, acquiring: bool = False, renewing: bool = False) -> None:
        for connection, is_idle in zip(self._own_connections, (renewing, acquiring), strict=False):
            if is_idle:
                connection.mark_unused()

    async def close(self) -> None:
        await close_connections(self._own_connections)


async def _connect(
    url: str, name: str, pooled: bool, password: PasswordSource | None
) -> Connection:
    return await connect_with_statement_timeout(
        url,
        f"riverpy {name}",
        statement_timeout=LEASE_STATEMENT_TIMEOUT,
        through_pooler=pooled,
        password=password,
    )


def _require_no_transaction(connection: Transaction) -> None:
    if is_in_transaction(connection):
        raise TransactionError(
            "the connection for leases is in a transaction, so that a lease would be granted only "
            "at the commit: give LeaseManager a connection of its own, a pool or a URL"
        )
