"""Plugins: the hooks and middleware of a client or of a kind of job, in their order."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

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
    from riverpy.middleware import JobInsertMiddleware, Middleware, Plugin, WorkerMiddleware

_HOOK_METHODS = ("insert_begin", "work_begin", "work_end", "periodic_jobs_start", "metric_emit")
_MIDDLEWARE_METHODS = ("insert_many", "work")
_SYNC_METHOD = "metric_emit"


class Plugins:
    """The hooks and middleware, in one list for each method. Plugins come first, then hooks and
    middleware, each in the given order."""

    def __init__(
        self,
        plugins: Sequence[Plugin] = (),
        hooks: Sequence[Hook] = (),
        middleware: Sequence[Middleware] = (),
    ) -> None:
        """Sort the objects into the lists by their methods.

        Raises:
            ConfigError: an object is not a plugin, hook or middleware.
        """
        _check_objects("plugins", plugins, (*_HOOK_METHODS, *_MIDDLEWARE_METHODS))
        _check_objects("hooks", hooks, _HOOK_METHODS)
        _check_objects("middleware", middleware, _MIDDLEWARE_METHODS)
        all_hooks, all_middleware = [*plugins, *hooks], [*plugins, *middleware]
        self.insert_begin: list[HookInsertBegin] = _with_method(all_hooks, "insert_begin")
        self.work_begin: list[HookWorkBegin] = _with_method(all_hooks, "work_begin")
        self.work_end: list[HookWorkEnd] = _with_method(all_hooks, "work_end")
        self.periodic_jobs_start: list[HookPeriodicJobsStart] = _with_method(
            all_hooks, "periodic_jobs_start"
        )
        self.metric_emit: list[HookMetricEmit] = _with_method(all_hooks, "metric_emit")
        self.insert_many: list[JobInsertMiddleware] = _with_method(all_middleware, "insert_many")
        self.work: list[WorkerMiddleware] = _with_method(all_middleware, "work")

    @property
    def has_insert(self) -> bool:
        """Whether a hook or middleware runs when jobs are inserted."""
        return bool(self.insert_begin or self.insert_many)


def plugins_of(args_class: object) -> Plugins:
    """Return the hooks and plugins that an args class declares in `hooks` and `plugins`.

    Raises:
        ConfigError: an object in `hooks` or `plugins` is not a hook or plugin.
    """
    return Plugins(
        _read_class_variable(args_class, "plugins"), _read_class_variable(args_class, "hooks")
    )


def check_middleware(owner: str, middleware: Sequence[WorkerMiddleware]) -> None:
    """Raise ConfigError unless each object is a worker middleware."""
    _check_objects(f"the middleware of {owner}", middleware, ("work",))


def _read_class_variable(args_class: object, name: str) -> Sequence[Any]:
    """Return the class variable `name` of an args class, or an empty list. A field of this name is
    an ordinary arg, and is not returned."""
    fields: tuple[str, ...] = getattr(args_class, "__struct_fields__", ())
    if isinstance(args_class, type) and dataclasses.is_dataclass(args_class):
        fields = tuple(field.name for field in dataclasses.fields(args_class))
    return () if name in fields else cast("Any", getattr)(args_class, name, ())


def _check_objects(setting: str, given: object, methods: Sequence[str]) -> None:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ConfigError(f"{setting} must be a list, got {type(given).__name__}")
    for one in cast("Sequence[object]", given):
        if isinstance(one, type):
            raise ConfigError(f"{setting} takes objects, got the class {one.__name__}: call it")
        found = [name for name in methods if callable(getattr(one, name, None))]
        if not found:
            raise ConfigError(
                f"{setting}: {plugin_name(one)} has none of the methods {', '.join(methods)}; wrap "
                "a plain function in an adapter, as in HookWorkBeginFunc(function)"
            )
        for name in found:
            if is_async(getattr(one, name)) == (name == _SYNC_METHOD):
                expected = "a plain function" if name == _SYNC_METHOD else "an `async def`"
                raise ConfigError(f"{setting}: {name} of {plugin_name(one)} must be {expected}")


def plugin_name(one: object) -> str:
    """Return the name of a plugin, hook or middleware. For an adapter of a function it is the
    function's name, otherwise the class's."""
    name = getattr(getattr(one, "__wrapped__", one), "__qualname__", None)
    return name if isinstance(name, str) else type(one).__name__


def is_async(function: object) -> bool:
    """Whether `function`, or its `__call__`, is an `async def`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 (an object with an async __call__)
    )


def _with_method(given: Sequence[object], method: str) -> list[Any]:
    return [one for one in given if callable(getattr(one, method, None))]
