"""InsertStacks: the hooks and middleware around the inserts of one client.

the client's middleware, then that of each args class of the batch, in the order of their jobs
  for each job its insert_begin hooks, the client's first
    the statement and its notification
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from riverpy._insert.row import params_of, row_of
from riverpy._plugins import plugins_of, through

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from riverpy._insert.row import InsertRow, InsertRules, PreparedJob
    from riverpy._plugins import Plugins
    from riverpy.insert_opts import InsertResult, JobInsertParams

T = TypeVar("T")


class InsertStacks:
    """What is around the inserts of one client."""

    def __init__(self, plugins: Plugins, rules: InsertRules) -> None:
        """
        Args:
            plugins: the client's.
            rules: by which it is checked what hooks and middleware have changed.
        """
        self._client, self._rules = plugins, rules
        self._kinds: dict[type, Plugins] = {}

    def is_empty_for(self, args: Sequence[object]) -> bool:
        """Whether nothing is around the insert of these args.

        Raises:
            ConfigError: an args class declares hooks or plugins that are none.
        """
        if self._client.has_insert:
            return False
        return not any(self._of(cls).has_insert for cls in set(map(type, args)))

    def _of(self, args_class: type) -> Plugins:
        plugins = self._kinds.get(args_class)
        if plugins is None:
            plugins = self._kinds[args_class] = plugins_of(args_class)
        return plugins

    async def insert(
        self, jobs: Sequence[PreparedJob], send: Callable[[list[InsertRow]], Awaitable[T]]
    ) -> T:
        """Insert jobs inside of what is around them. Returns what `send` did.

        Raises:
            InsertError: a hook or middleware set what is not allowed.
            RuntimeError: a middleware did not call its inner part once.
            BaseException: what a hook, a middleware or `send` raised.
        """
        params = tuple(params_of(job) for job in jobs)
        kinds = [self._of(cls) for cls in dict.fromkeys(type(job.args) for job in jobs)]
        sent: list[T] = []

        async def core() -> Sequence[InsertResult]:
            for job in params:
                await self._begin(job)
            rows = [
                row_of(job, changed, rules=self._rules)
                for job, changed in zip(jobs, params, strict=True)
            ]
            sent.append(await send(rows))
            results: object = sent[0]
            return cast("list[InsertResult]", results) if isinstance(results, list) else []

        await through(
            [*self._client.insert_many, *(one for kind in kinds for one in kind.insert_many)],
            lambda middleware, inner: middleware.insert_many(params, inner),
            core,
            may_catch=False,
        )
        return sent[0]

    async def _begin(self, job: JobInsertParams) -> None:
        for hook in (*self._client.insert_begin, *self._of(type(job.args)).insert_begin):
            await hook.insert_begin(job)
