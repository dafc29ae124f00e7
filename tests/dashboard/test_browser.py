"""The dashboard in a real browser: with and without JavaScript, on a narrow screen, by keyboard,
for a screen reader, with hostile values, and while the database does not answer."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Literal

import anyio
import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.async_api import expect

from riverpy._calls import batched_change
from riverpy._dashboard.app import CHANGE_ROUTES
from tests.cli.test_web import serving as serving_web
from tests.dashboard.chromium import PATIENCE_MS, opening_page, serving_dashboard
from tests.dashboard.clicking import ClickingUser, list_form_actions
from tests.dashboard.site_kit import insert_client, insert_job, insert_queue
from tests.kit.chromium import needs_chromium
from tests.kit.fleet import Shutdown, running_fleet
from tests.kit.proxy import proxied
from tests.tools.doctor.conftest import register, set_leader, set_lease_holder, set_queue_owner

if TYPE_CHECKING:
    from playwright.async_api import Page

    from tests._database import Schema

pytestmark = [
    needs_chromium,
    pytest.mark.timeout(300),  # a browser takes long on a busy machine
]
PATIENCE = 60.0
LATER = "now() + interval '1 h'"
PATHS = (
    *(
        "/",
        "/jobs",
        "/jobs?state=discarded",
        "/jobs?state=pending",
        "/jobs?args=x",
        "/jobs/1",
        "/jobs/1/neighbors",
    ),
    *(
        "/queues",
        "/queue?name=default",
        "/workers",
        "/worker?id=mail-1",
        "/periodic",
        "/periodic-job?id=nightly",
        "/leader",
        "/doctor",
    ),
    "/jobs/999",
)
"""The pages, also an error page."""
SCREENS: tuple[tuple[int, Literal["dark", "light"]], ...] = ((320, "dark"), (1280, "light"))
FIND_VIOLATIONS = """async () => {
  const found = await axe.run(document, {resultTypes: ["violations"]});
  return found.violations.filter((one) => ["serious", "critical"].includes(one.impact))
    .map((one) => one.id + ": " + one.nodes.map((node) => node.html).slice(0, 3).join(" "));
}"""


async def fill(schema: Schema) -> None:
    """Insert jobs of many states, clients, domains, leases, and a periodic job with runs."""
    error = "jsonb_build_object('at', now(), 'attempt', 1, 'error', 'no answer', 'trace', 'a.py')"
    await insert_job(
        schema,
        "discarded",
        errors=f"array[{error}]",
        attempt="1",
        attempted_by="array['mail-1']",
        attempted_at="now()",
        metadata='\'{"output": 1, "riverpy:progress": {"done": 1, "total": 4}}\'',
    )
    for state in ("available", "running", "retryable", "scheduled", "cancelled", "completed"):
        ran = {"attempted_at": "now()", "attempted_by": "array['mail-1']"}
        await insert_job(schema, state, **({} if state == "available" else ran))
    for cause in ("schedule", "request", "start", "unknown"):
        run = {"cause": cause, "due_at": "2026-01-31T02:00:00Z", "user": "ann@example.org"}
        metadata = {"river:periodic_job_id": "nightly", "riverpy:periodic_run": run}
        await insert_job(schema, "completed", metadata=f"'{json.dumps(metadata)}'")
    await schema.execute(
        "INSERT INTO riverpy_periodic (id, schedule, next_run_at, last_run_at)"
        " VALUES ('nightly', 'cron 0 2 * * * Europe/Berlin', now() + interval '1 h', now())"
    )
    await register(schema, "plain-1")
    await register(schema, "mail-1", domain="mail", queues=("mail",), slots=(5,), stuck=(3,))
    await set_leader(schema, "plain-1")
    await set_lease_holder(schema, "d:mail", "mail-1")
    await set_lease_holder(schema, "s:import", "gone", -70)
    await set_queue_owner(schema, "mail", "mail")
    await schema.execute(
        "INSERT INTO river_queue (name, created_at, updated_at, metadata, paused_at)"
        " VALUES ('default', now(), now(), '{}', now());"
        "INSERT INTO riverpy_job_count SELECT 60, date_trunc('minute', now() - interval"
        " '2 minutes'), queue, 9, 8, 1, 1, 5, 2, 0, 0, 0, 0, 0"
        " FROM unnest(array['', 'default']) AS queue"
    )


async def test_accessible(schema: Schema) -> None:
    """On each page axe finds nothing serious, on a narrow screen in dark colors and on a wide one
    in light colors. No page is wider than the screen, and no script fails."""
    await fill(schema)
    found: dict[str, Any] = {}
    async with serving_dashboard(schema) as url, opening_page() as page:
        for path in PATHS:
            await page.goto(url + path)
            await page.evaluate(AXE_SCRIPT)
            for width, colors in SCREENS:
                await page.set_viewport_size({"width": width, "height": 700})
                await page.emulate_media(color_scheme=colors)
                if violations := await page.evaluate(FIND_VIOLATIONS):
                    found[f"{path} {width}"] = violations
                wide = await page.evaluate("document.documentElement.scrollWidth")
                if wide > width:
                    found[f"{path} width"] = wide
    assert found == {}, json.dumps(found, indent=1)


FIND_BROKEN_NAMES = """() => [...document.querySelectorAll("tbody .whole, tbody th a")]
    .filter((one) => one.getClientRects().length > 1 || one.offsetHeight > 40)
    .map((one) => one.textContent)"""


async def test_room(schema: Schema) -> None:
    """On a wide screen no name of a table breaks. On a phone the menu takes little, and the changes
    of ticked jobs can be reached from the last row, without JavaScript."""
    await insert_client(
        schema, "worker.example.org:30756", queues="array['legacy_imports_of_2026']"
    )
    await insert_queue(schema, "legacy_imports_of_2026")
    for _ in range(30):
        await insert_job(schema, "discarded", kind="'legacy_imports'", queue="'partners'")
    async with (
        serving_dashboard(schema) as url,
        opening_page(width=1280, has_script=False) as page,
    ):
        for path in ("/jobs", "/queues", "/workers"):
            await page.goto(url + path)
            assert await page.evaluate(FIND_BROKEN_NAMES) == []
            assert await page.locator("tbody .whole").count() > 0
        await page.set_viewport_size({"width": 320, "height": 640})
        await page.goto(f"{url}/jobs?state=discarded")
        box = await page.locator("header.top").bounding_box()
        assert box is not None
        assert box["height"] <= 100
        await page.locator("tbody input").last.check()
        button = page.get_by_role("group", name="ticked").get_by_role("button", name="Retry")
        await expect(button).to_be_in_viewport()
        await button.click()
        await page.get_by_text("was retried.").wait_for()


async def focus(page: Page) -> dict[str, Any]:
    """Return the text of the focused element, whether its focus can be seen, and its id."""
    return await page.evaluate(
        """() => {
          const one = document.activeElement, style = getComputedStyle(one);
          const text = one.matches("input") ? one.value : one.textContent.trim();
          return {text, seen: style.outlineStyle !== "none" && style.outlineWidth !== "0px",
                  id: one.id, row: one.closest("tr")?.id};
        }"""
    )


async def test_keyboard(schema: Schema) -> None:
    """The first Tab leads to the link that skips the menu. Each link, box and button can be
    reached, and its focus is visible. A live update keeps the focus. A job is ticked and deleted by
    keys alone. The button Back then shows the question again."""
    job_id = await insert_job(schema, "discarded")
    async with serving_dashboard(schema) as url, opening_page(width=1280) as page:
        await page.goto(f"{url}/jobs")
        await page.keyboard.press("Tab")
        first = await focus(page)
        assert (first["text"], first["seen"]) == ("Skip to the content", True)
        seen: list[str] = []
        while (await focus(page))["row"] is None:
            await page.keyboard.press("Tab")
            now = await focus(page)
            assert now["seen"], now
            seen.append(now["text"])
            assert len(seen) < 60, seen
        assert {"Home", "Jobs", "Leader", "Doctor", "Pause updates", "Retry", "Delete"} <= set(seen)
        before = await focus(page)
        other_id = await insert_job(schema, "discarded")
        await page.locator(f"#job-{other_id}").wait_for()
        assert await focus(page) == before
        await page.keyboard.press("Space")
        while (await focus(page))["text"] != "Delete":
            await page.keyboard.press("Shift+Tab")
        await page.keyboard.press("Enter")
        await page.get_by_text(f"Delete job {job_id}?").first.wait_for()
        while (await focus(page))["text"] != f"Delete job {job_id}":
            await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await page.get_by_text(f"Job {job_id} was deleted.").wait_for()
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        assert (await focus(page))["id"] == "main"
        await page.go_back()  # this must not ask whether to send the form again
        while "Delete job" not in await page.title():
            await page.go_back()


@pytest.mark.parametrize("has_script", [True, False], ids=["script", "no script"])
async def test_retry_a_job(schema: Schema, has_script: bool) -> None:
    """From home, a user finds the job that failed, and retries it, on a screen of 320 pixels, also
    without JavaScript. That another tab follows a link from another site changes nothing."""
    await insert_job(schema, "discarded")
    async with (
        serving_dashboard(schema) as url,
        opening_page(has_script=has_script) as page,
    ):
        await page.goto(url)
        load_again = page.get_by_role("link", name="Load again")
        await expect(load_again).to_have_count(0 if has_script else 1)
        await page.get_by_role("link", name="Discarded jobs").click()
        await page.get_by_role("link", name="1", exact=True).click()
        other = await page.context.new_page()
        await other.set_content(f'<a href="{url}/jobs">here</a>')
        await other.get_by_role("link").click()
        await other.get_by_role("heading", name="Jobs").wait_for()
        await page.get_by_role("button", name="Retry").click()
        await page.get_by_text("Job 1 was retried.").wait_for()


async def test_live(schema: Schema) -> None:
    """A page shows a change without a new load. While the database does not answer, it says so and
    keeps the last state. Afterwards it shows the newest state. 100 open pages get the change too,
    and share the reads."""
    await insert_job(schema, "discarded")
    async with (
        proxied(schema.url) as proxy,
        serving_dashboard(schema, proxy.url) as url,
        opening_page() as page,
    ):
        await page.goto(url)
        async with anyio.create_task_group() as tasks:
            arrived = [anyio.Event() for _ in range(100)]
            for event in arrived:
                tasks.start_soon(follow, url, "2 jobs failed every", event)
            await insert_job(schema, "discarded")
            await page.get_by_text("2 jobs failed every attempt").wait_for()
            with anyio.fail_after(PATIENCE):
                for event in arrived:
                    await event.wait()
            assert proxy.most <= 5  # three of the pool, and two of the checks
            tasks.cancel_scope.cancel()
        proxy.refusing = True
        proxy.cut()
        problem = page.locator("[data-live-text]").get_by_text("The newest state cannot be read")
        await problem.wait_for()
        await expect(page.get_by_text("2 jobs failed every attempt")).to_be_visible()
        await insert_job(schema, "discarded")
        proxy.refusing = False
        await page.get_by_text("3 jobs failed every attempt").wait_for()
        await expect(problem).to_have_count(0)


async def test_restarts() -> None:
    """`riverpy web` is killed under an open page, which says that the connection is lost, and keeps
    the last state. When it is started again on the same port, the page shows the newest state by
    itself. The same is so if PostgreSQL itself crashes and starts again."""
    insert = "INSERT INTO river_job (kind, args, max_attempts) VALUES ('k', '{}', 1) RETURNING id"
    async with (
        running_fleet() as fleet,
        opening_page(expected_error="net::ERR_") as page,
    ):
        server, bar = fleet.server, page.locator("[data-live-text]")
        database = ("--database-url", server.url)

        async def insert_and_see() -> None:
            async with server.connected() as connection:
                job_id = await connection.fetchval(insert)
            await page.locator(f"#job-{job_id}").wait_for()
            await expect(bar).to_contain_text(re.compile("^Updated"))

        async with serving_web(*database) as (process, url):
            await page.goto(f"{url}/jobs")
            await insert_and_see()
            process.kill()
            await process.wait()
        await expect(bar).to_contain_text("The connection is lost, trying again.")
        await expect(page.locator("#job-1")).to_be_visible()
        async with serving_web(*database, "--port", url.rpartition(":")[2]):
            await insert_and_see()
            await server.shut_down(Shutdown.IMMEDIATE)
            await expect(bar).to_contain_text("The newest state cannot be read")
            await expect(page.locator("#job-2")).to_be_visible()
            await server.come_back()
            await insert_and_see()


async def test_windows(schema: Schema) -> None:
    """More windows are open than a browser has connections to a server. All of them load, because
    only the window in use keeps a connection. It is updated when it gets the focus. What the user
    opened or closed before the first update stays so."""
    error = "jsonb_build_object('at', now(), 'attempt', 1, 'error', 'no answer', 'trace', 'a.py')"
    await insert_job(schema, "discarded", errors=f"array[{error}]")
    async with serving_dashboard(schema) as url, opening_page() as page:
        await page.context.add_init_script("document.hasFocus = () => Boolean(window.isUsed)")
        for _ in range(8):
            page = await page.context.new_page()
            await page.goto(f"{url}/jobs/1", timeout=PATIENCE_MS)
            await page.locator("summary").click()
        await schema.execute("UPDATE river_job SET tags = array['newtag']")
        await page.evaluate("window.isUsed = true; window.dispatchEvent(new Event('focus'))")
        await page.get_by_text("newtag").wait_for()
        assert await page.locator("details").get_attribute("open") is None


async def test_aim(schema: Schema) -> None:
    """While the pointer is over a button, an update does not put another button there. The update
    follows when the pointer leaves."""
    await insert_queue(schema, "mail")
    async with serving_dashboard(schema) as url, opening_page(width=1280) as page:
        await page.goto(f"{url}/queues")
        await page.get_by_role("button", name="Pause the queue mail").hover()
        await insert_queue(schema, "another")
        async with anyio.create_task_group() as tasks:
            arrived = anyio.Event()
            tasks.start_soon(follow, url, "another", arrived, "/queues")
            await arrived.wait()
            tasks.cancel_scope.cancel()
        await page.wait_for_timeout(1500)  # longer than the page waits before it shows an update
        await expect(page.get_by_text("another")).to_have_count(0, timeout=1)
        await page.mouse.move(0, 0)
        await page.get_by_text("another").first.wait_for()


async def follow(url: str, text: str, arrived: anyio.Event, path: str = "/") -> None:
    """Read the stream of a page, and set the event when the text arrives."""
    port = int(url.rpartition(":")[2])
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(
            f"GET /live?path={path} HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n".encode()
        )
        received = b""
        while text.encode() not in received:
            received = received[-len(text) :] + await stream.receive()
        arrived.set()
        await anyio.sleep_forever()


async def test_hostile_values(schema: Schema) -> None:
    """Values that contain markup, scripts, 5 MB, or characters that turn the direction of text are
    shown as text, and do nothing. The whole args are sent as text too."""
    hostile = "</pre><script>window.hit = 1</script><img src=x onerror='window.hit = 1'>"
    quoted = hostile.replace("'", "''")
    job_id = await insert_job(
        schema,
        "discarded",
        kind=f"'{quoted}'",
        queue=f"'\"{quoted}'",
        args="jsonb_build_object('r', E'a\\u202eb\\u2066', 'x', repeat('<b>', 1700000))",
        metadata=f"jsonb_build_object('output', '{quoted}', '{quoted}', 1)",
        errors=f"array[jsonb_build_object('error', '{quoted}', 'trace', '{quoted}', 'attempt', 1,"
        " 'at', now())]",
        attempted_by=f"array['{quoted}']",
        attempted_at="now()",
    )
    await insert_job(schema, queue=f"'\"{quoted}'")
    async with serving_dashboard(schema) as url, opening_page() as page:
        for path in ("/", "/jobs", f"/jobs/{job_id}", f"/jobs/{job_id}/neighbors", "/queues"):
            await page.goto(url + path)
            await page.get_by_text("window.hit").first.wait_for()
            assert await page.evaluate("[window.hit, document.images.length]") == [None, 0]
            assert await page.evaluate("document.documentElement.scrollWidth") <= 320
        await page.goto(f"{url}/jobs/{job_id}")
        assert "a\\u202eb\\u2066" in await page.inner_text("main")
        assert len(await page.content()) < 80_000
        await page.goto(f"{url}/jobs/{job_id}/args")
        assert await page.evaluate("[window.hit, document.images.length]") == [None, 0]
        assert len(await page.inner_text("body")) > 5_000_000


async def test_every_control(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each button of each page does in the database what it says, and nothing else. Those that ask
    before change nothing if the answer is no. The forms of all templates, and all changes of the
    dashboard, are among them, so a new button without a click here makes this test fail."""
    monkeypatch.setattr(batched_change, "LOCKED_JOB_RETRY_DELAYS", (0.1,) * 1_200)
    ids: dict[str, list[int]] = {}
    for kind in ("one", "ticked", "matching"):
        for action in ("retry", "cancel", "delete"):
            ids[f"{kind}_{action}"] = [await insert_waiting(schema, f"{kind}_{action}")]
            if kind != "one":
                ids[f"{kind}_{action}"] += [await insert_waiting(schema, f"{kind}_{action}")]
    ids["stopped"] = [await insert_waiting(schema, "stopped") for _ in range(2)]
    await insert_job(schema, kind="'due'", queue="'mail'")
    await insert_job(schema, "retryable", kind="'later'", queue="'mail'", scheduled_at=LATER)
    await insert_queue(schema, "mail")
    await register(schema, "plain-1")
    await set_leader(schema, "plain-1")
    await schema.execute(
        "INSERT INTO riverpy_periodic (id, schedule, next_run_at)"
        " VALUES ('nightly', 'every 24h', now() + interval '1 h')"
    )
    async with serving_dashboard(schema) as url, opening_page(width=1280) as page:
        user = ClickingUser(page, schema, url)
        await user.find_changes()
        await change_jobs(user, ids)
        await change_matching_jobs(user, ids, schema)
        await change_queues(user)
        await change_periodic_jobs(user, schema)
        await look_around(user, schema)
        await let_leader_resign(user, schema)
        assert user.seen == user.clicked
        paths = {name.split()[2] for name in user.clicked if " post " in name or " get " in name}
        assert paths == list_form_actions()
        assert paths >= {one.path.replace("{run_id}", "*") for one in CHANGE_ROUTES}


