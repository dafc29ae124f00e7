"""scripts/bench compare: its ratios, goals and output, and a small run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts._bench.competitors import NAMES
from scripts._bench.goals import GOALS, Goal
from scripts._bench.samples import Samples
from scripts._bench.table import KEYS, TITLES, as_json, as_text
from scripts._bench.tx_insert.markdown import make_table
from scripts._bench.tx_insert.names import ALONE, SESSIONS
from scripts._bench.tx_insert.timing import Timings
from scripts.bench_compare import parse_arguments

ROOT = Path(__file__).parents[2]
ABOUT = {
    "machine": {"cores": "2"},
    "versions": {},
    "rounds": 3,
    "jobs": 100,
    "only": None,
    "notes": ["short"],
}


def samples() -> Samples:
    """Three rounds on a machine that gets slower in each, without Go."""
    found = Samples()
    for number, speed in enumerate((4.0, 2.0, 1.0)):
        found.add("work_100", "riverpy", number, 1.1 * speed)
        found.add("work_100", "bare", number, speed)
        found.add("pickup_p50_ms", "riverpy", number, 5 / speed)
        found.add("pickup_p50_ms", "bare", number, 2 / speed)
    return found


def test_ratios_are_taken_round_by_round() -> None:
    """A slower machine changes the rates but not the ratio. A round without the other figure is
    left out."""
    found = samples()
    assert found.ratio("work_100", "bare") == pytest.approx(1.1)
    assert found.spread("work_100", "bare") == [1.0, 4.0]
    found.add("work_100", "river_go", 2, 0.5)
    assert found.ratio("work_100", "river_go") == pytest.approx(2.2)
    assert found.ratio("work_1000", "bare") is None


def test_goals() -> None:
    """A goal is met, missed, or not measured."""
    found = samples()
    assert Goal("work_100", 1.0, "bare").verdict(found).met is True
    assert Goal("work_100", 1.2, "bare").verdict(found).met is False
    assert Goal("pickup_p50_ms", 2.0, "bare", is_least=False).verdict(found).met is False
    absent = Goal("work_100", 1.9, "river_go").verdict(found)
    assert absent.met is None
    assert absent.text == "at least 1.9 x river_go: no river_go"
    assert {goal.measure for goal in GOALS} <= {*TITLES}


def test_shape_of_the_json() -> None:
    """Each key has a figure or null for each competitor, even when nothing was measured."""
    for found in (samples(), Samples()):
        printed = json.loads(json.dumps(as_json(found, ABOUT)))
        assert [set(printed[key]) for key in KEYS] == [set(NAMES)] * len(KEYS)
        assert len(printed["goals"]) == len(GOALS)
    assert as_json(samples(), ABOUT)["work_100"]["bare"] == 2.0


def test_table() -> None:
    """The table has a line for each measurement, with the goals and their results."""
    text = as_text(samples(), ABOUT)
    assert "riverpy 2.2 (1.1 .. 4.4)   bare 2 (1 .. 4)" in text
    assert "goal at least 1 x bare: 1.10, met" in text
    assert "goal at most 2 x bare: 2.50, MISSED" in text
    assert all(title in text for title in TITLES.values())
    text = as_text(samples(), {**ABOUT, "only": ["tx_insert", "work_100"]})
    assert TITLES["tx_insert_django"] in text
    assert TITLES["work_1000"] not in text


def test_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown measurement or competitor is refused, with the list of known ones."""
    for wrong in (["--only", "works"], ["--competitors", "celery"], ["--rounds", "0"]):
        with pytest.raises(SystemExit):
            parse_arguments(wrong)
    assert "work_100" in capsys.readouterr().err


def test_transactions_are_compared_in_turns() -> None:
    """What an insert adds is the median of its differences to the transaction without a job in the
    same turn. An insert that fails is left out, with the reason."""
    timings = Timings([ALONE, "riverpy", "row"])
    turns = list(timings.run_turns(0))
    assert turns[:6] == [ALONE, "riverpy", "row", "riverpy", "row", ALONE]
    for alone, added in ((1.0, 0.1), (9.0, 0.2), (5.0, 0.3)):
        timings.add(ALONE, alone)
        timings.add("riverpy", alone + added)
    timings.leave_out("row", ImportError("no such\nmodule"))
    found = timings.result()
    assert found.us == pytest.approx({ALONE: 5e6, "riverpy": 2e5})
    assert found.reasons == {"row": "ImportError: no such"}


def test_table_of_transactions() -> None:
    """The table for the docs has a row for each kind of session, and a column for each insert that
    was measured, with the range of riverpy."""
    found = Samples()
    for number, us in enumerate((300.0, 310.0, 1500.0)):
        found.add("tx_insert_asyncpg", "riverpy", number, us)
        found.add("tx_insert_psycopg", "chancy", number, us)
    lines = make_table(as_json(found, ABOUT)).splitlines()
    assert lines[0] == "| session | riverpy | Chancy |"
    assert lines[2] == "| asyncpg | 310 µs (300 to 1,500) | – |"
    assert len(lines) == 2 + len(SESSIONS)


def test_small_run() -> None:
    """Standard output is one JSON object. A competitor that fails is null, and the reason is
    printed. A transaction of each kind of session is measured with and without the insert."""
    command = [sys.executable, "-m", "scripts.bench_compare", "--json", "--quick", "--jobs", "200"]
    only = "work_100,tx_insert_asyncpg,tx_insert_sqlalchemy_psycopg2"
    command += ["--rounds", "1", "--only", only, "--competitors", "riverpy,bare,chancy"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["work_100"]["riverpy"] > 0
    assert printed["work_100"]["bare"] > 0
    assert printed["work_100"]["river_go"] is None
    assert printed["work_1000"]["riverpy"] is None
    for measure in only.split(",")[1:]:
        names = ["alone", "row", "row_notify", "riverpy"]
        assert [name for name in names if printed[measure][name] is None] == [], done.stderr
