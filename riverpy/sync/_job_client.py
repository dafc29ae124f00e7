"""BlockingJobClient: the client that `riverpy.sync.current_client` returns to a blocking job."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import TYPE_CHECKING, Any, TypeVar

from riverpy._without_loop import get_running_loop
from riverpy.errors import ClientStateError
from riverpy.sync.client import Client

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Iterator

    from riverpy._postgres.sessions.protocols import BlockingTransaction
    from riverpy.client import Client as AsyncClient

T = TypeVar("T")


class BlockingJobClient(Client):
    """The client for a blocking job, which runs in a thread of a worker.

    A call without `tx` runs in the worker's event loop, on the connections of the worker's client.
    A call with `tx` runs in the job's thread."""

    def __init__(self, client: AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
        """Create the client. `client` is the worker's client, and `loop` is the event loop in which
        it runs."""
        super().__init__(workers=client.workers, config=client.config)
        self._calls, self._loop = client, loop

    def _run_coroutine(self, call: Coroutine[Any, Any, T], tx: BlockingTransaction | None) -> T:
        if tx is not None:
            return super()._run_coroutine(call, tx)
        if get_running_loop() is self._loop:
            call.close()
            raise ClientStateError(
                "riverpy.sync.current_client() is for a blocking job in a thread: use "
                "riverpy.current_client() in an async job"
            )
        try:
            # `result()` needs no timeout, because the call has its own. The call receives a copy of
            # the job's context variables, so that the trace of the job continues.
            return asyncio.run_coroutine_threadsafe(call, self._loop).result()
        except (concurrent.futures.CancelledError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not self._loop.is_closed():
                raise
            call.close()
            raise ClientStateError("the worker has ended before the call") from error

    def _require_blocking_connection(self, tx: BlockingTransaction | None) -> None:
        if tx is None:
            raise ClientStateError(
                "run_once in a blocking job needs tx=, a connection or session that is not async: "
                "the worker's own connections are async, so fn cannot use them. Nothing was done"
            )

    def _iterate_results(
        self, found: AsyncGenerator[T], tx: BlockingTransaction | None
    ) -> Iterator[T]:
        if tx is not None:
            yield from super()._iterate_results(found, tx)
            return

        async def get_next() -> T:
            return await anext(found)

        async def close() -> None:
            await found.aclose()

        try:
            while True:
                try:
                    value = self._run_coroutine(get_next(), tx)
                except StopAsyncIteration:
                    return
                yield value
        finally:
            self._run_coroutine(close(), tx)