async def insert_waiting(schema: Schema, kind: str) -> int:
    """Insert a job that can be retried, cancelled and deleted. Return its id."""
    return await insert_job(schema, "scheduled", kind=f"'{kind}'", scheduled_at=LATER)


async def change_jobs(user: ClickingUser, ids: dict[str, list[int]]) -> None:
    """Change one job on its page, and ticked jobs in a list."""
    await user.open(f"/jobs/{ids['one_retry'][0]}")
    await user.press("button[value=retry]")
    assert await user.find_changes() == {"one_retry": "available"}
    await user.open(f"/jobs/{ids['one_cancel'][0]}")
    await user.ask("button[value=cancel]")
    assert await user.find_changes() == {"one_cancel": "cancelled"}
    await user.open(f"/jobs/{ids['one_delete'][0]}")
    await user.ask("button[value=delete]")
    assert await user.find_changes() == {"one_delete": None}
    results = {"retry": "available available", "cancel": "cancelled cancelled", "delete": None}
    for action, result in results.items():
        await user.open(f"/jobs?queue=default&kind=ticked_{action}")
        ticked = tuple(ids[f"ticked_{action}"])
        await user.ask(f"button[form=change][value={action}]", ticked=ticked)
        assert await user.find_changes() == {f"ticked_{action}": result}


