"""The settings of commands, and the sources of their values.

The first of these sources that has a value is used:

- the option of the command
- the program that runs the command, such as Django's `manage.py`
- the environment variable RIVERPY_<NAME>; for the database also DATABASE_URL and PG*
- riverpy.toml or pyproject.toml (`[tool.riverpy]`) in the current directory or the nearest parent
  directory that has one
- the default

An unknown environment variable RIVERPY_* or an unknown key in the file is an error, because it may
be a misspelled setting.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast, get_args

import click
import msgspec

from riverpy._dsn import (
    PG_VARIABLES,
    database_address_from_url,
    make_pg_variables_url,
    mask_passwords,
    url_for_display,
)
from riverpy._duration import format_duration, parse_duration
from riverpy._names import validate_client_id, validate_schema_name
from riverpy._tools.health.http import Address
from riverpy.cli._types import (
    DOMAIN_NAME_TYPE,
    DURATION_TYPE,
    SIZE_TYPE,
    URL_TYPE,
    IntegerType,
    ParsedType,
    format_queues,
    format_size,
    make_validated_type,
    parse_queue_names,
    parse_queues,
)
from riverpy.config import (
    LEASE_DURATION_MIN,
    MAX_PROCESSES_MAX,
    SETTING_DURATION_MAX,
    DomainConflictPolicy,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")
CommandT = TypeVar("CommandT", bound="Callable[..., Any]")

WORKER_PROCESS_COUNT_MAX = 128
"""The maximum number of worker processes of one `riverpy worker`."""
WEB_PASSWORD_VARIABLE = "RIVERPY_WEB_PASSWORD"  # noqa: S105 (the name of a variable)
"""The environment variable with the password of `riverpy web`."""
NON_OPTION_VARIABLES = ("RIVERPY_EMBEDDED_DIR", "RIVERPY_PG_BIN", WEB_PASSWORD_VARIABLE)
"""The environment variables of riverpy that do not set an option of a command."""
TEST_VARIABLE_PREFIX = "RIVERPY_TEST_"
"""The prefix of the environment variables for riverpy's own tests."""
PROGRAM_SETTINGS_KEY = "riverpy.program_settings"
"""The key in click's `Context.meta` for the settings from the program that runs the command, such
as `manage.py`. The value is a dict from the name of a setting to a `SettingValue`. These settings
take precedence over the environment variables and the settings file."""
KUBERNETES_SERVICE_SUFFIX = "_SERVICE_HOST"
"""The suffix of the environment variables that Kubernetes sets for the Services of a namespace."""


class SettingsError(click.UsageError):
    """The value of a setting is wrong. The text of the error names the source of the value."""


@dataclass(frozen=True, eq=False)
class Setting(Generic[T]):
    """A setting of commands. For example, the setting `soft-stop` has the option `--soft-stop`, the
    environment variable RIVERPY_SOFT_STOP and the key `soft-stop` in the settings file
    (riverpy.toml or pyproject.toml)."""

    name: str
    type: click.ParamType[T]
    help: str
    metavar: str | None = None
    """The placeholder for the value in the help; None: click chooses it."""
    default: str = "-"
    """A text that describes the default value."""
    format_value: Callable[[T], str] = str
    """Returns the text of a value for the output, without passwords."""

    @property
    def parameter_name(self) -> str:
        """The name of the parameter that receives the option's value in the function of a
        command."""
        return self.name.replace("-", "_")

    @property
    def environment_variable(self) -> str:
        return "RIVERPY_" + self.parameter_name.upper()

    def click_option(self, *extra_names: str, **attributes: Any) -> Callable[[CommandT], CommandT]:
        """Return a decorator that adds the option to a command. A boolean setting becomes
        `--NAME/--no-NAME`. If the user does not give the option, its value is None.

        Args:
            extra_names: more names of the option.
            attributes: arguments of `click.option` that replace the default ones.
        """
        flag, kind = f"--{self.name}", self.type
        if self.type is click.BOOL:
            flag, kind = f"{flag}/--no-{self.name}", None
        usual: dict[str, Any] = {
            "type": kind,
            "metavar": self.metavar,
            "default": None,
            "help": self.help,
        }
        return click.option(*extra_names, flag, **(usual | attributes))


class SettingValue(msgspec.Struct, Generic[T], frozen=True):
    """The value of a setting and the source of the value. The value is UNSET if no source has
    one."""

    value: T | msgspec.UnsetType = msgspec.UNSET
    source: str = "default"

    def or_none(self) -> T | None:
        return None if self.value is msgspec.UNSET else self.value


ValueBySetting: TypeAlias = dict[Setting[Any], SettingValue[Any]]
"""The settings of a command with their values."""


