"""Database URLs: what may be one, which server it names, how it is shown without its password.

A URL that is not read for certain is never repeated in a text: where its password would stand is
then not known.
"""

from __future__ import annotations

import configparser
import getpass
import os
import re
import sys
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

PG_VARIABLES = ("PGSERVICE", "PGHOST", "PGPORT", "PGUSER", "PGDATABASE")
"""Each of these names a database."""

_ENVIRONMENT_URL = "postgresql://"
_PORT_DEFAULT = "5432"
_PORT_MAX = 65535
_SOCKETS = "/run/postgresql, /var/run/postgresql, /tmp, localhost"
"""Where asyncpg looks if nobody names a host."""

# Each pattern takes time linear in the text: it is applied to one word (a run of characters without
# spaces), no part of it can be read in two ways, and no search for an end starts twice.
_LOGINS = (
    re.compile(r"://[\w.%+~-]*+:"),
    re.compile(r"(?i)\bpostgres(?:ql)?[:：]?/++[^\s:：/@]*+[:：]"),
    re.compile(r"(?:(?<![\w.%+~/:-])|(?<=[/:])\w*+[.%+~-])[\w.%+~-]*+:(?!//)"),
)
"""A user and the colon before the password, in a URL, in what looks like one, and without one."""
_SPACED_PASSWORD = re.compile(r"(?P<user>://[\w.%+~-]*+):(?!\*\*\*@)[^/?#\n]{1,200}(?=@)")
_PASSWORD_PARAMETER = re.compile(r"(?i)(?<=[?&])((?:ssl)?(?:pass(?:w(?:or)?d)?|pwd))=[^&#\s]*")
_PASSWORD_KEYWORD = re.compile(r"(?i)\b((?:ssl)?password\s*+=\s*+)('[^']*'|\S+)")
_URL_START = re.compile(r"(?i)\bpostgres(?:ql)?://")
_QUERY_END = re.compile("[^'\"`]*")
_WORD = re.compile(r"\S+")

_FILE_VARIABLES = {
    "sslrootcert": "PGSSLROOTCERT",
    "sslcert": "PGSSLCERT",
    "sslkey": "PGSSLKEY",
    "sslcrl": "PGSSLCRL",
}
_SHOWN = frozenset(
    {
        "host",
        "port",
        "user",
        "dbname",
        "database",
        "service",
        "passfile",
        "sslmode",
        "sslnegotiation",
        "ssl_min_protocol_version",
        "ssl_max_protocol_version",
        "target_session_attrs",
        "application_name",
        "connect_timeout",
        "search_path",
        "options",
        *_FILE_VARIABLES,
    }
)
"""Parameters whose values are shown; any other may be a password with a slip in its name."""
_LIBPQ_ONLY = frozenset(
    {
        "channel_binding",
        "fallback_application_name",
        "gssdelegation",
        "gssencmode",
        "hostaddr",
        "keepalives",
        "keepalives_count",
        "keepalives_idle",
        "keepalives_interval",
        "load_balance_hosts",
        "replication",
        "require_auth",
        "requirepeer",
        "requiressl",
        "sslcertmode",
        "sslcompression",
        "sslcrldir",
        "sslsni",
        "tcp_user_timeout",
    }
)


def mask_url(text: str) -> str:
    """`text` with each password in it, of a URL or of a keyword list, replaced by three stars.

    It takes time linear in the length of the text.
    """
    if "@" in text:
        text = _WORD.sub(lambda word: _mask_login(word[0]), text)
        if "://" in text:
            text = _SPACED_PASSWORD.sub(r"\g<user>:***", text)
    if "=" not in text:  # as in most lines of a log, which may be long
        return text
    text = _PASSWORD_PARAMETER.sub(r"\1=***", text)
    if "://" in text:
        text = _WORD.sub(lambda word: _mask_queries(word[0]), text)
    return _PASSWORD_KEYWORD.sub(r"\1***", text)


