"""What holds for Django's connections as `tx`, with psycopg 3 and psycopg2."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from django.db import DatabaseError, connections, transaction

import riverpy
import riverpy.sync
from riverpy import InsertManyParams, InsertOpts, TransactionError, UniqueOpts
from tests.django.shop.jobs import Pack
from tests.django.shop.models import Order

TEXT = "a\\b\"c'%s %(p1)s $1 \n é 😀"


class ExpectedError(Exception):
    """What a block of a test raises."""


def write_with_job(client: Any, tx: Any, alias: str, number: int) -> None:
    """Write data, and insert a job."""
    client.insert(Pack(number), tx=tx)
    Order.objects.using(alias).create(number=number)


def read_stored() -> tuple[list[int], list[int]]:
    """Return the committed data, and the jobs, over another connection."""
    with connections["other"].cursor() as cursor:
        cursor.execute("select number from shop_order order by id")
        data = [row[0] for row in cursor.fetchall()]
        cursor.execute("select (args->>'number')::int from river_job order by id")
        return data, [row[0] for row in cursor.fetchall()]


def check_transactions(alias: str) -> None:
    """The job is there exactly if the data is: after a commit, a rollback, and a savepoint that is
    kept or rolled back. Without `atomic` the call commits."""
    client = riverpy.sync.Client()
    with suppress(ExpectedError), transaction.atomic(using=alias):
        write_with_job(client, alias, alias, 1)
        raise ExpectedError
    assert read_stored() == ([], [])
    with transaction.atomic(using=alias):
        write_with_job(client, alias, alias, 2)
        with suppress(ExpectedError), transaction.atomic(using=alias):
            write_with_job(client, alias, alias, 3)
            raise ExpectedError
        with transaction.atomic(using=alias):
            write_with_job(client, alias, alias, 4)
        assert read_stored() == ([], [])
    assert read_stored() == ([2, 4], [2, 4])
    client.insert(Pack(5), tx=alias)
    assert (
        client.insert_many_fast([InsertManyParams(Pack(6)), InsertManyParams(Pack(7))], tx=alias)
        == 2
    )
    assert read_stored() == ([2, 4], [2, 4, 5, 6, 7])


def check_values(alias: str) -> None:
    """Texts cross unchanged, duplicates are found, and a conflict of COPY leaves the transaction
    usable."""
    client = riverpy.sync.Client()
    unique = InsertOpts(unique_opts=UniqueOpts(by_args=True), metadata={"text": TEXT})
    with transaction.atomic(using=alias):
        first, second = (client.insert(Pack(1), unique, tx=alias) for _ in range(2))
        assert first.job.metadata["text"] == TEXT
        assert (second.job.id, second.unique_skipped_as_duplicate) == (first.job.id, True)
        assert second.job.created_at == first.job.created_at
        with pytest.raises(riverpy.UniqueConflictError):
            client.insert_many_fast([InsertManyParams(Pack(1), unique)], tx=alias)
        assert client.insert_many_fast([InsertManyParams(Pack(2), unique)], tx=alias) == 1
    assert read_stored() == ([], [1, 2])


def check_unusable(alias: str) -> None:
    """An aborted transaction and a lost connection raise TransactionError. An insert that fails
    marks the transaction, so that Django does not end it as if it had been committed."""
    client, connection = riverpy.sync.Client(), connections[alias]
    for abort in (_abort_by_error, transaction.set_rollback):
        with suppress(ExpectedError), transaction.atomic(using=alias):
            abort(True, using=alias)
            with pytest.raises(TransactionError, match="is aborted by an earlier error"):
                client.insert(Pack(1), tx=alias)
            raise ExpectedError
    missing = riverpy.sync.Client(config=riverpy.Config(schema="missing"))
    with transaction.atomic(using=alias):
        Order.objects.using(alias).create(number=1)
        with pytest.raises(riverpy.SchemaMissingError):
            missing.insert(Pack(1), tx=alias)
        with pytest.raises(transaction.TransactionManagementError):
            Order.objects.using(alias).create(number=2)
    assert read_stored() == ([], [])
    with suppress(DatabaseError), transaction.atomic(using=alias):
        _kill_connection(alias)
        with pytest.raises(TransactionError, match=r"closed|lost"):
            client.insert(Pack(1), tx=alias)
        with pytest.raises(TransactionError, match=r"closed|lost"):
            client.insert(Pack(1), tx=alias)
    connection.close()
    client.insert(Pack(2), tx=alias)
    assert read_stored() == ([], [2])


def _abort_by_error(_: bool, *, using: str) -> None:
    with connections[using].cursor() as cursor, suppress(DatabaseError):
        cursor.execute("select 1 / 0")


def _kill_connection(alias: str) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute("select pg_backend_pid()")
        (pid,) = cursor.fetchone()
    with connections["other"].cursor() as cursor:
        cursor.execute("select pg_terminate_backend(%s, 5000)", [pid])


def check_all(alias: str) -> None:
    """Check all in an empty database."""
    for check in (check_values, check_unusable, check_transactions):
        with connections["other"].cursor() as cursor:
            cursor.execute("truncate river_job, shop_order")
        check(alias)
