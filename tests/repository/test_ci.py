"""The workflow of GitHub and the hooks of pre-commit."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))


def runs(job: str) -> list[str]:
    """The commands of a job."""
    return [step["run"] for step in WORKFLOW["jobs"][job]["steps"] if "run" in step]


def test_every_supported_python_is_tested() -> None:
    """`.ci/run` runs on each Python that pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = re.findall(r":: (3\.\d+)", "\n".join(project["classifiers"]))
    assert WORKFLOW["jobs"]["python"]["strategy"]["matrix"] == {"python": named}
    assert runs("python")[-1] == ".ci/run"


def test_every_supported_postgres_is_tested() -> None:
    """`.ci/run` runs on each version of PostgreSQL from the oldest that riverpy takes."""
    versions = WORKFLOW["jobs"]["postgres"]["strategy"]["matrix"]["postgres"]
    assert versions == [str(version) for version in range(13, 20)]
    assert runs("postgres")[-1] == ".ci/run"


def test_scripts_of_the_workflow_exist() -> None:
    """The documentation and the package are built by scripts of this tree."""
    assert runs("docs") == ["scripts/docs"]
    assert runs("package") == ["scripts/package"]
    assert all((ROOT / script).is_file() for script in (".ci/run", *runs("docs"), *runs("package")))


def test_hooks_run_the_tools_of_the_check() -> None:
    """Each hook of pre-commit runs, at its pinned version, a tool that scripts/check runs."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert repository["repo"] == "local"
    check = (ROOT / "scripts" / "check").read_text("utf-8")
    for hook in repository["hooks"]:
        runner, tool, *_ = hook["entry"].split()
        assert runner == "scripts/_run"
        assert re.search(rf'[ "]{re.escape(tool)}[ "\n]', check), tool
