"""Stores: where leases are, and how each statement of one reaches it."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Protocol

from riverpy._names import USER_PREFIX, check_schema_length
from riverpy._postgres.connection import (
    ConnectionOutage,
    DedicatedConnection,
    InjectedConnection,
    SharedPool,
    close_all,
    connect_limited,
)
from riverpy._postgres.driver import (
    LockNotAvailableError,
    SerializationError,
    is_closed_for_good,
    is_in_transaction,
    is_pool,
    is_transaction,
)
from riverpy._postgres.leases import (
    lease_acquire,
    lease_fence,
    lease_fence_text,
    lease_release,
    lease_renew,
)
from riverpy._postgres.schema import (
    LEASES_VERSION,
    OWN_LINE,
    migrate_command,
    read_schema_state,
)
from riverpy._postgres.transactions import elsewhere_error, expect_fenceable
from riverpy.errors import ConfigError, SchemaMissingError, TransactionError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractAsyncContextManager

    from riverpy._postgres.driver import Connection, Pool, Transaction
    from riverpy._postgres.leases import LeaseBid

STATEMENT_LIMIT = timedelta(seconds=12)
"""After which the server ends a statement of an owned connection."""
BID_LOCK_LIMIT = timedelta(milliseconds=500)
"""How long a bid waits for the transaction that is fenced by a term that is over: others bid over
the same connection."""
OPEN_LIMIT = 15.0
"""Seconds that the first look at the database may take."""
OUTAGE_EFFECT = "leases that cannot be renewed end in time, and the process keeps connecting"


class LeaseStore(Protocol):
    """What is asked of a store. Each call takes `bound` seconds at most, and raises one of
    DATABASE_ERRORS when the answer is not known."""

    async def open(self) -> None:
        """See that there is a place for leases.

        Raises:
            SchemaMissingError: there is none; the text has the command that makes it.
        """
        ...

    @property
    def is_gone(self) -> bool:
        """Whether it will never answer again."""
        ...

    def rest(self, *, bids: bool, renewals: bool) -> None:
        """Nobody bids for now, or renews: that it failed last is no outage that goes on."""
        ...

    async def close(self) -> None:
        """Let go of what is owned."""
        ...

    async def acquire(
        self, name: str, holder: str, ttl: timedelta, *, bound: float
    ) -> LeaseBid | None:
        """Bid. None: somebody else has just won, or a transaction of the last term goes on."""
        ...

    async def renew(
        self, holder: str, terms: Iterable[tuple[str, int]], *, bound: float
    ) -> dict[str, bool]:
        """Extend terms, each a name and an epoch. Returns the names of those that go on, and
        whether they were extended: somebody else keeps the row of one that was not locked."""
        ...

    async def release(self, name: str, epoch: int, holder: str, *, bound: float) -> bool:
        """End a term. False: it was over before."""
        ...

    async def fence(self, transaction: object, name: str, epoch: int, *, bound: timedelta) -> bool:
        """Tie an open transaction, which may last for `bound`, to a term. False: it is over.

        Raises:
            TransactionError: that is no open transaction of this store's.
        """
        ...

    async def elsewhere_error(self, transaction: object, name: str) -> TransactionError:
        """What to raise if a term is held that a fence there does not find: it is another place."""
        ...

    def fence_statement(self, name: str, epoch: int, *, bound: timedelta) -> str:
        """The same as a statement without parameters.

        Raises:
            ConfigError: the store has none.
        """
        ...


class _Connections(Protocol):
    """How a statement gets a connection."""

    def use(self, purpose: str, bound: float) -> AbstractAsyncContextManager[Transaction]: ...


class LeaseTable:
    """The table of leases. A user's name has the prefix `s:` there."""

    def __init__(
        self,
        database: str | Pool | Transaction,
        *,
        schema: str | None,
        holder: str,
        pooler: bool = False,
    ) -> None:
        """Make it; nothing is connected.

        Args:
            database: a URL, of which it makes connections of its own; or a pool or a connection of
                the caller's, which is never closed, replaced or made again.
            schema: the schema of River's tables; None leaves it to the search path.
            holder: whose connections they are, for the log.
            pooler: whether the URL leads to a pooler in transaction mode.

        Raises:
            ConfigError: it is none of these.
        """
        self._schema = schema
        self._owned: list[DedicatedConnection] = []
        self._url: str | None = None
        self._given: Pool | Transaction | None = None
        self._holder, self._pooled = holder, pooler
        self._renewals: _Connections
        self._bids: _Connections
        if isinstance(database, str):
            self._url = database
        elif is_pool(database):
            self._given = database
            self._renewals = self._bids = SharedPool(database)
        elif is_transaction(database):
            self._given = database
            self._renewals = self._bids = InjectedConnection(database)
        else:
            raise ConfigError(
                "leases take a database URL, an asyncpg pool or connection, or MemoryLeases(), got "
                f"{type(database).__name__}"
            )

    async def open(self) -> None:
        """See that the table is there.

        Raises:
            SchemaMissingError: line `riverpy` is not migrated; the text has the command.
            ConfigError, DatabaseError, or one of DATABASE_ERRORS: the database cannot be used.
        """
        if self._url is not None:
            await self._connect(self._url)
        async with self._renewals.use("looking for the table of leases", OPEN_LIMIT) as connection:
            state = await read_schema_state(connection, self._schema)
        check_schema_length(state.schema)
        if LEASES_VERSION in state.missing(OWN_LINE):
            command = migrate_command(
                f"riverpy migrate up --line {OWN_LINE}", self._schema, self._url
            )
            raise SchemaMissingError(
                f"schema {state.schema!r} has no table of leases: run `{command}`"
            )

    async def _connect(self, url: str) -> None:
        """Make the connections; the second one when it is used first.

        A bid may wait for a transaction of the last holder's, and a release for whoever has locked
        the row. Renewals wait for nobody.
        """
        outage = ConnectionOutage(holder=self._holder, effect=OUTAGE_EFFECT)

        async def connect(name: str) -> Connection:
            return await connect_limited(
                url, f"riverpy {name}", limit=STATEMENT_LIMIT, pooled=self._pooled
            )

        renewals, bids = self._owned = [
            DedicatedConnection(name, partial(connect, name), outage)
            for name in ("leases", "lease bids")
        ]
        self._renewals, self._bids = renewals, bids
        await renewals.open()

    @property
    def is_gone(self) -> bool:
        """Whether the caller has closed the pool, or the connection."""
        return self._given is not None and is_closed_for_good(self._given)

    def rest(self, *, bids: bool, renewals: bool) -> None:
        """Nobody uses a connection for now: one that is lost would be so for ever, and keep the end
        of the outage, and the begin of others, from being told."""
        for connection, rests in zip(self._owned, (renewals, bids), strict=False):
            if rests:
                connection.rest()

    async def close(self) -> None:
        """Close the connections that it made."""
        await close_all(self._owned)

    async def acquire(
        self, name: str, holder: str, ttl: timedelta, *, bound: float
    ) -> LeaseBid | None:
        """Bid. None: somebody else has just won, or a transaction of the last term goes on.

        Raises:
            TransactionError: the caller's connection is in a transaction.
        """
        try:
            async with self._bids.use("bidding for a lease", bound) as connection:
                _expect_no_transaction(connection)
                return await lease_acquire(
                    connection,
                    self._schema,
                    name=_row(name),
                    holder=holder,
                    ttl=ttl,
                    lock_bound=BID_LOCK_LIMIT,
                )
        except (LockNotAvailableError, SerializationError):
            return None

    async def renew(
        self, holder: str, terms: Iterable[tuple[str, int]], *, bound: float
    ) -> dict[str, bool]:
        """Extend terms, each a name and an epoch. Returns the names of those that go on, and
        whether they were extended: somebody else keeps the row of one that was not locked.

        Raises:
            TransactionError: the caller's connection is in a transaction.
        """
        rows = [(_row(name), epoch) for name, epoch in terms]
        async with self._renewals.use("renewing leases", bound) as connection:
            _expect_no_transaction(connection)
            held = await lease_renew(connection, self._schema, holder=holder, terms=rows)
        return {row.removeprefix(USER_PREFIX): is_renewed for row, is_renewed in held.items()}

    async def release(self, name: str, epoch: int, holder: str, *, bound: float) -> bool:
        """End a term. False: it was over before.

        Raises:
            TransactionError: the caller's connection is in a transaction.
        """
        async with self._bids.use("releasing a lease", bound) as connection:
            _expect_no_transaction(connection)
            return await lease_release(
                connection, self._schema, name=_row(name), epoch=epoch, holder=holder
            )

    async def fence(self, transaction: object, name: str, epoch: int, *, bound: timedelta) -> bool:
        """Tie an open transaction, which may last for `bound`, to a term. False: it is over.

        Raises:
            TransactionError: a fence may not stand there; the text has the reason.
        """
        return await lease_fence(
            expect_fenceable(transaction),
            self._schema,
            name=_row(name),
            epoch=epoch,
            bound=bound,
            lock_bound=bound,
        )

    async def elsewhere_error(self, transaction: object, name: str) -> TransactionError:
        """What to raise if a term is held that a fence there does not find."""
        return await elsewhere_error(expect_fenceable(transaction), f"lease {name!r}")

    def fence_statement(self, name: str, epoch: int, *, bound: timedelta) -> str:
        """The same as a statement without parameters."""
        return lease_fence_text(
            self._schema, name=_row(name), epoch=epoch, bound=bound, lock_bound=bound
        )


def _row(name: str) -> str:
    return USER_PREFIX + name


def _expect_no_transaction(connection: Transaction) -> None:
    if is_in_transaction(connection):
        raise TransactionError(
            "the connection of the leases is in a transaction, and what it is granted there would "
            "be nobody's until the commit: give LeaseManager a connection of its own, a pool or a "
            "URL"
        )
