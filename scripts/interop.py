"""Runs tests/interop against a version of River in Go, by default the pinned one."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.interop.cases import summary
from tests.interop.river_go import SOURCES, SOURCES_VARIABLE, build

if TYPE_CHECKING:
    from collections.abc import Sequence

RIVER = "github.com/riverqueue/river"
COMMAND_TIMEOUT = 300
"""Timeout of a command of Go, in seconds. It may have to download modules, and Go itself."""
EXIT_UNUSABLE = 2
STEPS_VERSION = 0, 51
"""The first version with River's current form of steps. The Go program for older versions has no
job with steps."""
NO_GO = "Go is needed, and there is no `go` on the PATH"
HELP_END = """
The pinned version is in tests/interop/go/go.mod. Another one is built from a copy of that
directory, in which all modules of River get the version; the checkout is not changed.

  scripts/interop                               the pinned version
  scripts/interop --river latest                River's newest release
  scripts/interop --river v0.50.0 -n 2 -x       further arguments go to pytest
  scripts/interop --river v0.43.0 tests/interop/test_rows.py

When River has a new release: run it with --river, read what fails, change riverpy and the tests,
then put the version into go.mod (every module of River's, then `go mod tidy`).

Exit code: pytest's; 2 if there is no Go, no such version, or the program does not compile with it.
"""


class UnusableError(Exception):
    """River is not available in this version."""


def pinned() -> str:
    """Return the version of River in go.mod."""
    return versions_of((SOURCES / "go.mod").read_text("utf-8"))[RIVER]


def versions_of(go_mod: str) -> dict[str, str]:
    """Return the version of each module of River in a `go.mod`."""
    return dict(re.findall(rf"^\s*({re.escape(RIVER)}\S*) (\S+)", go_mod, re.MULTILINE))


def run_go(directory: Path, *arguments: str) -> str:
    """Run Go and return its output. Raises UnusableError with its error."""
    if shutil.which("go") is None:
        raise UnusableError(NO_GO)
    done = subprocess.run(
        ["go", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise UnusableError(f"go {' '.join(arguments)} failed:\n{done.stderr.strip()}")
    return done.stdout.strip()


def copy_with(version: str, directory: Path) -> str:
    """Copy the Go program with this version of River, and return the version's number.

    The `v` may be missing.
    """
    if version[:1].isdigit():
        version = f"v{version}"
    shutil.copytree(SOURCES, directory, dirs_exist_ok=True)
    found = run_go(directory, "list", "-mod=mod", "-m", "-f", "{{.Version}}", f"{RIVER}@{version}")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < STEPS_VERSION:
        (directory / "steps.go").unlink()
    for module in versions_of((directory / "go.mod").read_text("utf-8")):
        run_go(directory, "mod", "edit", f"-require={module}@{found}")
    run_go(directory, "mod", "tidy")
    used = versions_of((directory / "go.mod").read_text("utf-8"))[RIVER]
    if used != found:
        raise UnusableError(f"another module needs River {used}, so {found} cannot be used")
    return used


def test(version: str, arguments: Sequence[str]) -> int:
    """Build the program, run the tests, and return the exit code of pytest."""
    try:
        if build() is None:
            raise UnusableError("Go is missing, or its modules cannot be fetched")
    except subprocess.CalledProcessError as error:
        raise UnusableError(f"the program does not compile with River {version}") from error
    about = f"River {version} (pinned: {pinned()})"
    print(f"testing against {about}", flush=True)
    names_tests = any(argument.startswith("tests/") for argument in arguments)
    paths = [] if names_tests else ["tests/interop"]
    command = [sys.executable, "-m", "pytest", "-n", "auto", *paths, *arguments]
    code = subprocess.run(command, check=False).returncode
    print(f"tested against {about}, exit code {code}\n{summary()}", flush=True)
    return code


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="scripts/interop",
        description=__doc__,
        epilog=HELP_END,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--river", metavar="VERSION", help="vX.Y.Z or latest (default: pinned)")
    options, arguments = parser.parse_known_args()
    try:
        with tempfile.TemporaryDirectory(prefix="riverpy-interop-") as directory:
            version = pinned()
            if options.river is not None:
                version = copy_with(options.river, Path(directory))
                os.environ[SOURCES_VARIABLE] = directory
            code = test(version, arguments)
    except UnusableError as error:
        print(f"scripts/interop: {error}", file=sys.stderr)
        code = EXIT_UNUSABLE
    sys.exit(code)


if __name__ == "__main__":
    main()
