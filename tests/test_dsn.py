"""Database URLs: which are refused, their server, and hidden passwords."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import AsyncMock
from urllib.parse import quote

import anyio
import asyncpg
import pytest
import structlog

from riverpy import Client, Config, ConfigError
from riverpy._dsn import (
    adapt_url_for_asyncpg,
    database_address_from_url,
    find_ignored_pg_variables,
    make_pg_variables_url,
    mask_passwords,
    url_for_display,
    validate_url,
)
from riverpy._log_events import DATABASE_URL_PARAMETERS_IGNORED, DATABASE_VARIABLES_IGNORED
from riverpy._postgres import driver
from riverpy._postgres.driver import (
    CONNECT_TIMEOUT,
    close_connection,
    close_pool,
    connect,
    create_pool,
)
from tests.cli.invoking import invoke

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from click.testing import Result

RIVERPY = Path(sys.executable).with_name("riverpy")
WRONG = [
    "postgres//u:s3cret@h/d",
    "postgresql//u:s3cret@h/d",
    "postgres:/u:s3cret@h/d",
    "postgres:u:s3cret@h/d",
    "postgres://u:s3cret",
    "postgres://u:12?s3cret@host/d",
    "postgres://u:12/s3cret@host/d",
    "postgres://u:12#s3cret@host/d",
    "postgres://u:12@s3cret@host/d",
    "postgres://u:12 s3cret@host/d",
    "postgres:///u:s3cret@h/d",
    "postgres:////u:s3cret@h/d",
    "postgres://[s3cret@h/d",
    "postgres://h/d?s3cret",
    "postgres://u：s3cret@h/d",
    "postgres：//u:s3cret@h/d",
    "postgres://u@h:s3cret/d",
    "postgres://h/d:s3cret",
    ":s3cret@h",
    "s3cret",
    "u:s3cret@h/d",
    "mysql://u:s3cret@h/d",
    "postgres://u:s3cret@h:99999/d",
    "postgres://u:s3cret@h/d?port=xx",
    "postgres://u:s3cret@h/d?connect_timeout=soon",
    "postgres://u:s3cret@h/d?channel_binding=require",
    "postgres://u:s3cret@h/d?client_encoding=latin1",
    "postgres://u:s3cret@h/d?target_session_attrs=first",
    "postgres://u:s3cret@h/\0",
]


@pytest.mark.parametrize("url", WRONG)
def test_wrong_url_is_not_repeated(url: str) -> None:
    """The error for a URL that cannot be parsed contains nothing of the URL."""
    with pytest.raises(ConfigError) as caught:
        validate_url(url)
    assert "s3" not in str(caught.value)
    with pytest.raises(ConfigError):
        Client(url)
    with pytest.raises(ConfigError):
        Config(listen_url=url)


def test_port_of_thousands_of_digits() -> None:
    """A port with thousands of digits is refused like any other wrong port."""
    with pytest.raises(ConfigError, match="its port must be between"):
        validate_url(f"postgres://u@h:{'9' * 5_000}/d")


@pytest.mark.parametrize("url", [url for url in WRONG if "\0" not in url])
def test_command_does_not_repeat_a_wrong_url(url: str) -> None:
    """A command's error contains nothing of a wrong URL, with and without --debug (OP-04)."""
    for arguments in (["--database-url", url], ["--database-url", url, "--debug"]):
        done = invoke("migrate", "list", *arguments)
        assert done.exit_code == 2
        assert "s3" not in done.stdout + done.stderr


