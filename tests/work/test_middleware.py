"""Hooks and middleware around attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import msgspec
import pytest

import riverpy
from riverpy import (
    EventKind,
    HookWorkBeginFunc,
    HookWorkEndFunc,
    Job,
    JobCancel,
    JobSnooze,
    QueueConfig,
    WorkerMiddlewareFunc,
    WorkInner,
)
from riverpy._work import middleware as work_stack
from tests.work.rig import PATIENCE, Task, errors_of, metadata_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.work.rig import Rig


class Recorder:
    """A plugin that records its calls in their order."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    async def work_begin(self, job: Job[Any], /) -> None:
        self.calls.append(f"{self.name} begin")

    async def work_end(self, job: Job[Any], error: BaseException | None, /) -> bool | None:
        self.calls.append(f"{self.name} end {type(error).__name__}")

    async def work(self, job: Job[Any], do_inner: WorkInner, /) -> None:
        self.calls.append(f"{self.name} in")
        try:
            await do_inner()
        except BaseException as error:
            self.calls.append(f"{self.name} out {type(error).__name__}")
            raise
        self.calls.append(f"{self.name} out")


calls_of_class: list[str] = []


class Traced(msgspec.Struct):
    """Args that declare hooks and plugins."""

    kind: ClassVar[str] = "traced"
    hooks: ClassVar[Sequence[riverpy.Hook]] = (Recorder("args hook", calls_of_class),)
    plugins: ClassVar[Sequence[riverpy.Plugin]] = (Recorder("args plugin", calls_of_class),)


class Fields(msgspec.Struct):
    """Args with fields that have the names of the declarations."""

    kind: ClassVar[str] = "fields"
    hooks: list[str] = []
    plugins: str = ""


async def test_order(rig: Rig) -> None:
    """A worker's own middleware is outermost, then come plugins, middleware and those of the args
    class. Hooks are inside of all, in the same order."""
    calls = calls_of_class
    calls.clear()

    class OwnWorker(riverpy.Worker[Traced]):
        async def work(self, job: Job[Traced]) -> None:
            calls.append("work")

        def middleware(self, job: Job[Any]) -> Sequence[riverpy.WorkerMiddleware]:
            with pytest.raises(riverpy.ClientStateError, match="encoded_args"):
                job.args  # noqa: B018
            return [Recorder("own", calls)]

    rig.workers.add(OwnWorker())
    await rig.run_one(
        Traced(),
        hooks=[Recorder("hook", calls)],
        middleware=[Recorder("middleware", calls)],
        plugins=[Recorder("plugin 1", calls), Recorder("plugin 2", calls)],
    )
    wrapping = ["own", "plugin 1", "plugin 2", "middleware", "args plugin"]
    hooking = ["plugin 1", "plugin 2", "hook", "args plugin", "args hook"]
    assert calls == [
        *(f"{name} in" for name in wrapping),
        *(f"{name} begin" for name in hooking),
        "work",
        *(f"{name} end NoneType" for name in hooking),
        *(f"{name} out" for name in reversed(wrapping)),
    ]


async def test_fields_are_no_declarations(rig: Rig) -> None:
    """Fields named `hooks` and `plugins` are ordinary args."""

    @rig.job(args=Fields)
    async def work(job: Job[Fields]) -> None: ...

    row = await rig.run_one(Fields(hooks=["a"], plugins="b"))
    assert row["state"] == "completed"


async def test_own_middleware_of_functions(rig: Rig) -> None:
    """A function, async or blocking, can have middleware of its own."""
    calls: list[str] = []

    @rig.job(middleware=[Recorder("own", calls)])
    async def work(job: Job[Task]) -> None:
        calls.append("work")

    @rig.job(args=Traced, kind="blocking", executor="thread", middleware=[Recorder("b", calls)])
    def block(job: Job[Traced]) -> None:
        calls.append("block")

    await rig.run_one()
    assert calls == ["own in", "work", "own out"]
    calls.clear()
    await rig.run_one(riverpy.RawArgs("blocking", "{}"))
    assert calls == ["b in", "block", "b out"]


