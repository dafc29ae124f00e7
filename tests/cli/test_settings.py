"""The sources of settings, and the errors for wrong values."""

from __future__ import annotations

import subprocess
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from riverpy import Client, Config, QueueConfig
from riverpy._tools.health.http import Address
from riverpy.cli import main
from riverpy.cli._settings import (
    CANDIDATE,
    DATABASE_URL,
    DEAD_AFTER,
    DEBUG,
    DOMAIN_QUEUES,
    ELECT_INTERVAL,
    HEALTH,
    KNOWN_KINDS_ONLY,
    LEADER_DOMAIN,
    LEADER_SETTINGS,
    LEADER_TTL,
    LOG,
    LOG_LEVEL,
    MAX_AGE,
    MAX_JOBS,
    MAX_LEASES,
    MAX_PROCESSES,
    MAX_RSS,
    NAME,
    ON_DOMAIN_CONFLICT,
    POLL_ONLY,
    PROCESSES,
    QUEUES,
    SCHEMA,
    SETTINGS,
    SOFT_STOP,
    SPREAD_LEASES,
    Setting,
    SettingsError,
    SettingSources,
    SettingValue,
)
from tests.cli.worker_process import RIVERPY, environment

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

URL = "postgres://u:s3cret@db/app"

SAMPLES: list[tuple[Setting[Any], Any, str, str]] = [
    (DATABASE_URL, "postgres://flag/a", "postgres://env/a", "'postgres://file/a'"),
    (SCHEMA, "of_flag", "of_env", "'of_file'"),
    (QUEUES, {"flag": 1}, "env:2", "{ file = 3 }"),
    (POLL_ONLY, True, "no", "true"),
    (KNOWN_KINDS_ONLY, False, "yes", "false"),
    (SOFT_STOP, timedelta(seconds=1), "2s", "'3s'"),
    (MAX_PROCESSES, 1, "2", "3"),
    (PROCESSES, 1, "2", "3"),
    (MAX_JOBS, 1, "2", "3"),
    (MAX_AGE, timedelta(seconds=1), "2s", "'3s'"),
    (MAX_RSS, 1024, "2K", "'3K'"),
    (CANDIDATE, False, "yes", "false"),
    (LEADER_DOMAIN, "flag", "env", "'file'"),
    (DOMAIN_QUEUES, ("flag",), "env,e2", "['file', 'f2']"),
    (ON_DOMAIN_CONFLICT, "warn", "takeover", "'error'"),
    (ELECT_INTERVAL, timedelta(seconds=1), "2s", "'3s'"),
    (LEADER_TTL, timedelta(seconds=20), "30s", "'40s'"),
    (MAX_LEASES, 1, "2", "3"),
    (SPREAD_LEASES, True, "no", "true"),
    (DEAD_AFTER, timedelta(seconds=1), "2s", "'3s'"),
    (NAME, "flag", "env", "'file'"),
    (HEALTH, Address("::1", 1), "0.0.0.0:2", "':3'"),
    (LOG, "console", "json", "'json'"),
    (LOG_LEVEL, "debug", "warning", "'error'"),
    (DEBUG, True, "no", "true"),
]


def test_each_setting_has_samples() -> None:
    """No setting is missing in the tests of all settings."""
    assert tuple(setting for setting, *_ in SAMPLES) == SETTINGS


def sources(directory: Path, **environ: str) -> SettingSources:
    """The sources of a process with this environment in this directory."""
    return SettingSources(environ, directory)


@pytest.mark.parametrize(
    ("setting", "flag", "env", "toml"), SAMPLES, ids=[s[0].name for s in SAMPLES]
)
def test_order_of_sources(
    tmp_path: Path, setting: Setting[Any], flag: Any, env: str, toml: str
) -> None:
    """The flag wins over the variable, over the file, over the default (LD-15)."""
    key = setting.name
    assert sources(tmp_path).find_value(setting, None) == SettingValue()

    file = tmp_path / "pyproject.toml"
    file.write_text(f"[tool.riverpy]\n{key} = {toml}\n")
    from_file = sources(tmp_path).find_value(setting, None)
    assert from_file.source == str(file)
    assert from_file.value is not msgspec.UNSET

    found = sources(tmp_path, **{setting.environment_variable: env}).find_value(setting, None)
    assert found == SettingValue(
        setting.type.convert(env, None, None), setting.environment_variable
    )

    found = sources(tmp_path, **{setting.environment_variable: env}).find_value(setting, flag)
    assert found == SettingValue(flag, f"--no-{key}" if flag is False else f"--{key}")


