"""`riverpy dev`: one worker at a time, restarted when its code changes, and no process left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest
from click.testing import CliRunner

from riverpy._log_events import WORKER_STARTED, WORKER_STOPPED
from riverpy.cli import main
from riverpy.cli._embedded import make_dev_server_name
from riverpy.embedded import EmbeddedPostgres
from tests._database import connected
from tests.cli.invoking import invoke
from tests.cli.worker_process import JOBS, RIVERPY, SIGNAL_TIMEOUT, WorkerProcess, environment

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="Linux and macOS"),
    pytest.mark.timeout(180),  # a busy machine takes a while to start so many processes
]

UNREACHABLE = "postgres://u:s3cret@127.0.0.1:1/d"
STARTS = "\nimport subprocess; subprocess.Popen(['sleep', '1h'])\n"
"""Code that starts a process, which outlives it."""


class Dev(WorkerProcess):
    """A running `riverpy dev`, whose log holds that of its workers."""

    def workers(self) -> list[int]:
        """The process ids of the workers so far, in their order."""
        return [int(entry["client_id"].split(":")[-2]) for entry in self.entries(WORKER_STARTED)]

    async def until_workers(self, count: int) -> int:
        """Wait until so many workers have started, or more; returns the last one's process id."""
        await self._until(lambda: len(self.workers()) >= count, f"{count} workers")
        return self.workers()[-1]

    async def until_text(self, part: str, times: int = 1) -> None:
        """Wait until so many lines that are no log entries have this."""

        def seen() -> bool:
            lines = [entry.get("text", "") for entry in self.logged]
            return sum(part in line for line in lines) >= times

        await self._until(seen, repr(part))


