"""The JSON API: its answers and errors, its OpenAPI document, and who may use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate
from starlette.applications import Starlette
from starlette.routing import Mount

from riverpy import Client, Config
from riverpy._dashboard.api import jobs, status
from riverpy._dashboard.api.application import ENDPOINTS
from riverpy._log_events import DASHBOARD_CHANGED_JOBS, DASHBOARD_MADE_A_CHANGE
from riverpy.web import Access, dashboard
from tests.dashboard.site_kit import SAME_SITE, Browser, insert_job
from tests.kit.damaged_rows import damage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    import httpx
    from starlette.requests import Request

    from tests._database import Schema

JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def client(schema: Schema) -> AsyncGenerator[Client]:
    """An open client."""
    async with Client(schema.url, config=Config(schema=schema.name, pool_size=2)) as client:
        yield client


class Api:
    """Sends requests to the API, and compares each answer with the OpenAPI document."""

    def __init__(self, browser: Browser, document: Mapping[str, Any]) -> None:
        self._browser, self._document = browser, document
        self.used: set[tuple[str, str]] = set()
        """The methods and paths of the document that were used."""

    async def send(
        self, method: str, path: str, *, status: int = 200, json: Any = None, **headers: str
    ) -> Any:
        """Send a request as a program does, and return the members of the answer."""
        sent = JSON | headers if method != "GET" else headers
        answer = await self._browser.request(method, f"/api{path}", json=json, headers=sent)
        assert answer.status_code == status, answer.text
        self._check(method, path.partition("?")[0], answer)
        return answer.json()

    def _check(self, method: str, path: str, answer: httpx.Response) -> None:
        assert answer.headers["content-type"] == "application/json"
        described = self._find(method, path)
        responses = self._document["paths"][described][method.lower()]["responses"]
        response = responses.get(str(answer.status_code), responses["default"])
        schema = response["content"]["application/json"]["schema"]
        components = {"components": self._document["components"]}
        Draft202012Validator(_forbid_more_members({**schema, **components})).validate(answer.json())

    def _find(self, method: str, path: str) -> str:
        """Return the path of the document that fits."""
        words = path.split("/")
        for described, operations in self._document["paths"].items():
            pairs = list(zip(described.split("/"), words, strict=False))
            is_fitting = len(words) == len(described.split("/"))
            is_fitting &= all("{" in name or name == word for name, word in pairs)
            if is_fitting and method.lower() in operations:
                self.used.add((method, described))
                return described
        raise AssertionError(f"{method} {path} is not described")


def _forbid_more_members(schema: Any) -> Any:
    """Return a schema that also refuses members that it does not describe."""
    if isinstance(schema, list):
        return [_forbid_more_members(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: _forbid_more_members(value) for key, value in schema.items()}
    return changed | ({"additionalProperties": False} if "properties" in schema else {})


async def open_api(browser: Browser) -> Api:
    """Return the API of a dashboard. Its document is valid."""
    document = (await browser.get("/api/openapi.json")).json()
    validate(document)
    return Api(browser, document)


async def test_answers(schema: Schema, client: Client, log: list[dict[str, Any]]) -> None:
    """Each endpoint answers as the document says, with no member more. The document has each
    endpoint. Args are text with exact numbers. Changes of jobs are made for all ids or for none,
    and are logged with their user, as changes of queues are."""
    error = (
        "jsonb_build_object('at', '2026-01-02T03:04:05Z', 'attempt', 1,"
        " 'error', 'postgres://u:s3cret@h/d', 'trace', 'x')"
    )
    job_id = await insert_job(
        schema,
        "discarded",
        kind="'Mail'",
        args="'{\"n\": 12345678901234567890123}'",
        metadata="'{\"n\": 0.10}'",
        errors=f"array[{error}]",
        tags="array['a']",
    )
    taken = await insert_job(schema, "discarded", unique_key="'x'", unique_states="b'11111111'")
    running = await insert_job(schema, "running", attempted_by="array['c']", attempted_at="now()")
    await schema.execute(
        "INSERT INTO river_queue (name, updated_at, metadata)"
        " VALUES ('default', now(), '{\"kept\": 1}'), ('a/b', now(), '{}')"
    )

    def authorize(_: Request) -> Access:
        return Access("write", user="ann")

    async with Browser(dashboard(client, authorize=authorize)) as browser:
        api = await open_api(browser)
        (found,) = (await api.send("GET", "/jobs?state=discarded&kinds=Mail&tags=z&tags=a"))["data"]
        assert found["id"] == job_id
        assert found["args"] == '{"n": 12345678901234567890123}'
        details = await api.send("GET", f"/jobs/{job_id}")
        assert details["errors"][0] == {
            "at": "2026-01-02T03:04:05Z",
            "attempt": 1,
            "trace": "x",
            "error": "postgres://u:***@h/d",
        }
        assert b'"metadata":{"n": 0.10}' in (await browser.get(f"/api/jobs/{job_id}")).content
        assert [one["id"] for one in (await api.send("GET", "/jobs"))["data"]] == [running]
        first = await api.send("GET", "/jobs?state=discarded&limit=1")
        second = await api.send(
            "GET", f"/jobs?state=discarded&limit=1&after={first['next_cursor']}"
        )
        pages = first["data"] + second["data"]
        assert {one["id"] for one in pages} == {job_id, taken}
        assert (await api.send("GET", "/jobs?limit=0"))["data"] == []
        for name in ("default", "a/b"):
            await api.send("PUT", f"/queues/{name.replace('/', '%2F')}/pause")
        queues = (await api.send("GET", "/queues?limit=100"))["data"]
        assert [(one["name"], one["count_running"]) for one in queues] == [
            ("a/b", 0),
            ("default", 1),
        ]
        assert all(one["paused_at"] for one in queues)
        await api.send("PUT", "/queues/default/resume")
        limit = {"global_limit": 5, "local_limit": 0, "partition": {"by_args": [], "by_kind": True}}
        changed = await api.send("PATCH", "/queues/default", json={"concurrency": limit})
        assert changed["concurrency"] == limit
        await api.send("PATCH", "/queues/default", json={})
        assert (await api.send("GET", "/queues/default"))["concurrency"] == limit
        await api.send("PATCH", "/queues/default", json={"concurrency": None})
        assert (await client.queue_get("default")).metadata == {"kept": 1}
        states = await api.send("GET", "/states")
        assert states["discarded"]["count"] == 2
        assert not any((await api.send("GET", "/features"))["extensions"].values())
        for path, names in (
            ("facet=job_kind&match=MAI", ["Mail"]),
            ("facet=job_kind&after=Mail", ["k"]),
            ("facet=job_kind&exclude=Mail&exclude=k", []),
            ("facet=queue_name&match=/", ["a/b"]),
        ):
            assert (await api.send("GET", f"/autocomplete?{path}"))["data"] == names
        for check in ("complete", "minimal"):
            await api.send("GET", f"/health-checks/{check}")
        assert "riverpy" in (await api.send("GET", "/version"))["version"]
        refusals: list[tuple[str, list[Any], int]] = [
            *[("delete", [str(job_id), running], 400), ("cancel", [str(job_id), "99"], 404)],
            *[("retry", [], 400), ("retry", ["x"], 400), ("retry", [1] * 1001, 400)],
        ]
        await insert_job(schema, unique_key="'y'", unique_states="b'11111111'")
        await schema.execute("UPDATE river_job SET unique_states = '00000001' WHERE id = $1", taken)
        refused = await insert_job(
            schema, "discarded", unique_key="'y'", unique_states="b'00000001'"
        )
        refusals.append(("retry", [job_id, refused], 409))
        for action, ids, status in refusals:
            problem = await api.send("POST", f"/jobs/{action}", json={"ids": ids}, status=status)
            assert problem.keys() == {"message"}
        assert (await client.job_get(job_id)).state == "discarded"
        assert not [one for one in log if one["event"] == DASHBOARD_CHANGED_JOBS]
        for action in ("retry", "cancel", "delete"):
            await api.send("POST", f"/jobs/{action}", json={"ids": [str(job_id), taken]})
        await api.send("GET", f"/jobs/{job_id}", status=404)
        await api.send("GET", "/queues/none", status=404)
        assert api.used == {
            (one.method, one.path.replace(":path", "").replace(":int", "")) for one in ENDPOINTS
        }
    changes = [one for one in log if one["event"] == DASHBOARD_CHANGED_JOBS]
    assert [(one["action"], one["user"], one["changed"]) for one in changes] == [
        *[("retry", "ann", 2), ("cancel", "ann", 2), ("delete", "ann", 2)],
    ]
    others = [one for one in log if one["event"] == DASHBOARD_MADE_A_CHANGE]
    assert [one["target"] for one in others] == ["default", "a/b", *["default"] * 3]
    assert {one["user"] for one in others} == {"ann"}


async def test_requests_of_river_ui(schema: Schema, client: Client) -> None:
    """The requests of River UI's pages are answered: its changes come from the same site, and have
    no JSON type. Values that River UI ignores are ignored."""
    job_id = await insert_job(schema, "retryable")
    await schema.execute("INSERT INTO river_queue (name, updated_at) VALUES ('q', now())")
    app = Starlette(routes=[Mount("/ui", dashboard(client))])
    async with Browser(app) as browser:
        for path in (
            *("features", "states", "version", "queues?limit=100", "queues/q", f"jobs/{job_id}"),
            *("jobs?limit=20&state=retryable", "jobs?limit=20&priorities=1&queues=q&ids=1"),
            *("autocomplete?facet=job_kind&match=m", "pro"),
        ):
            answer = await browser.get(f"/ui/api/{path}")
            assert answer.status_code == (404 if path == "pro" else 200)
            assert answer.headers["content-type"] == "application/json"
        text = {**SAME_SITE, "Content-Type": "text/plain;charset=UTF-8"}
        body = f'{{"ids":["{job_id}"]}}'
        answer = await browser.post("/ui/api/jobs/cancel", content=body, headers=text)
        assert answer.json() == {"status": "ok"}
        answer = await browser.put("/ui/api/queues/q/pause", headers=SAME_SITE)
        assert answer.status_code == 200
        document = (await browser.get("/ui/api/openapi.json")).json()
        assert document["servers"] == [{"url": "/ui/api"}]
    assert (await client.job_get(job_id)).state == "cancelled"


async def test_who_may_use_it(schema: Schema, client: Client) -> None:
    """`authorize`, `read_only`, hidden args and masks hold in the API too. A change is refused if
    another site may have sent it. Requests that cannot be read get an error, and change nothing."""
    job_id = await insert_job(schema, args="'{\"card\": 4242}'")

    def choose(request: Request) -> Any:
        return request.headers.get("as")

    change = f'{{"ids": [{job_id}]}}'
    async with Browser(dashboard(client, authorize=choose)) as browser:
        for path in ("states", "openapi.json", f"jobs/{job_id}"):
            assert (await browser.get(f"/api/{path}")).status_code == 403
        write = {"as": "write"}
        for headers, status in (
            ({**JSON, "as": "read"}, 403),
            ({**JSON, **write, "Sec-Fetch-Site": "cross-site"}, 403),
            ({**JSON, **write, "Sec-Fetch-Site": "same-site"}, 403),
            ({**JSON, **write, "Origin": "https://evil.org"}, 403),
            ({**JSON, **write, "Origin": "null"}, 403),
            (write, 415),
            ({**write, "Content-Type": "text/plain"}, 415),
            ({**write, "Content-Type": "application/x-www-form-urlencoded"}, 415),
        ):
            answer = await browser.post("/api/jobs/cancel", content=change, headers=headers)
            assert (answer.status_code, list(answer.json())) == (status, ["message"])
        answer = await browser.options("/api/jobs/cancel", headers=write)
        assert answer.status_code == 405
        message = "OPTIONS is not possible for this address: use POST."
        assert answer.json() == {"message": message}
        for body, status in (
            (b"{", 400),
            (b"7", 400),
            (b"{}", 400),
            (b"\xff", 400),
            (b"[" * 100_000, 400),
            (b'{"ids": [1e3]}', 400),
            (b'{"ids": [99999999999999999999999]}', 400),
            (b" " * 300_000, 413),
        ):
            answer = await browser.post("/api/jobs/cancel", content=body, headers=JSON | write)
            assert answer.status_code == status, body[:40]
        for path in (
            "jobs?limit=1001",
            "jobs?state=x",
            "jobs?after=x",
            "jobs?ids=y",
            "jobs?kinds=%00",
            "autocomplete?facet=x",
            "queues?limit=-1",
            "queues/%00",
        ):
            answer = await browser.get(f"/api/{path}", headers=write)
            assert answer.status_code == 400, path
        assert (await client.job_get(job_id)).state == "available"
        assert (
            await browser.post("/api/jobs/cancel", content=change, headers=JSON | write)
        ).status_code == 200
    for options, shown in (
        ({"hide_args": True}, "hide_args"),
        ({"mask": lambda _, args: {**args, "card": "***"}}, "***"),
    ):
        async with Browser(dashboard(client, read_only=True, **options)) as browser:
            for path in (f"jobs/{job_id}", "jobs?state=cancelled"):
                text = (await browser.get(f"/api/{path}")).text
                assert "4242" not in text
                assert shown in text
            answer = await browser.post("/api/jobs/delete", content=change, headers=JSON)
            assert answer.status_code == 403


async def test_limits(schema: Schema, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged job breaks no list, and large args are not in a list. A database that does not
    answer gives the status 503."""
    monkeypatch.setattr(jobs, "JOBS_PER_READ", 2)
    monkeypatch.setattr(status, "NAMES_SEARCHED_MAX", 2)
    ids = [
        await insert_job(
            schema, kind=f"'k{number}'", args=f"jsonb_build_object('x', repeat('y', {size}))"
        )
        for number, size in enumerate((1, 30_000, 1))
    ]
    await damage(schema, ids[2], "metadata")
    async with Browser(dashboard(client)) as browser:
        api = await open_api(browser)
        found = await api.send("GET", "/jobs?state=available")
        assert [one["id"] for one in found["data"]] == ids[:2]
        assert [one["id"] for one in found["damaged"]] == ids[2:]
        assert "GET /api/jobs/" in found["data"][1]["args"]
        assert len((await api.send("GET", f"/jobs/{ids[1]}"))["args"]) > 30_000
        assert "cannot read" in (await api.send("GET", f"/jobs/{ids[2]}", status=500))["message"]
        names = (await api.send("GET", "/autocomplete?facet=job_kind"))["data"]
        assert names == ["k0", "k1"]
    async with Browser(dashboard(Client(schema.url))) as browser:
        answer = await browser.get("/api/health-checks/complete")
        assert (answer.status_code, list(answer.json())) == (503, ["message"])
        assert (await browser.get("/api/health-checks/minimal")).status_code == 200
