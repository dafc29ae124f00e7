"""The command `manage.py riverpy` of a Django project. It uses the database from the settings of
Django, and the workers from the setting `RIVERPY`."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, NoReturn, cast

import click
import django
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError
from msgspec import UNSET

from riverpy._postgres.schema import riverpy_program_by_url
from riverpy.cli import CommandGroup
from riverpy.cli import main as riverpy_main
from riverpy.cli._run import IS_PROCESS_KEPT_KEY, MAIN_MODULE_KEY
from riverpy.cli._settings import DATABASE_URL, PROGRAM_SETTINGS_KEY, SCHEMA, SettingValue
from riverpy.django.database import make_database_url
from riverpy.django.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

CLIENT_TARGET_DEFAULT = "riverpy.django.worker:make_client"
"""The function that creates the client of `manage.py riverpy worker` by default."""
_EXCLUDED_COMMANDS = ("bench", "db", "demo", "dev")
"""The commands that are not available in a Django project. They use their own database, or start a
process without Django."""


class _DjangoCommandGroup(CommandGroup):
    """The commands of riverpy that are available in a Django project."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in super().list_commands(ctx) if name not in _EXCLUDED_COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _EXCLUDED_COMMANDS:
            return None
        command = super().get_command(ctx, cmd_name)
        if command is None:
            return None
        return (
            _make_worker_command(command)
            if cmd_name == "worker"
            else _copy_command_with_django_help(command)
        )

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        is_process_kept: bool = False,
        **extra: Any,
    ) -> click.Context:
        context = super().make_context(info_name, args, parent, **extra)
        context.meta[MAIN_MODULE_KEY] = __name__
        context.meta[IS_PROCESS_KEPT_KEY] = is_process_kept
        context.meta[PROGRAM_SETTINGS_KEY] = _read_database_settings()
        return context


def _make_worker_command(command: click.Command) -> click.Command:
    """Return a copy of `riverpy worker` in which the argument MODULE:ATTR is optional."""
    worker = copy(command)
    worker.params = [
        click.Argument(["target"], metavar="[MODULE:ATTR]", default=CLIENT_TARGET_DEFAULT)
        if param.name == "target"
        else _make_refused_database_url_option(param)
        if param.name == DATABASE_URL.parameter_name
        else param
        for param in command.params
    ]
    worker.help = (
        "Work jobs until the process is stopped.\n\n"
        'Works the workers of RIVERPY["WORKERS"] and Django\'s tasks, on the database of '
        "Django's settings. MODULE:ATTR names another riverpy.Client, or a function that returns "
        "one."
    )
    return worker


def _make_refused_database_url_option(param: click.Parameter) -> click.Parameter:
    """Return a hidden copy of the option `--database-url` that raises an error if it is used."""

    def refuse_value(_context: click.Context, _param: click.Parameter, value: object) -> None:
        if value is not None:
            raise click.UsageError(
                "--database-url is not for this worker: its jobs and your models must use the same "
                'settings. Name the alias of the database with RIVERPY = {"DATABASE": …}'
            )

    option = copy(param)
    option.callback = refuse_value
    if isinstance(option, click.Option):
        option.hidden = True
    return option


def _copy_command_with_django_help(command: click.Command) -> click.Command:
    """Return a copy of a command whose help names the database of Django as the default.
    Subcommands are copied too."""
    adapted = copy(command)
    adapted.params = [*map(_copy_option_with_django_help, command.params)]
    if isinstance(adapted, click.Group):
        adapted.commands = {
            name: _copy_command_with_django_help(one)
            for name, one in cast("click.Group", command).commands.items()
        }
    return adapted


def _copy_option_with_django_help(param: click.Parameter) -> click.Parameter:
    if param.name != DATABASE_URL.parameter_name or not isinstance(param, click.Option):
        return param
    option = copy(param)
    option.help = "URL of another database. Default: the database of Django's settings."
    return option


def _read_database_settings() -> dict[str, SettingValue[Any]]:
    """Return the database and the schema from the settings of Django.

    Raises:
        UsageError: a setting is wrong.
    """
    try:
        settings = read_settings()
        url = make_database_url(settings.database)
    except ImproperlyConfigured as error:
        raise click.UsageError(f"Django's settings: {error}") from None
    values: dict[str, SettingValue[Any]] = {
        DATABASE_URL.name: SettingValue(url, f"DATABASES[{settings.database!r}]")
    }
    # Set this even without a schema, because commands must not read it from the environment.
    values[SCHEMA.name] = SettingValue(settings.schema or UNSET, "RIVERPY")
    riverpy_program_by_url[url] = "manage.py"
    return values


_command_group = _DjangoCommandGroup(
    "riverpy",
    params=riverpy_main.params,
    callback=riverpy_main.callback,
    help="The River job queue, on the database of this Django project.",
    context_settings=riverpy_main.context_settings,
)


def main(arguments: Sequence[str], prog_name: str) -> NoReturn:
    """Run a command of riverpy, and exit. The processes of `riverpy worker --processes` call this
    too."""
    if not apps.ready:
        django.setup()
    _command_group.main(list(arguments), prog_name=prog_name)
    raise AssertionError("unreachable")


def run_command(arguments: Sequence[str]) -> None:
    """Run a command of riverpy in this process, and return when it has ended. The process continues
    even after the command `worker`, which otherwise ends its process.

    Raises:
        django.core.management.CommandError: the command failed.
    """
    try:
        code = _command_group.main(
            list(arguments), prog_name="riverpy", standalone_mode=False, is_process_kept=True
        )
    except click.ClickException as error:
        raise CommandError(error.format_message(), returncode=error.exit_code) from error
    except SystemExit as error:
        code = error.code
    if code:
        raise CommandError("the command failed", returncode=code if isinstance(code, int) else 1)
