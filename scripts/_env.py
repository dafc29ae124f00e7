"""Makes `.venv` in a source tree contain riverpy (editable) and some of its dependency groups."""

from __future__ import annotations

import fcntl
import hashlib
import json
import subprocess
import sys
import venv
from pathlib import Path

PIP = "pip>=25.1"
"""The first version of pip that installs dependency groups."""


class Environment:
    """The virtual environment of one source tree."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root / ".venv"
        self.python = self.directory / "bin" / "python"
        self.stamp = self.directory / "riverpy-stamp.json"

    def prepare(self, groups: set[str]) -> None:
        """Install the groups that are missing or outdated."""
        if self.has(groups):
            return
        # One process at a time: two scripts may start together in a new clone.
        with (self.root / ".venv.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.has(groups):
                self.install(groups | (self.installed() or set()))

    def has(self, groups: set[str]) -> bool:
        """Return whether all groups are installed."""
        installed = self.installed()
        return installed is not None and groups <= installed and self.runs("-c", "")

    def installed(self) -> set[str] | None:
        """Return the groups installed from the current pyproject.toml; None if there are none."""
        try:
            stamp = json.loads(self.stamp.read_text())
        except (OSError, ValueError):
            return None
        return set(stamp["groups"]) if stamp["key"] == self.key() else None

    def install(self, groups: set[str]) -> None:
        """Install the groups, and create the environment if it does not work."""
        print(f"preparing {self.directory}", file=sys.stderr)
        self.stamp.unlink(missing_ok=True)
        if not (self.has_pip() and self.is_in_place()):
            self.create()
        chosen = [word for group in sorted(groups) for word in ("--group", group)]
        self.pip_install(PIP)
        self.pip_install("--editable", ".[embedded,web]", *chosen)
        self.stamp.write_text(json.dumps({"key": self.key(), "groups": sorted(groups)}))

    def create(self) -> None:
        """Create the environment and replace an existing one."""
        venv.create(self.directory, with_pip=True, clear=True)

    def has_pip(self) -> bool:
        """Return whether pip works in the environment."""
        return self.runs("-m", "pip", "--version")

    def pip_install(self, *arguments: str) -> None:
        """Run `pip install`; its output goes to stderr."""
        pip = [self.python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, *arguments], cwd=self.root, check=True, stdout=sys.stderr)

    def runs(self, *arguments: str) -> bool:
        """Return whether its Python runs this command."""
        try:
            done = subprocess.run([self.python, *arguments], capture_output=True, check=False)
        except OSError:
            return False
        return done.returncode == 0

    def is_in_place(self) -> bool:
        """Return whether it was created here. The scripts of a moved environment start another
        Python."""
        config = self.directory / "pyvenv.cfg"
        return f"{self.directory}\n" in config.read_text()

    def key(self) -> str:
        """Return a hash of everything that the contents depend on."""
        text = f"{self.root}\n".encode() + (self.root / "pyproject.toml").read_bytes()
        return hashlib.sha256(text).hexdigest()


def main(root: Path, groups: set[str]) -> None:
    """Print the path of the Python that has all groups."""
    environment = Environment(root)
    try:
        environment.prepare(groups)
    except PermissionError as error:
        sys.exit(f"cannot prepare .venv: {error}; use a clone of your own")
    except subprocess.CalledProcessError as error:
        sys.exit(f"cannot prepare .venv: pip ended with exit code {error.returncode}")
    print(environment.python)


if __name__ == "__main__":
    main(Path(sys.argv[1]), set(sys.argv[2:]))
