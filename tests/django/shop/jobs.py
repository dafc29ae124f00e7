"""The jobs of the app."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from django.db import connection

import riverpy
from tests.django.shop.models import Order

workers = riverpy.Workers()


class Pack(msgspec.Struct):
    """The args of a job for an order."""

    kind: ClassVar[str] = "pack"
    number: int


class PackInProcess(Pack):
    """The args of a job that runs in a process."""

    kind: ClassVar[str] = "pack_in_process"


class PackAsync(Pack):
    """The args of a job that is async."""

    kind: ClassVar[str] = "pack_async"


@workers.blocking_job
def pack(job: riverpy.Job[Pack]) -> None:
    """Record the order, and the server's process of the connection."""
    _record(job)


@workers.blocking_job(executor="process")
def pack_in_process(job: riverpy.Job[PackInProcess]) -> None:
    """Do the same in a process."""
    _record(job)


@workers.job
async def pack_async(job: riverpy.Job[PackAsync]) -> None:
    """Do the same in async code."""
    count = await Order.objects.filter(number=job.args.number).acount()
    job.record_output({"orders": count})


def _record(job: riverpy.Job[Pack]) -> None:
    count = Order.objects.filter(number=job.args.number).count()
    with connection.cursor() as cursor:
        cursor.execute("select pg_backend_pid()")
        (pid,) = cursor.fetchone()
    job.record_output({"orders": count, "pid": pid})
