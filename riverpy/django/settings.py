"""Reads and checks the setting `RIVERPY` of a Django project."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections

from riverpy._names import validate_queue_name, validate_schema_name
from riverpy.config import Config
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

SETTING_NAME = "RIVERPY"
QUEUES_DEFAULT: Mapping[str, int] = {"default": 100}
"""The default of the key `QUEUES`: the number of slots of each queue, i.e. how many of its jobs a
worker runs at the same time."""
_MIGRATION_TOOLS = ("django", "riverpy")


class RiverpySettings(NamedTuple):
    """The values of the keys in the setting `RIVERPY`."""

    workers: str | None = None
    """`module:attr` of a `riverpy.Workers`, of a `riverpy.Client`, or of a function that returns
    one of them. `manage.py riverpy worker` uses it if the command has no argument MODULE:ATTR. If
    both are missing, the worker runs only Django's tasks, and fails if there are none."""
    database: str = DEFAULT_DB_ALIAS
    """The alias of the database that has River's tables."""
    schema: str | None = None
    """The schema of River's tables; None: the search path of the database decides."""
    migrations: Literal["django", "riverpy"] = "django"
    """The tool that creates River's tables: `django` for `manage.py migrate`, `riverpy` for
    `manage.py riverpy migrate up`."""
    queues: Mapping[str, int] = QUEUES_DEFAULT
    """The queues of `manage.py riverpy worker` with their numbers of slots, i.e. how many jobs of
    the queue run at the same time. If `workers` names a client, its queues are used instead."""
    config: Config = Config()
    """The settings of the client. If the key `SCHEMA` is set, `Config.schema` gets its value."""


class SettingProblem(NamedTuple):
    """A problem of the setting `RIVERPY`: what is wrong, and a hint how to correct it."""

    message: str
    hint: str


_FIELD_BY_KEY = {name.upper(): name for name in RiverpySettings._fields}


def read_settings() -> RiverpySettings:
    """Read and check the setting `RIVERPY`.

    Raises:
        ImproperlyConfigured: a key or a value is wrong.
    """
    values = _read_setting_values()
    if problems := find_setting_problems():
        raise ImproperlyConfigured(f"{problems[0].message}: {problems[0].hint}")
    given = {_FIELD_BY_KEY[key]: value for key, value in values.items()}
    settings = RiverpySettings(**given)
    schema = settings.schema or settings.config.schema
    return settings._replace(
        schema=schema,
        config=_replace_schema(settings.config, schema) if schema else settings.config,
    )


def read_schema_name() -> str | None:
    """Return the schema of River's tables. None means that the search path decides, or that the
    setting is wrong. A wrong setting raises nothing here: Django imports the models before it
    reports wrong settings."""
    values = _read_setting_values()
    config = values.get("CONFIG")
    schema = values.get("SCHEMA") or (config.schema if isinstance(config, Config) else None)
    return schema if schema and _find_schema_problem(schema) is None else None


def is_migrated_by_django() -> bool:
    """Return whether `manage.py migrate` creates River's tables."""
    return _read_setting_values().get("MIGRATIONS") != "riverpy"


def read_database_alias() -> str:
    """Return the alias of the database that has River's tables."""
    return _read_setting_values().get("DATABASE", DEFAULT_DB_ALIAS)


def _replace_schema(config: Config, schema: str) -> Config:
    from msgspec.structs import replace

    return replace(config, schema=schema)


def _read_setting_values() -> dict[str, Any]:
    values = getattr(django_settings, SETTING_NAME, None)
    return cast("dict[str, Any]", values) if isinstance(values, dict) else {}


