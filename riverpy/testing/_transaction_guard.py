"""TransactionGuard: keeps the transaction of a test usable after the code of a job.

If the code of a job fails in a statement, PostgreSQL aborts the transaction. A real job has a
transaction of its own, which is then rolled back, and its result is stored in another one. In a
test both are the same transaction, so it is rolled back to a savepoint from before the code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._postgres.sessions.session import CallerSession
from riverpy._postgres.sql_files import get_query
from riverpy._postgres.transactions import expect_transaction, read_server_time
from riverpy.errors import TransactionError

if TYPE_CHECKING:
    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.sessions.protocols import CallerTransaction
    from riverpy._postgres.sessions.session import NestedTransaction

_ENDED_ERROR_TEXT = (
    "the code of the job has committed or rolled back the transaction given as tx, or has closed "
    "its connection, so the result of the job cannot be stored: give the code a session that joins "
    "the transaction of the test with savepoints, or pass the connection under the session as tx"
)
_ABORTED_ERROR_TEXT = (
    "the code of the job has returned after an error that aborted the transaction given as tx: let "
    "the error end the job, or catch it outside of a savepoint such as `async with "
    "connection.transaction():`"
)


class TransactionGuard:
    """Keeps a transaction usable while the code of one job uses it."""

    def __init__(self, tx: CallerTransaction) -> None:
        self._tx = tx
        self._connection: Transaction | None = None
        self._nested: NestedTransaction | None = None

    async def begin(self) -> None:
        """Set a savepoint before the code of the job."""
        connection = self._connection = expect_transaction(self._tx)
        if isinstance(connection, CallerSession):
            self._nested = await connection.begin_nested()
        if self._nested is None:
            await get_query("session", "session_attempt_savepoint", None).execute(connection)

    async def end(self, *, has_failed: bool) -> None:
        """If the code of the job has failed and has aborted the transaction, undo what it did.

        Raises:
            TransactionError: the code has ended the transaction, or has aborted it and returned.
        """
        cause = await self._check_usable()
        try:
            if self._nested is not None:
                await self._nested.end(keep=cause is None)
            elif cause is not None and self._connection is not None:
                rollback = get_query("session", "session_attempt_rollback", None)
                await rollback.execute(self._connection)
        except (TransactionError, *DATABASE_ERRORS) as error:
            raise TransactionError(_ENDED_ERROR_TEXT) from error
        if cause is None:
            return
        if (error := await self._check_usable()) is not None:
            raise TransactionError(_ENDED_ERROR_TEXT) from error
        if not has_failed:
            raise TransactionError(_ABORTED_ERROR_TEXT) from cause

    async def _check_usable(self) -> Exception | None:
        """Return why the transaction cannot be used; None: it can."""
        try:
            await read_server_time(expect_transaction(self._tx))
        except (TransactionError, *DATABASE_ERRORS) as error:
            return error
        return None