async def change_matching_jobs(
    user: ClickingUser, ids: dict[str, list[int]], schema: Schema
) -> None:
    """Change all jobs that match a filter, and stop one change before its end."""
    results = {"retry": "available available", "cancel": "cancelled cancelled", "delete": None}
    for action, result in results.items():
        await user.open(f"/jobs?state=scheduled&kind=matching_{action}")
        await user.ask(f"button[form=change-all][value={action}]")
        await user.expect_text("The change is done.")
        assert await user.find_changes() == {f"matching_{action}": result}
    async with schema.connected() as other:
        transaction = other.transaction()
        await transaction.start()
        await other.execute("SELECT FROM river_job WHERE id = $1 FOR UPDATE", ids["stopped"][1])
        await user.open("/jobs?state=scheduled&kind=stopped")
        await user.ask("button[form=change-all][value=retry]")
        await user.press("button.danger")
        await user.expect_text("The change was stopped before its end.")
        await expect(user.page).to_have_title(re.compile("^The change was stopped before its end"))
        await transaction.rollback()
    assert await user.find_changes() == {"stopped": "available scheduled"}


async def change_queues(user: ClickingUser) -> None:
    """Pause, resume and clear a queue, and find it in the list."""
    for path in ("/queues", "/queue?name=mail"):
        await user.open(path)
        await user.press("button[name=pause][value=mail]")
        assert await user.find_changes() == {"queue mail": True}
        await user.press("button[name=resume][value=mail]")
        assert await user.find_changes() == {"queue mail": False}
    await user.ask("button[name=clear]")
    assert await user.find_changes() == {"due": None}
    await user.ask("button[name=clear_all]")
    assert await user.find_changes() == {"later": None}
    await user.open("/queues")
    await user.ask("button[value='*'][name=pause]")
    assert await user.find_changes() == {"queue mail": True}
    await user.ask("button[value='*'][name=resume]")
    assert await user.find_changes() == {"queue mail": False}
    await user.find("input[name=find]").fill("mai")
    await user.press("form[role=search] button")
    await expect(user.find("tbody tr")).to_have_count(1)
    await user.press("form[role=search] a.button")
    await expect(user.find("tbody tr")).to_have_count(2)