def _mask_login(word: str) -> str:
    """Mask a password before an `@`. It may hold what should have been percent-encoded, so all up
    to the last `@` is taken for it."""
    for pattern in _LOGINS:
        end = word.rfind("@")
        login = pattern.search(word, 0, max(end, 0))
        if login is not None and login.end() < end:
            word = f"{word[: login.end()]}***{word[end:]}"
    return word


def _mask_queries(word: str) -> str:
    """Mask the parameters of each URL, but for those that are known to hold no password."""
    parts: list[str] = []
    done = 0
    while url := _URL_START.search(word, done):
        start = word.find("?", url.end()) + 1
        if not start:
            break
        query = _QUERY_END.match(word, start)
        assert query is not None  # noqa: S101 (it matches an empty text)
        parts += [word[done:start], _masked_query(query[0])]
        done = query.end()
    return "".join([*parts, word[done:]])


def _masked_query(query: str) -> str:
    parts = (part.partition("=") for part in query.split("&"))
    return "&".join(
        f"{name}{equals}{value if name in _SHOWN or not equals else '***'}"
        for name, equals, value in parts
    )


def validate_url(url: str) -> None:
    """Check that this can be the URL of a database; else ConfigError, which does not repeat it."""
    if "\0" in url:
        raise ConfigError("a database URL holds no NUL")
    if not url.startswith(("postgres://", "postgresql://")):
        scheme = re.match("[a-z][a-z0-9+.-]{0,20}://", url)
        raise ConfigError(
            "a database URL starts with postgres:// or postgresql://"
            + (f", got one that starts with {scheme[0]}" if scheme else "")
        )
    if reason := _why_unreadable(url):
        raise ConfigError(f"the database URL cannot be read (it is not shown): {reason}")


