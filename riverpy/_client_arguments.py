"""The checks of the arguments that async and blocking clients have in common, and the functions
that make the insert settings from these arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._clock import Clock, ConfiguredClock
from riverpy._insert.row import InsertSettings
from riverpy.config import Config
from riverpy.errors import ConfigError
from riverpy.worker import Workers

if TYPE_CHECKING:
    from collections.abc import Container


def check_client_arguments(workers: object, config: object) -> None:
    """Raise ConfigError if an argument has the wrong type."""
    if workers is not None and not isinstance(workers, Workers):
        raise ConfigError(
            f"workers must be a Workers registry, got {type(workers).__name__}: "
            "workers = riverpy.Workers(), filled with @workers.job or workers.add(…)"
        )
    if config is not None and not isinstance(config, Config):
        raise ConfigError(
            f"config must be a Config, as in Config(schema='jobs'), got {type(config).__name__}"
        )


def get_known_kinds(config: Config, workers: Workers | None) -> Workers | None:
    """Return the registry of the kinds that a client may insert. None: the client may insert all
    kinds."""
    return None if config.skip_unknown_job_check else workers


def make_insert_settings(config: Config, workers: Workers | None) -> InsertSettings:
    """Return the settings with which a client inserts jobs."""
    known_kinds: Container[str] | None = get_known_kinds(config, workers)
    return InsertSettings(
        default_max_attempts=config.max_attempts,
        known_kinds=known_kinds,
        skip_job_kind_validation=config.skip_job_kind_validation,
        should_notify=config.insert_notify,
    )


def make_insert_clock(config: Config) -> Clock:
    """Return the clock that a client uses when it inserts jobs."""
    return Clock() if config.clock is None else ConfiguredClock(config.clock)