@pytest.mark.parametrize(
    ("insert", "error"),
    [
        (riverpy.RawArgs("nobody", "{}"), "LookupError"),
        (riverpy.RawArgs("task", '{"n": "x"}'), "ValidationError"),
    ],
    ids=["unknown kind", "undecodable args"],
)
async def test_failures_before_the_code(rig: Rig, insert: Any, error: str) -> None:
    """Hooks and middleware are called for an unknown kind and for args that cannot be decoded
    (TY-07)."""
    calls: list[str] = []

    rig.register_task()
    row = await rig.run_one(insert, plugins=[Recorder("p", calls)], known_kinds_only=False)
    assert calls == ["p in", "p begin", f"p end {error}", f"p out {error}"]
    assert len(errors_of(row)) == 1


async def test_begin_sets_encoded_args(rig: Rig) -> None:
    """The args that work_begin sets are decoded, and the row keeps its own."""
    seen: list[int] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        seen.append(job.args.n)

    async def upgrade(job: Job[Any]) -> None:
        assert job.encoded_args == '{"n": 1}'
        job.encoded_args = '{"n": 2}'

    row = await rig.run_one(Task(1), hooks=[HookWorkBeginFunc(upgrade)])
    assert seen == [2]
    assert row["args"] == '{"n": 1}'
    event = rig.last.event
    assert event.job is not None
    assert event.job.encoded_args == '{"n": 1}'


async def test_begin_raises(rig: Rig) -> None:
    """An error of work_begin fails the attempt. Neither the job nor work_end runs (TY-07)."""
    ran: list[str] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        ran.append("work")

    async def refuse(job: Job[Any]) -> None:
        if job.attempt == 1 and not ran:
            raise SystemExit("no")

    recorder = Recorder("after", ran)
    hooks = [HookWorkBeginFunc(refuse), HookWorkEndFunc(recorder.work_end)]
    row = await rig.run_one(hooks=hooks)
    assert ran == []
    assert errors_of(row)[0]["error"] == "SystemExit: no"
    ran.append("go on")
    row = await rig.run_one(hooks=hooks)
    assert row["state"] == "completed"
    assert ran == ["go on", "work", "after end NoneType"]


async def test_end_swallows_and_replaces(rig: Rig) -> None:
    """work_end swallows an error by returning True, replaces it by raising, and keeps it otherwise.
    The next hook receives the result."""
    seen: list[str] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        raise ValueError("its own")

    async def keep(job: Job[Any], error: BaseException | None) -> Any:
        seen.append(repr(error))
        return "not True"

    async def replace(job: Job[Any], error: BaseException | None) -> None:
        raise KeyError("another") from error

    async def swallow(job: Job[Any], error: BaseException | None) -> bool:
        return isinstance(error, KeyError)

    hooks: list[riverpy.Hook] = [
        HookWorkEndFunc(keep),
        HookWorkEndFunc(replace),
        HookWorkEndFunc(keep),
    ]
    row = await rig.run_one(hooks=hooks)
    assert errors_of(row)[0]["error"] == "KeyError: 'another'"
    row = await rig.run_one(hooks=[*hooks, HookWorkEndFunc(swallow), HookWorkEndFunc(keep)])
    assert row["state"] == "completed"
    both = ["ValueError('its own')", "KeyError('another')"]
    assert seen == [*both, *both, "None"]


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (JobSnooze(timedelta(hours=1)), EventKind.JOB_SNOOZED),
        (JobCancel("enough"), EventKind.JOB_CANCELLED),
        (ValueError("bad"), EventKind.JOB_FAILED),
    ],
)
async def test_middleware_raises(rig: Rig, raised: Exception, kind: EventKind) -> None:
    """An error of a middleware ends the attempt as if the job had raised it, before or after the
    job. The job's result is lost."""
    ran: list[int] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        ran.append(job.id)

    async def before(job: Job[Any], do_inner: WorkInner) -> None:
        raise raised

    async def after(job: Job[Any], do_inner: WorkInner) -> None:
        await do_inner()
        raise raised

    await rig.run_one(middleware=[WorkerMiddlewareFunc(before)])
    assert (rig.last.event.kind, len(ran)) == (kind, 0)
    await rig.run_one(Task(1), middleware=[WorkerMiddlewareFunc(after)])
    assert (rig.last.event.kind, len(ran)) == (kind, 1)