def _parse_max_worker_age(text: str) -> timedelta:
    """Parse the maximum age of a worker process. The minimum is 1 s, so that a worker has time to
    work."""
    duration = parse_duration(text)
    if duration < timedelta(seconds=1):
        raise ValueError(f"expected a duration of at least 1s, got {text!r}")
    return duration


def _parse_lease_duration(text: str) -> timedelta:
    """Parse a setting that is a duration for leases or heartbeats, such as `leader-ttl`. Raise
    ValueError if it is not between `LEASE_DURATION_MIN` and `SETTING_DURATION_MAX`."""
    duration = parse_duration(text)
    if not LEASE_DURATION_MIN <= duration <= SETTING_DURATION_MAX:
        raise ValueError(
            f"expected {format_duration(LEASE_DURATION_MIN)} to "
            f"{format_duration(SETTING_DURATION_MAX)}, got {text!r}"
        )
    return duration


def _make_lease_duration_setting(name: str, default: str, help_text: str) -> Setting[timedelta]:
    return Setting(
        name,
        ParsedType("duration", _parse_lease_duration),
        f"{help_text} Default: the client's, else {default}.",
        metavar="DURATION",
        default=f"the client's, else {default}",
        format_value=format_duration,
    )


def _make_boolean_setting(name: str, default: str, help_text: str) -> Setting[bool]:
    return Setting(
        name, click.BOOL, help_text, default=default, format_value=lambda is_on: str(is_on).lower()
    )


DATABASE_URL = Setting(
    "database-url",
    URL_TYPE,
    "URL of the database, such as postgres://user@host/name. Default: RIVERPY_DATABASE_URL,"
    " DATABASE_URL, PGHOST and related variables, or the file.",
    metavar="URL",
    format_value=url_for_display,
)
SCHEMA = Setting(
    "schema",
    make_validated_type("schema", validate_schema_name),
    "Schema of River's tables. Default: the search path of the database.",
    metavar="NAME",
    default="the client's, else by search path",
)
QUEUES = Setting(
    "queues",
    ParsedType("queues", parse_queues),
    "Queues to work, and how many jobs of each run at the same time. Default: the client's.",
    metavar="NAME:SLOTS,…",
    default="the client's",
    format_value=format_queues,
)
POLL_ONLY = _make_boolean_setting(
    "poll-only",
    "the client's, else false",
    "Find jobs only by polling, without LISTEN. Default: the client's, else no.",
)
KNOWN_KINDS_ONLY = _make_boolean_setting(
    "known-kinds-only",
    "the client's, else true",
    "Claim only jobs of kinds that this program has a worker for. Default: the client's, else yes.",
)
SOFT_STOP = Setting(
    "soft-stop",
    DURATION_TYPE,
    "How long running jobs may continue after a stop. Default: the client's, else 30s.",
    metavar="DURATION",
    default="the client's, else 30s",
    format_value=format_duration,
)
MAX_PROCESSES = Setting(
    "max-processes",
    IntegerType(1, MAX_PROCESSES_MAX),
    "How many jobs run in processes at the same time. Default: the client's, else the number of CPU"
    " cores.",
    metavar="NUMBER",
    default="the client's, else the CPU cores",
)
PROCESSES = Setting(
    "processes",
    IntegerType(1, WORKER_PROCESS_COUNT_MAX),
    "How many worker processes this command starts and supervises. Each one works all queues, with"
    " its own slots and connections. Not on Windows. Default: 1, this process.",
    metavar="NUMBER",
    default="1",
)
MAX_JOBS = Setting(
    "max-jobs",
    IntegerType(1, 1_000_000_000),
    "Stop after about this many attempts, as at SIGTERM, and exit with 10. Default: no limit.",
    metavar="NUMBER",
    default="no limit",
)
MAX_AGE = Setting(
    "max-age",
    ParsedType("duration", _parse_max_worker_age),
    "Stop after about this time, as at SIGTERM, and exit with 10. Default: no limit.",
    metavar="DURATION",
    default="no limit",
    format_value=format_duration,
)
MAX_RSS = Setting(
    "max-rss",
    SIZE_TYPE,
    "Stop when the process uses about this much memory (such as 512MiB or 2G), as at SIGTERM, and"
    " exit with 10. Only on Linux. Default: no limit.",
    metavar="SIZE",
    default="no limit",
    format_value=format_size,
)
CANDIDATE = _make_boolean_setting(
    "candidate",
    "the client's, else true",
    "Take part in leader election. Default: the client's, else yes.",
)
LEADER_DOMAIN = Setting(
    "leader-domain",
    DOMAIN_NAME_TYPE,
    "Claim the queues for this leader domain, which has its own leader. Default: the client's, else"
    " `default`.",
    metavar="NAME",
    default="the client's, else default",
)
DOMAIN_QUEUES = Setting(
    "domain-queues",
    ParsedType("queues", parse_queue_names),
    "Queues that this worker claims for its leader domain. Default: the client's, else the queues"
    " that it works.",
    metavar="NAME,…",
    default="the client's, else those it works",
    format_value=",".join,
)
ON_DOMAIN_CONFLICT = Setting(
    "on-domain-conflict",
    click.Choice(get_args(DomainConflictPolicy), case_sensitive=False),
    "What to do at the start if a queue belongs to another domain: refuse to start (error), work it"
    " and leave its maintenance to that domain (warn), or claim it unless that domain has a live"
    " worker (takeover). Default: the client's, else error.",
    default="the client's, else error",
)
ELECT_INTERVAL = _make_lease_duration_setting(
    "elect-interval",
    "5s",
    "How often a leader renews its lease, and other workers try to acquire it.",
)
LEADER_TTL = _make_lease_duration_setting(
    "leader-ttl",
    "15s",
    "How long a lease lasts without a renewal, at least 2.4 times --elect-interval. Leases and"
    " singletons use both settings too.",
)
MAX_LEASES = Setting(
    "max-leases",
    IntegerType(1),
    "How many leases this worker holds at the same time, those of singletons included. Default: the"
    " client's, else no limit.",
    metavar="NUMBER",
    default="the client's, else no limit",
)
SPREAD_LEASES = _make_boolean_setting(
    "spread-leases",
    "the client's, else false",
    "Hand singletons over to workers that run fewer of them, at most one in each --leader-ttl."
    " Default: the client's, else no.",
)
DEAD_AFTER = _make_lease_duration_setting(
    "dead-after",
    "1m",
    "How long this worker may send no heartbeat until other workers get its running jobs. It sends"
    " six heartbeats in this time.",
)
NAME = Setting(
    "name",
    make_validated_type("name", validate_client_id),
    "First part of the client's id, which is stored in claimed jobs. Default: the host name.",
    metavar="NAME",
    default="the client's, else the host's",
)
HEALTH = Setting(
    "health",
    ParsedType("address", Address.parse),
    "Serve /livez, /readyz, /metrics and /events on this address; without a host, only for this"
    " machine. Default: off.",
    metavar="[HOST]:PORT",
    default="none",
)
LOG = Setting(
    "log",
    click.Choice(["console", "json"], case_sensitive=False),
    "Format of the log on stderr. Default: console.",
    default="console",
)
LOG_LEVEL = Setting(
    "log-level",
    click.Choice(["debug", "info", "warning", "error"], case_sensitive=False),
    "Lowest level that is logged. Default: info.",
    default="info",
)
DEBUG = _make_boolean_setting("debug", "false", "Show the tracebacks of errors. Default: no.")