def find_setting_problems() -> list[SettingProblem]:
    """Return all problems of the setting `RIVERPY`. This opens no connection."""
    given = getattr(django_settings, SETTING_NAME, None)
    if given is not None and not isinstance(given, dict):
        return [
            SettingProblem(
                f"{SETTING_NAME} must be a dict, got {type(given).__name__}",
                f'write {SETTING_NAME} = {{"WORKERS": "shop.jobs:workers"}}',
            )
        ]
    values = _read_setting_values()
    problems = [_describe_unknown_key(key) for key in values if key not in _FIELD_BY_KEY]
    checks = {
        "WORKERS": _find_workers_problem,
        "DATABASE": _find_database_problem,
        "SCHEMA": _find_schema_problem,
        "MIGRATIONS": _find_migrations_problem,
        "QUEUES": _find_queues_problem,
        "CONFIG": _find_config_problem,
    }
    for key, find_problem in checks.items():
        if key in values and (problem := find_problem(values[key])):
            problems.append(
                SettingProblem(f"{SETTING_NAME}[{key!r}] {problem.message}", problem.hint)
            )
    if "DATABASE" not in values and (problem := _find_database_problem(DEFAULT_DB_ALIAS)):
        problems.append(problem)
    config = values.get("CONFIG")
    if not problems and isinstance(config, Config) and config.schema and values.get("SCHEMA"):
        problems.append(
            SettingProblem(
                f"{SETTING_NAME} has a SCHEMA, and its CONFIG has one too", "keep one of them"
            )
        )
    return problems


def _describe_unknown_key(key: object) -> SettingProblem:
    near = get_close_matches(str(key).upper(), _FIELD_BY_KEY, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(_FIELD_BY_KEY)}"
    return SettingProblem(f"{SETTING_NAME} has the unknown key {key!r}", hint)


def _find_workers_problem(value: object) -> SettingProblem | None:
    if value is None:
        return None
    if isinstance(value, str):
        module, _, attribute = value.partition(":")
        if all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
            return None
    return SettingProblem(
        f"must be a text MODULE:ATTR, got {value!r}",
        'name your registry of workers, as in "shop.jobs:workers"',
    )


def _find_database_problem(value: object) -> SettingProblem | None:
    if not isinstance(value, str) or value not in connections:
        return SettingProblem(
            f"must be an alias of DATABASES, got {value!r}",
            f"the aliases are {', '.join(connections)}",
        )
    vendor = connections[value].vendor
    if vendor != "postgresql":
        engine = connections[value].settings_dict["ENGINE"]
        return SettingProblem(
            f"the database {value!r} has the engine {engine}, but River's tables need PostgreSQL",
            "set ENGINE to django.db.backends.postgresql, or name another alias with "
            f'{SETTING_NAME} = {{"DATABASE": …}}',
        )
    return None


def _find_schema_problem(value: object) -> SettingProblem | None:
    if value is None:
        return None
    if not isinstance(value, str):
        return SettingProblem(f"must be a text, got {value!r}", "name a schema of the database")
    try:
        validate_schema_name(value)
    except ConfigError as error:
        return SettingProblem(f"is not allowed: {error}", "name a schema of the database")
    return None


def _find_migrations_problem(value: object) -> SettingProblem | None:
    if value in _MIGRATION_TOOLS:
        return None
    return SettingProblem(
        f"must be 'django' or 'riverpy', got {value!r}",
        "'django': `manage.py migrate` creates River's tables. 'riverpy': `manage.py riverpy "
        "migrate up` does",
    )


def _find_queues_problem(value: object) -> SettingProblem | None:
    hint = 'write {"default": 100}: at most 100 jobs of this queue run at the same time'
    if not isinstance(value, dict) or not value:
        return SettingProblem(f"must be a dict with at least one queue, got {value!r}", hint)
    for name, slots in cast("dict[object, object]", value).items():
        try:
            validate_queue_name(cast("str", name))
        except (ConfigError, TypeError) as error:
            return SettingProblem(f"has a queue whose name is not allowed: {error}", hint)
        if not isinstance(slots, int) or isinstance(slots, bool) or slots < 1:
            return SettingProblem(f"of queue {name!r} must be a number from 1, got {slots!r}", hint)
    return None


def _find_config_problem(value: object) -> SettingProblem | None:
    if isinstance(value, Config):
        return None
    return SettingProblem(
        f"must be a riverpy.Config, got {type(value).__name__}",
        "import riverpy in the settings module, and write riverpy.Config(…)",
    )


def import_workers(import_path: str) -> object:
    """Import the object that `RIVERPY["WORKERS"]` names. If it is a function, it is not called.

    Raises:
        Exception: the module cannot be imported, or has no such attribute.
    """
    module_name, _, attribute_path = import_path.partition(":")
    found: Any = import_module(module_name)
    for name in attribute_path.split("."):
        found = getattr(found, name)
    return found
