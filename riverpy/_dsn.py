"""Database URLs: check them, find their server, and hide their password.

An error text never contains a URL that cannot be parsed, because riverpy cannot find and hide the
password in such a URL.
"""

from __future__ import annotations

import configparser
import getpass
import os
import re
import ssl
import sys
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PG_VARIABLES = ("PGSERVICE", "PGHOST", "PGPORT", "PGUSER", "PGDATABASE")
"""The environment variables that can select a database."""

UNKNOWN_USER = "?"
"""Stands for the user if no setting names a user, and the system has no name for the user id, as in
some containers."""
_EMPTY_URL = "postgresql://"
_PORT_DEFAULT = "5432"
_PORT_MAX = 65535
_ENCODING = "utf8"
_SYSTEM_CERTIFICATES = "system"
"""The value of `sslrootcert` for the certificates of the operating system."""
_DEFAULT_HOSTS = "/run/postgresql, /var/run/postgresql, /tmp, localhost"
"""The hosts that asyncpg tries if none is set."""

# Each pattern takes linear time, even for a text that an attacker chose. It is applied to one word,
# and each of its parts can match in only one way.
_LOGIN_PATTERNS = (
    re.compile(r"://[\w.%+~-]*+:"),
    re.compile(r"(?i)\bpostgres(?:ql)?[:：]?/++[^\s:：/@]*+[:：]"),
    re.compile(r"(?:(?<![\w.%+~/:-])|(?<=[/:])\w*+[.%+~-])[\w.%+~-]*+:(?!//)"),
)
"""Patterns for a user and a colon in front of a password: in a URL, in a mistyped URL, and outside
a URL."""
_SPACED_PASSWORD_PATTERN = re.compile(r"(?P<user>://[\w.%+~-]*+):(?!\*\*\*@)[^/?#\n]{1,200}(?=@)")
_PASSWORD_PARAMETER_PATTERN = re.compile(
    r"(?i)(?<=[?&])((?:ssl)?(?:pass(?:w(?:or)?d)?|pwd))=[^&#\s]*"
)
_PASSWORD_KEYWORD_PATTERN = re.compile(r"(?i)\b((?:ssl)?password\s*+=\s*+)('[^']*'|\S+)")
_URL_START_PATTERN = re.compile(r"(?i)\bpostgres(?:ql)?://")
_QUERY_END_PATTERN = re.compile("[^'\"`]*")
_WORD_PATTERN = re.compile(r"\S+")
_SECONDS_PATTERN = re.compile("-?[0-9]{1,9}")
_SESSION_KINDS = "any, read-write, read-only, primary, standby, prefer-standby"
"""The values of `target_session_attrs`."""

