"""Server-sent events: in a real server for one job and for all workers, and their text."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from litestar import Litestar, get
from litestar.params import FromPath
from litestar.response import Stream
from litestar.testing import TestClient
from starlette.requests import Request
from starlette.responses import StreamingResponse

import riverpy.web
from riverpy import Client, ClientStateError, Config, ConfigError, Event, EventKind
from riverpy.web import _event_endpoint, _event_stream
from riverpy.web._event_stream import encode_server_sent_event
from tests.web.test_servers import JOB_LOCK, PATIENCE, UVICORN, start

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    import httpx2

    from tests._database import Schema
    from tests.web.test_servers import Start

__all__ = ["start"]  # the fixture


REQUEST = Request({"type": "http", "headers": [], "path_params": {}})


class ReceivedEvent(NamedTuple):
    """A server-sent event, as a browser reads it."""

    name: str
    id: str
    data: Any


async def read_events(lines: AsyncIterator[str]) -> AsyncGenerator[ReceivedEvent]:
    """Yield the events of a stream, as a browser reads them."""
    fields: dict[str, str] = {}
    async for line in lines:
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = f"{fields[name]}\n{value}" if name in fields else value
        elif fields:
            yield ReceivedEvent(fields["event"], fields.get("id", ""), json.loads(fields["data"]))
            fields = {}


@asynccontextmanager
async def opened(
    http: httpx2.AsyncClient, path: str, **headers: str
) -> AsyncGenerator[AsyncGenerator[ReceivedEvent]]:
    """Open a stream of events."""
    async with http.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield read_events(answer.aiter_lines())


@pytest.mark.timeout(180)
async def test_real_server(start: Start) -> None:
    """A page receives the progress and the partial output of a running job, and its end. A browser
    that connects again with the last id gets nothing twice, and 204 after the end. A second stream
    has the events of all workers. An endpoint refuses streams beyond its limit, and forgets those
    whose reader has gone. At SIGTERM the server ends although streams are open."""
    async with start(UVICORN) as server, asyncio.timeout(2 * PATIENCE):
        http = server.http
        await server.until_answer()
        await server.connection.execute("SELECT pg_advisory_lock($1)", JOB_LOCK)
        job_id = (await http.post(f"/shown?lock={JOB_LOCK}")).text
        path = f"/jobs/{job_id}/events"
        async with opened(http, "/events") as all_events, opened(http, "/events"):
            assert (await http.get("/events")).status_code == 503
            output: object = None
            async with opened(http, path) as events:
                async for event in events:
                    output = event.data.get("output", output)
                    if output is not None and event.data["progress"] is not None:
                        break
            assert (event.name, output) == ("job", "a\r\nb\n\nevent: c")
            assert event.data["progress"]["text"] == "a\nb"
            assert event.data["state"] == "running"
            assert "args" not in event.data
            async with opened(http, path, **{"Last-Event-ID": event.id}) as events:
                await server.connection.execute("SELECT pg_advisory_unlock($1)", JOB_LOCK)
                rest = [one async for one in events]
            assert event.id not in {one.id for one in rest}
            assert [one.name for one in rest][-2:] == ["job", "end"]
            assert (rest[-1].data["state"], rest[-1].data["is_final"]) == ("completed", True)
            async for one in all_events:
                if one.name == "job_completed":
                    break
            assert (one.data["job_id"], one.data["kind"]) == (int(job_id), "show")
        last = await http.get(path, headers={"Last-Event-ID": rest[-1].id})
        assert last.status_code == 204
        for wrong in ("404", "x", "-1", "9" * 30):
            assert (await http.get(f"/jobs/{wrong}/events")).status_code == 404
        async with opened(http, "/events"), opened(http, "/events"):
            server.process.terminate()
            assert await server.process.wait() == -signal.SIGTERM  # uvicorn ends by the signal
        assert server.read_output().count("own lifespan ended") == 1


async def test_litestar(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of a stream are a response of Litestar. A heartbeat comes while nothing happens. A
    job that is deleted ends its stream. A stream begins before the row if the database is slow. The
    subscription of a stream that is never read ends. A hundred waiting events are one part."""
    monkeypatch.setattr(_event_endpoint, "FIRST_READ_TIMEOUT", 0.0)
    monkeypatch.setattr(_event_stream, "HEARTBEAT_INTERVAL", 0.05)
    monkeypatch.setattr(_event_stream, "SERVER_STOP_POLL_INTERVAL", 0.01)
    await schema.execute(
        "INSERT INTO river_job (args, kind, max_attempts) VALUES ('{}', 'any', 25)"
    )
    client = Client(schema.url, config=Config(schema=schema.name))

    @get("/jobs/{job_id:int}/events")
    async def send_job_events(job_id: int) -> Stream:
        stream = riverpy.web.event_stream(client, job_id=job_id)
        return Stream(stream, media_type="text/event-stream")

    send_job_events.fn.__annotations__ = {"job_id": FromPath[int], "return": Stream}
    app = Litestar([send_job_events], lifespan=[riverpy.web.lifespan(client)])

    def send_request() -> str:
        with TestClient(app) as http:
            return http.get("/jobs/7/events").text

    assert "event: deleted" in await asyncio.to_thread(send_request)
    with pytest.raises(ClientStateError, match="not open"):
        async for _ in riverpy.web.event_stream(client, job_id=1):
            pass
    async with asyncio.timeout(PATIENCE):
        async with client:
            watching = riverpy.web.event_stream(client, job_id=1)
            assert await anext(watching) == b": riverpy\n\n"
            parts = [await anext(watching)]
            while parts[-1] != b": heartbeat\n\n" or len(parts) < 3:
                parts.append(await anext(watching))
            [first] = [one for one in parts if not one.startswith(b":")]
            assert first.startswith(b"event: job\nid: ")
            response = await riverpy.web.events(client, job_id=1)(REQUEST)
            assert isinstance(response, StreamingResponse)
            body = aiter(response.body_iterator)
            assert [await anext(body), await anext(body)] == [b": riverpy\n\n", first]
            await riverpy.web.events(client)(REQUEST)  # its reader has gone before the answer
            while client._fleet_follower._open_streams:
                await asyncio.sleep(0)
            await schema.execute("DELETE FROM river_job")
            rest = [part async for part in watching if not part.startswith(b":")]
            assert rest == [b'event: deleted\ndata: {"id":1}\n\n']
            open_stream = riverpy.web.event_stream(client, kinds=["a"])
            await anext(open_stream)
            [stream] = client._fleet_follower._open_streams
            for number in range(101):
                stream.put(Event(EventKind.QUEUE_PAUSED, queue=f"q{number}"))
            parts = [await anext(open_stream) for _ in range(2)]
            assert [part.count(b"event: queue_paused") for part in parts] == [100, 1]
        assert [part async for part in open_stream if not part.startswith(b":")] == []


