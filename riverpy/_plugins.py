"""Plugins: which hooks and middleware there are, in their order, and how middleware is nested."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import anyio

from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from riverpy.hooks import (
        Hook,
        HookInsertBegin,
        HookMetricEmit,
        HookPeriodicJobsStart,
        HookWorkBegin,
        HookWorkEnd,
    )
    from riverpy.middleware import (
        JobInsertMiddleware,
        Middleware,
        Plugin,
        WorkerMiddleware,
    )

MiddlewareT = TypeVar("MiddlewareT")
ResultT = TypeVar("ResultT")

_HOOKS = ("insert_begin", "work_begin", "work_end", "periodic_jobs_start", "metric_emit")
_MIDDLEWARE = ("insert_many", "work")
_SYNC = "metric_emit"


class Plugins:
    """Hooks and middleware by what they are called for, each in River's order: plugins first, then
    the others as they are listed."""

    def __init__(
        self,
        plugins: Sequence[Plugin] = (),
        hooks: Sequence[Hook] = (),
        middleware: Sequence[Middleware] = (),
    ) -> None:
        """Sort them.

        Raises:
            ConfigError: one of them is none.
        """
        _check("plugins", plugins, (*_HOOKS, *_MIDDLEWARE))
        _check("hooks", hooks, _HOOKS)
        _check("middleware", middleware, _MIDDLEWARE)
        hooking, wrapping = [*plugins, *hooks], [*plugins, *middleware]
        self.insert_begin: list[HookInsertBegin] = _having(hooking, "insert_begin")
        self.work_begin: list[HookWorkBegin] = _having(hooking, "work_begin")
        self.work_end: list[HookWorkEnd] = _having(hooking, "work_end")
        self.periodic_jobs_start: list[HookPeriodicJobsStart] = _having(
            hooking, "periodic_jobs_start"
        )
        self.metric_emit: list[HookMetricEmit] = _having(hooking, "metric_emit")
        self.insert_many: list[JobInsertMiddleware] = _having(wrapping, "insert_many")
        self.work: list[WorkerMiddleware] = _having(wrapping, "work")

    @property
    def has_insert(self) -> bool:
        """Whether any is called when jobs are inserted."""
        return bool(self.insert_begin or self.insert_many)

    @property
    def has_work(self) -> bool:
        """Whether any is called when jobs are worked."""
        return bool(self.work_begin or self.work_end or self.work)


def plugins_of(args_class: object) -> Plugins:
    """What an args class declares for its kind, as `hooks` and `plugins`.

    Raises:
        ConfigError: it is no list of such.
    """
    return Plugins(_declared(args_class, "plugins"), _declared(args_class, "hooks"))


def check_middleware(owner: str, middleware: Sequence[WorkerMiddleware]) -> None:
    """Raise ConfigError unless all are middleware of workers."""
    _check(f"the middleware of {owner}", middleware, ("work",))


def _declared(args_class: object, name: str) -> Sequence[Any]:
    """The class variable; a field of this name is the user's own."""
    fields: tuple[str, ...] = getattr(args_class, "__struct_fields__", ())
    if isinstance(args_class, type) and dataclasses.is_dataclass(args_class):
        fields = tuple(field.name for field in dataclasses.fields(args_class))
    return () if name in fields else cast("Any", getattr)(args_class, name, ())


def _check(setting: str, given: object, methods: Sequence[str]) -> None:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ConfigError(f"{setting} must be a list, got {type(given).__name__}")
    for one in cast("Sequence[object]", given):
        if isinstance(one, type):
            raise ConfigError(f"{setting} takes objects, got the class {one.__name__}: call it")
        found = [name for name in methods if callable(getattr(one, name, None))]
        if not found:
            raise ConfigError(
                f"{setting}: {_name(one)} has none of the methods {', '.join(methods)}; a plain "
                "function needs one of the adapters, as in HookWorkBeginFunc(function)"
            )
        for name in found:
            if is_async(getattr(one, name)) == (name == _SYNC):
                wanted = "a plain function" if name == _SYNC else "an `async def`"
                raise ConfigError(f"{setting}: {name} of {_name(one)} must be {wanted}")


