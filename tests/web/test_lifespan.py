"""The lifespan of a web application, and the dependencies, in each framework."""

from __future__ import annotations

import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import litestar
import litestar.testing
import pytest
from fastapi import APIRouter, Depends, FastAPI, WebSocket
from litestar.di import NamedDependency
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.testclient import TestClient

import riverpy
import riverpy.web
from riverpy import ClientStateError, ConfigError, EventKind, QueueConfig
from riverpy._log_events import WEB_WORKER_FAILED
from riverpy._work.producer import Producer
from tests.work.rig import Task

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from tests.work.rig import Rig

ClientInFastApi = Annotated[riverpy.Client, Depends(riverpy.web.client)]
ClientInLitestar = NamedDependency[riverpy.Client]


async def insert_and_wait(client: riverpy.Client) -> dict[str, Any]:
    """Insert a job, and wait until the client has worked it."""
    async with client.subscribe(EventKind.JOB_COMPLETED) as events:
        result = await client.insert(Task())
        event = await anext(aiter(events))
    return {"is_worked": event.job.id == result.job.id}


def fastapi_app(lifespan: Callable[[Any], Any]) -> Any:
    """An application with a route of each protocol, in a router."""
    router = APIRouter()

    @router.post("/jobs")
    async def insert(client: ClientInFastApi) -> dict[str, Any]:
        return await insert_and_wait(client)

    @router.websocket("/socket")
    async def socket(websocket: WebSocket, client: ClientInFastApi) -> None:
        await websocket.accept()
        await websocket.send_json(await insert_and_wait(client))
        await websocket.close()

    app = FastAPI(lifespan=lifespan)
    app.include_router(router)
    return app


def starlette_app(lifespan: Callable[[Any], Any]) -> Any:
    """The same routes, in a mounted application, which has the client too."""

    async def insert(request: Any) -> JSONResponse:
        return JSONResponse(await insert_and_wait(request.state.riverpy))

    async def socket(websocket: Any) -> None:
        await websocket.accept()
        await websocket.send_json(await insert_and_wait(websocket.state.riverpy))
        await websocket.close()

    routes = [Route("/jobs", insert, methods=["POST"]), WebSocketRoute("/socket", socket)]
    return Starlette(routes=[Mount("/", app=Starlette(routes=routes))], lifespan=lifespan)


def litestar_app(lifespan: Callable[[Any], Any]) -> Any:
    """The same routes."""

    @litestar.post("/jobs", status_code=200)
    async def insert(client: ClientInLitestar) -> dict[str, Any]:
        return await insert_and_wait(client)

    @litestar.websocket("/socket")
    async def socket(socket: litestar.WebSocket[Any, Any, Any], client: ClientInLitestar) -> None:
        await socket.accept()
        await socket.send_json(await insert_and_wait(client))
        await socket.close()

    return litestar.Litestar(
        [insert, socket], lifespan=[lifespan], dependencies={"client": riverpy.web.litestar_client}
    )


FRAMEWORKS = [
    (fastapi_app, TestClient),
    (starlette_app, TestClient),
    (litestar_app, litestar.testing.TestClient),
]


@pytest.mark.parametrize(("make_app", "test_client"), FRAMEWORKS)
async def test_frameworks(rig: Rig, make_app: Callable[..., Any], test_client: Any) -> None:
    """Requests of both protocols have the client, and a client has several lifespans one after
    another. It is open while the inner lifespan starts and stops, and works jobs between these."""
    steps: list[tuple[str, bool, bool]] = []
    client = rig.client()

    @asynccontextmanager
    async def inner(app: object) -> AsyncGenerator[dict[str, object]]:
        steps.append((type(app).__name__, client.is_open, client.is_running))
        yield {"own": 1}
        steps.append(("end", client.is_open, client.is_running))

    rig.register_task()
    app = make_app(riverpy.web.lifespan(client, work=True, inner=inner))
    for _ in range(2):
        with test_client(app) as http:
            assert client.is_running
            assert http.post("/jobs").json() == {"is_worked": True}
            with http.websocket_connect("/socket") as socket:
                assert socket.receive_json() == {"is_worked": True}
        assert not client.is_open
    assert steps == [(type(app).__name__, True, False), ("end", True, False)] * 2