@asynccontextmanager
async def developing(
    directory: Path, *args: str, target: str = "jobs:client", **environ: str
) -> AsyncGenerator[Dev]:
    """`riverpy dev TARGET ARGS` beside a `jobs.py`; what it started is killed at the end."""
    if not (directory / "jobs.py").exists():
        (directory / "jobs.py").write_text(JOBS)
    process = await asyncio.create_subprocess_exec(
        *(RIVERPY, "dev", target, *args, "--", "--log=json"),
        cwd=directory,
        env=environment(**environ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout
    assert process.stderr
    dev = Dev(process)
    readers = [
        asyncio.create_task(dev.read(process.stdout, dev.printed.append)),
        asyncio.create_task(dev.read(process.stderr, dev.take_log)),
    ]
    try:
        yield dev
    finally:
        for pid in (process.pid, *dev.workers()):
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        await process.wait()
        await asyncio.gather(*readers)


def change(directory: Path, code: str) -> None:
    """Put another `jobs.py` in place of the one that is there, as one change."""
    new = directory / "jobs.py.new"
    new.write_text(code)
    new.replace(directory / "jobs.py")


async def do(url: str, what: str) -> None:
    """Insert a job of `jobs.py`."""
    async with connected(url) as connection:
        await connection.execute(
            "INSERT INTO river_job (kind, args, max_attempts)"
            " VALUES ('do', json_build_object('what', $1::text), 25)",
            what,
        )


async def command(directory: Path, *args: str, **environ: str) -> tuple[int, str]:
    """Run `riverpy ARGS` in a directory; its exit code and what it wrote to stderr."""
    done = await anyio.run_process(
        [RIVERPY, *args], cwd=directory, env=environment(**environ), check=False
    )
    return done.returncode, done.stderr.decode()


async def until_gone(pid: int) -> None:
    """Wait until a process, or a group of them, is no more."""
    with anyio.fail_after(SIGNAL_TIMEOUT, reason=f"{pid} is still there"):
        while True:
            try:
                os.killpg(pid, 0)
            except ProcessLookupError:
                return
            await asyncio.sleep(0.01)


async def states(url: str) -> list[tuple[str, int]]:
    """State and attempt of each job."""
    async with connected(url) as connection:
        rows = await connection.fetch("SELECT state::text, attempt FROM river_job ORDER BY id")
        return [tuple(row) for row in rows]


async def test_reload(fresh_database_url: str, tmp_path: Path) -> None:
    """It migrates, works, starts a new worker when code changes, waits where the code cannot be
    loaded, and stops at once when nothing runs. The dashboard beside it goes on all the time. No
    command line has the URL (SE-02)."""
    async with (
        developing(tmp_path, "--reload", "--web-port=0", DATABASE_URL=fresh_database_url) as dev,
        httpx.AsyncClient() as http,
    ):
        await dev.until_text("riverpy web: http://")
        (line,) = [one["text"] for one in dev.logged if "riverpy web:" in one.get("text", "")]
        url = line.split()[2]
        first = await dev.until_workers(1)
        if sys.platform == "linux":
            assert fresh_database_url not in Path(f"/proc/{first}/cmdline").read_text()
        await do(fresh_database_url, "this")
        await dev.until_printed("job this")
        (tmp_path / "notes.txt").write_text("no code")
        change(tmp_path, f"{JOBS}\n# changed\n")
        await dev.until_text("jobs.py changed, restarting")
        assert await dev.until_workers(2) != first
        await until_gone(first)
        change(tmp_path, f"{JOBS}\ndef broken(:\n")
        await dev.until_text("importing jobs failed")
        await dev.until_text("ended with code 1. It starts again when a file changes")
        started = len(dev.workers())
        change(tmp_path, JOBS)
        await dev.until_workers(started + 1)
        assert "is alive" in (await http.get(url)).text
        dev.send(signal.SIGINT)
        assert await dev.exit_code() == 0
        with pytest.raises(httpx.ConnectError):
            await http.get(url)
        await until_gone(dev.workers()[-1])
    assert not any("notes.txt" in entry.get("text", "") for entry in dev.logged)


async def test_stop_in_broken_code(fresh_database_url: str, tmp_path: Path) -> None:
    """While it waits for code to be mended, one signal ends it."""
    (tmp_path / "jobs.py").write_text("import nowhere_to_be_found\n")
    async with developing(tmp_path, "--reload", DATABASE_URL=fresh_database_url) as dev:
        await dev.until_text("It starts again when a file changes")
        dev.send(signal.SIGTERM)
        assert await dev.exit_code() == 1


async def test_without_reload(fresh_database_url: str, tmp_path: Path) -> None:
    """Without --reload it ends when its worker does, with the same code."""
    (tmp_path / "jobs.py").write_text("import nowhere_to_be_found\n")
    async with developing(tmp_path, DATABASE_URL=fresh_database_url) as dev:
        assert await dev.exit_code() == 1
    assert any("nowhere_to_be_found" in entry.get("text", "") for entry in dev.logged)


async def test_stop_puts_back(fresh_database_url: str, tmp_path: Path) -> None:
    """At the end of the soft stop a running job is released, and its attempt does not count."""
    async with developing(
        tmp_path, "--soft-stop=10ms", target="jobs:patient", DATABASE_URL=fresh_database_url
    ) as dev:
        await dev.until_workers(1)
        await do(fresh_database_url, "sleep")
        await dev.until_printed("job sleep")
        dev.send_to_group(signal.SIGINT)  # as a terminal does; the worker is in no group of it
        assert await dev.exit_code() == 0
    assert len(dev.entries(WORKER_STOPPED)) == 1
    assert await states(fresh_database_url) == [("available", 0)]


async def test_second_signal(fresh_database_url: str, tmp_path: Path) -> None:
    """A job that ignores its cancellation, and a process that it has started, hold a second signal
    for two seconds."""
    (tmp_path / "jobs.py").write_text(JOBS + STARTS)
    async with developing(tmp_path, "--soft-stop=1h", DATABASE_URL=fresh_database_url) as dev:
        worker = await dev.until_workers(1)
        await do(fresh_database_url, "ignore")
        await dev.until_printed("job ignore")
        dev.send(signal.SIGINT)
        await dev.until_text("stopping. A second signal")
        dev.send(signal.SIGINT)
        assert await dev.exit_code() in {4, 128 + signal.SIGKILL}
        await until_gone(worker)


async def test_parent_is_killed(fresh_database_url: str, tmp_path: Path) -> None:
    """After a SIGKILL of `riverpy dev` its worker stops as at a signal, and nothing is left, not
    even a process that it has started."""
    (tmp_path / "jobs.py").write_text(JOBS + STARTS)
    async with developing(
        tmp_path, "--soft-stop=10ms", target="jobs:patient", DATABASE_URL=fresh_database_url
    ) as dev:
        worker = await dev.until_workers(1)
        await do(fresh_database_url, "sleep")
        await dev.until_printed("job sleep")
        dev.send(signal.SIGKILL)
        await until_gone(worker)
    assert await states(fresh_database_url) == [("available", 0)]


async def test_embedded(embedded_directory: Path, tmp_path: Path) -> None:
    """Without a URL it has a server of its own, which stops with it and keeps its data. While it
    runs, commands in its directory use it, say so, and name a URL that wins over it."""
    place = {"RIVERPY_EMBEDDED_DIR": str(embedded_directory)}
    server = EmbeddedPostgres(make_dev_server_name(tmp_path), base_dir=embedded_directory)
    async with developing(tmp_path, **place) as dev:
        await dev.until_workers(1)
        inserted = await command(tmp_path, "insert", "do", '{"what": "this"}', **place)
        assert inserted[0] == 0, inserted[1]
        assert f"database of `riverpy dev` in this directory ({server.name})" in inserted[1]
        await dev.until_printed("job this")
        code, notes = await command(tmp_path, "job", "list", **place, DATABASE_URL=UNREACHABLE)
        assert code == 1
        assert "using the database postgres://u:***@127.0.0.1:1/d from DATABASE_URL" in notes
        assert "s3cret" not in notes
        code, notes = await command(
            tmp_path, "queue", "list", "--database-url", server.url, **place
        )
        assert (code, notes) == (0, "")
        dev.send(signal.SIGINT)
        assert await dev.exit_code() == 0
    code, notes = await command(tmp_path, "job", "list", **place)
    assert code != 0
    assert server.name not in notes  # it does not run
    async with developing(tmp_path, "--soft-stop=10ms", target="jobs:patient", **place) as dev:
        worker = await dev.until_workers(1)
        assert await states(server.url) == [("completed", 1)]
        await do(server.url, "sleep")
        await dev.until_printed("job sleep")
        dev.send(signal.SIGKILL)
        await until_gone(worker)
    with anyio.fail_after(SIGNAL_TIMEOUT, reason="the server still runs"):
        while await asyncio.to_thread(lambda: server.is_running):
            await asyncio.sleep(0.05)
    with server as url:  # the worker had it until it had released its job
        assert await states(url) == [("completed", 1), ("available", 0)]


def test_each_directory_has_a_server_of_its_own() -> None:
    """Also where two have the same name."""
    names = {make_dev_server_name(Path(path)) for path in ("/home/ada/shop", "/home/bob/shop")}
    assert len(names) == 2


def test_argument_too_many() -> None:
    """This command refuses an argument that is not an option of the worker, before anything
    starts."""
    result = CliRunner().invoke(main, ["dev", "jobs:client", "more"])
    assert result.exit_code == 2
    assert "unexpected argument 'more' (see riverpy dev --help)" in result.stderr


def test_watchfiles_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package watchfiles, the error of --reload names what to install."""
    monkeypatch.setattr("riverpy.cli.dev.find_spec", lambda _name: None)
    result = CliRunner().invoke(main, ["dev", "jobs:client", "--reload"])
    assert result.exit_code == 2
    assert "pip install 'riverpy-queue[dev]'" in result.stderr


def test_server_names() -> None:
    """Each directory has a server of its own, whatever it is called."""
    paths = ["/", "/a/Shop", "/b/Shop", "/Größe " * 20, "/a/.hidden", f"/{'x' * 200}"]
    names = [make_dev_server_name(Path(path)) for path in paths]
    assert len(set(names)) == len(names)
    for name in names:
        assert EmbeddedPostgres(name).name == name


def test_port_in_use() -> None:
    """A port in use for the dashboard is refused before anything starts."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = invoke("dev", "jobs:client", "--web-port", str(taken.getsockname()[1]))
    assert done.exit_code == 1
    assert "choose another one with --web-port" in done.stderr