def flags_of(command: click.Command, *path: str) -> Generator[tuple[tuple[str, ...], click.Option]]:
    """Each boolean option of a command and of those below it, with the command's path."""
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.is_flag:
            yield path, parameter
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from flags_of(below, *path, name)


BOOLEAN_SETTINGS = sorted(
    {
        setting.name
        for _, option in flags_of(main)
        for setting in SETTINGS
        if setting.type is click.BOOL
        and setting.parameter_name in {option.name, option.opts[0].strip("-").replace("-", "_")}
    }
)
"""The settings that an option without a value sets, found among all commands."""


def test_boolean_options_say_both() -> None:
    """An option that sets a boolean of a client, of a queue or of the settings has a `--no-` form,
    whatever command it belongs to, and every boolean setting has such an option."""
    booleans = {
        name
        for struct in (Config(), QueueConfig())
        for name, value in msgspec.structs.asdict(struct).items()
        if isinstance(value, bool)
    } | {setting.parameter_name for setting in SETTINGS if setting.type is click.BOOL}
    one_way = [
        (*path, option.opts[0])
        for path, option in flags_of(main)
        if option.opts[0].removeprefix("--").replace("-", "_") in booleans
        and not option.secondary_opts
    ]
    assert one_way == []
    assert {s.name for s in SETTINGS if s.type is click.BOOL} == set(BOOLEAN_SETTINGS)


@pytest.mark.parametrize("name", BOOLEAN_SETTINGS)
@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("source", ["flag", "variable", "file"])
def test_boolean_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, on: bool
) -> None:
    """Each source can say both values of each boolean, against the opposite in the weaker ones."""
    monkeypatch.chdir(tmp_path)
    value, opposite = str(on).lower(), str(not on).lower()
    (tmp_path / "riverpy.toml").write_text(f"{name} = {value if source == 'file' else opposite}\n")
    variable = "RIVERPY_" + name.upper().replace("-", "_")
    environ = {} if source == "file" else {variable: value if source == "variable" else opposite}
    flag = f"--{name}" if on else f"--no-{name}"
    arguments = ["worker", "jobs:client", "--print-config", *([flag] if source == "flag" else [])]
    result = CliRunner(env={variable: None, **environ}).invoke(main, arguments)
    assert result.exit_code == 0, result.output
    (row,) = (line.split() for line in result.stdout.splitlines() if line.startswith(f"{name} "))
    place = {"flag": flag, "variable": variable, "file": str(tmp_path / "riverpy.toml")}[source]
    assert row == [name, value, place]


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("name", [n for n in BOOLEAN_SETTINGS if n != "debug"])
def test_boolean_in_code(name: str, on: bool) -> None:
    """Code can say both values of each boolean of a client, and a setting wins over either."""
    field = name.replace("-", "_")
    client = Client(URL, config=Config(**{field: on}))  # pyright: ignore[reportArgumentType]
    assert getattr(client.config, field) is on
    client.configure(**{field: not on})  # pyright: ignore[reportArgumentType]
    assert getattr(client.config, field) is not on


def test_database_variables_of_others(tmp_path: Path) -> None:
    """RIVERPY_DATABASE_URL wins over DATABASE_URL, that over PG*, that over the file."""
    (tmp_path / "riverpy.toml").write_text("database-url = 'postgres://file/a'\n")
    environ = {
        "PGHOST": "h",
        "PGDATABASE": "d",
        "DATABASE_URL": "postgres://other/a",
        "RIVERPY_DATABASE_URL": "postgres://ours/a",
    }
    seen: list[tuple[object, str]] = []
    for leave_out in ("", "RIVERPY_DATABASE_URL", "DATABASE_URL", "PGHOST", "PGDATABASE"):
        environ.pop(leave_out, None)
        value = sources(tmp_path, **environ).find_value(DATABASE_URL, None)
        seen.append((value.value, value.source))
    assert seen == [
        ("postgres://ours/a", "RIVERPY_DATABASE_URL"),
        ("postgres://other/a", "DATABASE_URL"),
        ("postgresql://", "PGHOST, PGDATABASE"),
        ("postgresql://", "PGDATABASE"),
        ("postgres://file/a", str(tmp_path / "riverpy.toml")),
    ]


def test_empty_variable_is_none(tmp_path: Path) -> None:
    """An empty variable counts as not set."""
    value = sources(tmp_path, RIVERPY_SCHEMA="", DATABASE_URL="").find_value(SCHEMA, None)
    assert value.source == "default"


def test_nearest_file(tmp_path: Path) -> None:
    """The nearest file upwards counts; a pyproject.toml without [tool.riverpy] is none."""
    (tmp_path / "pyproject.toml").write_text("[tool.riverpy]\nschema = 'far'\n")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert sources(inner).find_value(SCHEMA, None).value == "far"
    (tmp_path / "a" / "riverpy.toml").write_text("schema = 'near'\n")
    assert sources(inner).find_value(SCHEMA, None).value == "near"