def test_text_of_events() -> None:
    """No line end in a name, an id or the data can end an event or begin another field."""
    assert encode_server_sent_event("a\nb", b"1\r\n2\r3\nevent: x", "4\n5") == (
        b"event: a b\nid: 4 5\ndata: 1\ndata: 2\ndata: 3\ndata: event: x\n\n"
    )


async def test_refused_values() -> None:
    """Wrong values are refused when the endpoint is made. Each endpoint raises if the client is not
    open."""
    client = Client("postgres://nobody@127.0.0.1:1/none")
    for options, text in (
        ({"job_id": 1, "kinds": ["a"]}, "job_id follows one job"),
        ({"kinds": "a"}, "job_kinds is a list"),
        ({"max_streams": 0}, "whole number from 1"),
        ({"max_streams": "x"}, "whole number from 1, got 'x'"),
        ({"event_kinds": ["x"]}, "not a kind of events"),
        ({"event_kinds": []}, "name the kinds"),
        ({"event_kinds": "job_failed"}, "event_kinds is a list"),
        *(({"job_id": wrong}, "job_id") for wrong in (True, 1.5, "", "{id}", 2**63, [1])),
    ):
        with pytest.raises(ConfigError, match=text):
            riverpy.web.events(client, **options)  # type: ignore[arg-type]
    for job_id in (None, 1):
        with pytest.raises(ClientStateError, match="not open"):
            await riverpy.web.events(client, job_id=job_id)(REQUEST)
    with pytest.raises(ConfigError, match=r"is a riverpy\.Client"):
        riverpy.web.events(object())  # type: ignore[arg-type]
