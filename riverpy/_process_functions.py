"""Checks for jobs in child processes: a child process must be able to find the function and the
args class by name.

The child process imports the module of the function and looks up the function's name. While a
decorator runs, the name is not bound yet. So these checks run when the client starts.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

_TOP_LEVEL_ADVICE = "write it as a `def` or `class` at the top level of a module"


def require_importable_function(function: Callable[..., Any], args_type: object) -> None:
    """Raise an error if a child process cannot find the function or the args class by name.

    Raises:
        ConfigError: the function or the args class is a lambda, is defined in a function, or is in
            a `__main__` without a file.
    """
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__qualname__"):  # it is an object with __call__
        function = type(function)
    _require_importable_by_name("the function", function)
    if isinstance(args_type, type):
        _require_importable_by_name("the args class", args_type)


def _require_importable_by_name(
    subject: str, found_by_name: Callable[..., Any] | type[Any]
) -> None:
    name, module = found_by_name.__qualname__, found_by_name.__module__
    reason: str | None = None
    if "<lambda>" in name:
        reason = "a lambda has no name"
    elif "<locals>" in name:
        reason = "it is defined inside a function"
    elif module == "__main__" and not _has_main_file():
        reason = "it is defined in an interactive session or in `python -c`, and not in a file"
    if reason is not None:
        raise ConfigError(
            f"{subject} {name} cannot be used with executor='process', because a process must find "
            f"it by its name and {reason}: {_TOP_LEVEL_ADVICE}"
        )


def _has_main_file() -> bool:
    """Return whether a child process can import `__main__` as a module or from a file."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)  # it may be "<stdin>"
    return getattr(main, "__spec__", None) is not None or (path is not None and Path(path).exists())


def require_distinct_function_names(
    function: Callable[..., Any], other: Callable[..., Any]
) -> None:
    """Raise an error if two registered functions have the same name: a child process would find
    only the last one.

    Raises:
        ConfigError: both have the same module and name, and are not the same function.
    """
    names = [
        (getattr(one, "__module__", None), getattr(one, "__qualname__", None))
        for one in (function, other)
    ]
    if function is not other and None not in names[0] and names[0] == names[1]:
        raise ConfigError(
            f"two functions of {names[0][0]} have the name {names[0][1]}, and a process finds only "
            "the last one: give each function its own name"
        )