def test_tool_riverpy_is_a_table(tmp_path: Path) -> None:
    """A `riverpy` in [tool] that is no table is an error, not nothing."""
    (tmp_path / "pyproject.toml").write_text("[tool]\nriverpy = 5\n")
    with pytest.raises(SettingsError, match=r"tool\.riverpy must be a table, got 5"):
        sources(tmp_path)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("soft_stop = '3s'", "unknown key 'soft_stop'; did you mean soft-stop?"),
        ("zebra = 1", "unknown key 'zebra'; known are database-url, schema, queues"),
        ("schema = 3", "schema: expected text in quotes, got 3"),
        ("poll-only = 'yes'", "poll-only: expected true or false, got 'yes'"),
        ("queues = 'default:3'", "queues: expected a table of names and slots"),
        ("queues = { A = 3 }", "queues: a queue name must have lower-case letters"),
        ("queues = { a = 0 }", "queues: queue 'a' needs 1 to 10000 slots, got 0"),
        ("queues = {}", "queues: '' is not NAME:SLOTS"),
        ("soft-stop = '3 parsecs'", "soft-stop: '3 parsecs' is not a duration"),
        ("max-age = '0s'", "max-age: expected a duration of at least 1s, got '0s'"),
        ("dead-after = '99ms'", "dead-after: expected 100ms to 365000d, got '99ms'"),
        ("domain-queues = 'mail'", 'domain-queues: expected a list of names, such as ["mail"'),
        ("domain-queues = []", 'domain-queues: expected a list of names, such as ["mail"'),
        ("domain-queues = ['a', 'a']", "domain-queues: queue 'a' is given twice"),
        ("on-domain-conflict = 'fight'", "'fight' is not one of 'error', 'warn', 'takeover'"),
        ("max-leases = 0", "max-leases: '0' is not a whole number from 1"),
        ("log = 'xml'", "log: 'xml' is not one of 'console', 'json'"),
        ("database-url = 'mysql://u:s3cret@h/d'", "database-url: a database URL must start with"),
        ("schema = ", "riverpy.toml: "),
    ],
)
def test_wrong_file(tmp_path: Path, toml: str, message: str) -> None:
    """A wrong key or value in the file is an error that names file, key and near match."""
    (tmp_path / "riverpy.toml").write_text(toml)

    def read_all() -> None:
        found = sources(tmp_path)
        for setting, *_ in SAMPLES:
            found.find_value(setting, None)

    with pytest.raises(SettingsError) as caught:
        read_all()
    assert message in caught.value.message
    assert str(tmp_path / "riverpy.toml") in caught.value.message
    assert "s3cret" not in caught.value.message


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("RIVERPY_SOFTSTOP", "unknown variable RIVERPY_SOFTSTOP; did you mean RIVERPY_SOFT_STOP?"),
        ("RIVERPY_X", "unknown variable RIVERPY_X; known are RIVERPY_DATABASE_URL"),
    ],
)
def test_unknown_variable(tmp_path: Path, variable: str, message: str) -> None:
    """An unknown RIVERPY_* variable is an error that suggests a similar name."""
    with pytest.raises(SettingsError, match="unknown variable") as caught:
        sources(tmp_path, **{variable: "1"})
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    "variable",
    [
        "RIVERPY_PG_BIN",
        "RIVERPY_EMBEDDED_DIR",
        "RIVERPY_WEB_PASSWORD",
        "RIVERPY_DEBUG",
        "RIVERPY_TEST_DATABASE_URL",
        "RIVERPY_TEST_GO",
        "RIVERPYX",
    ],
)
def test_known_variables(tmp_path: Path, variable: str) -> None:
    """Variables that other parts read, and those of others, are no errors."""
    sources(tmp_path, **{variable: "1"})


def test_variables_of_kubernetes(tmp_path: Path) -> None:
    """Kubernetes gives a container variables for each Service of its namespace. Those of a Service
    whose name begins with `riverpy` are no errors; a misspelled variable is still an error."""
    names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP_ADDR")
    for service in ("RIVERPY", "RIVERPY_WORKER"):
        environ = {f"{service}_{name}": "1" for name in names}
        sources(tmp_path, **environ)
        with pytest.raises(SettingsError, match="unknown variable RIVERPY_HEALTH_PORT"):
            sources(tmp_path, RIVERPY_HEALTH_PORT="80", **environ)