async def test_outcomes_pass_through(rig: Rig) -> None:
    """Snooze, cancel and failure of a job have the same meaning inside hooks and middleware, which
    receive them. What a middleware records is stored."""
    calls: list[str] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.args.n == 1:
            raise JobSnooze(timedelta(hours=1))
        if job.args.n == 2:
            raise JobCancel("enough")
        raise ValueError("bad")

    async def record(job: Job[Any], do_inner: WorkInner) -> None:
        job.set_metadata("seen", True)
        await do_inner()

    plugins = [WorkerMiddlewareFunc(record), Recorder("p", calls)]
    rows = await rig.work_in_order(Task(1), Task(2), Task(3), plugins=plugins)
    assert [row["state"] for row in rows] == ["scheduled", "cancelled", "available"]
    assert all(metadata_of(row)["seen"] for row in rows)
    for name in ("JobSnooze", "JobCancel", "ValueError"):
        assert f"p end {name}" in calls
        assert f"p out {name}" in calls


async def test_caught_error_completes(rig: Rig) -> None:
    """A middleware that catches the error of a job completes it."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        raise ValueError("bad")

    async def catch(job: Job[Any], do_inner: WorkInner) -> None:
        with pytest.raises(ValueError):
            await do_inner()

    outer: list[str] = []
    middleware = [Recorder("outer", outer), WorkerMiddlewareFunc(catch)]
    row = await rig.run_one(middleware=middleware)
    assert row["state"] == "completed"
    assert outer == ["outer in", "outer out"]


async def _never(job: Job[Any], do_inner: WorkInner) -> None: ...


async def _twice(job: Job[Any], do_inner: WorkInner) -> None:
    await do_inner()
    await do_inner()


async def _in_the_background(job: Job[Any], do_inner: WorkInner) -> None:
    tasks.append(asyncio.create_task(do_inner()))  # type: ignore[arg-type]
    await asyncio.sleep(0)


async def _leave_and_raise(job: Job[Any], do_inner: WorkInner) -> None:
    await _in_the_background(job, do_inner)
    raise ValueError("first raised")


tasks: list[asyncio.Task[None]] = []


@pytest.mark.parametrize(
    ("function", "text", "runs"),
    [
        (_never, "first returned without calling do_inner", 0),
        (_twice, "first called do_inner twice", 1),
        (_in_the_background, "first returned before do_inner had ended", 1),
        (_leave_and_raise, "first raised", 1),
    ],
)
async def test_rules_for_do_inner(
    rig: Rig, function: Callable[..., Any], text: str, runs: int
) -> None:
    """A middleware that does not call do_inner exactly once, or does not await it, fails the
    attempt. The next job is worked."""
    ran: list[int] = []
    ended: list[int] = []

    @rig.job
    async def work(job: Job[Task]) -> None:
        ran.append(job.id)
        try:
            await anyio.sleep(0.01)
        finally:
            await asyncio.sleep(0)
            ended.append(job.id)

    @rig.job(args=Traced, kind="good")
    async def good(job: Job[Traced]) -> None: ...

    async def first(job: Job[Any], do_inner: WorkInner) -> None:
        await (function(job, do_inner) if job.kind == "task" else do_inner())

    async def outer(job: Job[Any], do_inner: WorkInner) -> None:
        try:
            await do_inner()
        finally:
            if job.kind == "task":
                assert len(ran) == len(ended) == runs, "the job outlives its attempt"

    tasks.clear()
    middleware = [WorkerMiddlewareFunc(outer), WorkerMiddlewareFunc(first)]
    row, other = await rig.work_in_order(
        Task(), riverpy.RawArgs("good", "{}"), middleware=middleware
    )
    assert text in errors_of(row)[0]["error"]
    assert len(ran) == len(ended) == runs
    assert other["state"] == "completed"
    assert all(task.done() for task in tasks)


async def test_scope_that_is_cancelled_while_do_inner_ends(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the inner code is awaited, a cancelled scope around it does not wake the loop at each
    turn."""
    release = asyncio.Event()
    scopes: list[anyio.CancelScope] = []
    waits, wait = 0, asyncio.wait

    @rig.job
    async def work(job: Job[Task]) -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    async def outer(job: Job[Any], do_inner: WorkInner) -> None:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            await do_inner()

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal waits
        waits += 1
        return wait(*args, **kwargs)

    middleware = [WorkerMiddlewareFunc(outer), WorkerMiddlewareFunc(_leave_and_raise)]
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "wait", counted)
        async with rig.working(middleware=middleware) as client:
            await client.insert(Task())
            async with asyncio.timeout(PATIENCE):
                while not waits:
                    await asyncio.sleep(0.001)
            scopes[0].cancel()
            for _ in range(100):
                await asyncio.sleep(0)
            release.set()
            await rig.event()
    assert waits < 10