def _name(one: object) -> str:
    name = getattr(getattr(one, "__wrapped__", one), "__qualname__", None)
    return name if isinstance(name, str) else type(one).__name__


def is_async(function: object) -> bool:
    """Whether calling it gives a coroutine, as far as that can be told."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 (an object with an async __call__)
    )


def _having(given: Sequence[object], method: str) -> list[Any]:
    return [one for one in given if callable(getattr(one, method, None))]


# Nesting


class Inner(Generic[ResultT]):
    """What one middleware is given to call: all that is inside of it, once."""

    result: ResultT
    """What that returned."""

    __slots__ = ("_error", "_has_ended", "_is_over", "_middleware", "_rest", "_task", "result")

    def __init__(self, middleware: object, rest: Callable[[], Awaitable[ResultT]]) -> None:
        self._middleware, self._rest = middleware, rest
        self._task: asyncio.Task[Any] | None = None
        self._has_ended = self._is_over = False
        self._error: BaseException | None = None

    async def __call__(self) -> ResultT:
        """Go on.

        Raises:
            RuntimeError: the middleware has called it already, or is over.
            BaseException: what is inside failed.
        """
        if self._is_over:
            raise RuntimeError(
                f"do_inner was called when middleware {_name(self._middleware)} was over: nothing "
                "is run"
            )
        if self._task is not None:
            raise RuntimeError(
                f"middleware {_name(self._middleware)} called do_inner twice: it runs once"
            )
        self._task = asyncio.current_task()
        try:
            self.result = await self._rest()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._has_ended = True
        return self.result

    def caught(self) -> BaseException | None:
        """The middleware has returned. What its inner part had raised, and it has caught.

        Raises:
            RuntimeError: it has not called it, or not waited for its end.
        """
        if self._task is None:
            raise RuntimeError(
                f"middleware {_name(self._middleware)} returned without calling do_inner, so "
                "nothing was done: let it call do_inner, or raise"
            )
        if not self._has_ended:
            raise RuntimeError(
                f"middleware {_name(self._middleware)} returned before do_inner had ended"
            )
        return self._error

    async def end(self) -> None:
        """Cancel what the middleware has left running in another task, and wait for its end: the
        code of a job that is over must not go on."""
        task = self._task
        if task is None or self._has_ended or task is asyncio.current_task():
            return
        task.cancel()
        cancelled: asyncio.CancelledError | None = None
        # A scope around the middleware that is cancelled would end the wait at every turn.
        with anyio.CancelScope(shield=True):
            while not task.done():
                try:
                    await asyncio.wait([task])
                except asyncio.CancelledError as error:
                    cancelled = error
        try:
            if cancelled is not None:
                raise cancelled
        finally:
            cancelled = None  # it holds this frame

    def close(self) -> None:
        """The middleware is over: a call that comes now, as by a task that it has left behind, runs
        nothing. Let go of the error, which holds this through its frames."""
        self._is_over, self._error = True, None


async def through(
    middleware: Sequence[MiddlewareT],
    call: Callable[[MiddlewareT, Inner[ResultT]], Awaitable[None]],
    core: Callable[[], Awaitable[ResultT]],
    *,
    may_catch: bool,
) -> ResultT:
    """Run `core` inside of the middleware, the first outermost.

    Args:
        middleware: what is around it.
        call: calls one of them.
        core: what is inside of all.
        may_catch: whether a middleware that catches the error of what is inside has the last word,
            with None for a result. Otherwise the error is raised again.

    Raises:
        RuntimeError: a middleware did not keep to the rules for calling its inner part.
        BaseException: what the middleware or `core` raised.
    """
    if not middleware:
        return await core()
    first, *others = middleware
    error: BaseException | None = None
    inner = Inner(first, partial(through, others, call, core, may_catch=may_catch))
    try:
        try:
            await call(first, inner)
            error = inner.caught()
        except GeneratorExit:  # the loop is gone
            raise
        except BaseException:
            await inner.end()
            raise
        if error is None:
            return inner.result
        if may_catch:
            return cast("ResultT", None)
        raise error
    finally:
        inner.close()
        error = None  # it holds this frame
