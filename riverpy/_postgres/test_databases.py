"""Statements for the test databases of a run: create, copy, empty, rename and drop them. A run is
one pytest command, which may have several processes.

An advisory lock exists in only one database of the server. So each process of a run acquires all
locks on one connection, to the database that the server's URL names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from riverpy._postgres.sql_files import get_query, load_statements, quote_identifier

if TYPE_CHECKING:
    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.sql_files import Query

_RUN_LOCK_NAMESPACE: Final = 0x72697672
_TEMPLATE_LOCK_NAMESPACE: Final = 0x72697674


def _get_statement(name: str) -> Query:
    return get_query("test_database", f"test_database_{name}", None)


async def lock_test_run(connection: Transaction, run: int) -> None:
    """Acquire the shared lock of a run. Each process of the run holds this lock while databases of
    the run exist. If another process is dropping the databases of the run, wait until it has
    released its lock."""
    await _get_statement("lock_test_run").execute(
        connection, namespace=_RUN_LOCK_NAMESPACE, run=run
    )


async def unlock_test_run(connection: Transaction, run: int) -> None:
    """Release the shared lock of a run."""
    await _get_statement("unlock_test_run").execute(
        connection, namespace=_RUN_LOCK_NAMESPACE, run=run
    )


async def try_lock_ended_test_run(connection: Transaction, run: int) -> bool:
    """Try to acquire the lock of a run exclusively. Return False if a process of the run still
    holds it."""
    return await _get_statement("try_lock_ended_test_run").fetchval(
        connection, namespace=_RUN_LOCK_NAMESPACE, run=run
    )


async def unlock_ended_test_run(connection: Transaction, run: int) -> None:
    """Release the lock that `try_lock_ended_test_run` acquired."""
    await _get_statement("unlock_ended_test_run").execute(
        connection, namespace=_RUN_LOCK_NAMESPACE, run=run
    )


async def lock_template(connection: Transaction, run: int) -> None:
    """Acquire the lock for creating the template database of a run. Wait while another process
    holds it."""
    await _get_statement("lock_template").execute(
        connection, namespace=_TEMPLATE_LOCK_NAMESPACE, run=run
    )


async def unlock_template(connection: Transaction, run: int) -> None:
    """Release the lock for creating the template database of a run."""
    await _get_statement("unlock_template").execute(
        connection, namespace=_TEMPLATE_LOCK_NAMESPACE, run=run
    )


async def disable_idle_session_timeout(connection: Transaction) -> None:
    """Prevent the server from ending this session when it is idle."""
    await _get_statement("stay_connected").execute(connection)


async def fetch_database_oid(connection: Transaction) -> int:
    """Return the oid of the database of this connection."""
    return await _get_statement("oid").fetchval(connection)


async def fetch_database_names(connection: Transaction, prefix: str) -> list[str]:
    """Return the names of the databases whose names start with `prefix`."""
    rows = await _get_statement("names").fetch(connection, prefix=prefix)
    return [row[0] for row in rows]


async def make_database(connection: Transaction, name: str) -> None:
    """Create an empty database."""
    await _execute_with_database_names(connection, "make", a_new_database=name)


async def copy_database(connection: Transaction, template: str, name: str) -> None:
    """Create a database as a copy of another one."""
    await _execute_with_database_names(
        connection, "copy", a_new_database=name, a_template_database=template
    )


async def refuse_connections(connection: Transaction, name: str) -> None:
    """Prevent new connections to a database, and end its sessions. Only a database without sessions
    can be copied."""
    await _execute_with_database_names(connection, "refuse_connections", a_template_database=name)
    await _get_statement("end_connections").execute(connection, name=name)


async def rename_database(connection: Transaction, name: str, new_name: str) -> None:
    """Rename a database that has no connections."""
    await _execute_with_database_names(
        connection, "rename", a_new_database=name, a_template_database=new_name
    )


async def drop_database(connection: Transaction, name: str) -> None:
    """End the sessions of a database and drop the database, if it exists."""
    await _execute_with_database_names(connection, "drop", a_new_database=name)


async def record_tables_to_keep(connection: Transaction) -> None:
    """Record in this session which tables have rows. `empty_tables` keeps these rows."""
    await _execute_with_database_names(connection, "find_kept_tables")


async def empty_tables(connection: Transaction) -> None:
    """Delete the rows of all tables, except those that `record_tables_to_keep` recorded in this
    session."""
    await _execute_with_database_names(connection, "empty_tables")


async def fetch_filled_tables(connection: Transaction) -> list[str]:
    """Return the tables that have rows, except those that `record_tables_to_keep` recorded in this
    session."""
    await _execute_with_database_names(connection, "find_filled_tables")
    return [row[0] for row in await _get_statement("filled_tables").fetch(connection)]


async def fetch_locking_transactions(connection: Transaction) -> list[Any]:
    """Return the transactions of other sessions that have written or hold locks, as rows with
    `pid`, `began_at` (a text), `application_name`, `state` and `query`."""
    return [*await _get_statement("locking_transactions").fetch(connection)]


async def fetch_blocking_sessions(connection: Transaction, pid: int) -> list[Any]:
    """Return the sessions that the session of `pid` waits for, as rows with `pid`,
    `application_name`, `state` and `query`."""
    return [*await _get_statement("blocking_sessions").fetch(connection, pid=pid)]


async def end_session(connection: Transaction, pid: int) -> None:
    """End a session of the server."""
    await _get_statement("end_session").execute(connection, pid=pid)


async def mark_test_transaction(connection: Transaction) -> None:
    """Mark the transaction of a test, so that `fetch_transaction_state` recognizes it. Limit its
    waits for locks to 10 seconds."""
    await _get_statement("mark_test_transaction").execute(connection)


class TransactionState(NamedTuple):
    """The state of the transaction of a test."""

    is_marked: bool
    """Whether `mark_test_transaction` was called in this transaction."""
    has_changed_tables: bool
    """Whether the transaction has changed a table with a statement that takes an ACCESS EXCLUSIVE
    lock, such as ALTER TABLE or TRUNCATE."""


async def fetch_transaction_state(connection: Transaction) -> TransactionState:
    """Return the state of the open transaction."""
    (row,) = await _get_statement("transaction_state").fetch(connection)
    return TransactionState(row["is_marked"], row["has_changed_tables"])


async def reset_session(connection: Transaction) -> None:
    """Reset the settings, locks, cursors, channels and temporary tables of an idle session."""
    await _execute_with_database_names(connection, "reset_session")


async def _execute_with_database_names(
    connection: Transaction, block: str, **databases: str
) -> None:
    """Run a block after replacing its placeholders with the names of databases. `databases` maps
    placeholders to names. (CREATE DATABASE and similar statements take no parameters.)"""
    text = load_statements("test_database")[f"test_database_{block}"]
    for placeholder, name in databases.items():
        text = text.replace(placeholder, quote_identifier(name))
    await connection.execute(text)
