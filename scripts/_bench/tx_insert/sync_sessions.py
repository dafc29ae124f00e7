"""The sync kinds of sessions, and the inserts that each of them takes. See `async_sessions`."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from scripts._bench.riverpy_jobs import Noop
from scripts._bench.tx_insert.texts import ORDER_VALUES, VALUES, as_named, as_psycopg

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    Insert = Callable[[Any], object]


class SyncKind:
    """A kind of session: how to begin a transaction, and what can insert in it."""

    transaction: Callable[[], AbstractContextManager[Any]]
    """Begin a transaction, and commit it at the end of the block."""
    order: Insert
    """The caller's own INSERT."""
    inserts: dict[str, Insert]
    """The inserts of a job, by name."""


@contextmanager
def psycopg_kind(url: str) -> Generator[SyncKind]:
    """A connection of psycopg. PgQueuer demands autocommit outside of transactions."""
    import psycopg

    connection = psycopg.connect(url, autocommit=True)

    @contextmanager
    def transaction() -> Generator[Any]:
        with connection.transaction():
            yield connection

    kind = SyncKind()
    kind.transaction = transaction
    kind.order = lambda tx: tx.execute(as_psycopg("order"), ORDER_VALUES)
    kind.inserts = {
        "row": lambda tx: tx.execute(as_psycopg("row"), VALUES),
        "row_notify": lambda tx: tx.execute(as_psycopg("row_notify"), VALUES),
        "riverpy": _riverpy,
        "pgqueuer": _pgqueuer,
        "procrastinate": _procrastinate,
        "chancy": _chancy,
    }
    yield kind
    connection.close()


@contextmanager
def sqlalchemy_kind(url: str, driver: str) -> Generator[SyncKind]:
    """A session of SQLAlchemy for each transaction, on one pooled connection."""
    from sqlalchemy import create_engine, make_url, text
    from sqlalchemy.orm import sessionmaker

    from scripts._bench.tx_insert.peer_apps import RiverqueueArgs, riverqueue_client

    engine = create_engine(make_url(url).set(drivername=f"postgresql+{driver}"))
    texts = {name: text(as_named(name)) for name in ("order", "row", "row_notify")}
    kind = SyncKind()
    kind.transaction = sessionmaker(engine).begin
    kind.order = lambda tx: tx.execute(texts["order"], ORDER_VALUES)
    kind.inserts = {
        "row": lambda tx: tx.execute(texts["row"], VALUES),
        "row_notify": lambda tx: tx.execute(texts["row_notify"], VALUES),
        "riverpy": _riverpy,
        "riverqueue": lambda tx: riverqueue_client(engine, is_async=False).insert_tx(
            tx, RiverqueueArgs()
        ),
    }
    if driver == "psycopg2":
        kind.inserts["procrastinate"] = _procrastinate_psycopg2
    yield kind
    engine.dispose()


@contextmanager
def django_kind(url: str) -> Generator[SyncKind]:
    """Django's default connection, in `atomic`."""
    import django
    from django.conf import settings
    from psycopg.conninfo import conninfo_to_dict

    parts = conninfo_to_dict(url)
    keys = {
        "NAME": "dbname",
        "USER": "user",
        "PASSWORD": "password",
        "HOST": "host",
        "PORT": "port",
    }
    database = {key: parts[name] for key, name in keys.items() if name in parts}
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **database}},
        INSTALLED_APPS=["procrastinate.contrib.django"] if _has("procrastinate") else [],
        USE_TZ=True,
    )
    django.setup()
    from django.db import connection, transaction

    @contextmanager
    def begin() -> Generator[Any]:
        with transaction.atomic(), connection.cursor() as cursor:
            yield cursor

    kind = SyncKind()
    kind.transaction = begin
    kind.order = lambda cursor: cursor.execute(as_psycopg("order"), ORDER_VALUES)
    kind.inserts = {
        "row": lambda cursor: cursor.execute(as_psycopg("row"), VALUES),
        "row_notify": lambda cursor: cursor.execute(as_psycopg("row_notify"), VALUES),
        "riverpy": lambda _cursor: _riverpy("default"),
        "procrastinate": lambda _cursor: _procrastinate_django(),
    }
    yield kind
    connection.close()


SYNC_KINDS: dict[str, Callable[[str], AbstractContextManager[SyncKind]]] = {
    "psycopg": psycopg_kind,
    "sqlalchemy_psycopg": lambda url: sqlalchemy_kind(url, "psycopg"),
    "sqlalchemy_psycopg2": lambda url: sqlalchemy_kind(url, "psycopg2"),
    "django": django_kind,
}


def _has(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


@cache
def _client() -> Any:
    from riverpy import sync

    return sync.Client()


def _riverpy(tx: Any) -> None:
    _client().insert(Noop(), tx=tx)


def _pgqueuer(tx: Any) -> None:
    from pgqueuer.db import SyncPsycopgDriver
    from pgqueuer.queries import SyncQueries

    SyncQueries(SyncPsycopgDriver(tx)).enqueue("noop", b"{}")


def _procrastinate(tx: Any) -> None:
    from scripts._bench.tx_insert.peer_apps import procrastinate_task

    procrastinate_task(is_sync=True).configure(connection=tx).defer()


@cache
def _psycopg2_task() -> Any:
    from procrastinate import App
    from procrastinate.contrib.sqlalchemy import SQLAlchemyPsycopg2Connector

    @App(connector=SQLAlchemyPsycopg2Connector()).task(name="noop")
    def noop() -> None: ...

    return noop


def _procrastinate_psycopg2(tx: Any) -> None:
    _psycopg2_task().configure(connection=tx.connection()).defer()


@cache
def _django_task() -> Any:
    from procrastinate.contrib.django import app

    @app.task(name="noop")
    def noop() -> None: ...

    return noop


def _procrastinate_django() -> None:
    _django_task().defer()


def _chancy(tx: Any) -> None:
    from psycopg.rows import dict_row

    from scripts._bench.tx_insert.peer_apps import chancy_app

    chancy, job = chancy_app()
    with tx.cursor(row_factory=dict_row) as cursor:
        chancy.sync_push_many_ex(cursor, [job.job])