_TLS_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
"""The URL parameters that name a file. Each has an environment variable, such as PGSSLROOTCERT."""
_SHOWN_PARAMETERS = frozenset(
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
        *_TLS_FILES,
    }
)
"""Parameters whose values may be shown in logs and errors. Any other parameter may be a password
with a mistyped name."""
_IGNORED_PARAMETERS: Mapping[str, frozenset[str] | None] = {
    "channel_binding": frozenset({"disable", "prefer"}),
    "connection_limit": None,
    "fallback_application_name": None,
    "gssdelegation": frozenset({"0"}),
    "gssencmode": frozenset({"disable", "prefer"}),
    "keepalives": None,
    "keepalives_count": None,
    "keepalives_idle": None,
    "keepalives_interval": None,
    "load_balance_hosts": None,
    "max_protocol_version": None,
    "min_protocol_version": frozenset({"3.0"}),
    "pgbouncer": frozenset({"false"}),
    "pool_timeout": None,
    "replication": frozenset({"0", "false", "no", "off"}),
    "requiressl": frozenset({"0"}),
    "serverVersion": None,
    "socket_timeout": None,
    "sslcertmode": frozenset({"allow"}),
    "sslcompression": None,
    "sslkeylogfile": None,
    "sslsni": frozenset({"1"}),
    "statement_cache_size": None,
    "tcp_user_timeout": None,
    "uselibpqcompat": None,
}
"""Parameters that asyncpg does not support, with the values that can be ignored. None: all
values."""
_CHANNEL_BINDING_MESSAGE = (
    "asyncpg does not support channel binding, which protects from another server in the middle: "
    "use sslmode=verify-full&sslrootcert=system instead, which verifies the server's certificate "
    "(sslrootcert=FILE with your own certificate authority)"
)
_NO_SCHEMA = "remove it, and set the schema with Config(schema=…) or --schema"
_REFUSED_PARAMETERS: Mapping[str, str] = {
    "channel_binding": _CHANNEL_BINDING_MESSAGE,
    "currentSchema": _NO_SCHEMA,
    "gssdelegation": "asyncpg cannot delegate credentials: remove it",
    "gssencmode": "asyncpg cannot encrypt with GSSAPI: use sslmode=require or "
    "sslmode=verify-full instead",
    "hostaddr": "asyncpg does not support it: use the address as the host",
    "min_protocol_version": "asyncpg uses version 3.0 of the protocol: remove it",
    "oauth_client_id": "asyncpg cannot log in with OAuth: use a user with a password",
    "oauth_client_secret": "asyncpg cannot log in with OAuth: use a user with a password",
    "oauth_issuer": "asyncpg cannot log in with OAuth: use a user with a password",
    "oauth_scope": "asyncpg cannot log in with OAuth: use a user with a password",
    "pgbouncer": "remove it, and set Config(pooler=True)",
    "replication": "riverpy needs an ordinary connection: remove it",
    "require_auth": "asyncpg cannot restrict the authentication method: verify the server "
    "with sslmode=verify-full instead",
    "requirepeer": "asyncpg cannot check the user of the server's process: remove it, and "
    "protect the directory of its socket",
    "requiressl": "asyncpg does not support it: use sslmode=require instead",
    "scram_client_key": "asyncpg cannot log in with a key: use a password",
    "schema": _NO_SCHEMA,
    "scram_server_key": "asyncpg cannot log in with a key: use a password",
    "servicefile": "asyncpg does not support it: set PGSERVICEFILE",
    "ssl": "asyncpg does not support it: use sslmode=require or sslmode=verify-full instead",
    "sslaccept": "asyncpg does not support it: use sslmode=require or sslmode=verify-full instead",
    "sslcertmode": "asyncpg cannot require or suppress a client certificate: remove it, and set "
    "sslcert and sslkey if you use one",
    "sslcrldir": "asyncpg does not read a directory: use one file with sslcrl",
    "sslsni": "asyncpg always sends the server's name: remove it",
}
"""Parameters that asyncpg does not support, with the remedy for values that cannot be ignored. If
riverpy ignored such a value, the connection would be less secure or have another target."""
_UNSUPPORTED_VARIABLES: Mapping[str, str] = {
    "PGCHANNELBINDING": "channel_binding",
    "PGGSSDELEGATION": "gssdelegation",
    "PGGSSENCMODE": "gssencmode",
    "PGHOSTADDR": "hostaddr",
    "PGLOADBALANCEHOSTS": "load_balance_hosts",
    "PGMAXPROTOCOLVERSION": "max_protocol_version",
    "PGMINPROTOCOLVERSION": "min_protocol_version",
    "PGREQUIREAUTH": "require_auth",
    "PGREQUIREPEER": "requirepeer",
    "PGREQUIRESSL": "requiressl",
    "PGSSLCERTMODE": "sslcertmode",
    "PGSSLCOMPRESSION": "sslcompression",
    "PGSSLCRLDIR": "sslcrldir",
    "PGSSLSNI": "sslsni",
}
"""Variables of libpq that asyncpg does not read, with their parameters. A parameter of the URL
takes precedence."""
_IGNORED_VARIABLES = (
    "PGAPPNAME",
    "PGCLIENTENCODING",
    "PGDATESTYLE",
    "PGGEQO",
    "PGOPTIONS",
    "PGSYSCONFDIR",
    "PGTZ",
)
"""Variables of libpq that asyncpg does not read and that can be ignored."""


def mask_url(text: str) -> str:
    """In a text, replace the passwords of URLs and of lists such as `user=a password=b` with `***`,
    in linear time."""
    if "@" in text:
        text = _WORD_PATTERN.sub(lambda word: _mask_login(word[0]), text)
        if "://" in text:
            text = _SPACED_PASSWORD_PATTERN.sub(r"\g<user>:***", text)
    if "=" not in text:  # true for most log lines
        return text
    text = _PASSWORD_PARAMETER_PATTERN.sub(r"\1=***", text)
    if "://" in text:
        text = _WORD_PATTERN.sub(lambda word: _mask_queries(word[0]), text)
    return _PASSWORD_KEYWORD_PATTERN.sub(r"\1***", text)


