"""Context managers for the fixtures of the pytest plugin that give a test a connection or session
in a transaction."""

from __future__ import annotations

from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    close_connection,
    is_asyncpg_connection,
    is_in_transaction,
)
from riverpy._postgres.sessions.adapter import adapt_session
from riverpy._postgres.test_databases import (
    TransactionState,
    fetch_transaction_state,
    mark_test_transaction,
)
from riverpy._without_loop import run_without_loop
from riverpy.errors import ConfigError, TransactionError
from riverpy.testing._session_turns import MixedSessionsError, SessionTurns, sharing_turns
from riverpy.testing.kept_connections import kept_connections

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Sequence

    from sqlalchemy import Connection as SqlalchemyConnection
    from sqlalchemy import Engine
    from sqlalchemy.exc import SQLAlchemyError
    from sqlalchemy.ext.asyncio import (
        AsyncConnection,
        AsyncEngine,
        AsyncSession,
        async_sessionmaker,
    )
    from sqlalchemy.orm import Session, SessionTransaction, sessionmaker

    from riverpy._postgres.driver import Connection, Transaction

    SessionMaker: TypeAlias = async_sessionmaker[Any] | sessionmaker[Any]
    Bind: TypeAlias = AsyncConnection | AsyncEngine | SqlalchemyConnection | Engine


class TransactionEndedError(TransactionError):
    """The code under test has ended the transaction of a fixture."""

    def __init__(self, fixture: str) -> None:
        super().__init__(
            f"the code under test has ended the transaction of {fixture}. What it wrote before a "
            "commit was deleted now. Look for the text COMMIT or ROLLBACK, and for a commit or "
            "rollback of the connection under a session: with this fixture, only sessions may "
            "commit. Code that must commit is tested with riverpy_client"
        )


_MISSING_SAVEPOINT_SQLSTATE = "3B001"
_UNKNOWN_STATE = TransactionState(is_marked=True, has_changed_tables=True)


async def _fetch_transaction_state_or_unknown(connection: Transaction) -> TransactionState:
    """Return the state of the transaction that a fixture has opened, or `_UNKNOWN_STATE` if the
    state cannot be read.

    `connection` must be the driver's connection. If the tested code has executed `COMMIT` as an SQL
    text, SQLAlchemy's connection does not know this, and raises errors of its own."""
    try:
        return await fetch_transaction_state(connection)
    except DATABASE_ERRORS:  # the transaction is aborted, or the connection is lost
        return _UNKNOWN_STATE


def _is_savepoint_missing(error: SQLAlchemyError) -> bool:
    """Return whether PostgreSQL reports that a savepoint does not exist. This error shows that the
    tested code has ended the transaction, and with it the savepoint."""
    cause = getattr(error, "orig", None)
    return _MISSING_SAVEPOINT_SQLSTATE in (
        getattr(cause, "sqlstate", None),
        getattr(cause, "pgcode", None),
    )


def _adapt_driver_connection(connection: Any, of_sqlalchemy: object) -> Transaction:
    """Return the driver's connection itself if it is of asyncpg. For another driver, return
    riverpy's adapter of the connection. If riverpy has no adapter for this driver, return the
    adapter of SQLAlchemy's connection, `of_sqlalchemy`."""
    if is_asyncpg_connection(connection):
        return connection
    adapter = adapt_session(connection) or adapt_session(of_sqlalchemy)
    return cast("Transaction", adapter)


@asynccontextmanager
async def open_connection(url: str) -> AsyncGenerator[Connection]:
    """Open an asyncpg connection in a transaction, and roll the transaction back at the end.

    Raises:
        TransactionEndedError: raised at the end, if the tested code has ended the transaction.
    """
    connection = await kept_connections.acquire(url, "riverpy_connection")
    can_be_kept = False
    try:
        transaction: Any = connection.transaction()
        await transaction.start()
        await mark_test_transaction(connection)
        yield connection
        state = await _fetch_transaction_state_or_unknown(connection)
        if not state.is_marked:
            raise TransactionEndedError("riverpy_connection")
        if is_in_transaction(connection):
            await transaction.rollback()
            can_be_kept = not state.has_changed_tables
    finally:
        if can_be_kept:
            await kept_connections.release(url, connection)
        else:
            await close_connection(connection)


