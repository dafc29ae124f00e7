"""Blocking jobs in threads and in processes."""

from __future__ import annotations

import asyncio
import ctypes
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import anyio
import msgspec
import psutil
import pytest

import riverpy
from riverpy import EventKind, Job, JobCancel, JobSnooze, Workers
from riverpy._log_events import JOB_WROTE_OUTPUT
from riverpy._postgres.jobs import ClaimKey
from riverpy._work import child_pool, child_process, child_start
from riverpy._work.child_process import ChildProcess
from tests.work.rig import PATIENCE, Task, errors_of, metadata_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy.middleware import WorkInner
    from tests.work.rig import Rig


class Apart(msgspec.Struct):
    """Args of a job in a process of its own."""

    kind: ClassVar[str] = "apart"
    do: str
    path: str = ""


class Odd(Exception):
    """An exception that can be pickled but not unpickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def work_apart(job: Job[Apart]) -> None:
    """The function of the jobs in a process of their own."""
    if job.args.do == "ignore":
        assert not job.cancelled.is_set()
    if job.args.do == "program":
        program = subprocess.Popen(["sleep", "3600"])
        Path(f"{job.args.path}.program").write_text(str(program.pid))
    if job.args.path:
        Path(f"{job.args.path}.new").write_text(str(os.getpid()))
        Path(f"{job.args.path}.new").rename(job.args.path)
    match job.args.do:
        case "return":
            job.record_output({"pid": os.getpid(), "attempt": job.attempt, "id": job.id})
            job.set_metadata("k", "v")
        case "print":
            print("from Python")
            os.write(1, b"from C\n")
            subprocess.run(["echo", "from a program"], check=True)
            print("an error", file=sys.stderr)
            ctypes.CDLL(None).printf(b"C line\n")
            sys.stdout.write("no newline")
        case "fail":
            job.set_metadata("k", "before")
            raise ValueError("apart")
        case "odd":
            raise Odd("a", "b")
        case "snooze":
            raise JobSnooze(timedelta(hours=1))
        case "cancel":
            raise JobCancel("apart")
        case "exit":
            job.set_metadata("k", "kept")
            os._exit(3)
        case "crash":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "close":
            sys.stdout.close()
            os.close(1)
        case "fork":
            if os.fork() == 0:
                job.set_metadata("k", "of the fork")
                return
            os.wait()
        case "step":
            job.step("one", print)
        case "current":
            assert riverpy.current_job() is job
            job.record_output([error_of(lambda: job.log), error_of(riverpy.current_client)])
        case _:
            time.sleep(3600)


def error_of(call: Callable[[], object]) -> str:
    """Return the text of the error that the call raises."""
    try:
        call()
    except riverpy.ClientStateError as error:
        return str(error)
    return ""


class Watch(msgspec.Struct):
    """Args of a job that ends itself when it is cancelled."""

    kind: ClassVar[str] = "watch"
    directory: str


def watch(job: Job[Watch]) -> None:
    """Wait for the cancellation, and record that it was seen."""
    directory, cancelled = Path(job.args.directory), job.cancelled
    assert not cancelled.is_set()
    assert not cancelled.wait(0)
    (directory / "started").touch()
    assert cancelled.wait(60)
    assert job.cancelled.is_set()
    (directory / "seen").touch()
    raise asyncio.CancelledError


def register_apart(rig: Rig, timeout: timedelta) -> None:
    """Register the functions above."""
    later = timedelta(hours=1)
    rig.workers.blocking_job(executor="process", timeout=timeout, next_retry=lambda job: later)(
        work_apart
    )


async def test_thread(rig: Rig) -> None:
    """Blocking jobs run in threads, several at a time. What they record, return and raise counts as
    for any other job."""
    both = threading.Barrier(2, timeout=20)
    context: ContextVar[int] = ContextVar("context", default=0)

    @rig.job(executor="thread")
    def work(job: Job[Task]) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert riverpy.current_job() is job
        assert context.get() == 0
        context.set(job.id)
        match job.args.n:
            case 0 | 1:
                both.wait()
                job.record_output(job.args.n)
            case 2:
                raise ValueError("in a thread")
            case 3:
                raise JobSnooze(timedelta(hours=1))
            case 4:
                raise SystemExit(3)

    async with rig.working(slots=2) as client:
        rows = await rig.work(client, *(Task(n=n) for n in range(5)))
    assert [row["state"] for row in rows] == [
        "completed",
        "completed",
        "available",
        "scheduled",
        "available",
    ]
    assert [metadata_of(row).get("output") for row in rows[:2]] == [0, 1]
    trace = errors_of(rows[2])[0]["trace"]
    assert "in work" in trace
    assert "riverpy/_work" not in trace
    assert errors_of(rows[4])[0]["error"] == "SystemExit: 3"


async def test_thread_raises_stop_iteration(rig: Rig) -> None:
    """A StopIteration, which a future cannot hold, is a failure like any other."""

    @rig.job(executor="thread")
    def work(job: Job[Task]) -> None:
        next(iter(()))

    row = await rig.run_one()
    assert row["state"] == "available"
    (entry,) = errors_of(row)
    assert "StopIteration" in entry["error"]
    assert "in work" in entry["trace"]


async def test_thread_past_its_timeout(rig: Rig) -> None:
    """A thread cannot be stopped: after its timeout it keeps running and keeps its slot, and what
    it returns counts."""
    started, release = threading.Event(), threading.Event()

    @rig.job(executor="thread", timeout=timedelta(milliseconds=20))
    def work(job: Job[Task]) -> None:
        started.set()
        if job.args.n == 0:
            assert release.wait(20)

    async with rig.working(slots=1) as client:
        first = await client.insert(Task(n=0))
        await client.insert(Task(n=1))
        run = client._run
        assert run is not None
        async with asyncio.timeout(PATIENCE):
            while not any(attempt.stop_cause for attempt in run.running_attempts):
                await asyncio.sleep(0.001)
        assert await rig.states() == {"running": 1, "available": 1}
        release.set()
        events = await rig.take(2)
    assert [event.kind for event in events] == [EventKind.JOB_COMPLETED] * 2
    assert (await rig.row(first.job.id))["attempt"] == 1


async def test_thread_in_a_scope_that_is_cancelled(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled scope of a middleware does not wake the loop at each turn while a thread
    works."""
    started, release = threading.Event(), threading.Event()
    scopes: list[anyio.CancelScope] = []
    waits, wait = 0, asyncio.wait

    @rig.job(executor="thread")
    def work(job: Job[Task]) -> None:
        started.set()
        assert release.wait(20)

    async def limit(job: Job[Any], do_inner: WorkInner) -> None:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            await do_inner()

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal waits
        waits += 1
        return wait(*args, **kwargs)

    async with rig.working(middleware=[riverpy.WorkerMiddlewareFunc(limit)]) as client:
        await client.insert(Task())
        async with asyncio.timeout(PATIENCE):
            while not started.is_set():
                await asyncio.sleep(0.001)
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "wait", counted)
            scopes[0].cancel()
            for _ in range(100):
                await asyncio.sleep(0)
        release.set()
        assert (await rig.event()).kind is EventKind.JOB_COMPLETED
    assert waits < 10


