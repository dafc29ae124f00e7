"""Database URLs: validate them, find the server that they select, and mask their passwords.

If a URL cannot be parsed, riverpy cannot find the password in it. So an error text never contains
such a URL.
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

UNKNOWN_USER_TEXT = "?"
"""The text for an unknown user: no setting names the user, and the operating system has no name for
the user id, as in some containers."""
_EMPTY_URL = "postgresql://"
_PORT_DEFAULT = "5432"
_PORT_MAX = 65535
_CLIENT_ENCODING = "utf8"
_SSLROOTCERT_SYSTEM = "system"
"""The value of `sslrootcert` that selects the certificates of the operating system."""
_DEFAULT_HOSTS = "/run/postgresql, /var/run/postgresql, /tmp, localhost"
"""The hosts that asyncpg tries if no host is set."""

# Each pattern is applied to one word of a text (see `_WORD_PATTERN`), and each part of the pattern
# can match in only one way. So a search takes linear time, even in a text from an attacker.
_USER_BEFORE_PASSWORD_PATTERNS = (
    re.compile(r"://[\w.%+~-]*+:"),
    re.compile(r"(?i)\bpostgres(?:ql)?[:：]?/++[^\s:：/@]*+[:：]"),
    re.compile(r"(?:(?<![\w.%+~/:-])|(?<=[/:])\w*+[.%+~-])[\w.%+~-]*+:(?!//)"),
)
"""Patterns for a user name and the colon after it, where a password may start. The first pattern is
for URLs, the second for mistyped URLs, and the third for other texts."""
_PASSWORD_WITH_SPACES_PATTERN = re.compile(
    r"(?P<user>://[\w.%+~-]*+):(?!\*\*\*@)[^/?#\n]{1,200}(?=@)"
)
_QUERY_PASSWORD_PATTERN = re.compile(r"(?i)(?<=[?&])((?:ssl)?(?:pass(?:w(?:or)?d)?|pwd))=[^&#\s]*")
_CONNINFO_PASSWORD_PATTERN = re.compile(r"(?i)\b((?:ssl)?password\s*+=\s*+)('[^']*'|\S+)")
_URL_START_PATTERN = re.compile(r"(?i)\bpostgres(?:ql)?://")
_URL_QUERY_PATTERN = re.compile("[^'\"`]*")
_WORD_PATTERN = re.compile(r"\S+")
_SECONDS_PATTERN = re.compile("-?[0-9]{1,9}")
_TARGET_SESSION_ATTRS_VALUES = "any, read-write, read-only, primary, standby, prefer-standby"
"""The allowed values of `target_session_attrs`."""

_TLS_FILE_PARAMETERS = ("sslrootcert", "sslcert", "sslkey", "sslcrl")
"""The URL parameters whose value is the path of a file. libpq has an environment variable for each
of them, such as PGSSLROOTCERT."""
_UNMASKED_PARAMETERS = frozenset(
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
        *_TLS_FILE_PARAMETERS,
    }
)
"""The URL parameters whose values may appear in logs and errors. Any other parameter may be a
password with a mistyped name."""
_IGNORABLE_PARAMETER_VALUES: Mapping[str, frozenset[str] | None] = {
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
"""Parameters that asyncpg does not support, each with the values that riverpy can ignore. None:
riverpy can ignore all values."""
_CHANNEL_BINDING_REMEDY = (
    "asyncpg does not support channel binding, which protects from another server in the middle: "
    "use sslmode=verify-full&sslrootcert=system instead, which verifies the server's certificate "
    "(sslrootcert=FILE with your own certificate authority)"
)
_SCHEMA_PARAMETER_REMEDY = "remove it, and set the schema with Config(schema=…) or --schema"
_REFUSED_PARAMETER_REMEDIES: Mapping[str, str] = {
    "channel_binding": _CHANNEL_BINDING_REMEDY,
    "currentSchema": _SCHEMA_PARAMETER_REMEDY,
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
    "schema": _SCHEMA_PARAMETER_REMEDY,
    "scram_server_key": "asyncpg cannot log in with a key: use a password",
    "servicefile": "asyncpg does not support it: set PGSERVICEFILE",
    "ssl": "asyncpg does not support it: use sslmode=require or sslmode=verify-full instead",
    "sslaccept": "asyncpg does not support it: use sslmode=require or sslmode=verify-full instead",
    "sslcertmode": "asyncpg cannot require or suppress a client certificate: remove it, and set "
    "sslcert and sslkey if you use one",
    "sslcrldir": "asyncpg does not read a directory: use one file with sslcrl",
    "sslsni": "asyncpg always sends the server's name: remove it",
}
"""Parameters that asyncpg does not support, with advice for values that riverpy cannot ignore. If
riverpy ignored such a value, the connection would be less secure or have another target."""
_PARAMETER_BY_UNSUPPORTED_VARIABLE: Mapping[str, str] = {
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
"""libpq's environment variables that asyncpg does not read, with the equivalent URL parameters. The
parameter in the URL takes precedence."""
_IGNORED_PG_VARIABLES = (
    "PGAPPNAME",
    "PGCLIENTENCODING",
    "PGDATESTYLE",
    "PGGEQO",
    "PGOPTIONS",
    "PGSYSCONFDIR",
    "PGTZ",
)
"""libpq's environment variables that asyncpg does not read and that riverpy can ignore."""