@asynccontextmanager
async def open_session(
    engine: AsyncEngine, session_makers: Sequence[SessionMaker]
) -> AsyncGenerator[AsyncSession]:
    """Open an async SQLAlchemy session in a transaction, and roll the transaction back at the end.

    A commit of the session only releases a savepoint. In the `async with` block, the sessions that
    `session_makers` create use the same transaction.

    Raises:
        TransactionEndedError: raised at the end, if the tested code has ended the transaction.
        MixedSessionsError: raised at the end, if sessions overlapped in such a way that the
            result differs from production.
    """
    from sqlalchemy.exc import SQLAlchemyError
    from sqlalchemy.ext.asyncio import AsyncSession

    state = _UNKNOWN_STATE
    async with engine.connect() as connection:
        transaction = await connection.begin()
        raw_connection = await connection.get_raw_connection()
        driver = _adapt_driver_connection(raw_connection.driver_connection, connection)
        await mark_test_transaction(cast("Transaction", adapt_session(connection)))
        makers = select_session_makers(session_makers, is_async=True)
        turns = SessionTurns()
        try:
            with (
                bind_session_makers(makers, connection),
                _letting_sessions_take_turns(makers, turns),
                sharing_turns(turns),
                _recording_statements(connection.sync_connection, turns),
            ):
                async with AsyncSession(
                    connection,
                    join_transaction_mode="create_savepoint",
                    expire_on_commit=False,
                    sync_session_class=_make_test_session_class(turns),
                ) as session:
                    yield session
                    state = await _fetch_transaction_state_or_unknown(driver)
        except SQLAlchemyError as error:
            if _is_savepoint_missing(error):
                state = state._replace(is_marked=False)
            if state.is_marked and turns.error is None:
                raise
        if state.has_changed_tables:
            await connection.invalidate()
        if turns.error is not None:
            raise MixedSessionsError(str(turns.error))
        if not state.is_marked:
            raise TransactionEndedError("riverpy_session")
        await transaction.rollback()


@contextmanager
def open_sync_session(engine: Engine, session_makers: Sequence[SessionMaker]) -> Generator[Session]:
    """Open a blocking SQLAlchemy session in a transaction, as `open_session` does for async code.

    Raises:
        TransactionEndedError, MixedSessionsError: as `open_session`.
    """
    from sqlalchemy.exc import SQLAlchemyError

    state = _UNKNOWN_STATE
    with engine.connect() as connection:
        transaction = connection.begin()
        driver = _adapt_driver_connection(connection.connection.driver_connection, connection)
        run_without_loop(mark_test_transaction(cast("Transaction", adapt_session(connection))))
        makers = select_session_makers(session_makers, is_async=False)
        turns = SessionTurns()
        try:
            with (
                bind_session_makers(makers, connection),
                _letting_sessions_take_turns(makers, turns),
                _recording_statements(connection, turns),
                _make_test_session_class(turns)(
                    connection, join_transaction_mode="create_savepoint"
                ) as session,
            ):
                yield session
                state = run_without_loop(_fetch_transaction_state_or_unknown(driver))
        except SQLAlchemyError as error:
            if _is_savepoint_missing(error):
                state = state._replace(is_marked=False)
            if state.is_marked and turns.error is None:
                raise
        if turns.error is not None:
            raise MixedSessionsError(str(turns.error))
        if not state.is_marked:
            raise TransactionEndedError("riverpy_sync_session")
        transaction.rollback()


def select_session_makers(
    session_makers: Sequence[SessionMaker], *, is_async: bool
) -> list[SessionMaker]:
    """Return the session makers that create async sessions. If `is_async` is False, return those
    that create blocking sessions."""
    from sqlalchemy.ext.asyncio import async_sessionmaker

    return [one for one in session_makers if isinstance(one, async_sessionmaker) == is_async]


@contextmanager
def bind_session_makers(session_makers: Sequence[SessionMaker], bind: Bind) -> Generator[None]:
    """In the `with` block, let all sessions that the makers create use the connection or engine
    `bind`."""
    settings = [dict(maker.kw) for maker in session_makers]
    for maker in session_makers:
        # remove `binds`, the engines of single models, because they take precedence over `bind`
        maker.configure(bind=bind, binds=None, join_transaction_mode="create_savepoint")
    try:
        yield
    finally:
        for maker, before in zip(session_makers, settings, strict=True):
            maker.kw = before


@contextmanager
def refusing_sessions(session_makers: Sequence[SessionMaker]) -> Generator[None]:
    """In the `with` block, let each session that the makers create raise ConfigError at its first
    statement.

    Without this, these sessions would commit in the database for which the application is
    configured."""
    from sqlalchemy import NullPool, create_engine
    from sqlalchemy.ext.asyncio import create_async_engine

    with ExitStack() as stack:
        for is_async in (True, False):
            if makers := select_session_makers(session_makers, is_async=is_async):
                # SQLAlchemy creates an engine only if its driver is installed. asyncpg and sqlite3
                # always are. They open no connection: SQLAlchemy calls `creator` instead, which
                # raises ConfigError.
                create, driver = (
                    (create_async_engine, "postgresql+asyncpg")
                    if is_async
                    else (create_engine, "sqlite")
                )
                creator = _refuse_async_session if is_async else _refuse_blocking_session
                engine = create(f"{driver}://", poolclass=NullPool, creator=creator)
                stack.enter_context(bind_session_makers(makers, engine))
        yield


