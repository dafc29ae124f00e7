"""Data from a database never becomes code."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tests.repository.test_tree import MODULES, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ALLOWED = {
    ("riverpy/_work/child_main.py", "pickle"),  # own bytes, from and to the worker
    ("riverpy/_work/child_process.py", "pickle"),  # own bytes, to and from a child process
    ("riverpy/_tools/dev/worker.py", "runpy"),  # runs the command line itself
    ("riverpy/cli/__init__.py", "import_module"),  # loads the module of a command
    ("riverpy/cli/_target.py", "import_module"),  # loads the target of the command line
    ("riverpy/cli/_process_start.py", "import_module"),  # loads the program of the supervisor
    ("riverpy/_postgres/sessions/adapter.py", "import_module"),  # a module of riverpy itself
    ("riverpy/sync/_choice.py", "import_module"),  # checks that psycopg is there
    ("riverpy/_work/child_main.py", "import_module"),  # loads the setup functions of the worker
    ("riverpy/django/checks.py", "import_module"),  # loads Django's checks of tasks
    ("riverpy/django/tasks.py", "import_module"),  # loads the modules that TASKS names
    ("riverpy/django/settings.py", "import_module"),  # loads the workers of Django's settings
    ("riverpy/django/task_workers.py", "import_module"),  # loads the modules `tasks` of the apps
}
LOADERS = {"cloudpickle", "dill", "jsonpickle", "marshal", "pickle", "runpy", "shelve", "yaml"}
RUNNERS = {"__import__", "compile", "eval", "exec", "import_module"}


def run_time_imports(node: ast.AST) -> Iterator[str]:
    """Yield the top-level packages that a syntax tree imports outside of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name.split(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield (child.module or "").split(".")[0]
        yield from run_time_imports(child)


def finds_in(path: Path) -> Iterator[str]:
    """Yield the names in a module that could make code, or any object, from data."""
    tree = ast.parse(path.read_text("utf-8"))
    yield from LOADERS & set(run_time_imports(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(id=name) if name in RUNNERS:
                    yield name
                case ast.Attribute(attr=name, value=value) if name in RUNNERS:
                    if ast.unparse(value) != "re":
                        yield name
                case _:
                    pass


def test_no_code_from_data() -> None:
    """No module unpickles, evaluates or imports the contents of a row (SE-01)."""
    found = {(str(path.relative_to(ROOT)), name) for path in MODULES for name in finds_in(path)}
    assert found == ALLOWED


def test_finds_them(tmp_path: Path) -> None:
    """The check finds each way to run data as code (SE-01)."""
    module = tmp_path / "module.py"
    module.write_text(
        "import pickle\nfrom yaml import load\nre.compile('x')\neval('1')\nlib.import_module(n)"
    )
    assert set(finds_in(module)) == {"eval", "import_module", "pickle", "yaml"}
