"""Clients of one language that insert jobs and control jobs and queues. Both languages return
results in the same form."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import asyncpg
import msgspec

from riverpy import Client, Config, JobRunningError, NotFoundError, RiverError
from tests.interop.inserting import params_of
from tests.interop.read_rows import (
    queue_read_by_go,
    queue_read_by_python,
    read_by_go,
    read_by_python,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from riverpy import JobRow
    from tests._database import Schema
    from tests.interop.inserting import Request
    from tests.interop.river_go import GoProcess, RiverGo, Row


class Refused(Exception):
    """A call failed. The text is the error's."""


class NotThere(Refused):
    """The job or the queue does not exist."""


class Running(Refused):
    """The job is running."""


class Page(NamedTuple):
    """A page of a list of jobs."""

    rows: list[Row]
    cursor: str | None

    @property
    def ids(self) -> list[int]:
        """The ids of the jobs."""
        return [row["id"] for row in self.rows]


class Caller(Protocol):
    """A client of one language.

    All calls between `begin` and `commit` or `rollback` run in one transaction. Rows have the form
    of `read_rows.py`. Every call raises NotThere or Refused.
    """

    language: str

    async def begin(self) -> None: ...
    async def commit(self) -> None: ...
    async def rollback(self) -> None: ...
    async def fail(self) -> None:
        """Run a statement that fails."""
        ...

    async def insert(self, request: Request, /) -> Row: ...
    async def insert_many(self, *requests: Request) -> list[Row]: ...
    async def insert_unique(self, *requests: Request) -> list[tuple[Row, bool]]:
        """Insert one request alone, or several in a batch. Return each row, and whether it existed
        before."""
        ...

    async def insert_many_fast(self, *requests: Request) -> int: ...
    async def get(self, job_id: int, /) -> Row: ...
    async def cancel(self, job_id: int, /) -> Row: ...
    async def retry(self, job_id: int, /) -> Row: ...
    async def delete(self, job_id: int, /) -> Row: ...
    async def list_jobs(self, **params: Any) -> Page:
        """List jobs with the params of `go/session.go`."""
        ...

    async def delete_many(self, **params: Any) -> list[Row]: ...
    async def set_output(self, job_id: int, value: Any, /) -> Row: ...
    async def queue_get(self, name: str, /) -> Row: ...
    async def queue_list(self) -> list[Row]: ...
    async def queue_update(self, name: str, metadata: dict[str, Any], /) -> Row: ...
    async def pause(self, name: str, /) -> None: ...
    async def resume(self, name: str, /) -> None: ...


class GoCaller:
    """River in Go: a process that executes commands (`go/session.go`)."""

    language = "go"

    def __init__(self, process: GoProcess) -> None:
        self._process = process

    async def _do(self, do: str, **command: Any) -> Any:
        self._process.send({"do": do, **command})
        answer = await self._process.line()
        if "error" not in answer:
            return answer["result"]
        kinds = {"not_found": NotThere, "running": Running}
        raise kinds.get(answer["kind"], Refused)(answer["error"])

    async def _job(self, do: str, job_id: int, **command: Any) -> Row:
        return read_by_go(await self._do(do, id=job_id, **command))

    async def begin(self) -> None:
        await self._do("begin")

    async def commit(self) -> None:
        await self._do("commit")

    async def rollback(self) -> None:
        await self._do("rollback")

    async def fail(self) -> None:
        await self._do("fail")

    async def insert(self, request: Request, /) -> Row:
        ((row, _),) = await self.insert_unique(request)
        return row

    async def insert_many(self, *requests: Request) -> list[Row]:
        return [inserted(row)[0] for row in await self._do("insert_many", requests=requests)]

    async def insert_unique(self, *requests: Request) -> list[tuple[Row, bool]]:
        if len(requests) == 1:
            return [inserted(await self._do("insert", requests=requests))]
        return [inserted(row) for row in await self._do("insert_many", requests=requests)]

    async def insert_many_fast(self, *requests: Request) -> int:
        return await self._do("insert_many_fast", requests=requests)

    async def get(self, job_id: int, /) -> Row:
        return await self._job("get", job_id)

    async def cancel(self, job_id: int, /) -> Row:
        return await self._job("cancel", job_id)

    async def retry(self, job_id: int, /) -> Row:
        return await self._job("retry", job_id)

    async def delete(self, job_id: int, /) -> Row:
        return await self._job("delete", job_id)

    async def list_jobs(self, **params: Any) -> Page:
        if "metadata" in params:
            params["metadata"] = msgspec.json.encode(params["metadata"]).decode()
        page = await self._do("list", params=params)
        return Page([read_by_go(row) for row in page["jobs"]], page["cursor"])

    async def delete_many(self, **params: Any) -> list[Row]:
        return [read_by_go(row) for row in await self._do("delete_many", params=params)]

    async def set_output(self, job_id: int, value: Any, /) -> Row:
        return await self._job("output", job_id, value=value)

    async def queue_get(self, name: str, /) -> Row:
        return queue_read_by_go(await self._do("queue_get", queue=name))

    async def queue_list(self) -> list[Row]:
        return [queue_read_by_go(queue) for queue in await self._do("queue_list")]

    async def queue_update(self, name: str, metadata: dict[str, Any], /) -> Row:
        return queue_read_by_go(await self._do("queue_update", queue=name, value=metadata))

    async def pause(self, name: str, /) -> None:
        await self._do("pause", queue=name)

    async def resume(self, name: str, /) -> None:
        await self._do("resume", queue=name)