def _refuse_async_session() -> NoReturn:
    raise ConfigError(
        "this session of riverpy_session_makers cannot join the transaction of the test: add "
        "riverpy_session, or riverpy_client and call riverpy_jobs.drain(), to the test"
    )


def _refuse_blocking_session() -> NoReturn:
    raise ConfigError(
        "this session of riverpy_session_makers is blocking, and cannot join the transaction of "
        "an async test: test the job with riverpy_client and riverpy_jobs.drain(), where sessions "
        "commit in the database of the test; or write a test that is not async, with "
        "riverpy_sync_session and TestWorker"
    )


@contextmanager
def _letting_sessions_take_turns(
    session_makers: Sequence[SessionMaker], turns: SessionTurns
) -> Generator[None]:
    """In the `with` block, let the sessions that the makers create take turns, because they share
    one connection. See `SessionTurns`."""
    settings = [dict(maker.kw) for maker in session_makers]
    classes = [maker.class_ for maker in session_makers]
    for maker in session_makers:
        session_class: Any = maker.class_
        if hasattr(session_class, "sync_session_class"):
            inner = maker.kw.get("sync_session_class") or session_class.sync_session_class
            maker.configure(sync_session_class=_make_turn_taking_class(inner, turns, can_wait=True))
        else:
            maker.class_ = _make_turn_taking_class(session_class, turns, can_wait=False)
    try:
        yield
    finally:
        for maker, before, session_class in zip(session_makers, settings, classes, strict=True):
            maker.kw, maker.class_ = before, session_class


@contextmanager
def _recording_statements(connection: Any, turns: SessionTurns) -> Generator[None]:
    """In the `with` block, pass each statement that the connection executes to `turns`, which
    records whether a session has written."""
    from sqlalchemy import event

    def record(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        turns.record_statement(statement)

    event.listen(connection, "before_cursor_execute", record)
    try:
        yield
    finally:
        event.remove(connection, "before_cursor_execute", record)


def _make_test_session_class(turns: SessionTurns) -> type[Session]:
    """Return the class of the test's own session.

    While a session of the application has an open savepoint, the test's session runs its statements
    inside this savepoint. The test's session then sets no savepoint of its own, because an inner
    savepoint must end before the outer savepoint."""
    from sqlalchemy.orm import Session

    class TestSession(Session):
        """The session that the fixture gives to the test."""

        def get_bind(self, *args: Any, **options: Any) -> Any:
            """Choose whether to set a savepoint, and return the connection. SQLAlchemy calls this
            method before each statement."""
            is_inside = turns.has_open_turns()
            self.join_transaction_mode = "rollback_only" if is_inside else "create_savepoint"
            return super().get_bind(*args, **options)

    return TestSession


def _make_turn_taking_class(
    session_class: type[Session], turns: SessionTurns, *, can_wait: bool
) -> type[Session]:
    """Return a subclass of a session class whose sessions begin a turn before their first
    statement.

    `can_wait`: whether these sessions first wait until other tasks have ended their turns. Blocking
    sessions do not wait, because there is no other task."""
    from sqlalchemy import event

    class TurnTakingSession(session_class):
        """A session that begins a turn before its first statement."""

        def get_bind(self, *args: Any, **options: Any) -> Any:
            """Begin a turn if the session has none, and return the connection of the test.
            SQLAlchemy calls this method before each statement."""
            bind: Any = super().get_bind(*args, **options)
            if can_wait:
                turns.require_test_loop()
            if not turns.has_turn(self):
                if not turns.can_begin_turn() and can_wait:
                    # `run_async` lets this synchronous method wait in the event loop
                    bind.connection.run_async(wait_until_free)
                turns.begin_turn(self)
            return bind

    async def wait_until_free(_driver_connection: object) -> None:
        await turns.wait_until_turn_can_begin()

    def end_turn(session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None:
            turns.end_session_turn(session)

    def record_commit(session: Session) -> None:
        if session.get_nested_transaction() is None:
            turns.record_commit(session)

    event.listen(TurnTakingSession, "before_commit", turns.require_commit_order)
    event.listen(TurnTakingSession, "after_commit", record_commit)
    event.listen(TurnTakingSession, "after_transaction_end", end_turn)
    return TurnTakingSession