async def test_states(rig: Rig) -> None:
    """The keys of the inner state are kept beside the client. A lifespan without jobs works none.
    After the end, a request has no client, and an inner state with riverpy's key is refused."""
    client = rig.client()

    @asynccontextmanager
    async def inner(app: object) -> AsyncGenerator[dict[str, object]]:
        yield {key: 1}

    key = "own"
    lifespan = riverpy.web.lifespan(client, inner=inner)
    async with lifespan(None) as state:
        assert state == {"own": 1, "riverpy": client}
        assert (client.is_open, client.is_running) == (True, False)
    key = "riverpy"
    with pytest.raises(ConfigError, match="key 'riverpy'"):
        async with lifespan(None):
            pass
    assert not client.is_open
    with pytest.raises(ClientStateError, match=r"lifespan=riverpy\.web\.lifespan"):
        TestClient(fastapi_app(lifespan)).post("/jobs")
    with pytest.raises(ClientStateError, match="open already"):
        async with riverpy.web.lifespan(client)(None), riverpy.web.lifespan(client)(None):
            pass


async def test_failed_start(rig: Rig, unused_tcp_port: int) -> None:
    """A client that cannot open or work, and an inner lifespan that fails, fail the start. Then the
    client is closed and can be opened again."""

    @asynccontextmanager
    async def broken(app: object) -> AsyncGenerator[None]:
        raise ZeroDivisionError("broken")
        yield

    async def undecorated(app: object) -> AsyncGenerator[None]:
        yield

    rig.register_task()
    client = rig.client()
    unreachable = riverpy.Client(f"postgres://nobody@127.0.0.1:{unused_tcp_port}/none")
    no_tables = rig.client(schema="none")
    web = riverpy.web.lifespan
    with pytest.raises(OSError, match="connection refused") as raised:
        async with web(unreachable)(None):
            pass
    assert raised.value.__notes__ == ["riverpy.web.lifespan could not open the client"]
    for lifespan, error, text in (
        (web(client, inner=broken), ZeroDivisionError, "broken"),
        (web(client, work=True, inner=undecorated), ConfigError, "@asynccontextmanager"),  # type: ignore[call-overload]
        (web(riverpy.Client(rig.url), work=True), ConfigError, "no queue"),
        (web(no_tables, work=True), riverpy.SchemaMissingError, "none"),
    ):
        with pytest.raises(error, match=text):
            TestClient(Starlette(lifespan=lifespan)).__enter__()
        assert not client.is_open
    async with client:
        pass
    for arguments in ({"client": "postgres://"}, {"client": client, "inner": broken(None)}):
        with pytest.raises(ConfigError):
            web(**arguments)  # type: ignore[call-overload]


async def test_fault(rig: Rig, monkeypatch: pytest.MonkeyPatch, log: list[Any]) -> None:
    """A fault of riverpy during the lifespan is logged, and ends a lifespan that is not a server's
    with its error. An error of the block is raised as it is, after the client has stopped."""
    client = rig.client(queues={"default": QueueConfig(max_workers=1)})

    rig.register_task()
    lifespan = riverpy.web.lifespan(client, work=True)
    own = KeyError("own")
    with pytest.raises(KeyError) as raised:
        async with lifespan(None):
            raise own
    assert raised.value is own
    assert not client.is_open

    faulty = anyio.Event()

    async def fail(*_: object) -> None:
        await faulty.wait()
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(Producer, "_wait_until_next_claim", fail)
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):  # noqa: PT012
        async with lifespan(None):
            faulty.set()
            await anyio.sleep_forever()
    assert not client.is_open
    assert [entry["event"] for entry in log].count(WEB_WORKER_FAILED) == 1


async def test_cancelled_lifespan(rig: Rig) -> None:
    """A server that must end at once cancels the lifespan. Then running jobs are cancelled without
    a wait, and their attempts do not count."""
    is_running = anyio.Event()

    @rig.job(timeout=None)
    async def work(job: riverpy.Job[Task]) -> None:
        is_running.set()
        await anyio.sleep_forever()

    client = rig.client(soft_stop_timeout=None)
    with anyio.CancelScope() as scope:
        async with riverpy.web.lifespan(client, work=True)(None):
            await client.insert(Task())
            await is_running.wait()
            scope.cancel()
            await anyio.sleep_forever()
    assert not client.is_open
    assert [(job["state"], job["attempt"]) for job in await rig.schema.jobs()] == [("available", 0)]


def test_imports() -> None:
    """`import riverpy.web` imports no framework, and a missing framework has a clear error."""
    code = """
import sys, riverpy.web
assert not {"starlette", "fastapi", "litestar"} & set(sys.modules)
sys.modules["starlette.requests"] = sys.modules["litestar.datastructures"] = None
for name in ("client", "litestar_client"):
    try:
        getattr(riverpy.web, name)
    except ImportError as error:
        print(error)
assert not hasattr(riverpy.web, "other")
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert printed.decode().count(": pip install ") == 2
