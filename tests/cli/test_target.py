"""MODULE:ATTR: what it can name, and the errors if it names no client."""

from __future__ import annotations

import secrets
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from riverpy import Client
from riverpy.cli._run import CommandError
from riverpy.cli._target import ClientTarget, TargetError, load_client_target, open_client

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module of a new name into the current directory and returns the name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])

    def write(text: str) -> str:
        name = f"m_{secrets.token_hex(4)}"
        Path(f"{name}.py").write_text(text)
        return name

    return write


CLIENT = "from riverpy import Client\n"


@pytest.mark.parametrize("name", ["client", "app", "riverpy"])
def test_attribute_by_default(module: Callable[[str], str], name: str) -> None:
    """Without :ATTR it is `client`, `app` or `riverpy`, found in the current directory."""
    found = load_client_target(module(f"{CLIENT}{name} = Client()\n"))
    assert isinstance(found.imported_object, Client)


def test_attribute_by_path(module: Callable[[str], str]) -> None:
    """ATTR may go through attributes."""
    name = module(f"{CLIENT}class Box:\n    inner = Client()\n")
    assert isinstance(load_client_target(f"{name}:Box.inner").imported_object, Client)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "'' is not MODULE:ATTR, such as jobs:client"),
        (":client", "':client' is not MODULE:ATTR"),
        ("jobs:", "'jobs:' is not MODULE:ATTR"),
        ("..jobs:client", "is relative: give its full name"),
        ("jobs.py:client", "is a path: give a module, such as jobs:client"),
        ("./app/jobs.py", "is a path: give a module, such as app.jobs"),
        ("nowhere.at.all:client", "there is no module nowhere in "),
        ("email.nowhere", "there is no module email.nowhere in "),
        ("json:client", "module json has no 'client'; "),
        (
            "json",
            "module json has no client or app or riverpy; it has no client, but the functions",
        ),
    ],
)
def test_no_target(module: Callable[[str], str], spec: str, message: str) -> None:
    """The error for a wrong path has what was tried and what exists."""
    with pytest.raises(TargetError) as caught:
        load_client_target(spec)
    assert message in caught.value.message
    assert caught.value.exit_code == 2


def test_near_names(module: Callable[[str], str]) -> None:
    """The error for a misspelled module or attribute names a similar one."""
    name = module(f"{CLIENT}main_client = Client()\n")
    with pytest.raises(TargetError, match=f"did you mean {name}"):
        load_client_target(f"{name}x:client")
    with pytest.raises(TargetError, match="did you mean 'main_client'"):
        load_client_target(f"{name}:main_cleint")
    with pytest.raises(TargetError, match=f"give {name}:main_client"):
        load_client_target(name)


def test_wrong_setting_inside_the_module(module: Callable[[str], str]) -> None:
    """What riverpy refuses in the user's code is a wrong setting, at the user's own line."""
    name = module("import riverpy\n\nriverpy.Config(max_attempts=0)\n")
    with pytest.raises(CommandError) as caught:
        load_client_target(name)
    assert caught.value.message.endswith(f"({name}.py, line 3)")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n\n1 / 0\n", "failed: ZeroDivisionError: division by zero ({name}.py, line 3)"),
        (
            "import nowhere_at_all\n",
            "failed: ModuleNotFoundError: No module named 'nowhere_at_all'",
        ),
        ("x = (\n", "failed: SyntaxError: '(' was never closed ({name}.py, line 1)"),
        ("raise SystemExit(3)\n", "failed: SystemExit: 3 ({name}.py, line 1)"),
        ("raise OSError('postgres://u:s3cret@h/d')\n", "OSError: postgres://u:***@h/d"),
    ],
)
def test_error_inside_the_module(
    module: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    message: str,
) -> None:
    """An error in the user's code prints one line with its place; --debug shows the traceback."""
    name = module(text)
    with pytest.raises(CommandError) as caught:
        load_client_target(name)
    assert message.format(name=name) in caught.value.message
    assert capsys.readouterr().err == ""

    monkeypatch.setenv("RIVERPY_DEBUG", "1")
    with pytest.raises(CommandError):
        load_client_target(name)
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "s3cret" not in err