async def test_interrupted_thread_that_fails(rig: Rig) -> None:
    """A thread that raises after a stop has failed, since its code did not see the stop."""
    started, release = threading.Event(), threading.Event()

    @rig.job(executor="thread")
    def work(job: Job[Task]) -> None:
        started.set()
        release.wait(20)
        raise ValueError("its own")

    async with rig.working(soft_stop_timeout=timedelta(0)) as client:
        inserted = await client.insert(Task())
        await asyncio.get_running_loop().run_in_executor(None, started.wait)
        client.stop()
        asyncio.get_running_loop().call_later(0.05, release.set)
    row = await rig.row(inserted.job.id)
    assert (row["state"], row["attempt"]) == ("available", 1)
    assert errors_of(row)[0]["error"] == "ValueError: its own"


async def test_process(rig: Rig, monkeypatch: pytest.MonkeyPatch, log: list[Any]) -> None:
    """What a job in a process records, returns and raises arrives, and a process that dies is a
    failed attempt. This also works in a daemonic process, in which multiprocessing allows no
    children. What the job and its programs write is logged with the job (FR-01)."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    register_apart(rig, timedelta(seconds=60))
    async with rig.working(slots=2) as client:
        rows = await rig.work(
            client,
            *(Apart(do) for do in ("return", "fail", "snooze", "cancel", "exit", "odd", "print")),
        )
        await wait_until(lambda: "no newline" in [line for line, _ in lines_of(log)])
    assert [row["state"] for row in rows] == [
        "completed",
        "retryable",
        "scheduled",
        "cancelled",
        "retryable",
        "retryable",
        "completed",
    ]
    assert metadata_of(rows[4])["k"] == "kept"
    output = metadata_of(rows[0])["output"]
    assert output["pid"] != os.getpid()
    assert (output["attempt"], output["id"]) == (1, rows[0]["id"])
    assert metadata_of(rows[0])["k"] == "v"
    (entry,) = errors_of(rows[1])
    assert entry["error"] == "ValueError: apart"
    assert "in work_apart" in entry["trace"]
    assert metadata_of(rows[1])["k"] == "before"
    assert errors_of(rows[5])[0]["error"] == "RuntimeError: Odd: a and b"
    assert errors_of(rows[3])[0]["error"] == "JobCancelError: apart"
    assert "exited with code 3" in errors_of(rows[4])[0]["error"]
    assert lines_of(log) == [
        (line, rows[6]["id"])
        for line in ("from Python", "from C", "from a program", "an error", "C line", "no newline")
    ]


@pytest.mark.timeout(120)
async def test_process_that_its_job_damages(rig: Rig, log: list[Any]) -> None:
    """A job that crashes, kills its process, forks or closes its output fails alone or not at all,
    and the next job works in the same way. A crash in C code leaves its place in the log."""
    register_apart(rig, timedelta(seconds=60))
    async with rig.working(slots=1) as client:
        names = ("close", "print", "fork", "current", "step", "crash", "kill")
        rows = await rig.work(client, *(Apart(name) for name in names))
        await wait_until(lambda: any("in work_apart" in line for line, _ in lines_of(log)))
    by_name = dict(zip(names, rows, strict=True))
    completed = {name for name, row in by_name.items() if row["state"] == "completed"}
    assert completed == {"close", "fork", "current", "print"}
    assert "k" not in metadata_of(by_name["fork"])
    of_log, of_client = metadata_of(by_name["current"])["output"]
    assert "print the lines, and they go to the worker's log" in of_log
    assert "open a client of its own, or let an async job make the calls" in of_client
    errors = {name: errors_of(row)[0]["error"] for name, row in by_name.items() if row["errors"]}
    assert "job.step works only in an async job" in errors["step"]
    assert errors["crash"].endswith("killed by signal SIGSEGV")
    assert "SIGKILL; the usual cause is too little memory" in errors["kill"]
    crash = [line for line, job_id in lines_of(log) if job_id == by_name["crash"]["id"]]
    assert "Fatal Python error: Segmentation fault" in crash
    assert any("in work_apart" in line for line in crash)
    assert ("from Python", by_name["print"]["id"]) in lines_of(log)


def lines_of(log: list[Any]) -> list[tuple[str, int]]:
    """Return the lines that jobs in processes wrote, with the ids of the jobs."""
    return [(one["line"], one["job_id"]) for one in log if one["event"] == JOB_WROTE_OUTPUT]


@pytest.mark.timeout(120)
def test_child_of_a_worker_that_has_ended() -> None:
    """A child ends by itself if its worker ended before the kernel was told to kill it, even if its
    pipe is open."""
    command = [sys.executable, "-P", child_start.__file__, str(os.getpid() + 1)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        assert child.wait(PATIENCE) == 1
    finally:
        child.kill()
        child.communicate()


def test_child_is_out_of_reach_of_the_terminal() -> None:
    """Ctrl-C in a terminal reaches only the worker, not its child."""
    child = child_process.ChildProcess()
    try:
        assert os.getsid(child._process.pid) != os.getsid(0)
    finally:
        child.kill_and_wait(PATIENCE)


def test_reuse_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle child takes the next job, unless its last job was cancelled or is long ago. Then the
    child is ended."""
    children = child_pool.ChildProcessPool()
    one, two = ClaimKey(1, 1, 1), ClaimKey(2, 1, 1)
    try:
        first = children.assign_child(one)
        children.release_child(one)
        assert children.assign_child(two) is first
        first.is_job_cancelled = True
        children.release_child(two)
        assert first.has_exited
        second = children.assign_child(one)
        children.release_child(one)
        monkeypatch.setattr(child_pool, "IDLE_CHILD_TIMEOUT", -1.0)
        assert children.assign_child(two) is not second
        assert second.has_exited
        children.release_child(two)
    finally:
        children.end_all_idle_children()


