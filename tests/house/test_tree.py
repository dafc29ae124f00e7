"""The repository itself: what every file must hold to."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "riverpy").rglob("*.py"))
SCRIPTS = sorted(
    path for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix
)
TEXT = [
    path
    for pattern in ("*.*", "scripts/*", ".ci/*", "docs/**/*", "riverpy/**/*.py", "sql/**/*")
    for path in ROOT.glob(pattern)
    if path.is_file() and path.suffix not in {".pyc", ".lock"}
]


def ids(paths: list[Path]) -> list[str]:
    """Paths as they stand in the tree."""
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("path", MODULES, ids=ids(MODULES))
def test_module(path: Path) -> None:
    """A module says what it owns, and has at most 600 lines."""
    text = path.read_text("utf-8")
    code = [node for node in ast.parse(text).body if not isinstance(node, ast.ImportFrom)]
    assert not code or ast.get_docstring(ast.parse(text)), "no docstring"
    assert text.count("\n") <= 600


@pytest.mark.parametrize("path", MODULES, ids=ids(MODULES))
def test_asyncpg_is_imported_in_its_driver_alone(path: Path) -> None:
    """No other module imports asyncpg when it runs."""
    if path == ROOT / "riverpy" / "drivers" / "asyncpg.py":
        return
    assert "asyncpg" not in set(run_time_imports(ast.parse(path.read_text("utf-8"))))


def run_time_imports(node: ast.AST) -> Iterator[str]:
    """The top-level packages that a syntax tree imports outside of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name.split(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield (child.module or "").split(".")[0]
        yield from run_time_imports(child)


@pytest.mark.parametrize("path", MODULES, ids=ids(MODULES))
def test_no_sql_in_python(path: Path) -> None:
    """SQL stands in sql/."""
    statement = re.compile(
        r"\s*(SELECT\s.+\sFROM|INSERT\s+INTO|UPDATE\s+\S+\s+SET|DELETE\s+FROM|(CREATE|ALTER|DROP)\s+"
        r"(TABLE|INDEX|FUNCTION|TYPE))\s",
        re.DOTALL,
    )
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not statement.match(node.value), node.value


@pytest.mark.parametrize("path", TEXT, ids=ids(TEXT))
def test_text(path: Path) -> None:
    """Files name no package registry or mirror, end their last line, and have no stray blanks."""
    text = path.read_text("utf-8")
    assert not re.search(r"index-url|pypi\.org|registry\.npmjs|pythonhosted|proxy\.golang", text)
    assert not text or text.endswith("\n")
    assert not re.search(r"[ \t]+$", text, re.MULTILINE)


@pytest.mark.parametrize("path", [*SCRIPTS, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_script_is_executable_and_parses(path: Path) -> None:
    """Each script can be started as it is."""
    assert os.access(path, os.X_OK)
    subprocess.run(["sh", "-n", path], check=True)


def test_compose_file() -> None:
    """docker-compose.yml gives PostgreSQL and, in front of it, PgBouncer in transaction mode."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))["services"]
    assert set(services) == {"postgres", "pgbouncer"}
    postgres, pgbouncer = services["postgres"], services["pgbouncer"]
    assert pgbouncer["environment"]["POOL_MODE"] == "transaction"
    assert pgbouncer["environment"]["DB_HOST"] == "postgres"
    for name, value in (("USER", "POSTGRES_USER"), ("NAME", "POSTGRES_DB")):
        assert pgbouncer["environment"][f"DB_{name}"] == postgres["environment"][value]
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_contributing_is_short() -> None:
    """The rules fit on a page or two."""
    assert (ROOT / "CONTRIBUTING.md").read_text("utf-8").count("\n") <= 150


def test_changelog_names_the_version() -> None:
    """CHANGELOG.md has an entry for the version of pyproject.toml."""
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    assert f"## [{version[1]}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")
