"""Loads the client that the argument MODULE:ATTR of a command names."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeGuard, cast

import click

from riverpy.cli._run import (
    EXIT_FAILURE,
    EXIT_USAGE_ERROR,
    CommandError,
    error_to_one_line,
    print_traceback_if_debug,
)
from riverpy.client import Client
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from types import ModuleType


_PACKAGE_DIRECTORY = Path(__file__).resolve().parent.parent
CLIENT_NAMES_DEFAULT = ("client", "app", "riverpy")
"""The attributes of MODULE that are tried if the argument has no :ATTR."""


class TargetError(click.UsageError):
    """MODULE:ATTR does not name a client. If possible, the error text says what to give instead,
    for example a client of the module."""


class ClientTarget(NamedTuple):
    """An object that was imported as MODULE:ATTR. It is a client, a function that returns a client,
    or an async context manager that yields one."""

    import_path: str
    """The argument MODULE:ATTR, for messages."""
    imported_object: object


def load_client_target(import_path: str) -> ClientTarget:
    """Import MODULE, and return its attribute ATTR. Without :ATTR, try the names in
    CLIENT_NAMES_DEFAULT. The current directory is added to the front of Python's path.

    Raises:
        TargetError: the argument has a wrong form, or there is no such module or attribute.
        CommandError: the code of the module failed.
    """
    module_name, _, attribute = import_path.partition(":")
    if not module_name or import_path.endswith(":"):
        raise TargetError(f"{import_path!r} is not MODULE:ATTR, such as jobs:client")
    if "/" in module_name or "\\" in module_name or module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").replace("\\", "/").strip("./").replace("/", ".")
        better = f"{dotted}:{attribute}" if attribute else dotted
        raise TargetError(f"{import_path!r} is a path: give a module, such as {better}")
    if module_name.startswith("."):
        raise TargetError(f"{import_path!r} is relative: give its full name, such as jobs:client")
    module = _import_module(module_name)
    if attribute:
        return ClientTarget(import_path, _get_attribute(module, attribute))
    found = {name: getattr(module, name) for name in CLIENT_NAMES_DEFAULT if hasattr(module, name)}
    for name, value in sorted(found.items(), key=lambda item: not isinstance(item[1], Client)):
        if not inspect.ismodule(value):  # after `import riverpy`, this name is only the package
            return ClientTarget(f"{module_name}:{name}", value)
    raise TargetError(
        f"module {module_name} has no {' or '.join(CLIENT_NAMES_DEFAULT)}; "
        + _describe_module(module)
    )


@asynccontextmanager
async def open_client(target: ClientTarget) -> AsyncGenerator[Client]:
    """Yield the client of a target. A target that is a function is called first, and its result
    replaces the target. A client is yielded as it is, without opening it. Any other async context
    manager is entered, its client is yielded, and it is exited at the end."""
    spec, value = target
    verb = "returns"
    if not isinstance(value, Client | AbstractAsyncContextManager):
        value = await _call_client_factory(spec, value)
    async with AsyncExitStack() as stack:
        if isinstance(value, AbstractAsyncContextManager) and not isinstance(value, Client):
            verb = "yields"
            manager = cast("AbstractAsyncContextManager[object]", value)
            try:
                value = await stack.enter_async_context(manager)
            except Exception as error:
                _raise_user_code_error(f"entering {spec}", error)
        if not isinstance(value, Client):
            text = f"{spec} {verb} {_describe_type(value)}, not a riverpy.Client"
            raise TargetError(text + _make_client_hint(spec))
        yield value


async def _call_client_factory(import_path: str, imported_object: object) -> object:
    if inspect.isasyncgenfunction(imported_object) or inspect.isgeneratorfunction(imported_object):
        raise TargetError(
            f"{import_path} has a yield: decorate it with @contextlib.asynccontextmanager"
        )
    if not _can_call_without_arguments(imported_object):
        raise TargetError(
            f"{import_path} is {_describe_type(imported_object)}: give a riverpy.Client, a "
            "function without arguments that returns one, or an async context manager that yields "
            "one" + _make_client_hint(import_path)
        )
    try:
        result = imported_object()
        return await result if inspect.isawaitable(result) else result
    except Exception as error:
        _raise_user_code_error(f"{import_path}()", error)


def _can_call_without_arguments(value: object) -> TypeGuard[Callable[[], object]]:
    """Return whether a value can be called without arguments. An ASGI application, for example,
    needs arguments."""
    if not callable(value):
        return False
    try:
        inspect.signature(value).bind()
    except TypeError:
        return False
    except ValueError:
        pass  # no signature is known: try the call
    return True


def _make_client_hint(import_path: str) -> str:
    """Return a text that suggests a client of the module. The text is empty if the module has no
    client."""
    name = import_path.partition(":")[0]
    clients = _find_client_names(sys.modules[name]) if name in sys.modules else []
    if not clients:
        return ""
    return f"; {name} has the riverpy.Client `{clients[0]}`: give {name}:{clients[0]}"


def _find_client_names(module: ModuleType) -> list[str]:
    return [
        name for name in _list_public_names(module) if isinstance(getattr(module, name), Client)
    ]


def _import_module(name: str) -> ModuleType:
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            _raise_user_code_error(f"importing {name}", error)
        missing = error.name
    except (Exception, SystemExit) as error:
        _raise_user_code_error(f"importing {name}", error)
    from difflib import get_close_matches  # its import takes long, and few programs need it

    near = get_close_matches(name, _find_local_module_names(), n=1)
    raise TargetError(
        f"there is no module {missing} in {directory} or on Python's path"
        + (f"; did you mean {near[0]}?" if near else "")
    )


def _get_attribute(module: ModuleType, attribute_path: str) -> object:
    found: Any = module
    for name in attribute_path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            from difflib import get_close_matches

            near = get_close_matches(attribute_path, _list_public_names(module), n=1)
            raise TargetError(
                f"module {module.__name__} has no {attribute_path!r}"
                + (f"; did you mean {near[0]!r}?" if near else f"; {_describe_module(module)}")
            ) from None
    return found


def _raise_user_code_error(failed_action: str, error: BaseException) -> NoReturn:
    """Raise a CommandError with the line of the user's code that failed. With `--debug`, also print
    the traceback."""
    print_traceback_if_debug(error)
    place, reason = "", error_to_one_line(error)
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
    text = f"{failed_action} failed: {name}{reason}{place}"
    code = EXIT_USAGE_ERROR if isinstance(error, ConfigError) else EXIT_FAILURE
    raise CommandError(text, exit_code=code) from error


def _describe_module(module: ModuleType) -> str:
    if clients := _find_client_names(module):
        targets = " or ".join(f"{module.__name__}:{name}" for name in clients)
        return f"give {targets}"
    functions = [
        name
        for name in _list_public_names(module)
        if inspect.isfunction(value := getattr(module, name))
        and value.__module__ == module.__name__
    ]
    if functions:
        return f"it has no client, but the functions {', '.join(functions[:10])}"
    return f"it has {', '.join(_list_public_names(module)[:10]) or 'nothing'}"


def _list_public_names(module: ModuleType) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_")]


def _find_local_module_names() -> list[str]:
    return [
        path.stem
        for path in Path.cwd().iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    ]


def _describe_type(value: object) -> str:
    name = type(value).__name__
    if value is None:
        return "None"
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"