LEADER_SETTINGS: tuple[Setting[Any], ...] = (
    CANDIDATE,
    LEADER_DOMAIN,
    DOMAIN_QUEUES,
    ON_DOMAIN_CONFLICT,
    ELECT_INTERVAL,
    LEADER_TTL,
    MAX_LEASES,
    SPREAD_LEASES,
    DEAD_AFTER,
)
"""The settings of leader election, leases and heartbeats. With `_` instead of `-`, the name of each
setting is also the name of its field in `Config`."""

SETTINGS: tuple[Setting[Any], ...] = (
    DATABASE_URL,
    SCHEMA,
    QUEUES,
    POLL_ONLY,
    KNOWN_KINDS_ONLY,
    SOFT_STOP,
    MAX_PROCESSES,
    PROCESSES,
    MAX_JOBS,
    MAX_AGE,
    MAX_RSS,
    *LEADER_SETTINGS,
    NAME,
    HEALTH,
    LOG,
    LOG_LEVEL,
    DEBUG,
)


class SettingSources:
    """The environment variables and the settings file, which are sources of values.

    Args:
        environ: the environment variables. Default: those of the process.
        directory: the directory in which the search for the file starts. The search continues in
            its parent directories. Default: the current directory.
    """

    def __init__(
        self, environ: Mapping[str, str] | None = None, directory: Path | None = None
    ) -> None:
        self._environ = os.environ if environ is None else environ
        _reject_unknown_variables(self._environ)
        self._file_path, self._file_settings = _find_settings_file(directory or Path.cwd())

    def find_value(self, setting: Setting[T], option: T | None) -> SettingValue[T]:
        """Return the value of a setting from the first source that has one: the option, the program
        that runs the command (such as `manage.py`), the environment variables or the settings file.
        `option` is the value of the option of the command. None: the user has not given the
        option."""
        if option is not None:
            return SettingValue(
                option, f"--no-{setting.name}" if option is False else f"--{setting.name}"
            )
        context = click.get_current_context(silent=True)
        if context is not None and (
            given := context.find_root().meta.get(PROGRAM_SETTINGS_KEY, {}).get(setting.name)
        ):
            return given
        variables = [setting.environment_variable]
        if setting is DATABASE_URL:
            variables.append("DATABASE_URL")
        for variable in variables:
            if text := self._environ.get(variable):
                return SettingValue(_parse_value(setting, text, variable), variable)
        if setting is DATABASE_URL and (given := [v for v in PG_VARIABLES if self._environ.get(v)]):
            source = ", ".join(given)
            url = make_pg_variables_url(self._environ)
            try:
                database_address_from_url(url, self._environ)
            except ValueError as error:
                raise SettingsError(mask_passwords(f"{source}: {error}")) from None
            return SettingValue(_parse_value(setting, url, source), source)
        if setting.name in self._file_settings:
            source = f"{self._file_path}: {setting.name}"
            text = _toml_value_to_text(setting, self._file_settings[setting.name], source)
            return SettingValue(_parse_value(setting, text, source), str(self._file_path))
        return SettingValue()


