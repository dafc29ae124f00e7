"""The table of River's features names only what riverpy has, and gives a reason for each gap."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime
from inspect import Parameter, signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, NamedTuple

import msgspec
import pytest

import riverpy
from riverpy._insert.row import InsertSettings, prepare_row
from riverpy._plugins import read_class_plugins
from tests.repository.command_names import is_command

PAGE = (Path(__file__).parents[2] / "docs" / "features.md").read_text("utf-8")
HEADER = re.compile(r"\| River.* \| riverpy \| difference, or what to do \|\n\|---\|---\|---\|\n")
_LINK = re.compile(r"\]\([\w-]+\.md(?:#[\w-]+)?\)")
ALIASES = {
    "client.queues": "riverpy.ClientQueues",
    "client.periodic_jobs": "riverpy.PeriodicJobs",
    "client": "riverpy.Client",
    "job": "riverpy.Job",
    "workers": "riverpy.Workers",
    "JobLog": "riverpy.joblog.JobLog",
}
"""What the short names of the page stand for."""


class Row(NamedTuple):
    """One row: River's name, riverpy's name, and the difference."""

    river: str
    riverpy: str
    difference: str


def read_rows() -> list[Row]:
    """Return the rows of all tables of the page."""
    lines = [line for line in HEADER.sub("", PAGE).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]
    return [Row(*row) for row in cells]


ROWS = read_rows()


async def log_end(job: riverpy.Job[Any], error: BaseException | None) -> None:
    """A function that a hook calls."""


class Greet(msgspec.Struct):
    """An args class with each optional member that the page names."""

    kind: ClassVar[str] = "greet"
    kind_aliases: ClassVar[tuple[str, ...]] = ("welcome",)
    hooks: ClassVar[list[riverpy.Hook]] = [riverpy.HookWorkEndFunc(log_end)]
    plugins: ClassVar[list[riverpy.Plugin]] = [riverpy.HookWorkEndFunc(log_end)]

    def insert_opts(self) -> riverpy.InsertOpts:
        """Return the options of each insert."""
        return riverpy.InsertOpts(priority=4)


def code_texts(cell: str) -> list[str]:
    """Return the texts in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def find_object(path: str) -> Any:
    """Return what a dotted name of the page names; None: it does not exist."""
    for alias, target in ALIASES.items():
        if path == alias or path.startswith(f"{alias}."):
            path = target + path[len(alias) :]
            break
    for candidate in (path, f"riverpy.{path}"):
        with suppress(ImportError, AttributeError):
            return resolve_name(candidate) or candidate
    return None


def has_parameter(found: Any, name: str) -> bool:
    """Whether a class or function has a parameter of this name."""
    if isinstance(found, type) and issubclass(found, msgspec.Struct):
        return name in found.__struct_fields__
    parameters = signature(found).parameters
    if name in parameters:
        return True
    takes_filters = any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values())
    return takes_filters and name in riverpy.JobFilters.__annotations__


def exists(text: str) -> bool:
    """Whether a text in backticks names a command, an object of Python or one of its parameters."""
    if text.startswith("riverpy "):
        return is_command(text.split()[1:])
    call = re.fullmatch(r"([\w.]+)(?:\((.*)\))?", text)
    if call is None:
        return False
    found = find_object(call[1])
    names = re.findall(r"(\w+)=", call[2] or "")
    return found is not None and all(has_parameter(found, name) for name in names)


def test_page_has_rows() -> None:
    """Each subject has a table with rows of three cells, and no row is there twice."""
    subjects = re.findall(r"^## .+$", PAGE, re.MULTILINE)
    assert len(HEADER.findall(PAGE)) == len(subjects)
    assert len(ROWS) > 100
    assert len({row.river for row in ROWS}) == len(ROWS)


def test_rows_have_a_name_or_a_reason() -> None:
    """A row names something of riverpy, with a link, or says what to do without it."""
    for row in ROWS:
        if row.riverpy == "**none**":
            assert len(row.difference.split()) >= 5, row
        else:
            assert code_texts(row.riverpy), row
            assert _LINK.search(row.riverpy), row


def test_names_exist() -> None:
    """Each name in the second column exists, and so does each name of riverpy in the third."""
    named = [
        text
        for row in ROWS
        for text in code_texts(row.riverpy)
        if not row.riverpy.split(" (")[0].endswith("of the args class")
    ]
    named += [
        text
        for row in ROWS
        for text in code_texts(row.difference)
        if text.startswith(("riverpy ", "riverpy.", "client.", "job.", "workers."))
    ]
    assert [text for text in named if not exists(text)] == []


def test_members_of_args_classes() -> None:
    """Each member of an args class that the page names has an effect."""
    named = [
        text
        for row in ROWS
        if row.riverpy.split(" (")[0].endswith("of the args class")
        for text in code_texts(row.riverpy)
    ]
    assert sorted(named) == ["hooks", "insert_opts", "kind_aliases", "plugins"]
    workers = riverpy.Workers()

    @workers.job
    async def greet(job: riverpy.Job[Greet]) -> None: ...

    assert "welcome" in workers
    plugins = read_class_plugins(Greet)
    assert plugins.work_end_hooks == [*Greet.plugins, *Greet.hooks]
    settings = InsertSettings(default_max_attempts=25)
    row = prepare_row(Greet(), None, settings=settings, now=datetime.now(UTC))
    assert row.priority == "4"


WRONG_NAMES = """
riverpy migrate get
riverpy worker --none
riverpy.none
client.none
job.none
Config(none=)
client.insert(none=)
client.job_list(none=)
none
two words
"""


@pytest.mark.parametrize("text", WRONG_NAMES.strip().splitlines())
def test_a_wrong_name_is_found(text: str) -> None:
    """A command, option, object or parameter that does not exist is found."""
    assert not exists(text)
