"""InsertPlugins: the hooks and middleware around the inserts of one client.

Order of a batch: the client's middleware, then the middleware of each args class in the order of
the jobs, then the `insert_begin` hooks of each job (the client's first), then the statement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from riverpy._insert.row import params_of, row_of
from riverpy._middleware_chain import run_middleware
from riverpy._plugins import plugins_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from riverpy._insert.row import InsertRules, PreparedJob
    from riverpy._plugins import Plugins
    from riverpy._postgres.inserts import InsertRow
    from riverpy.insert_opts import InsertResult

T = TypeVar("T")


class InsertPlugins:
    """Runs the hooks and middleware around the inserts of one client."""

    def __init__(self, plugins: Plugins, rules: InsertRules) -> None:
        self._plugins, self._rules = plugins, rules
        self._by_class: dict[type, Plugins] = {}

    def is_empty_for(self, args: Sequence[object]) -> bool:
        """Whether no hook or middleware applies to an insert of these args. Raise ConfigError if an
        args class declares an object that is not a hook or plugin."""
        if self._plugins.has_insert:
            return False
        return not any(self._plugins_of(cls).has_insert for cls in set(map(type, args)))

    def _plugins_of(self, args_class: type) -> Plugins:
        plugins = self._by_class.get(args_class)
        if plugins is None:
            plugins = self._by_class[args_class] = plugins_of(args_class)
        return plugins

    async def insert(
        self, jobs: Sequence[PreparedJob], send: Callable[[list[InsertRow]], Awaitable[T]]
    ) -> T:
        """Run `send` inside the hooks and middleware of these jobs. Return the result of `send`.

        Raises:
            InsertError, ConfigError: a hook or middleware set a value that is not allowed.
            RuntimeError: a middleware did not call `do_inner` exactly once.
            BaseException: what a hook, a middleware or `send` raised.
        """
        params = tuple(params_of(job) for job in jobs)
        classes = [self._plugins_of(cls) for cls in dict.fromkeys(type(job.args) for job in jobs)]
        sent: list[T] = []

        async def insert() -> Sequence[InsertResult]:
            for job in params:
                hooks = (
                    *self._plugins.insert_begin,
                    *self._plugins_of(type(job.args)).insert_begin,
                )
                for hook in hooks:
                    await hook.insert_begin(job)
            rows = [
                row_of(job, changed, rules=self._rules)
                for job, changed in zip(jobs, params, strict=True)
            ]
            sent.append(await send(rows))
            results: object = sent[0]
            return cast("list[InsertResult]", results) if isinstance(results, list) else []

        await run_middleware(
            [*self._plugins.insert_many, *(one for cls in classes for one in cls.insert_many)],
            lambda middleware, do_inner: middleware.insert_many(params, do_inner),
            insert,
            may_catch=False,
        )
        return sent[0]
