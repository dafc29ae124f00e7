"""scripts/chaos steps: a limited run finds no violation, and its checker finds each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from scripts.chaos import parse_arguments
from scripts.chaos_steps import ChaosOfSteps, Kill, run_chaos
from tests.kit.fleet import Fleet, Server
from tests.kit.step_worker import Record

if TYPE_CHECKING:
    from pathlib import Path

SEED = 1


@pytest.mark.timeout(300)
async def test_short_chaos() -> None:
    """Jobs survive a SIGTERM, a kill -9 and a crash of the server. Each kept step runs until its
    result is stored, and later attempts get this result."""
    found = await run_chaos(SEED, kills=(Kill.SIGKILL, Kill.CRASH, Kill.SIGTERM), workers=1, jobs=2)
    assert found["violations"] == []
    assert (found["kept_results"], found["attempts"] > found["jobs"]) == (4, True)


def test_checker(tmp_path: Path) -> None:
    """A repeated step and a second result are violations. The last record of a killed process may
    be cut off."""
    chaos = ChaosOfSteps(SEED, Fleet(tmp_path, Server(tmp_path)), 50)
    assert len(chaos.kills) == 50
    ends = [
        Record(what="got", job_id=1, attempt=attempt, pid=1, step=3, token=token)
        for attempt, token in ((1, "a"), (2, "a"), (3, "b"))
    ]
    runs = [Record(what="run", job_id=1, attempt=4, pid=1, step=3, is_repeated=True)]
    lines = [msgspec.json.encode(one) for one in [*ends, *runs, *runs]]
    (tmp_path / "records").write_bytes(b"\n".join(lines)[:-3])
    assert chaos.records() == [*ends, *runs]
    chaos.check()
    assert [violation.rule for violation in chaos.violations] == [
        "a stored result is not made again",
        "all attempts get the same result",
    ]


@pytest.mark.parametrize("arguments", [["--kills=0"], ["--jobs=0"], ["--seconds=9"]])
def test_wrong_usage(arguments: list[str]) -> None:
    """Invalid arguments are refused with exit code 2."""
    with pytest.raises(SystemExit) as raised:
        parse_arguments(["steps", *arguments])
    assert raised.value.code == 2