async def client_of(target: object) -> Client:
    """What a target comes to."""
    async with open_client(ClientTarget("jobs:target", target)) as client:
        return client


async def test_kinds_of_targets() -> None:
    """A client, a function that returns one, an async context manager, a function giving one."""
    client = Client()
    entries: list[str] = []

    async def make() -> Client:
        return client

    @asynccontextmanager
    async def manage() -> AsyncGenerator[Client]:
        entries.append("in")
        yield client
        entries.append("out")

    for target in (client, lambda: client, make, manage, manage()):
        assert await client_of(target) is client
    assert entries == ["in", "out", "in", "out"]


async def test_wrong_targets() -> None:
    """The error for a target that is no client names its type."""

    async def generator() -> AsyncGenerator[Client]:
        yield Client()

    @asynccontextmanager
    async def manage() -> AsyncGenerator[int]:
        yield 3

    for target, message in (
        (3, "jobs:target is an int: give a riverpy.Client, a function without arguments"),
        (lambda: None, "jobs:target returns None, not a riverpy.Client"),
        (lambda _x: None, "jobs:target is a function: give a riverpy.Client, a function without"),
        (generator, "jobs:target has a yield: decorate it with @contextlib.asynccontextmanager"),
        (manage, "jobs:target yields an int, not a riverpy.Client"),
    ):
        with pytest.raises(TargetError) as caught:
            await client_of(target)
        assert caught.value.message.startswith(message)


APPLICATION = """
import riverpy

class Application:
    async def __call__(self, scope, receive, send): ...

app = Application()
workers = riverpy.Workers()
nothing = None
number = 3
jobs = riverpy.Client()

def make_nothing(): ...

class Empty: ...
"""


@pytest.mark.parametrize(
    ("attribute", "found"),
    [
        (":app", "is an Application"),
        ("", ":app is an Application"),
        (":workers", "is a Workers"),
        (":nothing", "is None"),
        (":number", "is an int"),
        (":Empty", "returns an Empty, not a riverpy.Client"),
        (":riverpy", "is a module"),
        (":make_nothing", "returns None, not a riverpy.Client"),
    ],
)
async def test_another_object(module: Callable[[str], str], attribute: str, found: str) -> None:
    """An object that is no client is named, with what is expected and the client of its module."""
    name = module(APPLICATION)
    spec = f"{name}{attribute}"
    with pytest.raises(TargetError) as caught:
        async with open_client(load_client_target(spec)):
            pass
    text = caught.value.message
    assert f"{spec} {found}" in text or f"{spec}{found}" in text
    assert "riverpy.Client" in text
    assert text.endswith(f"; {name} has the riverpy.Client `jobs`: give {name}:jobs")
    assert "\n" not in text


async def test_client_before_others(module: Callable[[str], str]) -> None:
    """Without :ATTR a client counts before another object that has one of the usual names."""
    name = module("import riverpy\nclient = None\napp = riverpy.Client()\n")
    assert isinstance(load_client_target(name).imported_object, Client)


async def test_failing_targets() -> None:
    """A factory or context manager that fails prints one line with the place."""

    async def fail() -> Client:
        raise RuntimeError("no config")

    @asynccontextmanager
    async def manage() -> AsyncGenerator[Client]:
        raise RuntimeError("no config")
        yield Client()

    for target, message in (
        (fail, "jobs:target() failed: RuntimeError: no config ("),
        (manage, "entering jobs:target failed: RuntimeError: no config ("),
    ):
        with pytest.raises(click.ClickException) as caught:
            await client_of(target)
        assert caught.value.message.startswith(message)
        assert "test_target.py, line " in caught.value.message
        assert caught.value.exit_code == 1


async def test_error_of_the_block_is_passed_on() -> None:
    """An error while working reaches the context manager and comes out unchanged."""
    seen: list[BaseException] = []

    @asynccontextmanager
    async def manage() -> AsyncGenerator[Client]:
        try:
            yield Client()
        except ValueError as error:
            seen.append(error)
            raise

    with pytest.raises(ValueError, match="while working"):
        async with open_client(ClientTarget("jobs:target", manage)):
            raise ValueError("while working")
    assert len(seen) == 1