@pytest.mark.timeout(120)
async def test_limit_of_processes(rig: Rig, tmp_path: Path) -> None:
    """Only `max_processes` jobs run in processes at a time, the others wait in their order with
    their whole timeout left, and a cancel, a stop and the end of another job reach them."""
    register_apart(rig, timedelta(minutes=1))
    async with rig.working(slots=20, max_processes=1) as client:
        first = await client.insert(Apart("hang", str(tmp_path / "first")))
        await until_exists(tmp_path / "first")
        inserted = [await client.insert(Apart("return")) for _ in range(3)]
        await rig.until_state("running", 4)
        assert client._run is not None
        waiting = {
            one.id: one for one in client._run.running_attempts if one.id in ids_of(inserted)
        }
        await wait_until(lambda: all(one.deadline == math.inf for one in waiting.values()))
        await client.job_cancel(inserted[1].job.id)
        assert (await rig.event()).kind is EventKind.JOB_CANCELLED
        await end_by("timeout", client, first.job.id)
        events = await rig.take(3)
        assert [event.kind for event in events] == [
            EventKind.JOB_FAILED,
            EventKind.JOB_COMPLETED,
            EventKind.JOB_COMPLETED,
        ]
        done = [event.job.id for event in events[1:] if event.job is not None]
        assert done == [inserted[0].job.id, inserted[2].job.id]
        for one in waiting.values():
            assert one.stop_cause or one.deadline == pytest.approx(one.started_at + 60, abs=0.1)
        await client.insert(Apart("hang", str(tmp_path / "second")))
        await until_exists(tmp_path / "second")
        last = await client.insert(Apart("return"))
        await rig.until_state("running", 2)
        client.stop_and_cancel()
        kinds = [event.kind for event in await rig.take(2)]
        assert kinds == [EventKind.JOB_INTERRUPTED] * 2
    row = await rig.row(last.job.id)
    assert (row["state"], row["attempt"]) == ("available", 0)


