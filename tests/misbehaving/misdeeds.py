"""What a job must not do to the process that works it: run by `riverpy worker` as `jobs.py`."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import locale
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import asyncpg
import msgspec

import riverpy

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

workers = riverpy.Workers()
left: list[object] = []
"""What jobs leave behind."""
deeds: dict[str, Callable[[riverpy.Job[Misdeed]], Awaitable[Any]]] = {}


class Misdeed(msgspec.Struct, frozen=True):
    """One that is named."""

    kind: ClassVar[str] = "misdeed"
    name: str


class Good(msgspec.Struct, frozen=True):
    """A job as it should be."""

    kind: ClassVar[str] = "good"
    name: str = ""


class GoodThread(Good, frozen=True):
    """One in a thread."""

    kind: ClassVar[str] = "good_thread"


class GoodProcess(Good, frozen=True):
    """One in a process."""

    kind: ClassVar[str] = "good_process"


@workers.job(timeout=timedelta(minutes=1))
async def misdeed(job: riverpy.Job[Misdeed]) -> None:
    await deeds[job.args.name](job)


@workers.job
async def good(job: riverpy.Job[Good]) -> None:
    await asyncio.sleep(0)


@workers.blocking_job()
def good_thread(job: riverpy.Job[GoodThread]) -> None:
    threading.current_thread().name = "good"


@workers.blocking_job(executor="process")
def good_process(job: riverpy.Job[GoodProcess]) -> None:
    job.record_output("apart")


def deed(
    name: str,
) -> Callable[
    [Callable[[riverpy.Job[Misdeed]], Awaitable[Any]]],
    Callable[[riverpy.Job[Misdeed]], Awaitable[Any]],
]:
    """Name one."""

    def register(
        function: Callable[[riverpy.Job[Misdeed]], Awaitable[Any]],
    ) -> Callable[[riverpy.Job[Misdeed]], Awaitable[Any]]:
        deeds[name] = function
        return function

    return register


class Mine(BaseException):
    """No Exception."""


def raises(error: BaseException) -> Callable[[riverpy.Job[Misdeed]], Awaitable[Any]]:
    """A job that raises it."""

    async def work(job: riverpy.Job[Misdeed]) -> None:
        raise error

    return work


for _error in (SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Mine("mine")):
    deeds[f"raise {type(_error).__name__}"] = raises(_error)


@deed("exit in a callback")
async def exit_in_a_callback(job: riverpy.Job[Misdeed]) -> None:
    asyncio.get_running_loop().call_soon(sys.exit, 3)
    await asyncio.sleep(0.01)


@deed("recurse")
async def recurse(job: riverpy.Job[Misdeed]) -> None:
    await recurse(job)


def nested() -> list[Any]:
    """Deeper than C code may go."""
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@deed("recurse in C")
async def recurse_in_c(job: riverpy.Job[Misdeed]) -> None:
    value = nested()
    errors = []
    for function in (repr, json.dumps, pickle.dumps):
        try:
            function(value)
        except RecursionError as error:
            errors.append(error)
    raise ExceptionGroup("recursions", errors)


class Endless(Exception):
    """Has no end."""

    def __str__(self) -> str:
        return str(self)


@deed("recurse in an error's text")
async def recurse_in_text(job: riverpy.Job[Misdeed]) -> None:
    raise Endless


class Dying:
    """Raises when it dies."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __del__(self) -> None:
        raise self.error


@deed("raise in __del__")
async def raise_in_del(job: riverpy.Job[Misdeed]) -> None:
    for error in (ValueError("from __del__"), SystemExit(3), KeyboardInterrupt()):
        Dying(error)
        cycle: list[object] = [Dying(error)]
        cycle.append(cycle)
    gc.collect()


@deed("leak tasks")
async def leak_tasks(job: riverpy.Job[Misdeed]) -> None:
    left.extend(asyncio.create_task(asyncio.sleep(3600)) for _ in range(1000))
    asyncio.get_running_loop().call_later(3600, print)


@deed("leak threads")
async def leak_threads(job: riverpy.Job[Misdeed]) -> None:
    for _ in range(20):
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()


@deed("leak a generator")
async def leak_a_generator(job: riverpy.Job[Misdeed]) -> None:
    async def generate() -> AsyncGenerator[int]:
        try:
            yield 1
            yield 2
        finally:
            raise OSError("at the end of the generator")

    await anext(generate())


@deed("fill the default executor")
async def fill_the_default_executor(job: riverpy.Job[Misdeed]) -> None:
    loop = asyncio.get_running_loop()
    left.extend(loop.run_in_executor(None, time.sleep, 3600) for _ in range(100))


@deed("log")
async def log(job: riverpy.Job[Misdeed]) -> None:
    for _ in range(100):
        logging.getLogger("mine").error("x" * 10_000)


@deed("record a huge output")
async def record_a_huge_output(job: riverpy.Job[Misdeed]) -> None:
    job.record_output("x" * 100_000_000)


@deed("return something huge")
async def return_something_huge(job: riverpy.Job[Misdeed]) -> bytes:
    return bytes(50_000_000)


@deed("cancel itself")
async def cancel_itself(job: riverpy.Job[Misdeed]) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


@deed("close the loop")
async def close_the_loop(job: riverpy.Job[Misdeed]) -> None:
    asyncio.get_running_loop().close()


@deed("terminate connections")
async def terminate_connections(job: riverpy.Job[Misdeed]) -> None:
    for value in gc.get_objects():
        if type(value) is asyncpg.Connection:
            value.terminate()


@deed("change the process")
async def change_the_process(job: riverpy.Job[Misdeed]) -> None:
    socket.setdefaulttimeout(0.001)
    locale.setlocale(locale.LC_ALL, "C")
    os.environ["TZ"] = "Asia/Kathmandu"
    time.tzset()
    time.time = functools.partial(float, 0)
    os.chdir("/")
    os.umask(0o777)
    warnings.simplefilter("error")
    sys.setrecursionlimit(200)
    gc.disable()
    logging.disable()


@deed("change the loop")
async def change_the_loop(job: riverpy.Job[Misdeed]) -> None:
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    loop.set_exception_handler(lambda *_: sys.exit(3))
    loop.call_soon(int, "no number")
    asyncio.set_event_loop(None)


@deed("take the streams and signals")
async def take_the_streams(job: riverpy.Job[Misdeed]) -> None:
    sys.stdout = sys.stderr = None  # type: ignore[assignment]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)


client = riverpy.Client(
    workers=workers,
    queues={"default": riverpy.QueueConfig(max_workers=5)},
    config=riverpy.Config(
        dead_after=timedelta(seconds=6),
        leader_ttl=timedelta(minutes=2),  # a busy machine is no loss of the lease
        fetch_poll_interval=timedelta(milliseconds=20),
    ),
)
