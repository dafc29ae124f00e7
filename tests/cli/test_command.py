"""The frame of every command: one-line errors, exit codes, masked passwords, plain output."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from riverpy._log_events import NEWER_MIGRATIONS_FOUND
from riverpy.cli import main
from riverpy.cli._output import print_json, print_table, should_use_color
from riverpy.cli._run import CommandError, run_async, text_to_one_line, translate_to_command_errors
from riverpy.errors import ConfigError
from tests.cli.invoking import invoke

if TYPE_CHECKING:
    from tests._database import Schema

RIVERPY = Path(sys.executable).with_name("riverpy")
UNREACHABLE = "postgres://u:s3cret@127.0.0.1:1/d"


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["nope"], 2, "riverpy: No such command 'nope' (see riverpy --help)\n"),
        (["migrate", "list", "--nope"], 2, "riverpy: No such option '--nope'"),
        (["migrate", "nope"], 2, "riverpy: No such command 'nope' (see riverpy migrate --help)\n"),
        (["insert", "foo", "-5"], 2, "riverpy: No such option '-5'; write -- before an argument"),
        (["migrate", "list"], 2, "riverpy: no database is given: use --database-url, RIVERPY_"),
        (["migrate", "list", "--database-url", "mysql://u:s3cret@h/d"], 2, "riverpy: Invalid"),
        (["migrate", "list", "--database-url", "postgres://u:s3/c@h/d"], 2, "riverpy: Invalid"),
        (["migrate", "list", "--schema", "1a", "--database-url", UNREACHABLE], 2, "riverpy: Inv"),
        (["migrate", "list", "--database-url", UNREACHABLE], 1, "riverpy: "),
    ],
)
def test_failure_is_one_line(args: list[str], code: int, message: str) -> None:
    """A failure is one line on stderr, without a password, and a code other than 0 (OP-04)."""
    result = invoke(*args)
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert "s3" not in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["job", "list", "--limit", "0"], "'--limit': '0' is not a whole number from 1 to 10000"),
        (["job", "list", "--limit", "x"], "'--limit': 'x' is not a whole number from 1 to 10000"),
        (["job", "show", "abc"], "'ID': 'abc' is not a whole number from 1 to 9223372036854775807"),
        (
            ["job", "cancel", "0"],
            "'ID...': '0' is not a whole number from 1 to 9223372036854775807",
        ),
        (["job", "retry", ""], "'ID...': '' is not a whole number"),
        (["bench", "--jobs", "-1"], "'--jobs': '-1' is not a whole number from 1"),
        (["bench", "--sleep-ms", "-1"], "-1.0 is not in the range 0<=x<=10000"),
        (["migrate", "up", "--to", "0"], "'--to': '0' is not a whole number from 1"),
        (["insert", "k", "{]"], "args: the text is not JSON"),
        (["insert", "k", "[1]"], "args: must be a JSON object, got [1]"),
        (["insert", "k", "{}", "--metadata", "["], "metadata: the text is not JSON"),
        (["insert", "k", "{}", "--in", "-5s"], "'--in': '-5s' is not a duration"),
        (["insert", "k", "{}", "--at", ""], "'--at': '' is not a time"),
        (
            ["insert", "k", "{}", "--priority", "9"],
            "'--priority': '9' is not a whole number from 1 to 4",
        ),
        (
            ["insert", "k", "{}", "--max-attempts", "0"],
            "'--max-attempts': '0' is not a whole number from 1 to",
        ),
        (["insert", "", "{}"], "'KIND': the text must not be empty"),
        (["queue", "pause", ""], "the text must not be empty"),
        (["periodic", "run", ""], "the text must not be empty"),
        (["top", "--interval", "99999999999d"], "the duration '99999999999d' is too long"),
        (["worker", "jobs:client", "--soft-stop", "-1s"], "'--soft-stop': '-1s' is not a duration"),
        (["worker", "jobs:client", "-q", "a:0"], "queue 'a' needs 1 to 10000 slots, got 0"),
    ],
)
def test_wrong_input_is_one_line(args: list[str], message: str) -> None:
    """A wrong value is wrong usage: one line that names it, its option and what is allowed."""
    result = invoke(*args, DATABASE_URL=UNREACHABLE)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_garbage_collection_while_a_command_runs() -> None:
    """Garbage is not collected while modules are imported, and is collected while a command
    runs."""
    code = """