def inserted(answer: Row) -> tuple[Row, bool]:
    """Return the row of an insert's answer, and whether it belongs to an earlier job."""
    row = read_by_go(answer)
    del row["encoded_args"]
    return row, row.pop("unique_skipped_as_duplicate")


class PythonCaller:
    """riverpy with a client that works no jobs; `connection` is for its transactions."""

    language = "python"

    def __init__(self, client: Client, connection: asyncpg.Connection[Any]) -> None:
        self._client = client
        self._connection = connection
        self._in_transaction = False

    @property
    def _tx(self) -> asyncpg.Connection[Any] | None:
        return self._connection if self._in_transaction else None

    async def begin(self) -> None:
        await self._connection.execute("BEGIN")
        self._in_transaction = True

    async def commit(self) -> None:
        await self._end("COMMIT")

    async def rollback(self) -> None:
        await self._end("ROLLBACK")

    async def _end(self, how: str) -> None:
        self._in_transaction = False
        answer = await self._connection.execute(how)
        if answer != how:
            raise Refused(f"{how} was answered by {answer}")

    async def fail(self) -> None:
        try:
            await self._connection.execute("SELECT 1/0")
        except asyncpg.PostgresError as error:
            raise Refused(str(error)) from error

    async def insert(self, request: Request, /) -> Row:
        ((row, _),) = await self.insert_unique(request)
        return row

    async def insert_many(self, *requests: Request) -> list[Row]:
        return [row for row, _ in await self._insert_many(*requests)]

    async def insert_unique(self, *requests: Request) -> list[tuple[Row, bool]]:
        if len(requests) > 1:
            return await self._insert_many(*requests)
        with refusals():
            params = params_of(requests[0])
            result = await self._client.insert(params.args, params.opts, tx=self._tx)
            return [(read_by_python(result.job), result.unique_skipped_as_duplicate)]

    async def _insert_many(self, *requests: Request) -> list[tuple[Row, bool]]:
        with refusals():
            params = [params_of(request) for request in requests]
            results = await self._client.insert_many(params, tx=self._tx)
            return [
                (read_by_python(result.job), result.unique_skipped_as_duplicate)
                for result in results
            ]

    async def insert_many_fast(self, *requests: Request) -> int:
        with refusals():
            params = [params_of(request) for request in requests]
            return await self._client.insert_many_fast(params, tx=self._tx)

    async def get(self, job_id: int, /) -> Row:
        with refusals():
            return read_by_python(await self._client.job_get(job_id, tx=self._tx))

    async def cancel(self, job_id: int, /) -> Row:
        with refusals():
            return read_by_python(await self._client.job_cancel(job_id, tx=self._tx))

    async def retry(self, job_id: int, /) -> Row:
        with refusals():
            return read_by_python(await self._client.job_retry(job_id, tx=self._tx))

    async def delete(self, job_id: int, /) -> Row:
        with refusals():
            return read_by_python(await self._client.job_delete(job_id, tx=self._tx))

    async def list_jobs(self, **params: Any) -> Page:
        if "order" in params:
            params["order_by"] = params.pop("order")
        with refusals():
            page = await self._client.job_list(**params, tx=self._tx)
            assert page.damaged == {}
            return Page([read_by_python(job) for job in page.jobs], page.cursor)

    async def delete_many(self, **params: Any) -> list[Row]:
        with refusals():
            jobs = await self._client.job_delete_many(**params, tx=self._tx)
            return [read_by_python(job) for job in jobs]

    async def set_output(self, job_id: int, value: Any, /) -> Row:
        with refusals():
            job: JobRow = await self._client.job_update(job_id, output=value, tx=self._tx)
            return read_by_python(job)

    async def queue_get(self, name: str, /) -> Row:
        with refusals():
            return queue_read_by_python(await self._client.queue_get(name, tx=self._tx))

    async def queue_list(self) -> list[Row]:
        with refusals():
            queues = await self._client.queue_list(tx=self._tx)
            return [queue_read_by_python(queue) for queue in queues]

    async def queue_update(self, name: str, metadata: dict[str, Any], /) -> Row:
        with refusals():
            queue = await self._client.queue_update(name, metadata=metadata, tx=self._tx)
            return queue_read_by_python(queue)

    async def pause(self, name: str, /) -> None:
        with refusals():
            await self._client.queue_pause(name, tx=self._tx)

    async def resume(self, name: str, /) -> None:
        with refusals():
            await self._client.queue_resume(name, tx=self._tx)


@contextmanager
def refusals() -> Generator[None]:
    """Convert riverpy's errors to those of this module."""
    try:
        yield
    except NotFoundError as error:
        raise NotThere(str(error)) from error
    except JobRunningError as error:
        raise Running(str(error)) from error
    except RiverError as error:
        raise Refused(str(error)) from error


@asynccontextmanager
async def both_callers(go: RiverGo, schema: Schema) -> AsyncGenerator[dict[str, Caller]]:
    """Yield a caller of each language by its name."""
    config = Config(schema=schema.name, skip_unknown_job_check=True)
    async with AsyncExitStack() as stack:
        process = await stack.enter_async_context(go.process("session"))
        client = await stack.enter_async_context(Client(schema.url, config=config))
        connection = await stack.enter_async_context(schema.connected())
        yield {"go": GoCaller(process), "python": PythonCaller(client, connection)}
