"""Jobs that harm the process in which they run. `riverpy worker` runs a copy."""

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
leaked: list[object] = []
"""Objects that jobs leave behind."""
functions: dict[str, Callable[[riverpy.Job[Harmful]], Awaitable[Any]]] = {}


class Harmful(msgspec.Struct, frozen=True):
    """Args of a job that runs the function with this name."""

    kind: ClassVar[str] = "harmful"
    name: str


class Good(msgspec.Struct, frozen=True):
    """Args of a job without faults."""

    kind: ClassVar[str] = "good"
    name: str = ""


class GoodThread(Good, frozen=True):
    """The same in a thread."""

    kind: ClassVar[str] = "good_thread"


class GoodProcess(Good, frozen=True):
    """The same in a process."""

    kind: ClassVar[str] = "good_process"


@workers.job(timeout=timedelta(minutes=1))
async def harmful(job: riverpy.Job[Harmful]) -> None:
    await functions[job.args.name](job)


@workers.job
async def good(job: riverpy.Job[Good]) -> None:
    await asyncio.sleep(0)


@workers.blocking_job()
def good_thread(job: riverpy.Job[GoodThread]) -> None:
    threading.current_thread().name = "good"


@workers.blocking_job(executor="process")
def good_process(job: riverpy.Job[GoodProcess]) -> None:
    job.record_output("apart")


def harms_by(
    name: str,
) -> Callable[
    [Callable[[riverpy.Job[Harmful]], Awaitable[Any]]],
    Callable[[riverpy.Job[Harmful]], Awaitable[Any]],
]:
    """Register a function by its name."""

    def register(
        function: Callable[[riverpy.Job[Harmful]], Awaitable[Any]],
    ) -> Callable[[riverpy.Job[Harmful]], Awaitable[Any]]:
        functions[name] = function
        return function

    return register


class OwnError(BaseException):
    """An exception that is no Exception."""


def raises(error: BaseException) -> Callable[[riverpy.Job[Harmful]], Awaitable[Any]]:
    """Return a job function that raises this."""

    async def work(job: riverpy.Job[Harmful]) -> None:
        raise error

    return work


for _error in (SystemExit(3), KeyboardInterrupt(), GeneratorExit(), OwnError("own")):
    functions[f"raise {type(_error).__name__}"] = raises(_error)


@harms_by("exit in a callback")
async def exit_in_a_callback(job: riverpy.Job[Harmful]) -> None:
    asyncio.get_running_loop().call_soon(sys.exit, 3)
    await asyncio.sleep(0.01)


@harms_by("recurse")
async def recurse(job: riverpy.Job[Harmful]) -> None:
    await recurse(job)


def nested() -> list[Any]:
    """Return a value that is nested too deeply for C code."""
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@harms_by("recurse in C")
async def recurse_in_c(job: riverpy.Job[Harmful]) -> None:
    value = nested()
    errors = []
    for function in (repr, json.dumps, pickle.dumps):
        try:
            function(value)
        except RecursionError as error:
            errors.append(error)
    raise ExceptionGroup("recursions", errors)


class Endless(Exception):
    """An error whose text cannot be made."""

    def __str__(self) -> str:
        return str(self)


@harms_by("recurse in an error's text")
async def recurse_in_text(job: riverpy.Job[Harmful]) -> None:
    raise Endless


class RaisesInFinalizer:
    """An object that raises in its finalizer."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __del__(self) -> None:
        raise self.error


@harms_by("raise in __del__")
async def raise_in_del(job: riverpy.Job[Harmful]) -> None:
    for error in (ValueError("from __del__"), SystemExit(3), KeyboardInterrupt()):
        RaisesInFinalizer(error)
        cycle: list[object] = [RaisesInFinalizer(error)]
        cycle.append(cycle)
    gc.collect()


@harms_by("leak tasks")
async def leak_tasks(job: riverpy.Job[Harmful]) -> None:
    leaked.extend(asyncio.create_task(asyncio.sleep(3600)) for _ in range(1000))
    asyncio.get_running_loop().call_later(3600, print)


@harms_by("leak threads")
async def leak_threads(job: riverpy.Job[Harmful]) -> None:
    for _ in range(20):
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()


@harms_by("leak a generator")
async def leak_a_generator(job: riverpy.Job[Harmful]) -> None:
    async def generate() -> AsyncGenerator[int]:
        try:
            yield 1
            yield 2
        finally:
            raise OSError("at the end of the generator")

    await anext(generate())


@harms_by("fill the default executor")
async def fill_the_default_executor(job: riverpy.Job[Harmful]) -> None:
    loop = asyncio.get_running_loop()
    leaked.extend(loop.run_in_executor(None, time.sleep, 3600) for _ in range(100))


@harms_by("log")
async def log(job: riverpy.Job[Harmful]) -> None:
    for _ in range(100):
        logging.getLogger("mine").error("x" * 10_000)


@harms_by("record a huge output")
async def record_a_huge_output(job: riverpy.Job[Harmful]) -> None:
    job.record_output("x" * 100_000_000)


@harms_by("return something huge")
async def return_something_huge(job: riverpy.Job[Harmful]) -> bytes:
    return bytes(50_000_000)


@harms_by("cancel itself")
async def cancel_itself(job: riverpy.Job[Harmful]) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


@harms_by("close the loop")
async def close_the_loop(job: riverpy.Job[Harmful]) -> None:
    asyncio.get_running_loop().close()


@harms_by("terminate connections")
async def terminate_connections(job: riverpy.Job[Harmful]) -> None:
    for value in gc.get_objects():
        if type(value) is asyncpg.Connection:
            value.terminate()


@harms_by("change the process")
async def change_the_process(job: riverpy.Job[Harmful]) -> None:
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


@harms_by("change the loop")
async def change_the_loop(job: riverpy.Job[Harmful]) -> None:
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    loop.set_exception_handler(lambda *_: sys.exit(3))
    loop.call_soon(int, "no number")
    asyncio.set_event_loop(None)


@harms_by("take the streams and signals")
async def take_the_streams(job: riverpy.Job[Harmful]) -> None:
    sys.stdout = sys.stderr = None  # type: ignore[assignment]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)


client = riverpy.Client(
    workers=workers,
    queues={"default": riverpy.QueueConfig(max_workers=5)},
    config=riverpy.Config(
        dead_after=timedelta(seconds=6),
        leader_ttl=timedelta(minutes=2),  # a busy machine does not lose the lease
        fetch_poll_interval=timedelta(milliseconds=20),
    ),
)