def _mask_login(word: str) -> str:
    """Mask a password before an `@`. A password may contain an `@`, so everything up to the last
    `@` is masked."""
    for pattern in _LOGIN_PATTERNS:
        end = word.rfind("@")
        login = pattern.search(word, 0, max(end, 0))
        if login is not None and login.end() < end:
            word = f"{word[: login.end()]}***{word[end:]}"
    return word


def _mask_queries(word: str) -> str:
    """Mask the parameters of each URL, except those in `_SHOWN_PARAMETERS`."""
    parts: list[str] = []
    done = 0
    while url := _URL_START_PATTERN.search(word, done):
        start = word.find("?", url.end()) + 1
        if not start:
            break
        query = _QUERY_END_PATTERN.match(word, start)
        assert query is not None  # noqa: S101 (it matches an empty text)
        parts += [word[done:start], _mask_query(query[0])]
        done = query.end()
    return "".join([*parts, word[done:]])


def _mask_query(query: str) -> str:
    parts = (part.partition("=") for part in query.split("&"))
    return "&".join(
        f"{name}{equals}{value if name in _SHOWN_PARAMETERS or not equals else '***'}"
        for name, equals, value in parts
    )


def validate_url(url: str) -> None:
    """Raise ConfigError unless this is a valid database URL. The error text does not contain the
    URL."""
    if not url.startswith(("postgres://", "postgresql://")):
        scheme = re.match("[a-z][a-z0-9+.-]{0,20}://", url)
        raise ConfigError(
            "a database URL must start with postgres:// or postgresql://"
            + (f", got one that starts with {scheme[0]}" if scheme else "")
        )
    if reason := _syntax_problem(url):
        raise ConfigError(f"the database URL is not valid (it is not shown): {reason}")
    query = parse_qsl(urlsplit(url).query, keep_blank_values=True)
    if reason := _parameter_problem(query):
        raise ConfigError(f"the database URL cannot be used (it is not shown): {reason}")