def ids_of(inserted: list[riverpy.InsertResult]) -> set[int]:
    """Return the ids of the inserted jobs."""
    return {one.job.id for one in inserted}


async def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def end_by(how: str, client: riverpy.Client, job_id: int) -> None:
    """Cancel the running job in one of three ways."""
    if how == "cancel":
        await client.job_cancel(job_id)
    elif how == "stop":
        client.stop()
    else:
        assert client._run is not None
        running = client._run.running_attempts
        for attempt in running:  # the timeout has passed
            if attempt.id != job_id:
                continue
            attempt.timeout, attempt.deadline = 0.0, time.monotonic()
            running.schedule_deadline_check(attempt.deadline)


async def until_exists(file: Path) -> None:
    """Wait until a file exists."""
    async with asyncio.timeout(90):
        while not file.exists():
            await asyncio.sleep(0.01)


CANCELLED = {
    "timeout": (EventKind.JOB_FAILED, "retryable", 1),
    "cancel": (EventKind.JOB_CANCELLED, "cancelled", 1),
    "stop": (EventKind.JOB_INTERRUPTED, "available", 0),
}
"""The event, the state and the attempt of a job after each kind of cancellation."""


@pytest.mark.timeout(120)
async def test_process_is_killed(rig: Rig, tmp_path: Path) -> None:
    """A process whose job does not use `job.cancelled` is killed at its timeout, by a cancel, or by
    a hard stop, with the programs that the job has started."""
    register_apart(rig, timedelta(minutes=1))
    async with rig.working(soft_stop_timeout=timedelta(0)) as client:
        for job_id, how in enumerate(CANCELLED, start=1):
            await client.insert(Apart("program", str(tmp_path / how)))
            await until_exists(tmp_path / how)
            await end_by(how, client, job_id)
            event, row = await rig.event(), await rig.row(job_id)
            assert (event.kind, row["state"], row["attempt"]) == CANCELLED[how]
    for written in tmp_path.iterdir():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(written.read_text()))
            async with asyncio.timeout(PATIENCE):
                while process.status() != psutil.STATUS_ZOMBIE:
                    await asyncio.sleep(0.01)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("executor", ["thread", "process"])
