"""The blocks of docs/operations.md are valid for their readers, and agree with the code."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from riverpy._tools.health.metrics import render_metrics
from riverpy.cli import _COMMANDS, main
from riverpy.config import HARD_STOP_TIMEOUT_DEFAULT, SOFT_STOP_TIMEOUT_DEFAULT
from riverpy.stats import ClientStats

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "operations.md").read_text("utf-8")
STOP_MOST = (SOFT_STOP_TIMEOUT_DEFAULT + HARD_STOP_TIMEOUT_DEFAULT).total_seconds() + 5
"""Seconds from the signal to the exit of a worker, as docs/configuration.md says."""
CONNECTIONS = {
    "claims",
    "cleaning",
    "fleet",
    "inserts",
    "listener",
    "maintenance",
    "reindex",
    "reserved",
    "results",
}
"""Connections of a worker; their names begin with `riverpy`."""
_HISTOGRAM_SUFFIX = re.compile("_(bucket|sum|count)$")


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def documents() -> list[dict[str, Any]]:
    """Return every YAML document."""
    return [document for block in blocks("yaml") for document in yaml.safe_load_all(block)]


def service() -> configparser.SectionProxy:
    """Return the service section of the systemd unit."""
    (block,) = blocks("ini")
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(block)
    assert parser.sections() == ["Unit", "Service", "Install"]
    return parser["Service"]


def manifest(kind: str) -> dict[str, Any]:
    """Return the only manifest of this kind."""
    (found,) = [document for document in documents() if document.get("kind") == kind]
    return found


def pod() -> dict[str, Any]:
    """Return the specification of the worker's pods."""
    return manifest("Deployment")["spec"]["template"]["spec"]


def expect_call(words: list[str]) -> None:
    """Assert that riverpy accepts the command line."""
    result = CliRunner(env={"RIVERPY_DATABASE_URL": "postgres://h/d"}).invoke(
        main, [*words, "--print-config"]
    )
    assert result.exit_code == 0, result.output


def test_unit() -> None:
    """The unit's command is valid, its timeouts leave enough time for a stop, and systemd kills no
    child process of a job before its worker."""
    unit = service()
    program, *words = shlex.split(unit["ExecStart"].replace("%i", "1"))
    assert program.endswith("/riverpy")
    expect_call(words)
    assert float(unit["TimeoutStopSec"]) >= STOP_MOST
    assert (unit["Type"], unit["KillMode"]) == ("notify", "mixed")
    assert unit["RestartPreventExitStatus"] == "2"


def test_manifests() -> None:
    """The pod's command and timeouts are valid, and its probes use existing pages on the served
    port."""
    spec = pod()
    (container,) = spec["containers"]
    program, *words = container["command"]
    assert program == "riverpy"
    expect_call(words)
    assert spec["terminationGracePeriodSeconds"] >= STOP_MOST
    (port,) = container["ports"]
    assert f"0.0.0.0:{port['containerPort']}" in words
    for probe, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        assert container[probe]["httpGet"] == {"path": path, "port": port["name"]}
    (migrate,) = manifest("Job")["spec"]["template"]["spec"]["containers"]
    assert migrate["command"] == ["riverpy", "migrate", "up"]


def test_alerts() -> None:
    """A worker exports each metric of an alert."""
    stats = ClientStats(client_id="c", state="starting")
    page = "".join(render_metrics(stats, process_started_at=0.0, queue_lags=None))
    told = set(re.findall(r"^# TYPE (\w+) ", page, re.MULTILINE))
    (alerts,) = [document["groups"] for document in documents() if "groups" in document]
    rules = [rule for group in alerts for rule in group["rules"]]
    assert len(rules) > 5
    for rule in rules:
        named = re.findall(r"\briverpy_\w+", rule["expr"])
        assert named, rule
        assert {_HISTOGRAM_SUFFIX.sub("", name) for name in named} <= told


@pytest.mark.parametrize("page", ["operations.md", "development.md"])
def test_commands(page: str) -> None:
    """Each command on a page exists."""
    named = set(re.findall(r"(?:`|\$ |\(|1m )riverpy ([a-z]+)\b", (DOCS / page).read_text("utf-8")))
    assert named
    assert named - CONNECTIONS <= set(_COMMANDS)
