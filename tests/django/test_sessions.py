"""Django's connections as the caller's transaction."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import unittest
from datetime import timedelta
from typing import Any, ClassVar

import msgspec
import pytest
from django.db import connection, connections, transaction
from django.test import TestCase

import riverpy.django
import riverpy.sync
from riverpy import TransactionError, WaitTimeoutError, _plugins
from riverpy._work import blocking
from riverpy.django.connections import ConnectionCloser
from riverpy.testing import TestWorker, drain, require_many_inserted
from tests.django import contract
from tests.django.shop.jobs import Pack
from tests.django.shop.models import Order

PSYCOPG2 = """
import sys
sys.modules["psycopg"] = None
from tests.django import project
project.set_up(sys.argv[1])
from django.db.backends.postgresql import psycopg_any
from tests.django import contract
assert not psycopg_any.is_psycopg3
contract.check_all("default")
"""


class Follow(msgspec.Struct, frozen=True):
    """The args of a job that another job inserts."""

    kind: ClassVar[str] = "follow"


@pytest.mark.parametrize("alias", ["default", "bound"])
def test_contract(alias: str) -> None:
    """The job is there exactly if the data is: with parameters that psycopg binds, and in
    serializable transactions with parameters that the server binds."""
    contract.check_all(alias)


def test_connections() -> None:
    """`tx` takes the connection of the thread and its proxy. `riverpy.django.insert` uses it."""
    with transaction.atomic():
        client = riverpy.sync.Client()
        client.insert(Pack(1), tx=transaction.get_connection())
        client.insert(Pack(2), tx=connection)
        riverpy.django.insert(Pack(3))
        riverpy.django.client("other").insert(Pack(4))
        assert contract.read_stored() == ([], [4])
    assert contract.read_stored() == ([], [1, 2, 3, 4])
    for tx, match in (
        ("missing", "no alias of DATABASES"),
        (connections.create_connection("default"), "not the one of this thread"),
    ):
        with pytest.raises(TransactionError, match=match):
            client.insert(Pack(5), tx=tx)


def test_waits() -> None:
    """A wait outside of `atomic()` polls in transactions of its own. Inside, and where an event
    loop runs, it is refused before anything is inserted."""
    client = riverpy.django.client()

    async def show() -> None:
        client.insert_and_wait(Pack(8))

    with pytest.raises(TransactionError, match=r"await sync_to_async\(client\.insert_and_wait\)"):
        asyncio.run(show())
    job_id = riverpy.django.insert(Pack(6)).job.id
    with transaction.atomic():
        for wait in (lambda: client.wait(job_id), lambda: client.insert_and_wait(Pack(7))):
            with pytest.raises(TransactionError, match=r"wait inside.*non_atomic_requests"):
                wait()
    with pytest.raises(WaitTimeoutError, match=rf"job {job_id} \(available\)"):
        client.wait(job_id, timeout=timedelta(milliseconds=30))
    client.job_cancel(job_id)
    assert client.wait(job_id).state == "cancelled"
    client.job_delete(job_id)


def test_psycopg2(project_url: str) -> None:
    """The contract holds with psycopg2 too."""
    subprocess.run([sys.executable, "-c", PSYCOPG2, project_url], check=True, timeout=60)


def test_wrappers_and_autocommit() -> None:
    """Wrappers of `execute` see the statements. Without AUTOCOMMIT the caller commits."""
    seen: list[str] = []

    def record(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        seen.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(record):
        riverpy.django.insert(Pack(1))
    assert len(seen) == 1
    assert "river_job" in seen[0]
    transaction.set_autocommit(False)
    riverpy.django.insert(Pack(2))
    transaction.rollback()
    riverpy.django.insert(Pack(3))
    transaction.commit()
    transaction.set_autocommit(True)
    assert contract.read_stored() == ([], [1, 3])


def test_async_code() -> None:
    """In an event loop Django's connections are refused, and `ainsert` inserts."""

    async def run() -> None:
        with pytest.raises(TransactionError, match="ainsert"):
            riverpy.django.insert(Pack(1))
        await riverpy.django.ainsert(Pack(2))

    asyncio.run(run())
    assert contract.read_stored() == ([], [2])


def test_django_test_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a TestCase of Django's, each test is rolled back with its jobs. A job of each kind is
    worked in its transaction, also with the async ORM. The plugin that closes connections leaves it
    open."""
    monkeypatch.setattr(_plugins, "process_wide_plugins", [ConnectionCloser()])
    monkeypatch.setattr(blocking, "process_wide_plugins", _plugins.process_wide_plugins)
    workers = riverpy.Workers()

    @workers.blocking_job(kind="pack")
    def pack(job: riverpy.Job[Pack]) -> int:
        with transaction.atomic():
            Order.objects.create(number=job.args.number)
        riverpy.django.insert(Follow())
        if job.args.number == 2:
            raise ValueError
        return Order.objects.count()

    @workers.job
    async def follow(_job: riverpy.Job[Follow]) -> int:
        await Order.objects.acreate(number=9)
        return await Order.objects.acount()

    class InsertTest(TestCase):
        def test_work(self) -> None:
            worker = TestWorker(workers)
            assert worker.work(Pack(1), tx="default").output == 1
            assert worker.work(Pack(2), tx="default").event.kind == "job_failed"
            client = riverpy.Client(workers=workers)
            outputs = [result.output for result in drain(client, tx="default")]
            assert outputs == [3, 4]
            assert Order.objects.count() == 4

        def test_insert(self) -> None:
            riverpy.django.insert(Pack(1))
            with transaction.atomic():
                riverpy.django.insert(Pack(2))
            require_many_inserted([Pack(1), Pack(2)], tx="default")

    names = ("test_insert", "test_work")
    result = unittest.TestSuite(map(InsertTest, names)).run(unittest.TestResult())
    assert result.wasSuccessful(), result.errors
    assert contract.read_stored() == ([], [])