import gc, sys
from riverpy.__main__ import main
sys.argv = ["riverpy", "worker", "--help"]
before = gc.get_stats()[1]["collections"]
try:
    main()
except SystemExit:
    print(gc.isenabled(), gc.get_stats()[1]["collections"] - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True 0"


@pytest.mark.parametrize("environ", [{"RIVERPY_DEBUG": "1"}, {}])
def test_debug_shows_traceback(environ: dict[str, str]) -> None:
    """--debug (anywhere) or RIVERPY_DEBUG=1 adds the traceback, without the password."""
    arguments = ["migrate", "list", "--database-url", UNREACHABLE]
    for args in [arguments] if environ else [["--debug", *arguments], [*arguments, "--debug"]]:
        result = invoke(*args, **environ)
        assert result.exit_code == 1
        assert "Traceback (most recent call last)" in result.stderr
        assert "s3cret" not in result.stderr


@pytest.mark.parametrize("value", ["", "0", "false", "no", "OFF"])
def test_debug_can_be_off(value: str) -> None:
    """RIVERPY_DEBUG=false is no wish for tracebacks."""
    result = invoke("migrate", "list", "--database-url", UNREACHABLE, RIVERPY_DEBUG=value)
    assert result.stderr == "riverpy: cannot connect to 127.0.0.1:1: connection refused\n"


def test_version() -> None:
    """`riverpy --version` names the version of the installed package."""
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("riverpy, version 0.")


def test_help_of_the_worker_tells_exit_codes() -> None:
    """`riverpy worker --help` lists all reasons for exit code 4 (OP-04)."""
    text = " ".join(invoke("worker", "--help").output.split())
    assert (
        "4 stopped, but jobs, maintenance or singletons were abandoned, or results could not be "
        "stored"
    ) in text


def test_help_lists_commands_without_importing_them() -> None:
    """`riverpy --help` imports no command, so that it stays quick."""
    code = (
        "import sys\nfrom riverpy.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "print([m for m in sys.modules if m.startswith('riverpy.cli.') and '._' not in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "migrate" in done.stdout
    assert done.stdout.endswith("[]\n")


def test_every_listed_command_is_there() -> None:
    """Each command of the list answers --help, and the lines of its list of commands are not cut
    short."""
    for name in main.list_commands(click.Context(main)):
        result = invoke(name, "--help")
        assert result.exit_code == 0, name
        assert not re.search(r"[.]{3}$", result.output.partition("Commands:")[2], re.MULTILINE)


def test_run_translates_expected_errors() -> None:
    """An expected error becomes a CommandError; a defect keeps its type and traceback."""

    async def fail(error: Exception) -> None:
        raise error

    expected = [(ConfigError("wrong"), 2), (OSError("down"), 1), (TimeoutError(), 1)]
    for error, code in expected:
        with pytest.raises(CommandError) as caught:
            run_async(fail, error)
        assert caught.value.exit_code == code
    with pytest.raises(CommandError, match="TimeoutError"):
        run_async(fail, ExceptionGroup("one", [TimeoutError()]))
    with pytest.raises(ExceptionGroup):
        run_async(fail, ExceptionGroup("two", [TimeoutError(), OSError()]))
    with pytest.raises(ZeroDivisionError):
        run_async(fail, ZeroDivisionError())


def test_message_is_one_line_without_password() -> None:
    """Line breaks become spaces, passwords stars."""
    with pytest.raises(CommandError) as caught, translate_to_command_errors():
        raise OSError("cannot reach\npostgres://u:s3cret@h/d")
    assert caught.value.message == "cannot reach postgres://u:***@h/d"


def test_print_json(capsys: pytest.CaptureFixture[str]) -> None:
    """One document on one line, times in RFC 3339."""
    print_json({"at": datetime(2026, 1, 31, 18, tzinfo=UTC), "none": None})
    out = capsys.readouterr().out
    assert json.loads(out) == {"at": "2026-01-31T18:00:00Z", "none": None}
    assert out.count("\n") == 1


def test_print_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns are aligned, numbers to the right, None is a dash; no rows leave the head."""
    print_table(("ID", "KIND"), [(1, "a"), (1000, None)])
    assert capsys.readouterr().out == "  ID  KIND\n   1  a\n1000  -\n"
    print_table(("ID", "KIND"), [])
    assert capsys.readouterr().out == "ID  KIND\n"


def test_nothing_commands_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """What a name in the database holds moves no cursor and sets no title."""
    name = "a\x1b]0;b\x07\x9b2J\u202ec\nd"
    print_table(("KIND",), [(name,)])
    assert capsys.readouterr().out == "KIND\na?]0;b??2J?c?d\n"
    assert text_to_one_line(name) == "a?]0;b??2J?c d"


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    """Colours need a terminal, and NO_COLOR turns them off."""
    monkeypatch.setenv("TERM", "xterm")
    terminal = io.StringIO()
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert not should_use_color(terminal)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    assert should_use_color(terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not should_use_color(terminal)


def test_closed_stdout_is_no_traceback() -> None:
    """`riverpy migrate sql | head -1` ends without a traceback (OP-05)."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [RIVERPY, "migrate", "sql"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("option", ["--version", "--help"])
def test_full_disk(option: str) -> None:
    """Text that cannot be written is an error on one line."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run([RIVERPY, option], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "riverpy: No space left on device\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_stream(schema: Schema, closed: str) -> None:
    """A standard stream that is closed costs no more than what would go through it: the command
    does its work and ends with its exit code."""
    place = f"--database-url '{schema.url}' --schema {schema.name}"
    script = f"{RIVERPY} insert shell '{{}}' {place} {closed}"
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("shell" in done.stdout) is (">&-" not in closed.split())
    jobs = invoke("job", "list", "--database-url", schema.url, "--schema", schema.name, "--json")
    assert [job["kind"] for job in json.loads(jobs.stdout)["jobs"]] == ["shell"]


async def test_odd_row_is_listed(schema: Schema) -> None:
    """A row whose errors hold a null, written by SQL, hides no other and is shown as it is."""
    await schema.execute(
        "INSERT INTO river_job (kind, max_attempts, args, errors)"
        " VALUES ('odd', 5, '{}', array[null, '{\"error\": \"x\"}']::jsonb[])"
    )
    command = [RIVERPY, "job", "list", "--json", "--database-url", schema.url]
    done = subprocess.run([*command, "--schema", schema.name], capture_output=True, text=True)
    (job,) = json.loads(done.stdout)["jobs"]
    assert job["errors"] == [None, {"error": "x"}]


@pytest.mark.parametrize("closed", ["<&-", "</dev/null"])
def test_args_from_closed_stdin(closed: str) -> None:
    """Args that are to come from a closed or empty stdin are one line of error, and wrong usage."""
    script = f"{RIVERPY} insert shell - --database-url {UNREACHABLE} {closed}"
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("riverpy: stdin is empty or closed")
    assert done.stderr.count("\n") == 1


async def test_warnings_do_not_mix_with_data(schema: Schema) -> None:
    """What the library logs while a command runs is on stderr: stdout holds the data alone."""
    await schema.execute("INSERT INTO river_migration (line, version) VALUES ('main', 999)")
    command = [RIVERPY, "job", "list", "--json", "--database-url", schema.url]
    done = subprocess.run([*command, "--schema", schema.name], capture_output=True, text=True)
    await schema.execute("DELETE FROM river_migration WHERE version = 999")
    assert json.loads(done.stdout) == {"jobs": [], "damaged": [], "cursor": None}
    assert NEWER_MIGRATIONS_FOUND in done.stderr
