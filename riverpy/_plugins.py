"""PluginLists: the hooks and middleware of a client or of an args class, in the order in which they
run."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast

from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Generator
    from contextlib import AbstractContextManager

    from riverpy.hooks import (
        Hook,
        HookInsertBegin,
        HookMetricEmit,
        HookPeriodicJobsStart,
        HookWorkBegin,
        HookWorkEnd,
    )
    from riverpy.job import Job
    from riverpy.middleware import (
        JobInsertMiddleware,
        Middleware,
        Plugin,
        WorkerMiddleware,
        WorkInner,
    )

_HOOK_METHODS = ("insert_begin", "work_begin", "work_end", "periodic_jobs_start", "metric_emit")
_MIDDLEWARE_METHODS = ("insert_many", "work")
_SYNC_HOOK_METHOD = "metric_emit"


class ProcessWidePlugin(Protocol):
    """Worker middleware that a framework, such as Django, adds to all clients of this process."""

    @property
    def child_setup_path(self) -> str:
        """The path `module:function` of the plugin's setup function. Each child process that runs
        jobs calls the setup function when the process starts."""
        ...

    def around_blocking_job(self) -> AbstractContextManager[None]:
        """Return a context manager in which riverpy runs a blocking job. riverpy enters it in the
        thread that runs the job."""
        ...

    def work(self, job: Job[Any], do_inner: WorkInner, /) -> Awaitable[None]:
        """Run an attempt of a job inside this middleware; see `WorkerMiddleware.work`."""
        ...


process_wide_plugins: list[ProcessWidePlugin] = []
"""The process-wide plugins, which all clients of this process use. They are the outermost
middleware."""


def add_process_wide_plugin(plugin: ProcessWidePlugin) -> None:
    """Add a process-wide plugin, unless a plugin of the same class was added before. Clients that
    are already running do not use the new plugin."""
    if not any(type(one) is type(plugin) for one in process_wide_plugins):
        process_wide_plugins.append(plugin)


@contextmanager
def enter_blocking_job_contexts() -> Generator[None]:
    """Enter the context managers of all process-wide plugins around the `with` block. The caller
    runs a blocking job in this block."""
    with ExitStack() as stack:
        for plugin in process_wide_plugins:
            stack.enter_context(plugin.around_blocking_job())
        yield


class PluginLists:
    """The hooks and middleware of a client or args class, in one list for each method that riverpy
    calls. In each list, the plugins come before the hooks or the middleware. Plugins, hooks and
    middleware are each in the order in which they were passed."""

    def __init__(
        self,
        plugins: Sequence[Plugin] = (),
        hooks: Sequence[Hook] = (),
        middleware: Sequence[Middleware] = (),
    ) -> None:
        """Sort the objects into one list for each method. An object with several of these methods
        is in several lists.

        Raises:
            ConfigError: an object is not a plugin, hook or middleware.
        """
        _check_plugins("plugins", plugins, (*_HOOK_METHODS, *_MIDDLEWARE_METHODS))
        _check_plugins("hooks", hooks, _HOOK_METHODS)
        _check_plugins("middleware", middleware, _MIDDLEWARE_METHODS)
        all_hooks, all_middleware = [*plugins, *hooks], [*plugins, *middleware]
        self.insert_begin_hooks: list[HookInsertBegin] = _select_plugins_with_method(
            all_hooks, "insert_begin"
        )
        self.work_begin_hooks: list[HookWorkBegin] = _select_plugins_with_method(
            all_hooks, "work_begin"
        )
        self.work_end_hooks: list[HookWorkEnd] = _select_plugins_with_method(all_hooks, "work_end")
        self.periodic_jobs_start_hooks: list[HookPeriodicJobsStart] = _select_plugins_with_method(
            all_hooks, "periodic_jobs_start"
        )
        self.metric_emit_hooks: list[HookMetricEmit] = _select_plugins_with_method(
            all_hooks, "metric_emit"
        )
        self.insert_middleware: list[JobInsertMiddleware] = _select_plugins_with_method(
            all_middleware, "insert_many"
        )
        self.work_middleware: list[WorkerMiddleware] = _select_plugins_with_method(
            all_middleware, "work"
        )
        self.has_insert_plugins = bool(self.insert_begin_hooks or self.insert_middleware)
        """Whether a hook or middleware runs when jobs are inserted."""


def read_class_plugins(args_class: object) -> PluginLists:
    """Return the hooks and plugins that an args class declares in `hooks` and `plugins`.

    Raises:
        ConfigError: an object in `hooks` or `plugins` is not a hook or plugin.
    """
    return PluginLists(
        _read_class_variable(args_class, "plugins"), _read_class_variable(args_class, "hooks")
    )


def check_worker_middleware(owner: str, middleware: Sequence[WorkerMiddleware]) -> None:
    """Raise ConfigError unless each object is a worker middleware. `owner` is the name of the
    object that has the middleware, for the error text."""
    _check_plugins(f"the middleware of {owner}", middleware, ("work",))


def _read_class_variable(args_class: object, name: str) -> Sequence[Any]:
    """Return the class variable `name` of an args class, or an empty sequence if the class has no
    such variable. A field of this name does not count, because it is an argument of the job."""
    fields: tuple[str, ...] = getattr(args_class, "__struct_fields__", ())
    if isinstance(args_class, type) and dataclasses.is_dataclass(args_class):
        fields = tuple(field.name for field in dataclasses.fields(args_class))
    return () if name in fields else cast("Any", getattr)(args_class, name, ())


def _check_plugins(setting: str, plugins: object, allowed_methods: Sequence[str]) -> None:
    if isinstance(plugins, str) or not isinstance(plugins, Sequence):
        raise ConfigError(f"{setting} must be a list, got {type(plugins).__name__}")
    for one in cast("Sequence[object]", plugins):
        if isinstance(one, type):
            raise ConfigError(f"{setting} takes objects, got the class {one.__name__}: call it")
        found = [name for name in allowed_methods if callable(getattr(one, name, None))]
        if not found:
            raise ConfigError(
                f"{setting}: {plugin_name(one)} has none of the methods "
                f"{', '.join(allowed_methods)}; wrap a plain function in an adapter, as in "
                "HookWorkBeginFunc(function)"
            )
        for name in found:
            if is_async_function(getattr(one, name)) == (name == _SYNC_HOOK_METHOD):
                expected = "a plain function" if name == _SYNC_HOOK_METHOD else "an `async def`"
                raise ConfigError(f"{setting}: {name} of {plugin_name(one)} must be {expected}")


def plugin_name(plugin: object) -> str:
    """Return the name of a plugin, hook or middleware: the name of its class. For an adapter of a
    function, it is the name of the function."""
    name = getattr(getattr(plugin, "__wrapped__", plugin), "__qualname__", None)
    return name if isinstance(name, str) else type(plugin).__name__


def is_async_function(function: object) -> bool:
    """Return whether `function`, or its `__call__`, is an `async def`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 (an object with an async __call__)
    )


def _select_plugins_with_method(plugins: Sequence[object], method_name: str) -> list[Any]:
    return [one for one in plugins if callable(getattr(one, method_name, None))]
