"""The settings of commands, and the sources of their values.

Sources, in this order: the option, RIVERPY_<NAME>, for the database DATABASE_URL or PG*, the
nearest riverpy.toml or `[tool.riverpy]` of the nearest pyproject.toml, the default. An unknown name
is an error, since it may be misspelled.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import click
import msgspec

from riverpy._dsn import (
    PG_VARIABLES,
    environment_url,
    mask_url,
    server_of,
    show_url,
    validate_url,
)
from riverpy._duration import format_duration, parse_duration
from riverpy._names import validate_client_id, validate_domain, validate_schema
from riverpy._tools.health.address import Address
from riverpy.cli._output import print_table
from riverpy.cli._types import ParsedType, check_queues, format_queues, parse_queues

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import timedelta

T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., Any]")

OTHER_VARIABLES = ("RIVERPY_EMBEDDED_DIR", "RIVERPY_PG_BIN")
"""Environment variables of riverpy that are not settings of a command."""
TESTS_PREFIX = "RIVERPY_TEST_"
"""The prefix of the environment variables of riverpy's own tests."""
SERVICE_SUFFIX = "_SERVICE_HOST"
"""The suffix of the environment variables that Kubernetes sets for the Services of a namespace."""


class SettingsError(click.UsageError):
    """A setting is wrong. The text names the source of the wrong value."""


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A setting, such as option `--soft-stop`, variable RIVERPY_SOFT_STOP and key `soft-stop`."""

    name: str
    parse: Callable[[str], T]
    show: Callable[[T], str] = str
    parse_toml: Callable[[object], T] | None = None
    """Parses the value in the file. Default: the value is text, for `parse`."""
    default: str = "-"
    """The default value, in words."""

    @property
    def parameter(self) -> str:
        """The name of the setting's option as a parameter of a command."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """The name of the setting's environment variable."""
        return "RIVERPY_" + self.parameter.upper()


class Value(msgspec.Struct, Generic[T], frozen=True):
    """The value of a setting and the source of the value. Without a value it is UNSET."""

    value: T | msgspec.UnsetType
    source: str

    def or_none(self) -> T | None:
        """Return the value; None if it is unset."""
        return None if self.value is msgspec.UNSET else self.value


def _validated(validate: Callable[[str], object]) -> Callable[[str], str]:
    """Return a parser that only validates the text."""

    def parse(text: str) -> str:
        validate(text)
        return text

    return parse


def _positive_duration(text: str) -> timedelta:
    duration = parse_duration(text)
    if not duration:
        raise ValueError(f"expected a duration above zero, got {text!r}")
    return duration


def _boolean(text: str) -> bool:
    match text.lower():
        case "1" | "true" | "yes" | "on":
            return True
        case "0" | "false" | "no" | "off":
            return False
        case _:
            raise ValueError(f"{text!r} is not true or false")


def _toml_boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {value!r}")  # noqa: TRY004
    return value


def _toml_queues(value: object) -> dict[str, int]:
    try:
        queues = msgspec.convert(value, dict[str, int])
    except msgspec.ValidationError:
        raise ValueError(
            f"expected a table of names and slots, such as {{ default = 50 }}, got {value!r}"
        ) from None
    if not queues:
        raise ValueError("expected at least one queue, such as { default = 50 }")
    check_queues(queues)
    return queues


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return text.lower()

    return parse


def _boolean_setting(name: str, default: str) -> Setting[bool]:
    return Setting(name, _boolean, lambda on: str(on).lower(), _toml_boolean, default)


DATABASE_URL: Setting[str] = Setting("database-url", _validated(validate_url), show_url)
SCHEMA: Setting[str] = Setting(
    "schema",
    _validated(validate_schema),
    default="the client's, else by search path",
)
QUEUES: Setting[dict[str, int]] = Setting(
    "queues", parse_queues, format_queues, _toml_queues, "the client's"
)
POLL_ONLY = _boolean_setting("poll-only", "the client's, else false")
KNOWN_KINDS_ONLY = _boolean_setting("known-kinds-only", "the client's, else true")
CANDIDATE = _boolean_setting("candidate", "the client's, else true")
LEADER_DOMAIN: Setting[str] = Setting(
    "leader-domain", _validated(validate_domain), default="the client's, else default"
)
SOFT_STOP: Setting[timedelta] = Setting(
    "soft-stop", parse_duration, format_duration, default="the client's, else 30s"
)
DEAD_AFTER: Setting[timedelta] = Setting(
    "dead-after", _positive_duration, format_duration, default="the client's, else 1m"
)
NAME: Setting[str] = Setting(
    "name", _validated(validate_client_id), default="the client's, else the host's"
)
HEALTH: Setting[Address] = Setting("health", Address.parse, default="none")
LOG: Setting[str] = Setting("log", _one_of("console", "json"), default="console")
LOG_LEVEL: Setting[str] = Setting(
    "log-level", _one_of("debug", "info", "warning", "error"), default="info"
)
DEBUG = _boolean_setting("debug", "false")

SETTINGS: tuple[Setting[Any], ...] = (
    DATABASE_URL,
    SCHEMA,
    QUEUES,
    POLL_ONLY,
    KNOWN_KINDS_ONLY,
    CANDIDATE,
    LEADER_DOMAIN,
    SOFT_STOP,
    DEAD_AFTER,
    NAME,
    HEALTH,
    LOG,
    LOG_LEVEL,
    DEBUG,
)


class Sources:
    """The environment and the settings file.

    Args:
        environ: the environment variables. Default: those of the process.
        directory: the search for the file starts here. Default: the current directory.

    Raises:
        SettingsError: a name is unknown, or the file cannot be read.
    """

    def __init__(
        self, environ: Mapping[str, str] | None = None, directory: Path | None = None
    ) -> None:
        self._environ = os.environ if environ is None else environ
        _check_variables(self._environ)
        self._path, self._table = _read_file(directory or Path.cwd())

    def value(self, setting: Setting[T], flag: T | None) -> Value[T]:
        """Return the value of a setting. `flag` is the value of the option; None: not given.

        Raises:
            SettingsError: the value is not allowed.
        """
        if flag is not None:
            return Value(flag, f"--no-{setting.name}" if flag is False else f"--{setting.name}")
        variables = [setting.variable]
        if setting is DATABASE_URL:
            variables.append("DATABASE_URL")
        for variable in variables:
            if text := self._environ.get(variable):
                return Value(_checked(variable, setting.parse, text), variable)
        if setting is DATABASE_URL and (given := [v for v in PG_VARIABLES if self._environ.get(v)]):
            source = ", ".join(given)
            _checked(source, self._check_server, environment_url(self._environ))
            return Value(setting.parse(environment_url(self._environ)), source)
        if setting.name in self._table:
            return Value(self._from_file(setting), str(self._path))
        return Value(msgspec.UNSET, "default")

    def _check_server(self, url: str) -> None:
        server_of(url, self._environ)

    def _from_file(self, setting: Setting[T]) -> T:
        value = self._table[setting.name]
        source = f"{self._path}: {setting.name}"
        if setting.parse_toml is not None:
            return _checked(source, setting.parse_toml, value)
        if not isinstance(value, str):
            raise SettingsError(f"{source}: expected text in quotes, got {value!r}")
        return _checked(source, setting.parse, value)


def setting_option(
    setting: Setting[Any],
    *,
    help: str,  # noqa: A002 (click's name)
    metavar: str | None = None,
    **attributes: Any,
) -> Callable[[F], F]:
    """Return the click option for a setting, `--NAME/--no-NAME` for a boolean one. Without the
    option the value is None."""
    flag = f"--{setting.name}"
    if setting.parse is _boolean:
        flag, kind = f"{flag}/--no-{setting.name}", None
    else:
        kind = ParsedType(setting.name, setting.parse)
    return click.option(flag, type=kind, metavar=metavar, default=None, help=help, **attributes)


class Settings:
    """The values of all settings, with their sources."""

    def __init__(self, values: Iterable[tuple[Setting[Any], Value[Any]]]) -> None:
        self._values = {setting.name: (setting, value) for setting, value in values}

    def __getitem__(self, setting: Setting[T]) -> Value[T]:
        return self._values[setting.name][1]

    def print(self) -> None:
        """Print a table of names, values without passwords, and sources."""
        rows = [
            (
                setting.name,
                setting.default if value.value is msgspec.UNSET else setting.show(value.value),
                value.source,
            )
            for setting, value in self._values.values()
        ]
        print_table(("SETTING", "VALUE", "SOURCE"), rows)


def _checked(source: str, parse: Callable[[Any], T], value: object) -> T:
    try:
        return parse(value)
    except ValueError as error:
        raise SettingsError(mask_url(f"{source}: {error}")) from None


def _check_variables(environ: Mapping[str, str]) -> None:
    known = [*(setting.variable for setting in SETTINGS), *OTHER_VARIABLES]
    services = [
        name.removesuffix(SERVICE_SUFFIX) for name in environ if name.endswith(SERVICE_SUFFIX)
    ]
    foreign = (
        TESTS_PREFIX,
        *(f"{name}_{part}" for name in services for part in ("SERVICE_", "PORT")),
    )
    for variable in environ:
        if (
            variable.startswith("RIVERPY_")
            and variable not in known
            and not variable.startswith(foreign)
        ):
            hint = _hint(variable, known, prefix="RIVERPY_")
            raise SettingsError(f"unknown variable {variable}{hint}")


def _read_file(directory: Path) -> tuple[Path | None, dict[str, object]]:
    for parent in (directory, *directory.parents):
        path = parent / "riverpy.toml"
        if path.is_file():
            return path, _check_keys(path, _parse_file(path))
        path = parent / "pyproject.toml"
        if path.is_file():
            tool = _parse_file(path).get("tool")
            table = (
                cast("dict[str, object]", tool).get("riverpy") if isinstance(tool, dict) else None
            )
            if table is not None and not isinstance(table, dict):
                raise SettingsError(f"{path}: tool.riverpy must be a table, got {table!r}")
            if isinstance(table, dict):
                return path, _check_keys(path, cast("dict[str, object]", table))
    return None, {}


def _parse_file(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: {error}") from None


def _check_keys(path: Path, table: dict[str, object]) -> dict[str, object]:
    known = [setting.name for setting in SETTINGS]
    for key in table:
        if key not in known:
            raise SettingsError(f"{path}: unknown key {key!r}{_hint(key, known)}")
    return table


def _hint(name: str, known: list[str], prefix: str = "") -> str:
    endings = [word.removeprefix(prefix) for word in known]
    near = get_close_matches(name.removeprefix(prefix), endings, n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else f"; known are {', '.join(known)}"