def mask_passwords(text: str) -> str:
    """Replace the passwords in a text with `***`, in linear time. Passwords are found in URLs and
    in lists such as `user=a password=b`."""
    if "@" in text:
        text = _WORD_PATTERN.sub(lambda word: _mask_password_before_at(word[0]), text)
        if "://" in text:
            text = _PASSWORD_WITH_SPACES_PATTERN.sub(r"\g<user>:***", text)
    if "=" not in text:  # most log lines
        return text
    text = _QUERY_PASSWORD_PATTERN.sub(r"\1=***", text)
    if "://" in text:
        text = _WORD_PATTERN.sub(lambda word: _mask_url_queries(word[0]), text)
    return _CONNINFO_PASSWORD_PATTERN.sub(r"\1***", text)


def _mask_password_before_at(word: str) -> str:
    """Mask a password before an `@`. A password may contain an `@`, so everything between the colon
    after the user and the last `@` is masked."""
    for pattern in _USER_BEFORE_PASSWORD_PATTERNS:
        end = word.rfind("@")
        login = pattern.search(word, 0, max(end, 0))
        if login is not None and login.end() < end:
            word = f"{word[: login.end()]}***{word[end:]}"
    return word


def _mask_url_queries(word: str) -> str:
    """Mask the values of the query parameters of each URL, except those in
    `_UNMASKED_PARAMETERS`."""
    parts: list[str] = []
    done = 0
    while url := _URL_START_PATTERN.search(word, done):
        start = word.find("?", url.end()) + 1
        if not start:
            break
        query = _URL_QUERY_PATTERN.match(word, start)
        assert query is not None  # noqa: S101 (it matches an empty text)
        parts += [word[done:start], _mask_query_values(query[0])]
        done = query.end()
    return "".join([*parts, word[done:]])


def _mask_query_values(query: str) -> str:
    parts = (part.partition("=") for part in query.split("&"))
    return "&".join(
        f"{name}{equals}{value if name in _UNMASKED_PARAMETERS or not equals else '***'}"
        for name, equals, value in parts
    )


def validate_url(url: str) -> None:
    """Raise ConfigError if `url` is not a valid database URL, or if riverpy cannot use one of its
    parameters. The error text does not contain the URL."""
    if not url.startswith(("postgres://", "postgresql://")):
        scheme = re.match("[a-z][a-z0-9+.-]{0,20}://", url)
        raise ConfigError(
            "a database URL must start with postgres:// or postgresql://"
            + (f", got one that starts with {scheme[0]}" if scheme else "")
        )
    if reason := _find_syntax_problem(url):
        raise ConfigError(f"the database URL is not valid (it is not shown): {reason}")
    query = parse_qsl(urlsplit(url).query, keep_blank_values=True)
    if reason := _find_refused_parameter_problem(query):
        raise ConfigError(f"the database URL cannot be used (it is not shown): {reason}")


