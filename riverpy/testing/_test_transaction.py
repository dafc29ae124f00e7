"""TestTransaction: the transaction of a test, in an async or a blocking session."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from riverpy._postgres.transactions import is_blocking_transaction
from riverpy.testing._calling_thread import CallingThreadExecutor, CallingThreadSession

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from riverpy._postgres.sessions.protocols import BlockingTransaction, CallerTransaction

T = TypeVar("T")


class TestTransaction(NamedTuple):
    """The transaction of a test, for code in the event loop and for blocking jobs."""

    tx: CallerTransaction
    """The session of the test or, if the session is blocking, an async adapter of it."""
    blocking_tx: BlockingTransaction | None = None
    """The session of the test if it is blocking; otherwise None."""
    thread: CallingThreadExecutor | None = None
    """Runs blocking jobs in the thread of a blocking session; None: the session is async."""


def run_in_transaction(
    tx: BlockingTransaction | CallerTransaction,
    function: Callable[[TestTransaction], Coroutine[object, None, T]],
) -> T | Coroutine[object, None, T]:
    """Run an async function with a test's transaction.

    With a blocking session as `tx`, return the function's result. With an async session, return a
    coroutine, which the caller awaits."""
    if not is_blocking_transaction(tx):
        return function(TestTransaction(cast("CallerTransaction", tx)))
    thread = CallingThreadExecutor()
    session = cast("CallerTransaction", CallingThreadSession(tx, thread))
    transaction = TestTransaction(session, cast("BlockingTransaction", tx), thread)
    return thread.run_in_event_loop_thread(lambda: function(transaction))