async def _leave_unstarted(job: Job[Any], do_inner: WorkInner) -> None:
    tasks.append(asyncio.create_task(do_inner()))  # type: ignore[arg-type]


async def _leave_unstarted_and_raise(job: Job[Any], do_inner: WorkInner) -> None:
    await _leave_unstarted(job, do_inner)
    raise ValueError("raised")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (_leave_unstarted, "returned without calling do_inner"),
        (_leave_unstarted_and_raise, "raised"),
    ],
)
async def test_do_inner_after_the_attempt(
    rig: Rig, function: Callable[..., Any], text: str
) -> None:
    """A job does not start in a leftover task of a middleware after its attempt has ended."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        pytest.fail("the job has begun")

    tasks.clear()
    row = await rig.run_one(middleware=[WorkerMiddlewareFunc(function)])
    assert text in errors_of(row)[0]["error"]
    late = f"{function.__name__} called do_inner after it returned"
    with pytest.raises(RuntimeError, match=late):
        await tasks[0]


async def test_timeout_is_an_error(rig: Rig) -> None:
    """At its timeout the job is cancelled. Hooks and middleware receive TimeoutError, and can await
    as usual."""
    calls: list[str] = []

    @rig.job(timeout=timedelta(milliseconds=20))
    async def work(job: Job[Task]) -> None:
        await anyio.sleep_forever()

    async def fail() -> None:
        raise OSError

    async def group_of_two() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            await anyio.sleep_forever()

    async def end(job: Job[Any], error: BaseException | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        with pytest.raises(ExceptionGroup):
            await group_of_two()
        await asyncio.sleep(0)
        calls.append(type(error).__name__)

    row = await rig.run_one(hooks=[HookWorkEndFunc(end)], middleware=[Recorder("p", calls)])
    assert calls == ["p in", "TimeoutError", "p out TimeoutError"]
    assert "exceeded its timeout of 0.02 s" in errors_of(row)[0]["error"]


async def test_timeout_covers_work_end(rig: Rig) -> None:
    """The timeout ends a work_end hook that hangs, and the attempt fails."""

    @rig.job(timeout=timedelta(milliseconds=20))
    async def work(job: Job[Task]) -> None: ...

    async def hang(job: Job[Any], error: BaseException | None) -> None:
        await anyio.sleep_forever()

    row = await rig.run_one(hooks=[HookWorkEndFunc(hang)])
    assert "exceeded its timeout" in errors_of(row)[0]["error"]


async def test_hook_hangs_after_timeout(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A work_end hook that hangs after the timeout is ended by its own limit. The next hook has a
    limit of its own."""
    monkeypatch.setattr(work_stack, "WORK_END_HOOK_TIMEOUT", 0.02)
    calls: list[str] = []

    @rig.job(timeout=timedelta(milliseconds=20))
    async def work(job: Job[Task]) -> None:
        await anyio.sleep_forever()

    async def hang(job: Job[Any], error: BaseException | None) -> None:
        calls.append(type(error).__name__)
        await anyio.sleep_forever()

    row = await rig.run_one(hooks=[HookWorkEndFunc(hang), HookWorkEndFunc(hang)])
    assert "exceeded its timeout" in errors_of(row)[0]["error"]
    assert calls == ["TimeoutError", "TimeoutError"]


