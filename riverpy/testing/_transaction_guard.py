"""JobSavepoint: keeps the transaction of a test usable after a job has failed in it.

If a statement of a job fails, PostgreSQL aborts the transaction. In production the job's own
transaction is rolled back, and the result is stored in another transaction. In a test there is only
one transaction, so it is rolled back to a savepoint that was set before the job's code.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._postgres.sessions.session import CallerSession
from riverpy._postgres.sql_files import get_query
from riverpy._postgres.transactions import read_server_time, validate_and_adapt_tx
from riverpy.errors import TransactionError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.sessions.protocols import CallerTransaction
    from riverpy._postgres.sessions.session import NestedTransaction

_ENDED_ERROR_TEXT = (
    "the code of the job has committed or rolled back the transaction given as tx, or has closed "
    "its connection, so the result of the job cannot be stored: give the code a session that joins "
    "the transaction of the test with savepoints, or pass the connection under the session as tx. "
    "Code that uses this connection in several tasks at once needs a connection for each of them: "
    "work the job with riverpy.testing.drain(client), without tx"
)
_ABORTED_ERROR_TEXT = (
    "the code of the job has returned after an error that aborted the transaction given as tx: let "
    "the error end the job, or catch it outside of a savepoint such as `async with "
    "connection.transaction():`"
)


class JobSavepoint:
    """Sets a savepoint before the code of a job, and rolls back to it if the code has aborted the
    transaction."""

    def __init__(self, tx: CallerTransaction) -> None:
        self._tx = tx
        self._connection: Transaction | None = None
        self._nested: NestedTransaction | None = None

    async def begin(self) -> AbstractContextManager[None]:
        """Set a savepoint. Return a context manager in which the caller runs the code of the
        job."""
        connection = self._connection = validate_and_adapt_tx(self._tx)
        if isinstance(connection, CallerSession):
            self._nested = await connection.begin_nested()
        if self._nested is None:
            await get_query("session", "session_attempt_savepoint", None).execute(connection)
        if isinstance(connection, CallerSession):
            return connection.keep_connection_if_cancelled()
        return nullcontext()

    async def end(self, *, has_failed: bool, error: BaseException | None) -> None:
        """If the code of the job has aborted the transaction, roll back to the savepoint. This
        undoes what the code did.

        Args:
            has_failed: whether the attempt failed. If it did not fail, an aborted transaction is an
                error.
            error: the error that the code raised, if any.

        Raises:
            TransactionError: the code has ended the transaction; or it has aborted the transaction,
                but returned without an error.
        """
        cause = await self._find_transaction_error()
        try:
            if self._nested is not None:
                await self._nested.end(keep=cause is None)
            elif cause is not None and self._connection is not None:
                rollback = get_query("session", "session_attempt_rollback", None)
                await rollback.execute(self._connection)
        except (TransactionError, *DATABASE_ERRORS) as failure:
            raise _make_transaction_ended_error(error) from failure
        if cause is None:
            return
        if (failure := await self._find_transaction_error()) is not None:
            raise _make_transaction_ended_error(error) from failure
        if not has_failed:
            raise TransactionError(_ABORTED_ERROR_TEXT) from cause

    async def _find_transaction_error(self) -> Exception | None:
        """Check the transaction with a query. Return the error if the transaction cannot be used,
        otherwise None."""
        try:
            await read_server_time(validate_and_adapt_tx(self._tx))
        except (TransactionError, *DATABASE_ERRORS) as error:
            return error
        return None


def _make_transaction_ended_error(error: BaseException | None) -> TransactionError:
    """Return the error for a transaction that the job's code has ended. `error` is the error that
    the code raised, if any."""
    if not isinstance(error, TimeoutError):
        return TransactionError(_ENDED_ERROR_TEXT)
    return TransactionError(
        f"{error}, and this has ended the connection of the transaction given as tx: either the "
        "code closes its connection when it is cancelled, or the driver does. Work the job with "
        "riverpy.testing.drain(client), without tx, where the code has connections of its own"
    )
