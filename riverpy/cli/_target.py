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
from typing import TYPE_CHECKING, Any, NoReturn, cast

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
    from collections.abc import AsyncGenerator
    from types import ModuleType


_RIVERPY = Path(__file__).resolve().parent.parent
ATTRIBUTES_DEFAULT = ("client", "app", "riverpy")
"""The names that are tried in MODULE if no :ATTR is given."""


class TargetError(click.UsageError):
    """MODULE:ATTR does not name a client. The text lists what the module has."""


def load(spec: str) -> object:
    """Import MODULE, with the current directory first on Python's path, and return its ATTR.

    Raises:
        TargetError: there is no such module or attribute.
        CommandError: importing the module failed.
    """
    module_name, _, attribute = spec.partition(":")
    if not module_name or spec.endswith(":"):
        raise TargetError(f"{spec!r} is not MODULE:ATTR, such as jobs:client")
    if "/" in module_name or "\\" in module_name or module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").replace("\\", "/").strip("./").replace("/", ".")
        better = f"{dotted}:{attribute}" if attribute else dotted
        raise TargetError(f"{spec!r} is a path: give a module, such as {better}")
    if module_name.startswith("."):
        raise TargetError(f"{spec!r} is relative: give its full name, such as jobs:client")
    module = _import(module_name)
    if attribute:
        return _attribute(module, attribute)
    found = {name: getattr(module, name) for name in ATTRIBUTES_DEFAULT if hasattr(module, name)}
    for name, value in sorted(found.items(), key=lambda item: not isinstance(item[1], Client)):
        if inspect.ismodule(value):  # for example after `import riverpy`
            continue
        if not _may_be_target(value):
            raise _wrong(f"{module_name}:{name}", f"is {_article(value)}")
        return value
    raise TargetError(
        f"module {module_name} has no {' or '.join(ATTRIBUTES_DEFAULT)}; {_offer(module)}"
    )


@asynccontextmanager
async def entered(spec: str, target: object) -> AsyncGenerator[Client]:
    """Yield the client of a target: the target itself, or what it returns or yields. A context
    manager is closed at the end.

    Raises:
        TargetError: the target gives no client.
        CommandError: the target raised an error.
    """
    if not isinstance(target, Client | AbstractAsyncContextManager):
        target = await _called(spec, target)
    if isinstance(target, Client):
        yield target
    elif isinstance(target, AbstractAsyncContextManager):
        async with AsyncExitStack() as stack:
            try:
                client = await stack.enter_async_context(
                    cast("AbstractAsyncContextManager[object]", target)
                )
            except Exception as error:
                _failed(f"entering {spec}", error)
            if not isinstance(client, Client):
                raise TargetError(
                    f"{spec} yields {_article(client)}, not a riverpy.Client{_hint(spec)}"
                )
            yield client
    else:
        raise TargetError(f"{spec} returns {_article(target)}, not a riverpy.Client{_hint(spec)}")


async def _called(spec: str, target: object) -> object:
    if inspect.isasyncgenfunction(target) or inspect.isgeneratorfunction(target):
        raise TargetError(f"{spec} has a yield: decorate it with @contextlib.asynccontextmanager")
    if not callable(target) or not _may_be_target(target):
        raise _wrong(spec, f"is {_article(target)}")
    try:
        inspect.signature(target).bind()
    except TypeError as error:
        raise TargetError(f"{spec} must take no arguments: {error}") from None
    except ValueError:
        pass  # the value has no signature
    try:
        result = target()
        return await result if inspect.isawaitable(result) else result
    except Exception as error:
        _failed(f"{spec}()", error)


def _may_be_target(value: object) -> bool:
    """Whether a value can be a client or return one. An ASGI application is callable, but needs
    arguments."""
    if isinstance(value, Client | AbstractAsyncContextManager):
        return True
    if inspect.isclass(value):
        return issubclass(value, Client) or hasattr(value, "__aenter__")
    if not callable(value):
        return False
    if inspect.isroutine(value):
        return True
    try:
        inspect.signature(value).bind()
    except TypeError:
        return False
    except ValueError:
        pass  # the value has no signature
    return True


def _wrong(spec: str, what: str) -> TargetError:
    return TargetError(
        f"{spec} {what}: give a riverpy.Client, a function without arguments that returns one, or "
        f"an async context manager that yields one{_hint(spec)}"
    )


def _hint(spec: str) -> str:
    """Return a hint that names a client in the module."""
    name = spec.partition(":")[0]
    clients = _clients(sys.modules[name]) if name in sys.modules else []
    if not clients:
        return ""
    return f"; {name} has the riverpy.Client `{clients[0]}`: give {name}:{clients[0]}"


def _clients(module: ModuleType) -> list[str]:
    return [name for name in _public(module) if isinstance(getattr(module, name), Client)]


def _import(name: str) -> ModuleType:
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            _failed(f"importing {name}", error)
        missing = error.name
    except (Exception, SystemExit) as error:
        _failed(f"importing {name}", error)
    near = get_close_matches(name, _modules_here(), n=1)
    raise TargetError(
        f"there is no module {missing} in {directory} or on Python's path"
        + (f"; did you mean {near[0]}?" if near else "")
    )


def _attribute(module: ModuleType, path: str) -> object:
    found: Any = module
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            near = get_close_matches(path, _public(module), n=1)
            raise TargetError(
                f"module {module.__name__} has no {path!r}"
                + (f"; did you mean {near[0]!r}?" if near else f"; {_offer(module)}")
            ) from None
    return found


def _failed(what: str, error: BaseException) -> NoReturn:
    """Raise a CommandError that names the line of the user's code that raised the error. The
    traceback is printed with `--debug`."""
    show_traceback(error)
    place, reason = "", describe(error)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not Path(frame.filename).is_relative_to(_RIVERPY)
    ]
    if isinstance(error, SyntaxError):
        reason = f"{type(error).__name__}: {error.msg}"  # the text of the error repeats the place
        place = f" ({os.path.relpath(error.filename or '?')}, line {error.lineno})"
    elif frames:
        place = f" ({os.path.relpath(frames[-1].filename)}, line {frames[-1].lineno})"
    name = f"{type(error).__name__}: " if isinstance(error, OSError) and error.args else ""
    text = f"{what} failed: {name}{reason}{place}"
    code = EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILURE
    raise CommandError(text, exit_code=code) from error


def _offer(module: ModuleType) -> str:
    if clients := _clients(module):
        targets = " or ".join(f"{module.__name__}:{name}" for name in clients)
        return f"give {targets}"
    functions = [
        name
        for name in _public(module)
        if inspect.isfunction(value := getattr(module, name))
        and value.__module__ == module.__name__
    ]
    if functions:
        return f"it has no client, but the functions {', '.join(functions[:10])}"
    return f"it has {', '.join(_public(module)[:10]) or 'nothing'}"


def _public(module: ModuleType) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_")]


def _modules_here() -> list[str]:
    return [
        path.stem
        for path in Path.cwd().iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    ]


def _article(value: object) -> str:
    name = type(value).__name__
    if value is None:
        return "None"
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"