async def change_periodic_jobs(user: ClickingUser, schema: Schema) -> None:
    """Pause, resume and run a periodic job, in the list and on its page."""
    for path in ("/periodic", "/periodic-job?id=nightly"):
        await user.open(path)
        await user.press("button[name=pause]")
        assert await user.find_changes() == {"nightly": "(t,f)"}
        await user.press("button[name=resume]")
        assert await user.find_changes() == {"nightly": "(f,f)"}
    await user.ask("button[name=run]")
    assert await user.find_changes() == {"nightly": "(f,t)"}
    await schema.execute("UPDATE riverpy_periodic SET run_requested_at = NULL")
    await user.find_changes()
    await user.open("/periodic")
    await user.ask("button[name=run]")
    assert await user.find_changes() == {"nightly": "(f,t)"}


async def look_around(user: ClickingUser, schema: Schema) -> None:
    """Filter the list of jobs, show other times in plots, and pause the updates of a page."""
    await user.open("/jobs")
    await user.find("summary").first.click()
    await user.find("input[name=kind]").fill("one_retry")
    await user.press("form[role=search] button")
    await expect(user.find("tbody tr")).to_have_count(1)
    await user.press("form[role=search] a.button")
    assert await user.find("tbody tr").count() > 1
    for path in ("/", "/queue?name=mail"):
        await user.open(path)
        for number in range(3):
            await user.press(f"nav.tabs li:nth-child({number + 1}) a")
            link = user.find("nav.tabs a").nth(number)
            await expect(link).to_have_attribute("aria-current", "page")
    for path in ("/workers", "/worker?id=plain-1", "/doctor", "/jobs?state=available"):
        await user.open(path)
    await user.toggle("#live-bar button")
    await user.expect_text("Live updates are paused.")
    await insert_job(schema, kind="'seen later'")
    await user.toggle("#live-bar button")
    await user.expect_text("seen later")
    await user.find_changes()


async def let_leader_resign(user: ClickingUser, schema: Schema) -> None:
    """Request that the leader resigns, which its notification shows."""
    received: list[object] = []
    async with schema.connected() as listener:
        await listener.add_listener(
            f"{schema.name}.river_leadership", lambda *message: received.append(message[3])
        )
        await user.open("/leader")
        await user.ask("button[name=domain]")
        await listener.execute("SELECT 1")
    assert [json.loads(str(one))["action"] for one in received] == ["request_resign"]
    assert await user.find_changes() == {}