def _find_syntax_problem(url: str) -> str | None:
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
    return _find_host_problem(hosts) or _find_invalid_value_problem(dict(query))


def _find_refused_parameter_problem(parameters: Sequence[tuple[str, str]]) -> str | None:
    """Return why one of the parameters is refused, or None. The text does not contain the value of
    the parameter."""
    values = dict(parameters)
    sslmode = values.get("sslmode")
    for name, value in parameters:
        if reason := _find_unsupported_parameter_problem(name, value, sslmode):
            return f"its parameter {name} {reason}"
    encoding = values.get("client_encoding", _CLIENT_ENCODING)
    if encoding.lower().replace("-", "") != _CLIENT_ENCODING:
        return "riverpy uses UTF-8 for every database: remove client_encoding"
    if values.get("sslrootcert") == _SSLROOTCERT_SYSTEM and sslmode not in {None, "verify-full"}:
        return "its parameter sslrootcert=system requires sslmode=verify-full"
    return None


def _find_unsupported_parameter_problem(name: str, value: str, sslmode: str | None) -> str | None:
    """Return why riverpy cannot ignore a parameter that asyncpg does not support. Return None if
    riverpy can ignore the parameter, or if asyncpg supports the parameter."""
    ignored = _IGNORABLE_PARAMETER_VALUES.get(name, frozenset())
    if name not in _REFUSED_PARAMETER_REMEDIES or ignored is None or value in ignored:
        return None
    if name == "channel_binding":
        if value != "require":
            return "must be disable, prefer or require"
        # With `verify-full`, the certificate proves the identity of the server, so channel binding
        # is not needed.
        if sslmode == "verify-full":
            return None
    return f"is not supported: {_REFUSED_PARAMETER_REMEDIES[name]}"


def _find_host_problem(hosts: str) -> str | None:
    for host in hosts.split(",") if hosts else ():
        match = re.fullmatch(r"(?:\[[0-9a-fA-F:.%]+\]|[^\[\]:]*)(?::(?P<port>.*))?", host)
        if match is None:
            return "a host must be a name or an address; write an IPv6 address in [ ]"
        if match["port"] and (reason := _find_port_problem(match["port"])):
            return reason
    return None


def _find_invalid_value_problem(parameters: Mapping[str, str]) -> str | None:
    for port in filter(None, parameters.get("port", "").split(",")):
        if reason := _find_port_problem(port):
            return reason
    if (limit := parameters.get("connect_timeout")) and not _SECONDS_PATTERN.fullmatch(limit):
        return "its connect_timeout must be a number of seconds"
    if _is_unknown_session_attrs(parameters.get("target_session_attrs")):
        return f"its target_session_attrs must be one of {_TARGET_SESSION_ATTRS_VALUES}"
    return None


def _is_unknown_session_attrs(target_session_attrs: str | None) -> bool:
    return bool(
        target_session_attrs
    ) and target_session_attrs not in _TARGET_SESSION_ATTRS_VALUES.split(", ")


def _find_port_problem(port: str) -> str | None:
    if not re.fullmatch("[0-9]+", port):
        return "its port must be a number (in a password, write / ? # and @ as %2F %3F %23 and %40)"
    if not 1 <= int(port[:9]) <= _PORT_MAX:
        return f"its port must be between 1 and {_PORT_MAX}"
    return None


# -- the server


