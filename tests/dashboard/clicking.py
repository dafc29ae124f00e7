"""A user who clicks the controls of pages, and what each click changes in the database."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playwright.async_api import expect

from riverpy import _dashboard

if TYPE_CHECKING:
    from playwright.async_api import Locator, Page

    from tests._database import Schema

TEMPLATES = Path(_dashboard.__file__).parent / "templates"
_FORM_ACTION = re.compile(r'<form\b[^>]*\baction="\{\{ root \}\}([^"]*)"')
# A form may have a button with the name `action`, which hides the property `action`.
_DESCRIBE = r"""(one) => {
  const shorten = (path) => path.replace(/\/(\d+|[0-9a-f]{32})(?=\/|$)/g, "/*");
  const place = shorten(location.pathname);
  if (one.matches("a")) return `${place}: ${one.textContent.trim()}`;
  if (!one.form) return one.textContent.trim();
  const path = shorten(new URL(one.form.getAttribute("action"), location.href).pathname);
  const value = one.name === "action" || one.value === "*" ? `=${one.value}` : "";
  return `${place}: ${one.form.getAttribute("method")} ${path} ${one.name}${value}`.trim();
}"""
_LIST_ALL = f"""() => {{
  const describe = {_DESCRIBE};
  return [...document.querySelectorAll("button, a.button, nav.tabs a")].map(describe);
}}"""
_STATES = "SELECT kind, string_agg(state::text, ' ' ORDER BY id) FROM river_job GROUP BY kind"
_PAUSES = "SELECT 'queue ' || name, paused_at IS NOT NULL FROM river_queue"
_PERIODIC = "SELECT id, (paused_at IS NOT NULL, run_requested_at IS NOT NULL)::text"
_PERIODIC += " FROM riverpy_periodic"


def list_form_actions() -> set[str]:
    """Return the addresses of the forms in the templates. `*` stands for an id. The form of a
    question is left out, because its address is that of another form."""
    texts = [path.read_text() for path in TEMPLATES.glob("*.html")]
    paths = {re.sub(r"\{\{.*?\}\}", "*", path) for text in texts for path in find_actions(text)}
    return paths - {"*"}


def find_actions(template: str) -> list[str]:
    """Return the addresses of the forms of a template, below the dashboard's own. Each `<form` must
    have one."""
    found = _FORM_ACTION.findall(template)
    assert len(found) == template.count("<form"), template
    return found


class ClickingUser:
    """Clicks controls: buttons, links that look like buttons, and links to other times of plots.

    A control is named by the page on which it stands, and by what it sends, such as
    `/jobs/*: post /jobs/change action=retry`."""

    def __init__(self, page: Page, schema: Schema, url: str) -> None:
        self.page, self._schema, self._url = page, schema, url
        self.seen: set[str] = set()
        """The controls on all pages that were seen."""
        self.clicked: set[str] = set()
        self._stored: dict[str, Any] = {}

    async def open(self, path: str) -> None:
        """Open a page."""
        await self.page.goto(self._url + path)
        await self._note_controls()

    async def _note_controls(self) -> None:
        self.seen |= set(await self.page.evaluate(_LIST_ALL))

    def find(self, selector: str) -> Locator:
        """Return what a selector finds on the page."""
        return self.page.locator(selector)

    async def press(self, selector: str) -> None:
        """Click a control that leads to another page or state of the page."""
        control = self.find(selector)
        self.clicked.add(await control.evaluate(_DESCRIBE))
        async with self.page.expect_navigation():
            await control.click()
        await self._note_controls()

    async def toggle(self, selector: str) -> None:
        """Click a control that the script handles."""
        self.clicked.add(await self.find(selector).evaluate(_DESCRIBE))
        await self.find(selector).click()

    async def ask(self, selector: str, *, ticked: tuple[int, ...] = ()) -> None:
        """Click a control that asks before it changes something. First decline, then agree.

        Args:
            selector: the control.
            ticked: the ids of jobs to tick before.
        """
        place, before = self.page.url, await self._read_stored()
        for answer in ("main a.button", "main button[name=confirmed]"):
            for job_id in ticked:
                await self.find(f"#job-{job_id} input").check()
            await self.press(selector)
            assert await self._read_stored() == before  # it asks first
            await self.press(answer)
            if answer == "main a.button":
                assert self.page.url == place
                assert await self._read_stored() == before

    async def find_changes(self) -> dict[str, Any]:
        """Return what has changed in the database since the last call: the states of the jobs by
        kind, the pauses of queues, and the pauses and requested runs of periodic jobs."""
        before, self._stored = self._stored, await self._read_stored()
        names = before.keys() | self._stored.keys()
        return {
            name: self._stored.get(name)
            for name in names
            if before.get(name) != self._stored.get(name)
        }

    async def _read_stored(self) -> dict[str, Any]:
        rows = [
            row
            for statement in (_STATES, _PAUSES, _PERIODIC)
            for row in await self._schema.fetch(statement)
        ]
        return dict(rows)

    async def expect_text(self, text: str) -> None:
        """Wait until the page has a text."""
        await expect(self.find("main")).to_contain_text(text)