def _why_unreadable(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        return "it is no URL of the form postgres://user:password@host:port/database?name=value"
    login, _, hosts = parts.netloc.rpartition("@")
    if "@" in login + parts.path + parts.query or "#" in url:
        return "in a user's name or a password, write / ? # @ as %2F %3F %23 %40"
    if re.search(r"[\s\x00-\x1f]", url):
        return "write a space in it as %20"
    if parts.path.startswith("//") or ":" in parts.path:
        return "the name of the database is one word after one /"
    for name, _value in query:
        if name in _LIBPQ_ONLY:
            return f"its parameter {name} is none that asyncpg knows: leave it out"
    return _why_no_hosts(hosts) or _why_no_parameters(dict(query))


def _why_no_hosts(hosts: str) -> str | None:
    for host in hosts.split(",") if hosts else ():
        match = re.fullmatch(r"(?:\[[0-9a-fA-F:.%]+\]|[^\[\]:]*)(?::(?P<port>.*))?", host)
        if match is None:
            return "a host is a name or an address, an IPv6 address stands in [ ]"
        if match["port"] and (reason := _why_no_port(match["port"])):
            return reason
    return None


def _why_no_parameters(query: Mapping[str, str]) -> str | None:
    for port in filter(None, query.get("port", "").split(",")):
        if reason := _why_no_port(port):
            return reason
    if (limit := query.get("connect_timeout")) and not re.fullmatch("-?[0-9]{1,9}", limit):
        return "its connect_timeout is no number of seconds"
    return None


def _why_no_port(port: str) -> str | None:
    if not re.fullmatch("[0-9]+", port):
        return "its port is no number (in a password, write / ? # and @ as %2F %3F %23 and %40)"
    if not 1 <= int(port[:9]) <= _PORT_MAX:
        return f"its port is out of range: 1 to {_PORT_MAX}"
    return None


# --- the server


class Server(NamedTuple):
    """The server that a URL and the environment name, without a password."""

    hosts: str
    """`host:port`, more than one with commas."""
    user: str
    database: str

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Each host, without the brackets of IPv6, and its port; none if nobody names a host."""
        if self.hosts.startswith(_SOCKETS):
            return []
        places = (place.rpartition(":") for place in self.hosts.split(", "))
        return [(host.strip("[]"), int(port)) for host, _, port in places]

    def __str__(self) -> str:
        return f"database {self.database} of user {self.user} at {self.hosts}"


def server_of(url: str, environ: Mapping[str, str] | None = None) -> Server:
    """The server to which a valid URL leads with the environment's `PG*` variables.

    Raises:
        ConfigError: the service that it names is not there, or PGPORT is no port.
    """
    environ = os.environ if environ is None else environ
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    service = _service(query.get("service"), environ)
    login, _, netloc = parts.netloc.rpartition("@")

    def of(name: str, *others: str, variable: str) -> str | None:
        found = (source.get(key) for source in (query, service) for key in (name, *others))
        return next(filter(None, found), None) or environ.get(variable) or None

    hosts = unquote(netloc) or of("host", variable="PGHOST")
    ports = (of("port", variable="PGPORT") or _PORT_DEFAULT).split(",")
    for port in ports:
        if reason := _why_no_port(port):
            raise ConfigError(f"PGPORT, or the port of the service, is wrong: {reason}")
    user = unquote(login.partition(":")[0]) or of("user", variable="PGUSER") or _system_user()
    database = unquote(parts.path[1:]) or of("dbname", "database", variable="PGDATABASE") or user
    return Server(_with_ports(hosts or _SOCKETS, ports), user, database)


def _with_ports(hosts: str, ports: list[str]) -> str:
    if hosts == _SOCKETS:
        return f"{hosts} (port {ports[0]})"
    pairs = zip_longest(hosts.split(","), ports[: hosts.count(",") + 1], fillvalue=ports[-1])
    return ", ".join(
        host if re.search(r"[^:]:\d+$|\]:\d+$", host) else f"{host}:{port}" for host, port in pairs
    )


def _system_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "?"


def _service(name: str | None, environ: Mapping[str, str]) -> Mapping[str, str]:
    if not name:
        return {}
    path = _service_file(environ)
    parser = configparser.ConfigParser()
    try:
        parser.read(path)
        if name not in parser.sections():
            raise ConfigError(f"there is no service {name!r} in {path}")
        return dict(parser[name])
    except (configparser.Error, OSError, UnicodeDecodeError):  # their texts have lines of the file
        raise ConfigError(
            f"the service {name!r} in {path} cannot be read: it is lines NAME=VALUE below "
            f"[{name}], with % written as %%"
        ) from None


def _service_file(environ: Mapping[str, str]) -> Path:
    if chosen := environ.get("PGSERVICEFILE"):
        return Path(chosen)
    if sys.platform == "win32":
        return Path(environ.get("APPDATA", ""), "postgresql", ".pg_service.conf")
    return Path.home() / ".pg_service.conf"


def environment_url(environ: Mapping[str, str] | None = None) -> str:
    """The URL that leaves all to the `PG*` variables.

    asyncpg looks at PGSERVICE after it has read the file of services, too late: it is named in the
    URL.
    """
    service = (os.environ if environ is None else environ).get("PGSERVICE")
    return f"{_ENVIRONMENT_URL}?service={quote(service, safe='')}" if service else _ENVIRONMENT_URL


def show_url(url: str) -> str:
    """The URL without its password; of one that leaves all to the environment, what that says."""
    if url.partition("?service=")[0] == _ENVIRONMENT_URL:
        return str(server_of(url))
    return mask_url(url)


def take_connect_timeout(url: str) -> tuple[str, float | None]:
    """The URL without libpq's `connect_timeout`, which asyncpg would send to the server, and that.

    None if it has none, or one that means for ever.
    """
    parts = urlsplit(url)
    kept = [part for part in parts.query.split("&") if not part.startswith("connect_timeout=")]
    limit = int(dict(parse_qsl(parts.query)).get("connect_timeout", 0))
    if len(kept) == parts.query.count("&") + 1:
        return url, None
    base = url.partition("?")[0]
    return base + ("?" + "&".join(kept) if kept else ""), float(limit) if limit > 0 else None


def missing_file(url: str) -> str | None:
    """A file of TLS that the URL or the environment names and that is not there, in words."""
    query = dict(parse_qsl(urlsplit(url).query))
    for name, variable in _FILE_VARIABLES.items():
        path = query.get(name) or os.environ.get(variable)
        if path and not Path(path).is_file():
            return f"there is no file {path!r}, which {name if query.get(name) else variable} names"
    return None