def _parse_value(setting: Setting[T], text: str, source: str) -> T:
    try:
        return setting.type.convert(text, None, None)
    except click.BadParameter as error:
        raise SettingsError(f"{source}: {error.message}") from None


def _toml_value_to_text(setting: Setting[Any], value: object, source: str) -> str:
    """Convert a value of the settings file to the text that the environment variable would have for
    the same setting."""
    expected = "text in quotes"
    if setting.type is click.BOOL:
        if isinstance(value, bool):
            return setting.format_value(value)
        expected = "true or false"
    elif isinstance(setting.type, click.IntRange):
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        expected = "a number"
    elif setting is QUEUES:
        if isinstance(value, dict):
            return format_queues(cast("dict[str, object]", value))
        expected = "a table of names and slots, such as { default = 50 }"
    elif setting is DOMAIN_QUEUES:
        names = cast("list[object]", value) if isinstance(value, list) else []
        if names and all(isinstance(name, str) and "," not in name for name in names):
            return ",".join(map(str, names))
        expected = 'a list of names, such as ["mail", "reports"]'
    elif isinstance(value, str):
        return value
    raise SettingsError(f"{source}: expected {expected}, got {value!r}")


def _reject_unknown_variables(environ: Mapping[str, str]) -> None:
    """Raise SettingsError if there is an unknown environment variable RIVERPY_*. Variables that
    Kubernetes sets for a Service with a name like `riverpy` are allowed."""
    known = [*(setting.environment_variable for setting in SETTINGS), *NON_OPTION_VARIABLES]
    services = [
        name.removesuffix(KUBERNETES_SERVICE_SUFFIX)
        for name in environ
        if name.endswith(KUBERNETES_SERVICE_SUFFIX)
    ]
    foreign = (
        TEST_VARIABLE_PREFIX,
        *(f"{name}_{part}" for name in services for part in ("SERVICE_", "PORT")),
    )
    for variable in environ:
        if (
            variable.startswith("RIVERPY_")
            and variable not in known
            and not variable.startswith(foreign)
        ):
            hint = _make_spelling_hint(variable, known, prefix="RIVERPY_")
            raise SettingsError(f"unknown variable {variable}{hint}")


def _find_settings_file(directory: Path) -> tuple[Path | None, dict[str, object]]:
    """Return the path and the settings of the nearest settings file. Without a file, return None
    and no settings."""
    for parent in (directory, *directory.parents):
        path = parent / "riverpy.toml"
        if path.is_file():
            return path, _reject_unknown_keys(path, _parse_toml_file(path))
        path = parent / "pyproject.toml"
        if path.is_file():
            tool = _parse_toml_file(path).get("tool")
            table = (
                cast("dict[str, object]", tool).get("riverpy") if isinstance(tool, dict) else None
            )
            if isinstance(table, dict):
                return path, _reject_unknown_keys(path, cast("dict[str, object]", table))
            if table is not None:
                raise SettingsError(f"{path}: tool.riverpy must be a table, got {table!r}")
    return None, {}


def _parse_toml_file(path: Path) -> dict[str, object]:
    import tomllib

    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: {error}") from None


def _reject_unknown_keys(path: Path, settings: dict[str, object]) -> dict[str, object]:
    known = [setting.name for setting in SETTINGS]
    for key in settings:
        if key not in known:
            raise SettingsError(f"{path}: unknown key {key!r}{_make_spelling_hint(key, known)}")
    return settings


def _make_spelling_hint(name: str, known_names: list[str], prefix: str = "") -> str:
    from difflib import get_close_matches

    endings = [word.removeprefix(prefix) for word in known_names]
    near = get_close_matches(name.removeprefix(prefix), endings, n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else f"; known are {', '.join(known_names)}"