async def test_timeout_leaves_middleware_out(rig: Rig) -> None:
    """The time of a middleware before and after the job does not count."""
    limit = timedelta(milliseconds=30)

    class Limited(riverpy.Worker[Task]):
        async def work(self, job: Job[Task]) -> None: ...

        def timeout(self, job: Job[Task]) -> timedelta:
            return limit

    rig.workers.add(Limited())

    async def slow(job: Job[Any], do_inner: WorkInner) -> None:
        await anyio.sleep(2 * limit.total_seconds())
        await do_inner()
        await anyio.sleep(2 * limit.total_seconds())

    row = await rig.run_one(middleware=[WorkerMiddlewareFunc(slow)], job_timeout=limit)
    assert row["state"] == "completed"


async def test_timeout_in_another_task(rig: Rig) -> None:
    """If a middleware runs the job in a task group, its timeout is still a timeout, also for the
    middleware around it, which can await as usual."""
    seen: list[tuple[str, int]] = []

    @rig.job(timeout=timedelta(milliseconds=20))
    async def work(job: Job[Task]) -> None:
        await anyio.sleep_forever()

    async def beside(job: Job[Any], do_inner: WorkInner) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(do_inner)

    async def outer(job: Job[Any], do_inner: WorkInner) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await do_inner()
        except BaseException as error:
            await asyncio.sleep(0)
            seen.append((type(error).__name__, task.cancelling()))
            raise

    middleware = [WorkerMiddlewareFunc(outer), WorkerMiddlewareFunc(beside)]
    row = await rig.run_one(middleware=middleware)
    assert seen == [("TimeoutError", 0)]
    assert "exceeded its timeout" in errors_of(row)[0]["error"]


async def _catch_around(job: Job[Any], do_inner: WorkInner) -> None:
    with suppress(asyncio.CancelledError):
        await do_inner()


async def _catch_before(job: Job[Any], do_inner: WorkInner) -> None:
    begun.set()
    try:
        await anyio.sleep_forever()
    except asyncio.CancelledError:
        await do_inner()


async def _catch_and_return(job: Job[Any], do_inner: WorkInner) -> None:
    begun.set()
    try:
        await anyio.sleep_forever()
    except asyncio.CancelledError:
        return


async def _catch_and_raise(job: Job[Any], do_inner: WorkInner) -> None:
    try:
        await do_inner()
    except asyncio.CancelledError:
        raise ValueError("another") from None


async def _swallow(job: Job[Any], error: BaseException | None) -> bool:
    return True


