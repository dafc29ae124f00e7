"""The options of `riverpy worker` for leader election, and the check of all settings of this
command.

All wrong values are reported in one message, so that a user can correct them together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec
from msgspec import UNSET

from riverpy._duration import format_duration
from riverpy.cli._settings import (
    DOMAIN_QUEUES,
    LEADER_SETTINGS,
    SETTINGS,
    Setting,
    SettingsError,
    SettingSources,
    SettingValue,
    ValueBySetting,
)
from riverpy.config import find_leader_setting_faults

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from riverpy.config import Config

CommandT = TypeVar("CommandT", bound="Callable[..., Any]")
_OPTION_FAULTS_KEY = "riverpy.worker_option_faults"
_CLIENT_SOURCE = "the client's Config"
"""The source of a value in an error text, if the value comes from the `Config` of the client. Other
sources are an option, an environment variable and the settings file."""


class _LeaderOption(click.Option):
    """An option in the group "Leading" of the help. A wrong value does not end the command at once.
    Its error is added to a list, so that one message reports all wrong values."""

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        try:
            return super().process_value(ctx, value)
        except click.BadParameter as error:
            ctx.meta.setdefault(_OPTION_FAULTS_KEY, []).append(f"{self.opts[-1]}: {error.message}")
            return None


class GroupedOptionsCommand(click.Command):
    """A command whose help shows the options of `leader_options` under their own heading."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, is_leading in (("Options", False), ("Leading", True)):
            records = [
                record
                for option in self.get_params(ctx)
                if isinstance(option, click.Option)
                and isinstance(option, _LeaderOption) is is_leading
                and (record := option.get_help_record(ctx)) is not None
            ]
            with formatter.section(heading):
                formatter.write_dl(records)


def _parse_domain_queues(
    _ctx: click.Context, _param: click.Parameter, texts: tuple[str, ...]
) -> tuple[str, ...] | None:
    return DOMAIN_QUEUES.type.convert(",".join(texts), None, None) if texts else None


def leader_options(command: CommandT) -> CommandT:
    """Decorate a command with an option for each setting of leader election."""
    for setting in reversed(LEADER_SETTINGS):
        attributes: dict[str, Any] = {"cls": _LeaderOption}
        if setting is DOMAIN_QUEUES:
            attributes |= {
                "multiple": True,
                "type": click.STRING,
                "callback": _parse_domain_queues,
            }
        command = setting.click_option(**attributes)(command)
    return command


def find_setting_values(
    sources: SettingSources,
    known_values: Mapping[Setting[Any], SettingValue[Any]],
    flags: Mapping[str, Any],
) -> ValueBySetting:
    """Return the value of each setting and the source of the value.

    Args:
        sources: the environment variables and the settings file.
        known_values: the settings whose values are already known.
        flags: the value of each option, by the name of its parameter in the command function. None:
            the user has not given the option.

    Raises:
        SettingsError: one or more values are wrong. The text lists all of them.
    """
    context = click.get_current_context(silent=True)
    faults: list[str] = [] if context is None else context.meta.get(_OPTION_FAULTS_KEY, [])
    values: ValueBySetting = dict(known_values)
    for setting in SETTINGS:
        if setting not in known_values:
            try:
                values[setting] = sources.find_value(setting, flags[setting.parameter_name])
            except SettingsError as error:
                faults.append(error.message)
    if faults:
        faults += _find_faults_of_combinations({}, values)
    _raise_if_faults(faults)
    return values


def check_leader_settings(config: Config, values: ValueBySetting) -> None:
    """Check that `values` are valid in combination with the settings of the client.

    Raises:
        SettingsError: the combination is not valid. The text has the rule, and the source of each
            value.
    """
    _raise_if_faults(_find_faults_of_combinations(msgspec.structs.asdict(config), values))


def _find_faults_of_combinations(
    client_settings: Mapping[str, Any], values: ValueBySetting
) -> list[str]:
    """Return a text for each combination of settings that is not valid. If `values` has a setting,
    its value is used instead of that of the client."""
    given = {
        setting.parameter_name: value
        for setting, value in values.items()
        if setting in LEADER_SETTINGS and value.value is not UNSET
    }

    def name_setting(field: str) -> str:
        """Return the name of a setting and where its value comes from, for an error text."""
        source = given[field].source if field in given else _CLIENT_SOURCE
        return f"{field.replace('_', '-')} (from {source})"

    settings = {**client_settings, **{field: value.value for field, value in given.items()}}
    return find_leader_setting_faults(settings, name_setting, format_duration)


def _raise_if_faults(faults: Sequence[str]) -> None:
    if len(faults) == 1:
        raise SettingsError(faults[0])
    if faults:
        texts = (text.rstrip(".") for text in faults)
        listed = "; ".join(f"({number}) {text}" for number, text in enumerate(texts, start=1))
        raise SettingsError(f"{len(faults)} settings are wrong: {listed}")
