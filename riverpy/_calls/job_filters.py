"""CheckedFilters: validated filters of a list of jobs, as parameters of SQL statements."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from riverpy import _json
from riverpy.errors import ConfigError
from riverpy.job import JobState

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy.job_list import JobFilters

VALUES_PER_FILTER_MAX = 10_000
"""The maximum number of values of any filter other than `ids`."""
FILTER_IDS_MAX = 1_000_000
"""The maximum number of values of the filter `ids`."""
PRIORITY_MAX = 4
_UNSTORABLE_CHARACTER = re.compile("[\0\ud800-\udfff]")


class CheckedFilters(NamedTuple):
    """Validated filters of a list of jobs."""

    values: dict[str, object]
    """The values of the given filters, by filter name. The SQL statements for lists of jobs contain
    one condition for each given filter. The filter name is also the name of the condition."""

    @property
    def states(self) -> list[str]:
        """The values of the filter `states`, in the caller's order. Empty: the filter is not
        used."""
        return cast("list[str]", self.values.get("states", []))

    @property
    def ids(self) -> list[int] | None:
        """The values of the filter `ids`, sorted. None: the filter is not used."""
        return cast("list[int] | None", self.values.get("ids"))

    def without_filter(self, name: str) -> CheckedFilters:
        """Return these filters without the filter `name`."""
        return CheckedFilters({key: value for key, value in self.values.items() if key != name})


def check_filters(filters: JobFilters) -> CheckedFilters:
    """Validate the caller's filters. Repeated values are dropped.

    Raises:
        ConfigError: a filter is unknown, has no values or too many, or a value is not allowed.
    """
    given = cast("Mapping[str, object]", filters)
    if unknown := given.keys() - _CHECK_BY_FILTER.keys():
        raise ConfigError(
            f"there is no filter {', '.join(map(repr, sorted(unknown)))}: the filters are "
            f"{', '.join(_CHECK_BY_FILTER)}"
        )
    return CheckedFilters(
        {name: _CHECK_BY_FILTER[name](name, value) for name, value in given.items()}
    )


def require_filter(filters: CheckedFilters, method_name: str) -> None:
    """Raise ConfigError if there is no filter, because the method would then change all jobs. The
    error text contains `method_name`."""
    if not filters.values:
        raise ConfigError(
            f"{method_name} without a filter would change all jobs: give at least one of "
            f"{', '.join(_CHECK_BY_FILTER)}"
        )


def _check_value_list(name: str, value: object) -> list[object]:
    """Return the values of a filter without duplicates, in the caller's order."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | set | frozenset):
        raise ConfigError(
            f"the filter {name} must be a list of values, got {type(value).__name__}: write "
            f"{name}=[…]"
        )
    items = cast("Sequence[object]", value)
    if not items:
        raise ConfigError(f"the filter {name} is empty: leave it out, or give at least one value")
    limit = FILTER_IDS_MAX if name == "ids" else VALUES_PER_FILTER_MAX
    if len(items) > limit:
        raise ConfigError(f"the filter {name} has at most {limit:,} values, got {len(items):,}")
    try:
        return list(dict.fromkeys(items))
    except TypeError:
        raise ConfigError(f"the filter {name} has a value that is no single value") from None


def _check_ids(name: str, value: object) -> list[int]:
    return sorted(
        _check_integer(name, item, 1, 2**63 - 1) for item in _check_value_list(name, value)
    )


def _check_priorities(name: str, value: object) -> list[int]:
    return [_check_integer(name, item, 1, PRIORITY_MAX) for item in _check_value_list(name, value)]


def _check_integer(name: str, item: object, minimum: int, maximum: int) -> int:
    if isinstance(item, bool) or not isinstance(item, int) or not minimum <= item <= maximum:
        raise ConfigError(
            f"the filter {name} takes whole numbers from {minimum} to {maximum}, got {item!r}"
        )
    return item


def _check_states(name: str, value: object) -> list[str]:
    states: list[str] = []
    for item in _check_value_list(name, value):
        try:
            states.append(JobState(cast("str", item)).value)
        except ValueError:
            raise ConfigError(
                f"the filter {name} takes {', '.join(JobState)}, got {item!r}"
            ) from None
    return states


def _check_texts(name: str, value: object) -> list[str]:
    return [_check_text(name, item) for item in _check_value_list(name, value)]


def _check_text(name: str, item: object) -> str:
    if not isinstance(item, str) or not item:
        raise ConfigError(f"the filter {name} takes texts that are not empty, got {item!r}")
    if (match := _UNSTORABLE_CHARACTER.search(item)) is not None:
        raise ConfigError(
            f"the filter {name}: no job has the character {match[0]!a}, which PostgreSQL cannot "
            "store"
        )
    return item


def _check_json_object(name: str, value: object) -> str:
    if not isinstance(value, Mapping):
        raise ConfigError(f"the filter {name} must be an object, got {type(value).__name__}")
    if not value:
        raise ConfigError(f"the filter {name} is empty: leave it out, or give at least one key")
    return _json.encode(cast("Mapping[str, object]", value), path=name)


_CHECK_BY_FILTER: dict[str, Callable[[str, object], object]] = {
    "ids": _check_ids,
    "kinds": _check_texts,
    "queues": _check_texts,
    "priorities": _check_priorities,
    "states": _check_states,
    "tags_all": _check_texts,
    "tags_any": _check_texts,
    "metadata": _check_json_object,
    "args": _check_json_object,
    "error": _check_text,
}
"""For each filter, the function that validates its value and converts it for the SQL statement."""