def test_process_does_not_repeat_a_wrong_url() -> None:
    """A process prints nothing of a wrong URL until it ends (OP-04)."""
    arguments = ("migrate", "list", "--debug", "--database-url", WRONG[0])
    done = subprocess.run([RIVERPY, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr
    assert "s3" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "url",
    [
        "postgres://",
        "postgresql:///d",
        "postgres://u:p%40@h:5432/d",
        "postgres://u@[::1]:5432/d?sslmode=require",
        "postgres://u@a:1,b:2/d?target_session_attrs=read-write",
        "postgresql://postgres@/postgres?host=/run/x&port=5432",
        "postgres://u@%2Frun%2Fx/d",
        "postgres://h/d?application_name=a&connect_timeout=10",
        "postgres://h/d?options=-c%20search_path%3Da",
    ],
)
def test_right_url(url: str) -> None:
    """Common URLs are accepted."""
    validate_url(url)
    assert mask_passwords(url).replace("***", "p%40") == url


@pytest.mark.parametrize(
    "text",
    [
        "at postgres//u:s3cret@h/d now",
        "at postgres:///u:s3cret@h/d now",
        "at postgres：//u：s3cret@h/d now",
        "at postgres://h/d?passwd=s3cret now",
        "at postgres://h/d?sslmode=require&foo=s3cret now",
        "at :s3cret@h now",
        "at postgresql+asyncpg://u:12/s3cret@h/d now",
        "at postgres://u:my s3cret@h/d now",
        "at postgres://u:1@2/s3cret@h/d now",
        "at mysql://h/d?pwd=s3cret now",
        "at host=h sslpassword = 's3cret' now",
    ],
)
def test_mask_in_text(text: str) -> None:
    """Passwords of mistyped URLs are masked in any text."""
    assert "s3cret" not in mask_passwords(text)
    assert mask_passwords(text).startswith("at ")
    assert mask_passwords(text).endswith(" now")


def test_mask_leaves_other_text() -> None:
    """A URL with a port and an unrelated address after it is not masked."""
    text = f"see http://host:80 {'word ' * 50} ada@example.com"
    assert mask_passwords(text) == text


def test_config_shows_no_password() -> None:
    """The repr of a Config masks the password of listen_url and shows the rest."""
    shown = repr(Config(listen_url="postgres://u:s3cret@h/d", pool_size=3))
    assert "s3cret" not in shown
    assert "listen_url='postgres://u:***@h/d'" in shown
    assert shown.startswith("Config(")
    assert "pool_size=3" in shown


@pytest.mark.parametrize(
    ("url", "environ", "hosts", "user", "database"),
    [
        ("postgres://u:p@h/d", {}, "h:5432", "u", "d"),
        ("postgres://u@h:1,g:2/d", {}, "h:1, g:2", "u", "d"),
        ("postgres://u@h,g/d?port=1,2", {}, "h:1, g:2", "u", "d"),
        ("postgres://u@[::1]/d", {}, "[::1]:5432", "u", "d"),
        ("postgres://u@/d?host=/run/x&port=7", {}, "/run/x:7", "u", "d"),
        ("postgresql://", {"PGHOST": "h", "PGPORT": "7", "PGUSER": "u"}, "h:7", "u", "u"),
        ("postgres://h/d", {"PGHOST": "g", "PGUSER": "u"}, "h:5432", "u", "d"),
    ],
)
def test_server(url: str, environ: Mapping[str, str], hosts: str, user: str, database: str) -> None:
    """The server comes from the URL, and from PG* variables for parts that the URL lacks."""
    assert database_address_from_url(url, environ) == (hosts, user, database)


def test_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PGSERVICE alone selects the host, port, user and database of the service file."""
    (tmp_path / "services").write_text("[mine]\nhost=h\nport=7\nuser=u\ndbname=d\npassword=s3c\n")
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    monkeypatch.setenv("PGSERVICE", "mine")
    assert database_address_from_url(make_pg_variables_url()) == ("h:7", "u", "d")
    assert url_for_display(make_pg_variables_url()) == "database d of user u at h:7"
    monkeypatch.setenv("PGSERVICE", "other")
    with pytest.raises(ConfigError, match=r"there is no service 'other' in .*services"):
        database_address_from_url(make_pg_variables_url())
    (tmp_path / "services").write_text("[other]\npassword=s3cret%x\n")
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        database_address_from_url(make_pg_variables_url())
    assert "s3cret" not in str(caught.value)


async def test_connect_by_service(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a URL, a connection uses the service of PGSERVICE."""
    for variable in ("PGHOST", "PGPORT", "PGUSER", "PGDATABASE"):
        monkeypatch.delenv(variable, raising=False)
    connection = await connect(database_url)
    ((host, port, user, name),) = await connection.fetch(
        "SELECT split_part(current_setting('unix_socket_directories'), ',', 1),"
        " current_setting('port'), current_user, current_database()"
    )
    await close_connection(connection)
    (tmp_path / "services").write_text(
        f"[it]\nhost={host}\nport={port}\nuser={user}\ndbname={name}"
    )
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    monkeypatch.setenv("PGSERVICE", "it")
    connection = await connect(None)
    assert await connection.fetchval("SELECT current_database()") == name
    await close_connection(connection)


@dataclass
class Address:
    """The address of the tests' server, as parts of a URL."""

    host: str
    port: str
    user: str
    database: str

    def url(self, port: int, parameters: str = "") -> str:
        """A URL whose first host is a local port."""
        return (
            f"postgres://{self.user}@/{self.database}"
            f"?host=127.0.0.1,{self.host}&port={port},{self.port}{parameters}"
        )


@pytest.fixture
async def address(database_url: str) -> Address:
    """The address of the tests' server."""
    connection = await connect(database_url)
    ((host, port, user, name),) = await connection.fetch(
        "SELECT split_part(current_setting('unix_socket_directories'), ',', 1),"
        " current_setting('port'), current_user, current_database()"
    )
    await close_connection(connection)
    return Address(host, port, user, name)


async def test_next_host_after_a_silent_host(address: Address) -> None:
    """If the first host of a URL does not answer, connections and pools try the next host within
    the shortest timeout (NR-12)."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = address.url(silent.getsockname()[1], "&target_session_attrs=primary")
        with anyio.fail_after(CONNECT_TIMEOUT / 2):
            connection = await connect(url)
            await close_connection(connection)
        pool = await create_pool(url, max_size=1, through_pooler=False, command_timeout=5)
        with anyio.fail_after(CONNECT_TIMEOUT / 2):
            assert await pool.fetchval("SELECT NOT pg_is_in_recovery()", timeout=5)
        assert await close_pool(pool)


async def test_next_host_after_a_closed_connection(address: Address) -> None:
    """If the first host is a proxy without a server, the next host is tried. Another refusal is
    raised (NR-12)."""

    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        for mode in ("prefer", "disable"):
            await close_connection(await connect(address.url(port, f"&sslmode={mode}")))
        address.database = "none_of_this_name"
        with pytest.raises(asyncpg.InvalidCatalogNameError):
            await connect(address.url(port))


async def test_reasons_of_all_hosts(address: Address) -> None:
    """If no host of a URL can be used, the error has the reason for each host."""
    with pytest.raises(ConnectionError) as caught:
        await connect(address.url(1, "&target_session_attrs=standby"))
    assert str(caught.value) == (
        f"cannot connect to 127.0.0.1:1, {address.host}:{address.port}: "
        "connection refused; it does not match target_session_attrs"
    )


async def test_connect_timeout(database_url: str) -> None:
    """`connect_timeout` in a URL is a timeout and is not sent to the server."""
    assert adapt_url_for_asyncpg("postgres://h/d?connect_timeout=3") == ("postgres://h/d", 3, ())
    assert adapt_url_for_asyncpg("postgres://h/d?a=1&connect_timeout=0&b=%202") == (
        "postgres://h/d?a=1&b=%202",
        None,
        (),
    )
    url = database_url + ("&" if "?" in database_url else "?") + "connect_timeout=10"
    async with Client(url):
        pass


@pytest.mark.parametrize(
    ("parameter", "reason"),
    [
        ("channel_binding=require", "use sslmode=verify-full&sslrootcert=system instead"),
        ("channel%5Fbinding=require", "asyncpg does not support channel binding"),
        (
            "channel_binding=prefer&channel_binding=require",
            "asyncpg does not support channel binding",
        ),
        ("channel_binding=require&sslmode=require", "asyncpg does not support channel binding"),
        ("channel_binding=s3cret", "must be disable, prefer or require"),
        ("require_auth=scram-sha-256", "asyncpg cannot restrict the authentication method"),
        ("requirepeer=postgres", "asyncpg cannot check the user of the server"),
        ("gssencmode=require", "use sslmode=require or sslmode=verify-full instead"),
        ("requiressl=1", "use sslmode=require instead"),
        ("sslcertmode=require", "asyncpg cannot require or suppress"),
        ("sslcrldir=/etc/crl", "use one file with sslcrl"),
        ("hostaddr=127.0.0.1", "use the address as the host"),
        ("replication=database", "riverpy needs an ordinary connection"),
        ("scram_client_key=s3cret", "asyncpg cannot log in with a key"),
        ("oauth_issuer=s3cret", "asyncpg cannot log in with OAuth"),
        ("pgbouncer=true", "remove it, and set Config(pooler=True)"),
        ("schema=s3cret", "set the schema with Config(schema=…) or --schema"),
        ("currentSchema=s3cret", "set the schema with Config(schema=…) or --schema"),
        ("ssl=true", "use sslmode=require or sslmode=verify-full instead"),
        ("sslrootcert=system&sslmode=require", "sslrootcert=system requires sslmode=verify-full"),
    ],
)
def test_refused_parameter_is_named(parameter: str, reason: str) -> None:
    """A parameter that asyncpg does not support, and that cannot be ignored safely, is refused with
    the reason and an alternative."""
    name = parameter.partition("=")[0].replace("%5F", "_")
    with pytest.raises(ConfigError) as caught:
        validate_url(f"postgres://u:s3cret@h/d?{parameter}")
    assert f"its parameter {name}" in str(caught.value)
    assert reason in str(caught.value)
    assert "s3" not in str(caught.value)


@pytest.mark.parametrize(
    ("query", "kept", "ignored"),
    [
        ("channel_binding=prefer", "", ["channel_binding"]),
        ("sslmode=require&channel_binding=disable&a=%20b", "sslmode=require&a=%20b", None),
        ("sslmode=verify-full&channel_binding=require", "sslmode=verify-full", None),
        ("keepalives=1&keepalives_idle=30&tcp_user_timeout=5", "", None),
        ("fallback_application_name=x&gssencmode=prefer&sslsni=1", "", None),
        ("connection_limit=5&pool_timeout=3&pgbouncer=false", "", None),
        ("client_encoding=utf-8&statement_cache_size=0", "client_encoding=utf-8", None),
        ("load_balance_hosts=random&sslcompression=0&replication=false", "", None),
    ],
)
def test_ignored_parameters(query: str, kept: str, ignored: list[str] | None) -> None:
    """A parameter that can be ignored is not sent to the server, and is listed."""
    url = f"postgres://u:p@h/d?{query}"
    validate_url(url)
    found = adapt_url_for_asyncpg(url)
    assert found.url == f"postgres://u:p@h/d?{kept}".removesuffix("?")
    names = [part.partition("=")[0] for part in query.split("&") if part not in kept]
    assert list(found.ignored_parameters) == (ignored or names)


def test_system_root_certificates() -> None:
    """`sslrootcert=system` verifies the server's name and certificate with the system's
    certificates."""
    cafile = ssl.get_default_verify_paths().cafile
    assert cafile is not None, "this system has no certificates"
    expected = f"postgres://h/d?sslmode=verify-full&sslrootcert={quote(cafile, safe='')}"
    for query in ("sslrootcert=system", "sslmode=verify-full&sslrootcert=system"):
        validate_url(f"postgres://h/d?{query}")
        assert adapt_url_for_asyncpg(f"postgres://h/d?{query}").url == expected


def test_libpq_parameter_of_a_service(tmp_path: Path) -> None:
    """A parameter that asyncpg does not support is also refused in a service file."""
    file = tmp_path / "services"
    file.write_text("[main]\nhost=h\nchannel_binding=require\npassword=s3cret\n")
    with pytest.raises(ConfigError) as caught:
        database_address_from_url("postgres://?service=main", {"PGSERVICEFILE": str(file)})
    assert "parameter channel_binding" in str(caught.value)
    assert "s3" not in str(caught.value)


async def test_ignored_parameters_are_logged_once(
    database_url: str,
) -> None:
    """A connection with ignored parameters works, and one warning lists them."""
    url = database_url + ("&" if "?" in database_url else "?")
    url += "channel_binding=prefer&keepalives_count=3"
    with structlog.testing.capture_logs() as logged:
        async with Client(url), Client(url):
            pass
    assert [entry for entry in logged if entry["event"] == DATABASE_URL_PARAMETERS_IGNORED] == [
        {
            "event": DATABASE_URL_PARAMETERS_IGNORED,
            "log_level": "warning",
            "parameters": ["channel_binding", "keepalives_count"],
        }
    ]


@pytest.mark.parametrize("query", ["?connect_timeout=1", ""])
async def test_connect_timeout_is_kept(monkeypatch: pytest.MonkeyPatch, query: str) -> None:
    """Connecting to a server that does not answer ends after the URL's timeout, or
    PGCONNECT_TIMEOUT. The error has the server."""
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "2" if query else "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(TimeoutError) as caught:
            await connect(f"postgres://u:s3cret@127.0.0.1:{port}/d{query}")
    assert str(caught.value) == f"cannot connect to 127.0.0.1:{port}: no answer within 1 s"


@pytest.mark.parametrize(
    ("parameter", "reason"),
    [
        ("nosuch=s3cret", 'unrecognized configuration parameter "nosuch"'),
        ("max_connections=5", "cannot be changed without restarting the server"),
        ("timezone=Mars", 'invalid value for parameter "TimeZone"'),
    ],
)
async def test_parameter_that_the_server_refuses(
    database_url: str, parameter: str, reason: str
) -> None:
    """An unknown parameter is sent as a setting of the session. The server's error is raised as an
    error of the URL."""
    url = database_url + ("&" if "?" in database_url else "?") + parameter
    with pytest.raises(ConfigError, match="the database URL has a parameter") as caught:
        await connect(url)
    assert reason in str(caught.value)
    assert "s3" not in str(caught.value)


VARIABLES = ("PGAPPNAME", "PGCLIENTENCODING", "PGLOADBALANCEHOSTS", "PGOPTIONS", "PGTZ")


def test_ignored_variables(database_url: str) -> None:
    """A command that connects logs one event with the variables of libpq that have no effect."""
    with structlog.testing.capture_logs() as events:
        invoke(
            *("queue", "list", "--database-url", database_url),
            **dict.fromkeys(VARIABLES, "x"),
            PGGSSENCMODE="prefer",
            PGSSLMODE="prefer",
        )
    (event,) = (one for one in events if one["event"] == DATABASE_VARIABLES_IGNORED)
    assert event["variables"] == [
        *("PGAPPNAME", "PGCLIENTENCODING", "PGOPTIONS", "PGTZ", "PGGSSENCMODE"),
        "PGLOADBALANCEHOSTS",
    ]


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        (
            "PGCHANNELBINDING",
            "require",
            "is not supported: asyncpg does not support channel binding",
        ),
        ("PGHOSTADDR", "127.0.0.1", "is not supported: asyncpg does not support it"),
        ("PGREQUIREAUTH", "s3cret", "is not supported: asyncpg cannot restrict"),
        ("PGCONNECT_TIMEOUT", "s3cret", "must be a number of seconds"),
        ("PGTARGETSESSIONATTRS", "s3cret", "must be one of any, read-write"),
    ],
)
def test_refused_variables(variable: str, value: str, reason: str) -> None:
    """A variable that cannot be ignored safely is refused like a parameter of the URL."""
    url = "postgres://u@127.0.0.1:1/d"
    result = invoke("queue", "list", "--database-url", url, **{variable: value})
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{variable} {reason}" in result.stderr
    assert "s3" not in result.stderr


def test_no_server_matches_target_session_attrs(database_url: str) -> None:
    """If no server matches PGTARGETSESSIONATTRS, the command's error says so."""
    result = invoke("queue", "list", "--database-url", database_url, PGTARGETSESSIONATTRS="standby")
    assert result.exit_code == 1
    assert result.stderr == ("riverpy: no server of the URL matches target_session_attrs\n")


@pytest.mark.parametrize(
    ("query", "environ", "ignored"),
    [
        ("?sslmode=verify-full", {"PGCHANNELBINDING": "require"}, ("PGCHANNELBINDING",)),
        ("", {"PGCHANNELBINDING": "require", "PGSSLMODE": "verify-full"}, ("PGCHANNELBINDING",)),
        ("?channel_binding=prefer", {"PGCHANNELBINDING": "require"}, ()),
        ("?host=/run/pg", {"PGCHANNELBINDING": "require"}, ("PGCHANNELBINDING",)),
        ("?target_session_attrs=any", {"PGTARGETSESSIONATTRS": "x", "PGTZ": ""}, ()),
    ],
)
def test_variables_beside_a_url(
    query: str, environ: dict[str, str], ignored: tuple[str, ...]
) -> None:
    """A parameter of the URL overrides the variable. A verified server, or a local socket, needs no
    channel binding."""
    host = "" if "host=" in query else "h"
    assert find_ignored_pg_variables(f"postgres://{host}/d{query}", environ) == ignored


def test_peer_of_a_socket() -> None:
    """PGREQUIREPEER is refused for sockets, and has no effect for other hosts."""
    with pytest.raises(ConfigError, match="PGREQUIREPEER is not supported"):
        find_ignored_pg_variables("postgres:///d?host=/run/pg", {"PGREQUIREPEER": "postgres"})


@pytest.mark.parametrize(
    ("place", "kind", "text"),
    [
        (
            "127.0.0.1:1",
            ConnectionRefusedError,
            "cannot connect to 127.0.0.1:1: connection refused",
        ),
        ("none.invalid", socket.gaierror, "cannot connect to none.invalid:5432: "),
        ("%2Fnone", FileNotFoundError, "cannot connect to /none:5432: no such file or directory"),
    ],
)
@pytest.mark.parametrize("is_pool_open", [False, True])
async def test_error_names_the_server(
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    kind: type[OSError],
    text: str,
    *,
    is_pool_open: bool,
) -> None:
    """The error for an unreachable server contains the server, and keeps its type, also when an
    open pool makes a connection."""
    url = f"postgres://u:s3cret@{place}/d"
    open_connection: Callable[[], Awaitable[object]] = partial(connect, url)
    if is_pool_open:
        monkeypatch.setattr(driver, "connect", AsyncMock())  # the connection that opens the pool
        monkeypatch.setattr(driver, "close_connection", AsyncMock())
        pool = await create_pool(url, max_size=1, through_pooler=False, command_timeout=1)
        open_connection = pool.acquire
    with pytest.raises(kind) as caught:
        await open_connection()
    assert str(caught.value).startswith(text)
    assert caught.value.errno
    with pytest.raises(kind, match=r" \(of listen_url\): "):
        await connect(f"postgres://u:s3cret@{place}/d", url_setting_name="listen_url")


async def test_missing_certificate_is_named(tmp_path: Path) -> None:
    """The error for a missing certificate file has the file and its parameter."""
    absent = tmp_path / "absent.crt"
    with pytest.raises(
        FileNotFoundError, match=re.escape(f"file '{absent}' of sslrootcert does not exist")
    ):
        await connect(f"postgres://u@127.0.0.1:1/d?sslmode=verify-full&sslrootcert={absent}")


def test_command_names_the_server_of_the_environment(tmp_path: Path) -> None:
    """--print-config and connection errors show the server that the PG* variables select."""
    environ = {"PGHOST": "127.0.0.1", "PGPORT": "1", "PGUSER": "u", "PGDATABASE": "d"}

    def run(*args: str, **more: str) -> Result:
        return invoke(*args, **{**environ, **more})

    assert "database d of user u at 127.0.0.1:1 " in run("worker", "x", "--print-config").stdout
    done = run("migrate", "list")
    assert (done.exit_code, done.stderr) == (
        1,
        "riverpy: cannot connect to 127.0.0.1:1: connection refused\n",
    )
    done = run("migrate", "list", PGPORT="xx")
    assert done.exit_code == 2
    assert "PGPORT" in done.stderr
    done = run("migrate", "list", PGSERVICE="none", PGSERVICEFILE=str(tmp_path / "none"))
    assert done.exit_code == 2
    assert "there is no service 'none'" in done.stderr


async def test_process_without_a_user_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """If neither the settings nor the system give a user name, the error says so in one
    sentence."""

    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", nobody)
    monkeypatch.delenv("PGUSER", raising=False)
    with pytest.raises(ConfigError, match="has no user"):
        await connect("postgres://127.0.0.1:1/d")
    with pytest.raises(OSError, match="refused"):
        await connect("postgres://u@127.0.0.1:1/d")