async def test_job_sees_that_it_is_cancelled(
    rig: Rig, tmp_path: Path, executor: Literal["thread", "process"]
) -> None:
    """A blocking job sees its timeout, a cancel and a hard stop in `job.cancelled`, and can end
    itself as cancelled."""
    later = timedelta(hours=1)
    rig.workers.blocking_job(
        executor=executor, timeout=timedelta(minutes=1), next_retry=lambda job: later
    )(watch)
    # A cancelled process may use a share of the hard stop timeout, and be late here.
    stop = {"soft_stop_timeout": timedelta(0), "hard_stop_timeout": timedelta(minutes=1)}
    async with rig.working(**stop) as client:
        assert client._run is not None
        client._run._job_executor._blocking_runner._cancel_grace_period = 60.0
        for job_id, how in enumerate(CANCELLED, start=1):
            (directory := tmp_path / how).mkdir()
            await client.insert(Watch(str(directory)))
            await until_exists(directory / "started")
            await end_by(how, client, job_id)
            event, row = await rig.event(), await rig.row(job_id)
            assert (event.kind, row["state"], row["attempt"]) == CANCELLED[how]
            assert (directory / "seen").exists()


@pytest.mark.timeout(120)
async def test_cancelled_before_the_worker_knows_that_it_started(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job in a process that already uses `job.cancelled` sees its cancellation, even if the
    worker has not read yet that the job has started."""
    cancelled = threading.Event()
    cancel, receive = ChildProcess.cancel_job, ChildProcess._pass_message_to_job

    def cancel_first(child: ChildProcess) -> None:
        cancel(child)
        cancelled.set()

    def receive_later(*args: Any) -> None:
        assert cancelled.wait(PATIENCE)
        receive(*args)

    monkeypatch.setattr(ChildProcess, "cancel_job", cancel_first)
    monkeypatch.setattr(ChildProcess, "_pass_message_to_job", receive_later)
    rig.workers.blocking_job(executor="process")(watch)
    async with rig.working(hard_stop_timeout=timedelta(minutes=1)) as client:
        client._run._job_executor._blocking_runner._cancel_grace_period = 60.0  # type: ignore[union-attr]
        inserted = await client.insert(Watch(str(tmp_path)))
        await until_exists(tmp_path / "started")
        await client.job_cancel(inserted.job.id)
        assert (await rig.event()).kind is EventKind.JOB_CANCELLED
    assert (tmp_path / "seen").exists()


@pytest.mark.timeout(120)
async def test_process_that_ignores_its_cancellation(rig: Rig, tmp_path: Path) -> None:
    """A process whose job uses `job.cancelled` but does not end is killed a moment later."""
    register_apart(rig, timedelta(minutes=1))
    async with rig.working() as client:
        inserted = await client.insert(Apart("ignore", str(tmp_path / "pid")))
        await until_exists(tmp_path / "pid")
        await client.job_cancel(inserted.job.id)
        assert (await rig.event()).kind is EventKind.JOB_CANCELLED
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


async def test_cancelled_of_an_async_job(rig: Rig) -> None:
    """In an async job `job.cancelled` is set when the job gets its CancelledError. Waiting for it
    would block the loop and is refused."""
    seen: list[bool] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        seen.append(job.cancelled.is_set())
        with pytest.raises(riverpy.ClientStateError, match="block the event loop"):
            job.cancelled.wait()
        try:
            rig.release.set()
            await asyncio.sleep(60)
        finally:
            seen.append(job.cancelled.is_set())

    async with rig.working() as client:
        inserted = await client.insert(Task())
        await rig.release.wait()
        await client.job_cancel(inserted.job.id)
        assert (await rig.event()).kind is EventKind.JOB_CANCELLED
    assert seen == [False, True]


def test_invalid_arguments_are_refused() -> None:
    """A coroutine function is refused as a blocking job and a plain function as an async one. There
    are two executors."""

    async def coroutine(job: Job[Task]) -> None: ...

    def plain(job: Job[Task]) -> None: ...

    with pytest.raises(riverpy.ConfigError, match="plain function"):
        Workers().blocking_job()(coroutine)  # type: ignore[type-var]
    with pytest.raises(riverpy.ConfigError, match="blocking_job"):
        Workers().job(plain)  # type: ignore[type-var]
    with pytest.raises(riverpy.ConfigError, match="thread"):
        Workers().blocking_job(executor="fork")  # type: ignore[arg-type]
    assert multiprocessing.active_children() == []


def twin(job: Job[Apart]) -> None: ...


first_twin = twin


def twin(job: Job[Apart]) -> None: ...


def test_function_without_a_name_is_refused() -> None:
    """A function or args class that a process cannot find by its name is refused at registration,
    with what to do. An async job and a job in a thread need no name."""

    class Inner(msgspec.Struct):
        kind: ClassVar[str] = "inner"

    def nested(job: Job[Apart]) -> None: ...

    def nested_args(job: Job[Any]) -> None: ...

    nested_args.__annotations__["job"] = Job[Inner]
    nested_args.__qualname__ = "nested_args"
    interactive = FunctionType(work_apart.__code__, {"__name__": "__main__"}, "interactive")
    interactive.__annotations__ = {"job": Job[Apart]}
    unnamed = lambda job: None  # noqa: E731
    unnamed.__annotations__ = {"job": Job[Apart]}
    for function, reason in [
        (nested, "inside a function: write it"),
        (partial(nested), "inside a function"),
        (nested_args, "args class .*Inner"),
        (unnamed, "a lambda has no name"),
    ]:
        Workers().blocking_job(executor="thread")(function)
        with pytest.raises(riverpy.ConfigError, match=reason):
            Workers().blocking_job(executor="process")(function)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__main__", ModuleType("__main__"))
        with pytest.raises(riverpy.ConfigError, match="interactive session"):
            Workers().blocking_job(executor="process")(interactive)
    workers = Workers()
    workers.blocking_job(executor="process")(first_twin)
    with pytest.raises(riverpy.ConfigError, match="its own name"):
        workers.blocking_job(executor="process", kind="other")(twin)


async def test_replaced_function_is_refused(rig: Rig) -> None:
    """A function whose name another object has is refused when the client starts."""
    rig.workers.blocking_job(executor="process")(first_twin)
    with pytest.raises(riverpy.ConfigError, match=r"put @workers\.blocking_job above"):
        await rig.client().run()