def test_wrong_variable_names_its_source(tmp_path: Path) -> None:
    """The error for a wrong value names the variable and contains no password."""
    with pytest.raises(SettingsError) as caught:
        sources(tmp_path, DATABASE_URL="postgres://u:s3/cret@h:5x/d").find_value(DATABASE_URL, None)
    assert caught.value.message.startswith("DATABASE_URL: ")
    assert "cret" not in caught.value.message


def test_print_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--print-config shows each value with its source, the password masked, defaults in words."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "riverpy.toml").write_text("poll-only = false\n")
    environ = {"DATABASE_URL": URL, "RIVERPY_SOFT_STOP": "90s"}
    arguments = ["worker", "jobs:client", "-q", "default:50", "--queues=mail:5", "--print-config"]
    lines = CliRunner(env=environ).invoke(main, arguments).stdout.splitlines()
    rows = {name: rest for name, *rest in map(str.split, lines)}
    assert list(rows) == ["SETTING", *(setting.name for setting in SETTINGS)]
    assert rows["database-url"] == ["postgres://u:***@db/app", "DATABASE_URL"]
    assert rows["queues"] == ["default:50,mail:5", "--queues"]
    assert rows["soft-stop"] == ["1m30s", "RIVERPY_SOFT_STOP"]
    assert rows["poll-only"] == ["false", str(tmp_path / "riverpy.toml")]
    assert rows["name"] == ["the", "client's,", "else", "the", "host's", "default"]


WRONG_TOGETHER = """
from riverpy import Client, Config, Workers
client = Client("postgres://nobody@127.0.0.1:1/none", workers=Workers())
"""


def test_settings_of_leaders_are_checked_together(tmp_path: Path) -> None:
    """One error has all wrong values of flags, variables and the file, and all rules that the
    values break together. It names the source of each value. No connection is opened before."""
    (tmp_path / "wrong_together.py").write_text(WRONG_TOGETHER)
    file = tmp_path / "riverpy.toml"

    def run_worker(toml: str, *flags: str, **variables: str) -> str:
        file.write_text(toml)
        done = subprocess.run(  # a worker ends its process
            [RIVERPY, "worker", "wrong_together:client", *flags],
            cwd=tmp_path,
            env=environment(**variables),
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1
        return done.stderr

    error = run_worker(
        "max-leases = 0\nelect-interval = '10s'",
        "--leader-ttl=2s",
        "--domain-queues=mail,A",
        "--dead-after=1ms",
        RIVERPY_ON_DOMAIN_CONFLICT="fight",
        RIVERPY_LEADER_DOMAIN="b@d",
    )
    for text in (
        "6 settings are wrong: (1) --domain-queues: a queue name must have lower-case",
        "--dead-after: expected 100ms to 365000d, got '1ms'",
        "RIVERPY_LEADER_DOMAIN: a domain name must",
        "RIVERPY_ON_DOMAIN_CONFLICT: 'fight' is not one of 'error', 'warn', 'takeover'",
        f"{file}: max-leases: '0' is not a whole number from 1; ",
        f"leader-ttl (from --leader-ttl) must be at least 2.4 times elect-interval (from {file})",
        "at least 24s with 10s, got 2s",
    ):
        assert text in error

    error = run_worker("", RIVERPY_LEADER_TTL="2s", RIVERPY_DOMAIN_QUEUES="mail")
    for text in (
        "2 settings are wrong: (1) leader-ttl (from RIVERPY_LEADER_TTL) must be at least 2.4",
        "elect-interval (from the client's Config)",
        "at least 12s with 5s, got 2s",
        "(2) domain-queues (from RIVERPY_DOMAIN_QUEUES) requires leader-domain (from the client's",
    ):
        assert text in error

    error = run_worker("leader-domain = 'mail'", "--leader-ttl=2d")
    assert "leader-ttl (from --leader-ttl) must be 1d or less with leader-domain (from " in error


def test_settings_of_leaders_reach_the_client() -> None:
    """Each setting of leader election changes the field of its name in the client's config, and
    `--help` has all of them under one heading."""
    changes = {setting.parameter_name: flag for setting, flag, *_ in SAMPLES}
    changes = {
        setting.parameter_name: changes[setting.parameter_name] for setting in LEADER_SETTINGS
    }
    client = Client(URL)
    client.configure(**changes)
    assert {name: getattr(client.config, name) for name in changes} == changes
    with pytest.raises(TypeError, match="no_such"):
        client.configure(no_such=1)  # pyright: ignore[reportCallIssue]
    options, leading = CliRunner().invoke(main, ["worker", "--help"]).stdout.split("Leading:")
    for setting in LEADER_SETTINGS:
        assert f"--{setting.name} " in leading
        assert f"--{setting.name} " not in options