def _syntax_problem(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        return "it must have the form postgres://user:password@host:port/database?name=value"
    login, _, hosts = parts.netloc.rpartition("@")
    if "@" in login + parts.path + parts.query or "#" in url:
        return "in a user name or a password, write / ? # @ as %2F %3F %23 %40"
    if re.search(r"[\s\x00-\x1f]", url):
        return "write a space as %20, and remove control characters"
    if parts.path.startswith("//") or ":" in parts.path:
        return "the name of the database must be one word after one /"
    return _host_problem(hosts) or _value_problem(dict(query))


def _parameter_problem(query: Sequence[tuple[str, str]]) -> str | None:
    """Return why a parameter is refused, or None. The text does not contain the parameter's
    value."""
    values = dict(query)
    sslmode = values.get("sslmode")
    for name, value in query:
        if reason := _support_problem(name, value, sslmode):
            return f"its parameter {name} {reason}"
    encoding = values.get("client_encoding", _ENCODING)
    if encoding.lower().replace("-", "") != _ENCODING:
        return "riverpy uses UTF-8 for every database: remove client_encoding"
    if values.get("sslrootcert") == _SYSTEM_CERTIFICATES and sslmode not in {None, "verify-full"}:
        return "its parameter sslrootcert=system requires sslmode=verify-full"
    return None


def _support_problem(name: str, value: str, sslmode: str | None) -> str | None:
    """Return why a parameter that asyncpg does not support cannot be ignored. Otherwise return
    None."""
    ignored = _IGNORED_PARAMETERS.get(name, frozenset())
    if name not in _REFUSED_PARAMETERS or ignored is None or value in ignored:
        return None
    if name == "channel_binding":
        if value != "require":
            return "must be disable, prefer or require"
        # This mode needs no channel binding: the certificate proves the identity of the server.
        if sslmode == "verify-full":
            return None
    return f"is not supported: {_REFUSED_PARAMETERS[name]}"


def _host_problem(hosts: str) -> str | None:
    for host in hosts.split(",") if hosts else ():
        match = re.fullmatch(r"(?:\[[0-9a-fA-F:.%]+\]|[^\[\]:]*)(?::(?P<port>.*))?", host)
        if match is None:
            return "a host must be a name or an address; write an IPv6 address in [ ]"
        if match["port"] and (reason := _port_problem(match["port"])):
            return reason
    return None


def _value_problem(query: Mapping[str, str]) -> str | None:
    for port in filter(None, query.get("port", "").split(",")):
        if reason := _port_problem(port):
            return reason
    if (limit := query.get("connect_timeout")) and not _SECONDS_PATTERN.fullmatch(limit):
        return "its connect_timeout must be a number of seconds"
    if _is_unknown_session_attrs(query.get("target_session_attrs")):
        return f"its target_session_attrs must be one of {_SESSION_KINDS}"
    return None


def _is_unknown_session_attrs(target_session_attrs: str | None) -> bool:
    return bool(target_session_attrs) and target_session_attrs not in _SESSION_KINDS.split(", ")


def _port_problem(port: str) -> str | None:
    if not re.fullmatch("[0-9]+", port):
        return "its port must be a number (in a password, write / ? # and @ as %2F %3F %23 and %40)"
    if not 1 <= int(port[:9]) <= _PORT_MAX:
        return f"its port must be between 1 and {_PORT_MAX}"
    return None


# -- the server


class Server(NamedTuple):
    """The server that a URL and the environment select, without a password."""

    hosts: str
    """`host:port`, separated by commas."""
    user: str
    database: str

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The hosts, without the brackets of IPv6, and their ports. Empty: no host is set."""
        if self.hosts.startswith(_DEFAULT_HOSTS):
            return []
        places = (place.rpartition(":") for place in self.hosts.split(", "))
        return [(host.strip("[]"), int(port)) for host, _, port in places]

    @property
    def is_local(self) -> bool:
        """Whether all hosts are local sockets."""
        return all(host.startswith("/") for host, _ in self.addresses)

    def __str__(self) -> str:
        return f"database {self.database} of user {self.user} at {self.hosts}"


def server_of(url: str, environ: Mapping[str, str] = os.environ) -> Server:
    """Return the server that a valid URL and the `PG*` variables of the environment select.

    Raises:
        ConfigError: the service in the URL does not exist, or PGPORT is not a port.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    service = _read_service(query.get("service"), environ)
    login, _, netloc = parts.netloc.rpartition("@")

    def of(name: str, *others: str, variable: str) -> str | None:
        found = (source.get(key) for source in (query, service) for key in (name, *others))
        return next(filter(None, found), None) or environ.get(variable) or None

    hosts = unquote(netloc) or of("host", variable="PGHOST")
    ports = (of("port", variable="PGPORT") or _PORT_DEFAULT).split(",")
    for port in ports:
        if reason := _port_problem(port):
            raise ConfigError(f"PGPORT, or the port of the service, is not valid: {reason}")
    user = unquote(login.partition(":")[0]) or of("user", variable="PGUSER") or _system_user()
    database = unquote(parts.path[1:]) or of("dbname", "database", variable="PGDATABASE") or user
    return Server(_with_ports(hosts or _DEFAULT_HOSTS, ports), user, database)


def _with_ports(hosts: str, ports: list[str]) -> str:
    if hosts == _DEFAULT_HOSTS:
        return f"{hosts} (port {ports[0]})"
    pairs = zip_longest(hosts.split(","), ports[: hosts.count(",") + 1], fillvalue=ports[-1])
    return ", ".join(
        host if re.search(r"[^:]:\d+$|\]:\d+$", host) else f"{host}:{port}" for host, port in pairs
    )


def _system_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return UNKNOWN_USER


def _read_service(name: str | None, environ: Mapping[str, str]) -> Mapping[str, str]:
    if not name:
        return {}
    path = _service_file(environ)
    parser = configparser.ConfigParser()
    try:
        parser.read(path)
        if name not in parser.sections():
            raise ConfigError(f"there is no service {name!r} in {path}")
        found = dict(parser[name])
    except (configparser.Error, OSError, UnicodeDecodeError):  # the error may show a password
        raise ConfigError(
            f"the service {name!r} in {path} cannot be read: write lines NAME=VALUE below "
            f"[{name}], and % as %%"
        ) from None
    for parameter in found:
        if parameter in _IGNORED_PARAMETERS or parameter in _REFUSED_PARAMETERS:
            raise ConfigError(
                f"the service {name!r} in {path} has the parameter {parameter}, which asyncpg does "
                "not support: remove it there, or use a URL instead of the service"
            )
    return found


def _service_file(environ: Mapping[str, str]) -> Path:
    if chosen := environ.get("PGSERVICEFILE"):
        return Path(chosen)
    if sys.platform == "win32":
        return Path(environ.get("APPDATA", ""), "postgresql", ".pg_service.conf")
    return Path.home() / ".pg_service.conf"


def environment_url(environ: Mapping[str, str] = os.environ) -> str:
    """Return a URL for the `PG*` variables. The URL contains the service of PGSERVICE, because
    asyncpg reads this variable too late."""
    service = environ.get("PGSERVICE")
    return f"{_EMPTY_URL}?service={quote(service, safe='')}" if service else _EMPTY_URL


def show_url(url: str) -> str:
    """Return the URL without its password. For a URL from `environment_url`, return the server
    instead."""
    if url.partition("?service=")[0] == _EMPTY_URL:
        return str(server_of(url))
    return mask_url(url)


class SplitUrl(NamedTuple):
    """A URL for asyncpg, and the parts that were removed."""

    url: str
    connect_timeout: float | None
    """The timeout for making a connection, in seconds. None: no limit."""
    ignored: tuple[str, ...]
    """The names of the parameters that have no effect."""


def split_url(url: str, environ: Mapping[str, str] = os.environ) -> SplitUrl:
    """Remove parameters of libpq from a valid URL. asyncpg would send them to the server as
    settings of the session.

    As with libpq, `sslrootcert=system` becomes the path of the system's certificates, and implies
    `sslmode=verify-full`.

    Raises:
        ConfigError: the URL has no `connect_timeout`, and PGCONNECT_TIMEOUT is not a number.
    """
    base, _, query = url.partition("?")
    seconds = dict(parse_qsl(query)).get("connect_timeout") or environ.get("PGCONNECT_TIMEOUT")
    if seconds and not _SECONDS_PATTERN.fullmatch(seconds):
        raise ConfigError("PGCONNECT_TIMEOUT must be a number of seconds")
    limit = int(seconds or 0)
    kept: list[str] = []
    ignored: list[str] = []
    for part in query.split("&") if query else ():
        ((name, value),) = parse_qsl(part, keep_blank_values=True)
        if name in _IGNORED_PARAMETERS or name in _REFUSED_PARAMETERS:
            ignored.append(name)
        elif name == "sslrootcert" and value == _SYSTEM_CERTIFICATES:
            kept += _system_certificate_parameters(query)
        elif name != "connect_timeout":
            kept.append(part)
    return SplitUrl(
        base + ("?" + "&".join(kept) if kept else ""),
        float(limit) if limit > 0 else None,
        tuple(ignored),
    )


def ignored_variables(url: str, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the variables of libpq that are set but have no effect.

    Raises:
        ConfigError: a variable cannot be ignored for a connection over the network, or
            PGTARGETSESSIONATTRS has an invalid value.
    """
    query = dict(parse_qsl(urlsplit(url).query))
    if "target_session_attrs" not in query and _is_unknown_session_attrs(
        environ.get("PGTARGETSESSIONATTRS")
    ):
        raise ConfigError(f"PGTARGETSESSIONATTRS must be one of {_SESSION_KINDS}")
    sslmode = query.get("sslmode") or environ.get("PGSSLMODE")
    ignored = [variable for variable in _IGNORED_VARIABLES if environ.get(variable)]
    for variable, parameter in _UNSUPPORTED_VARIABLES.items():
        value = environ.get(variable)
        if not value or parameter in query:
            continue
        reason = _support_problem(parameter, value, sslmode)
        is_about_network = parameter != "requirepeer"
        if reason and not (is_about_network and server_of(url, environ).is_local):
            raise ConfigError(f"the variable {variable} {reason}")
        ignored.append(variable)
    return tuple(ignored)


def _system_certificate_parameters(query: str) -> list[str]:
    paths = ssl.get_default_verify_paths()
    found = quote(paths.cafile or paths.openssl_cafile, safe="")
    mode = [] if "sslmode" in dict(parse_qsl(query)) else ["sslmode=verify-full"]
    return [*mode, f"sslrootcert={found}"]


def missing_tls_file_message(url: str) -> str | None:
    """If a TLS file of the URL or the environment is missing, return an error text about the first
    such file."""
    query = dict(parse_qsl(urlsplit(url).query))
    for name in _TLS_FILES:
        variable = f"PG{name.upper()}"
        path = query.get(name) or os.environ.get(variable)
        if path and not Path(path).is_file():
            return f"the file {path!r} of {name if query.get(name) else variable} does not exist"
    return None
