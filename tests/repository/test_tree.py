"""Rules for every file of the repository."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from riverpy._postgres.sql_files import load_statements
from riverpy._version import VERSION

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "riverpy").rglob("*.py"))
SCRIPTS = sorted(
    path for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix
)
TEXT = [
    path
    for pattern in ("*.*", "scripts/*", ".ci/*", "docs/**/*", "riverpy/**/*.py", "sql/**/*")
    for path in ROOT.glob(pattern)
    if path.is_file() and path.suffix not in {".pyc", ".lock", ".png"}
]


STATEMENT = re.compile(
    r"\s*(SELECT\s.+\sFROM|INSERT\s+INTO|UPDATE\s+\S+\s+SET|DELETE\s+FROM|(CREATE|ALTER|DROP)\s+"
    r"(TABLE|INDEX|FUNCTION|TYPE))\s",
    re.DOTALL,
)


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """The syntax tree of each module."""
    return {name_of(path): ast.parse(path.read_text("utf-8")) for path in MODULES}


def name_of(path: Path) -> str:
    """Return the path relative to the repository."""
    return str(path.relative_to(ROOT))


def test_modules_have_docstrings(trees: dict[str, ast.Module]) -> None:
    """A module with more than imports has a docstring."""
    assert trees
    mute = [
        name
        for name, tree in trees.items()
        if not all(isinstance(node, ast.ImportFrom) for node in tree.body)
        if not ast.get_docstring(tree)
    ]
    assert mute == []


def test_packages_can_be_listed() -> None:
    """A tool can import each package of riverpy, without Django settings."""
    code = (
        "import pkgutil, riverpy; "
        "print(len(list(pkgutil.walk_packages(riverpy.__path__, 'riverpy.'))))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 400


def test_no_sql_in_python(trees: dict[str, ast.Module]) -> None:
    """SQL is only in sql/."""
    found = [
        (name, node.value)
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if STATEMENT.match(node.value)
    ]
    assert found == []


def test_no_notification_into_a_full_queue() -> None:
    """No statement notifies while the server's queue of notifications is nearly full, since it
    would fail with all its other effects. Doctor's statement does: its failure is the finding
    (FR-05)."""
    statements = {
        name: text
        for path in (ROOT / "sql" / "queries").glob("*.sql")
        for name, text in load_statements(path.stem).items()
    }
    is_free = "pg_notification_queue_usage() < 0.9"
    careless = {
        name for name, text in statements.items() if text.count("pg_notify(") != text.count(is_free)
    }
    assert careless == {"doctor_notify"}


@pytest.mark.parametrize(
    "unwanted",
    [
        r"index-url|pypi\.org|registry\.npmjs|pythonhosted|proxy\.golang",
        r"[^\n]\Z",
        r"[ \t]+$",
    ],
    ids=["registry or mirror", "last line without an end", "blanks at the end of a line"],
)
def test_text_files(unwanted: str) -> None:
    """No file names a package registry or mirror, lacks the end of its last line, or has trailing
    blanks."""
    pattern = re.compile(unwanted, re.MULTILINE)
    assert TEXT
    found = [name_of(path) for path in TEXT if pattern.search(path.read_text("utf-8"))]
    assert found == []


@pytest.mark.parametrize("path", [*SCRIPTS, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_script_is_executable_and_parses(path: Path) -> None:
    """Each script is executable and valid."""
    assert os.access(path, os.X_OK)
    subprocess.run(["sh", "-n", path], check=True)


def test_compose_file() -> None:
    """docker-compose.yml has PostgreSQL and, in front of it, PgBouncer in transaction mode."""
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
    """CONTRIBUTING.md has one or two pages."""
    assert (ROOT / "CONTRIBUTING.md").read_text("utf-8").count("\n") <= 150


def test_changelog_names_the_version() -> None:
    """CHANGELOG.md has an entry for the version of the package."""
    assert f"## [{VERSION}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")
