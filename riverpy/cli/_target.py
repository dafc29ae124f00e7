"""Load the client that MODULE:ATTR names on the command line."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeGuard, cast

import click

from riverpy.cli._run import (
    EXIT_FAILURE,
    EXIT_USAGE,
    CommandError,
    describe,
    show_traceback,
)
from riverpy.client import Client
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from types import ModuleType


_PACKAGE_DIRECTORY = Path(__file__).resolve().parent.parent
ATTRIBUTES_DEFAULT = ("client", "app", "riverpy")
"""The names that are tried in MODULE if no :ATTR is given."""


class TargetError(click.UsageError):
    """MODULE:ATTR does not name a client. The text lists what the module has."""


class Target(NamedTuple):
    """An imported object: a client, or a function or context manager that gives a client."""

    spec: str
    """The text MODULE:ATTR of the command line, for messages."""
    value: object


def load_target(spec: str) -> Target:
    """Import MODULE, with the current directory first on Python's path, and return its ATTR."""
    module_name, _, attribute = spec.partition(":")
    if not module_name or spec.endswith(":"):
        raise TargetError(f"{spec!r} is not MODULE:ATTR, such as jobs:client")
    if "/" in module_name or "\\" in module_name or module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").replace("\\", "/").strip("./").replace("/", ".")
        better = f"{dotted}:{attribute}" if attribute else dotted
        raise TargetError(f"{spec!r} is a path: give a module, such as {better}")
    if module_name.startswith("."):
        raise TargetError(f"{spec!r} is relative: give its full name, such as jobs:client")
    module = _import_module(module_name)
    if attribute:
        return Target(spec, _get_attribute(module, attribute))
    found = {name: getattr(module, name) for name in ATTRIBUTES_DEFAULT if hasattr(module, name)}
    for name, value in sorted(found.items(), key=lambda item: not isinstance(item[1], Client)):
        if not inspect.ismodule(value):  # the name `riverpy` may be the package itself
            return Target(f"{module_name}:{name}", value)
    raise TargetError(
        f"module {module_name} has no {' or '.join(ATTRIBUTES_DEFAULT)}; "
        + _describe_contents(module)
    )


@asynccontextmanager
async def open_target(target: Target) -> AsyncGenerator[Client]:
    """Yield the client of a target. The target is the client, a function that returns it, or a
    context manager that yields it. A context manager is closed at the end."""
    spec, value = target
    verb = "returns"
    if not isinstance(value, Client | AbstractAsyncContextManager):
        value = await _call_target(spec, value)
    async with AsyncExitStack() as stack:
        if isinstance(value, AbstractAsyncContextManager) and not isinstance(value, Client):
            verb = "yields"
            manager = cast("AbstractAsyncContextManager[object]", value)
            try:
                value = await stack.enter_async_context(manager)
            except Exception as error:
                _raise_failure(f"entering {spec}", error)
        if not isinstance(value, Client):
            text = f"{spec} {verb} {_with_article(value)}, not a riverpy.Client"
            raise TargetError(text + _client_hint(spec))
        yield value


async def _call_target(spec: str, value: object) -> object:
    if inspect.isasyncgenfunction(value) or inspect.isgeneratorfunction(value):
        raise TargetError(f"{spec} has a yield: decorate it with @contextlib.asynccontextmanager")
    if not _needs_no_arguments(value):
        raise TargetError(
            f"{spec} is {_with_article(value)}: give a riverpy.Client, a function without "
            "arguments that returns one, or an async context manager that yields one"
            + _client_hint(spec)
        )
    try:
        result = value()
        return await result if inspect.isawaitable(result) else result
    except Exception as error:
        _raise_failure(f"{spec}()", error)


def _needs_no_arguments(value: object) -> TypeGuard[Callable[[], object]]:
    """Whether a value can be called without arguments. An ASGI application needs arguments."""
    if not callable(value):
        return False
    try:
        inspect.signature(value).bind()
    except TypeError:
        return False
    except ValueError:
        pass  # no signature is known: try the call
    return True


def _client_hint(spec: str) -> str:
    """Return a hint that names a client in the module."""
    name = spec.partition(":")[0]
    clients = _client_names(sys.modules[name]) if name in sys.modules else []
    if not clients:
        return ""
    return f"; {name} has the riverpy.Client `{clients[0]}`: give {name}:{clients[0]}"


def _client_names(module: ModuleType) -> list[str]:
    return [name for name in _public_names(module) if isinstance(getattr(module, name), Client)]


def _import_module(name: str) -> ModuleType:
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            _raise_failure(f"importing {name}", error)
        missing = error.name
    except (Exception, SystemExit) as error:
        _raise_failure(f"importing {name}", error)
    near = get_close_matches(name, _local_modules(), n=1)
    raise TargetError(
        f"there is no module {missing} in {directory} or on Python's path"
        + (f"; did you mean {near[0]}?" if near else "")
    )


def _get_attribute(module: ModuleType, path: str) -> object:
    found: Any = module
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            near = get_close_matches(path, _public_names(module), n=1)
            raise TargetError(
                f"module {module.__name__} has no {path!r}"
                + (f"; did you mean {near[0]!r}?" if near else f"; {_describe_contents(module)}")
            ) from None
    return found


def _raise_failure(what: str, error: BaseException) -> NoReturn:
    """Raise a CommandError that names the failed line of the user's code. With `--debug`, print the
    traceback."""
    show_traceback(error)
    place, reason = "", describe(error)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not Path(frame.filename).is_relative_to(_PACKAGE_DIRECTORY)
    ]
    if isinstance(error, SyntaxError):
        reason = f"{type(error).__name__}: {error.msg}"  # str(error) also has the file and line
        place = f" ({os.path.relpath(error.filename or '?')}, line {error.lineno})"
    elif frames:
        place = f" ({os.path.relpath(frames[-1].filename)}, line {frames[-1].lineno})"
    name = f"{type(error).__name__}: " if isinstance(error, OSError) and error.args else ""
    text = f"{what} failed: {name}{reason}{place}"
    code = EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE
    raise CommandError(text, exit_code=code) from error


def _describe_contents(module: ModuleType) -> str:
    if clients := _client_names(module):
        targets = " or ".join(f"{module.__name__}:{name}" for name in clients)
        return f"give {targets}"
    functions = [
        name
        for name in _public_names(module)
        if inspect.isfunction(value := getattr(module, name))
        and value.__module__ == module.__name__
    ]
    if functions:
        return f"it has no client, but the functions {', '.join(functions[:10])}"
    return f"it has {', '.join(_public_names(module)[:10]) or 'nothing'}"


def _public_names(module: ModuleType) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_")]


def _local_modules() -> list[str]:
    return [
        path.stem
        for path in Path.cwd().iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    ]


def _with_article(value: object) -> str:
    name = type(value).__name__
    if value is None:
        return "None"
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"