class Signal:
    """An event that each test makes again."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        with anyio.fail_after(PATIENCE):
            await self._event.wait()


begun = Signal()


@pytest.mark.parametrize(
    "plugin",
    [
        WorkerMiddlewareFunc(_catch_around),
        WorkerMiddlewareFunc(_catch_before),
        WorkerMiddlewareFunc(_catch_and_return),
        WorkerMiddlewareFunc(_catch_and_raise),
        HookWorkEndFunc(_swallow),
    ],
    ids=["around", "before", "return", "raise", "hook"],
)
async def test_caught_cancellation_counts(rig: Rig, plugin: riverpy.Plugin) -> None:
    """A job that was cancelled or stopped is cancelled or released, even if hooks and middleware
    catch the cancellation."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        begun.set()
        await anyio.sleep_forever()

    async with rig.working(plugins=[plugin]) as client:
        for way in ("cancel", "stop"):
            begun.clear()
            job = (await client.insert(Task())).job
            await begun.wait()
            if way == "cancel":
                await client.job_cancel(job.id)
                assert (await rig.event()).kind is EventKind.JOB_CANCELLED
            else:
                client.stop_and_cancel()
                assert (await rig.event()).kind is EventKind.JOB_INTERRUPTED
    cancelled, stopped = await rig.schema.jobs()
    assert cancelled["state"] == "cancelled"
    assert (stopped["state"], stopped["attempt"], stopped["errors"]) == ("available", 0, None)


async def test_hanging_middleware(rig: Rig) -> None:
    """A middleware that hangs keeps only its slot. A cancel ends it."""
    begun.clear()

    rig.register_task()

    async def hang(job: Job[Any], do_inner: WorkInner) -> None:
        if job.encoded_args == '{"n": 1}':
            begun.set()
            await anyio.sleep_forever()
        await do_inner()

    queues = {"default": QueueConfig(max_workers=2)}
    async with rig.working(queues=queues, middleware=[WorkerMiddlewareFunc(hang)]) as client:
        job = (await client.insert(Task(1))).job
        await begun.wait()
        rows = await rig.work(client, *(Task(n) for n in range(10, 20)))
        assert {row["state"] for row in rows} == {"completed"}
        await client.job_cancel(job.id)
        assert (await rig.event()).kind is EventKind.JOB_CANCELLED


async def test_stuck_middleware(rig: Rig) -> None:
    """A middleware that keeps running after its job was cancelled counts as stuck."""
    begun.clear()
    told: asyncio.Event = asyncio.Event()

    class Handler:
        def handle_stuck(self, job: riverpy.StuckJob, /) -> bool:
            told.set()
            return False

    @rig.job
    async def work(job: Job[Task]) -> None:
        begun.set()
        await anyio.sleep_forever()

    async def linger(job: Job[Any], do_inner: WorkInner) -> None:
        try:
            await do_inner()
        finally:
            with anyio.CancelScope(shield=True):
                await told.wait()

    async with rig.working(
        middleware=[WorkerMiddlewareFunc(linger)],
        job_stuck_threshold=timedelta(milliseconds=50),
        job_stuck_handler=Handler(),
    ) as client:
        job = (await client.insert(Task())).job
        await begun.wait()
        await client.job_cancel(job.id)
        assert (await rig.event()).kind is EventKind.JOB_CANCELLED
    assert told.is_set()


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        ("hooks", [object()], "object has none of the methods insert_begin"),
        ("hooks", [Recorder], "the class Recorder: call it"),
        ("hooks", Recorder("x", []), "hooks must be a list"),
        ("middleware", [HookWorkBeginFunc(_never)], "none of the methods insert_many, work"),
        ("middleware", [WorkerMiddlewareFunc(print)], "work of print must be an"),
        ("hooks", [riverpy.HookMetricEmitFunc(_never)], "must be a plain function"),
        ("plugins", [lambda job: None], "wrap a plain function in an adapter"),
    ],
)
def test_refused(setting: str, value: Any, text: str) -> None:
    """An object that is not a hook or middleware is refused when the settings are made (TY-04)."""
    with pytest.raises(riverpy.ConfigError, match=text):
        riverpy.Config(**{setting: value})
