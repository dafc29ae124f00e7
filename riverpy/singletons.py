"""Singletons and leader functions of a client.

A singleton is a function that runs in only one process at a time, even if several processes
register it. The process holds a lease with the name of the singleton. A leader function runs while
its client is the leader."""

from __future__ import annotations

from inspect import (
    isasyncgen,
    isasyncgenfunction,
    isawaitable,
    iscoroutine,
    iscoroutinefunction,
    isgenerator,
    isgeneratorfunction,
)
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

from riverpy._names import validate_lease_name
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy._leading.term_fence import LeaderTerm
    from riverpy._leases.lease import Lease

SingletonFn: TypeAlias = "Callable[[Lease], Awaitable[object]] | Callable[[Lease], None]"
"""The function of a singleton: a coroutine function, or a plain function, which runs in a
thread."""
LeaderFn: TypeAlias = "Callable[[LeaderTerm], Awaitable[object]]"
RestartPolicy: TypeAlias = Literal["on_error", "never"]


class Singleton(NamedTuple):
    """A function that runs in only one process at a time. `name` is also the name of its lease."""

    name: str
    fn: SingletonFn
    restart_policy: RestartPolicy
    is_candidate: bool

    @property
    def runs_in_thread(self) -> bool:
        """Whether the function runs in a thread."""
        return not _has_function_type(self.fn, iscoroutinefunction)

    def check_not_awaitable(self, result: object) -> None:
        """Check the result of a function that ran in a thread.

        Raises:
            TypeError: the result is an awaitable or a generator, whose code would never run.
        """
        if not (isawaitable(result) or isasyncgen(result) or isgenerator(result)):
            return
        if iscoroutine(result):
            result.close()  # avoids Python's warning "never awaited"
        raise TypeError(
            f"singleton {self.name!r} returned {type(result).__name__}, which never runs: "
            "register an `async def` that awaits it, or functools.partial of one, not a lambda"
        )


class LeaderFunction(NamedTuple):
    """A function that runs while its client is the leader. `name` is its name in the log."""

    name: str
    fn: LeaderFn


class SingletonRegistry:
    """The singletons and leader functions of a client, in the order of their registration."""

    def __init__(self) -> None:
        self.singletons_by_name: dict[str, Singleton] = {}
        self.leader_functions: dict[str, LeaderFunction] = {}
        """The functions that run while the client is the leader, by name."""

    def add_singleton(self, singleton: Singleton) -> None:
        """Register a singleton.

        Raises:
            ConfigError: the name is already registered or not allowed, or another value is not
                allowed.
        """
        name, fn, restart, candidate = singleton
        validate_lease_name(name)
        if name in self.singletons_by_name:
            raise ConfigError(f"singleton {name!r} is registered already: names are given once")
        if not callable(fn):
            raise ConfigError(f"singleton {name!r} takes a function, got {type(fn).__name__}")
        if _has_function_type(fn, isasyncgenfunction) or _has_function_type(
            fn, isgeneratorfunction
        ):
            raise ConfigError(
                f"singleton {name!r} is a generator, which would never run: remove the `yield`"
            )
        if restart not in get_args(RestartPolicy):
            raise ConfigError(
                f"restart of singleton {name!r} is 'on_error' or 'never', got {restart!r}"
            )
        if not isinstance(candidate, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"candidate of singleton {name!r} is True or False, got {candidate!r}"
            )
        self.singletons_by_name[name] = singleton

    def add_leader_function(self, function: LeaderFunction) -> None:
        """Register a function that runs while the client is the leader.

        Raises:
            ConfigError: the name is already registered or not allowed, or the function is not a
                coroutine function.
        """
        name, fn = function
        validate_lease_name(name)
        if name in self.leader_functions:
            raise ConfigError(
                f"leader function {name!r} is registered already: names are given once"
            )
        if not _has_function_type(fn, iscoroutinefunction):
            raise ConfigError(f"leader function {name!r} must be an `async def`")
        self.leader_functions[name] = function


def _has_function_type(fn: object, is_type: Callable[[object], bool]) -> bool:
    """Return whether `is_type` is true for `fn`, or for the method `__call__` of `fn`."""
    return is_type(fn) or is_type(getattr(fn, "__call__", None))  # noqa: B004 (it is called)
