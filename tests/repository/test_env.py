"""scripts/_env.py: when it creates, repairs or keeps `.venv`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

# An environment whose pip only records its arguments, slowly enough for another process to start.
PRETEND = """
import importlib.util, sys, time, venv
from pathlib import Path
spec = importlib.util.spec_from_file_location("_env", sys.argv[1])
env = importlib.util.module_from_spec(spec)
spec.loader.exec_module(env)

class Pretending(env.Environment):
    def create(self):
        venv.create(self.directory, clear=True)

    def has_pip(self):
        return self.runs("-c", "")

    def pip_install(self, *arguments):
        with (self.root / "pip.log").open("a") as log:
            log.write(" ".join(arguments) + "\\n")
        time.sleep(0.2)

env.Environment = Pretending
env.main(Path(sys.argv[2]), set(sys.argv[3:]))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree without an environment."""
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    return tmp_path


def start(tree: Path, *groups: str) -> subprocess.Popen[str]:
    """Start to prepare the environment."""
    command = [sys.executable, "-c", PRETEND, ROOT / "scripts" / "_env.py", tree, *groups]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def prepare(tree: Path, *groups: str) -> list[str]:
    """Prepare the environment, and return what was installed."""
    log = tree / "pip.log"
    log.write_text("")
    process = start(tree, *groups)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out == f"{tree}/.venv/bin/python\n"
    return [line for line in log.read_text().splitlines() if line.startswith("--editable")]


def test_installs_what_is_missing(tree: Path) -> None:
    """The first call installs its groups, the same call nothing, and another group only itself. A
    changed pyproject.toml installs all of them again."""
    assert prepare(tree, "test") == ["--editable .[embedded,web] --group test"]
    assert prepare(tree, "test") == []
    assert prepare(tree) == []
    assert prepare(tree, "check") == ["--editable .[embedded,web] --group check --group test"]
    with (tree / "pyproject.toml").open("a") as file:
        file.write("version = '1'\n")
    assert prepare(tree) == ["--editable .[embedded,web]"]
    assert prepare(tree, "test") == ["--editable .[embedded,web] --group test"]


def test_broken_environment_is_made_again(tree: Path) -> None:
    """An environment without a working Python, or one that was moved, is created again."""
    prepare(tree)
    (tree / ".venv" / "bin" / "python").unlink()
    assert prepare(tree) == ["--editable .[embedded,web]"]
    moved = tree.with_name(f"{tree.name}-moved")
    tree.rename(moved)
    assert prepare(moved) == ["--editable .[embedded,web]"]
    assert f"{moved}/.venv" in (moved / ".venv" / "pyvenv.cfg").read_text()


def test_several_at_once(tree: Path) -> None:
    """Of several that start at once in a new clone one installs, and the others wait for it."""
    processes = [start(tree, "test") for _ in range(3)]
    outcomes = [(process.communicate()[1], process.returncode) for process in processes]
    assert [code for _, code in outcomes] == [0, 0, 0], outcomes
    installs = (tree / "pip.log").read_text().count("--editable")
    assert installs == 1


def test_failing_pip_is_reported(tree: Path) -> None:
    """When pip fails, one line follows pip's own output, and the environment does not count as
    prepared."""
    spec = importlib.util.spec_from_file_location("_env", ROOT / "scripts" / "_env.py")
    assert spec
    assert spec.loader
    env: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(env)

    class Failing(env.Environment):
        def create(self) -> None:
            pass

        def pip_install(self, *_arguments: str) -> None:
            raise subprocess.CalledProcessError(1, "pip")

    env.Environment = Failing
    with pytest.raises(SystemExit, match="pip ended with exit code 1"):
        env.main(tree, {"test"})
    assert not env.Environment(tree).has(set())


def test_arguments_and_directory(tmp_path: Path) -> None:
    """The scripts pass their arguments on, and run from any directory."""
    tree = tmp_path / "a tree"
    scripts = tree / "scripts"
    binaries = tree / "bin"
    for directory in (scripts, binaries):
        directory.mkdir(parents=True)
    for name in ("test", "demo", "bench"):
        (scripts / name).symlink_to(ROOT / "scripts" / name)
    executable(scripts / "_env", f'echo "{binaries}/python"')
    executable(binaries / "python", 'echo "$PWD: python $*"')
    executable(binaries / "riverpy", 'echo "$PWD: riverpy $*"')

    def run(name: str) -> str:
        command = [scripts / name, "-x", "a b"]
        return subprocess.run(
            command, cwd="/", capture_output=True, text=True, check=True
        ).stdout.strip()

    assert run("test") == f"{tree}: python -m pytest -n auto -x a b"
    assert run("demo") == "/: riverpy demo -x a b"
    assert run("bench") == "/: riverpy bench -x a b"


def executable(path: Path, command: str) -> None:
    """Write a shell script."""
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)