class DatabaseAddress(NamedTuple):
    """The server, user and database that a URL and the environment select. This object contains no
    password."""

    hosts: str
    """The hosts as `host:port`, separated by commas."""
    user: str
    database: str

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The hosts with their ports. IPv6 addresses have no brackets. Empty: no host is set."""
        if self.hosts.startswith(_DEFAULT_HOSTS):
            return []
        places = (place.rpartition(":") for place in self.hosts.split(", "))
        return [(host.strip("[]"), int(port)) for host, _, port in places]

    @property
    def is_local(self) -> bool:
        """Whether all hosts are Unix sockets of this machine."""
        return all(host.startswith("/") for host, _ in self.addresses)

    def __str__(self) -> str:
        return f"database {self.database} of user {self.user} at {self.hosts}"


def database_address_from_url(url: str, environ: Mapping[str, str] = os.environ) -> DatabaseAddress:
    """Return the server that a valid URL and the environment variables `PG*` select.

    Raises:
        ConfigError: the service in the URL does not exist or cannot be read, or the port in PGPORT
            or in the service is not valid.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    service = _read_pg_service(query.get("service"), environ)
    login, _, netloc = parts.netloc.rpartition("@")

    def find_setting(name: str, *other_names: str, variable: str) -> str | None:
        found = (source.get(key) for source in (query, service) for key in (name, *other_names))
        return next(filter(None, found), None) or environ.get(variable) or None

    hosts = unquote(netloc) or find_setting("host", variable="PGHOST")
    ports = (find_setting("port", variable="PGPORT") or _PORT_DEFAULT).split(",")
    for port in ports:
        if reason := _find_port_problem(port):
            raise ConfigError(f"PGPORT, or the port of the service, is not valid: {reason}")
    user = (
        unquote(login.partition(":")[0])
        or find_setting("user", variable="PGUSER")
        or _get_system_user()
    )
    database = (
        unquote(parts.path[1:]) or find_setting("dbname", "database", variable="PGDATABASE") or user
    )
    return DatabaseAddress(_add_ports_to_hosts(hosts or _DEFAULT_HOSTS, ports), user, database)


def _add_ports_to_hosts(hosts: str, ports: list[str]) -> str:
    if hosts == _DEFAULT_HOSTS:
        return f"{hosts} (port {ports[0]})"
    pairs = zip_longest(hosts.split(","), ports[: hosts.count(",") + 1], fillvalue=ports[-1])
    return ", ".join(
        host if re.search(r"[^:]:\d+$|\]:\d+$", host) else f"{host}:{port}" for host, port in pairs
    )


def _get_system_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return UNKNOWN_USER_TEXT


def _read_pg_service(service_name: str | None, environ: Mapping[str, str]) -> Mapping[str, str]:
    if not service_name:
        return {}
    path = _service_file_path(environ)
    parser = configparser.ConfigParser()
    try:
        parser.read(path)
        if service_name not in parser.sections():
            raise ConfigError(f"there is no service {service_name!r} in {path}")
        found = dict(parser[service_name])
    # The text of these errors may contain a password. So the new error does not contain it.
    except (configparser.Error, OSError, UnicodeDecodeError):
        raise ConfigError(
            f"the service {service_name!r} in {path} cannot be read: write lines NAME=VALUE below "
            f"[{service_name}], and % as %%"
        ) from None
    for parameter in found:
        if parameter in _IGNORABLE_PARAMETER_VALUES or parameter in _REFUSED_PARAMETER_REMEDIES:
            raise ConfigError(
                f"the service {service_name!r} in {path} has the parameter {parameter}, which "
                "asyncpg does not support: remove it there, or use a URL instead of the service"
            )
    return found


def _service_file_path(environ: Mapping[str, str]) -> Path:
    if chosen := environ.get("PGSERVICEFILE"):
        return Path(chosen)
    if sys.platform == "win32":
        return Path(environ.get("APPDATA", ""), "postgresql", ".pg_service.conf")
    return Path.home() / ".pg_service.conf"


def make_pg_variables_url(environ: Mapping[str, str] = os.environ) -> str:
    """Return a URL that selects the same server as the environment variables `PG*`. If PGSERVICE
    names a service, the URL contains this name, because asyncpg reads PGSERVICE too late to use
    it."""
    service = environ.get("PGSERVICE")
    return f"{_EMPTY_URL}?service={quote(service, safe='')}" if service else _EMPTY_URL


def url_for_display(url: str) -> str:
    """Return the URL without its password. If the URL comes from `make_pg_variables_url`, return a
    text about the server instead."""
    if url.partition("?service=")[0] == _EMPTY_URL:
        return str(database_address_from_url(url))
    return mask_passwords(url)


class AsyncpgUrl(NamedTuple):
    """A URL for asyncpg, and the settings that were removed from it."""

    url: str
    connect_timeout: float | None
    """The timeout for opening a connection, in seconds. None: no limit."""
    ignored_parameters: tuple[str, ...]
    """The names of the removed parameters that have no effect."""


def adapt_url_for_asyncpg(url: str, environ: Mapping[str, str] = os.environ) -> AsyncpgUrl:
    """Remove the parameters that asyncpg does not support from `url`, which must be a valid URL.
    asyncpg would send such a parameter to the server as a setting of the session.

    As in libpq, `sslrootcert=system` selects the certificates of the operating system and implies
    `sslmode=verify-full`. The value `system` is replaced by the path of these certificates.

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
        if name in _IGNORABLE_PARAMETER_VALUES or name in _REFUSED_PARAMETER_REMEDIES:
            ignored.append(name)
        elif name == "sslrootcert" and value == _SSLROOTCERT_SYSTEM:
            kept += _make_system_certificate_parameters(query)
        elif name != "connect_timeout":
            kept.append(part)
    return AsyncpgUrl(
        base + ("?" + "&".join(kept) if kept else ""),
        float(limit) if limit > 0 else None,
        tuple(ignored),
    )


def find_ignored_pg_variables(url: str, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the environment variables of libpq that are set but have no effect.

    Raises:
        ConfigError: riverpy cannot ignore the value of a variable, or PGTARGETSESSIONATTRS has an
            invalid value. If all hosts are Unix sockets, riverpy can ignore every variable except
            PGREQUIREPEER.
    """
    query = dict(parse_qsl(urlsplit(url).query))
    if "target_session_attrs" not in query and _is_unknown_session_attrs(
        environ.get("PGTARGETSESSIONATTRS")
    ):
        raise ConfigError(f"PGTARGETSESSIONATTRS must be one of {_TARGET_SESSION_ATTRS_VALUES}")
    sslmode = query.get("sslmode") or environ.get("PGSSLMODE")
    ignored = [variable for variable in _IGNORED_PG_VARIABLES if environ.get(variable)]
    for variable, parameter in _PARAMETER_BY_UNSUPPORTED_VARIABLE.items():
        value = environ.get(variable)
        if not value or parameter in query:
            continue
        reason = _find_unsupported_parameter_problem(parameter, value, sslmode)
        is_about_network = parameter != "requirepeer"
        if reason and not (is_about_network and database_address_from_url(url, environ).is_local):
            raise ConfigError(f"the variable {variable} {reason}")
        ignored.append(variable)
    return tuple(ignored)


def _make_system_certificate_parameters(query: str) -> list[str]:
    paths = ssl.get_default_verify_paths()
    found = quote(paths.cafile or paths.openssl_cafile, safe="")
    mode = [] if "sslmode" in dict(parse_qsl(query)) else ["sslmode=verify-full"]
    return [*mode, f"sslrootcert={found}"]


def find_tls_file_problem(url: str) -> str | None:
    """Return an error text about the first TLS file that does not exist. Return None if all TLS
    files exist. The URL or the environment names these files."""
    query = dict(parse_qsl(urlsplit(url).query))
    for name in _TLS_FILE_PARAMETERS:
        variable = f"PG{name.upper()}"
        path = query.get(name) or os.environ.get(variable)
        if path and not Path(path).is_file():
            return f"the file {path!r} of {name if query.get(name) else variable} does not exist"
    return None
