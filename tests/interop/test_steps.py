"""Steps of jobs in each language: what an attempt leaves, and what the next one does with it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest

from tests.interop.stepping import Spec, steps
from tests.interop.test_jobs import same_row
from tests.interop.working import LANGUAGES, OTHER

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.interop.callers import Caller
    from tests.interop.working import Fleet, Worker

    Callers = dict[str, Caller]

EITHER = pytest.mark.parametrize("language", LANGUAGES)
STEP, CURSOR = "river:resumable_step", "river:resumable_cursor"
FAILS = "no luck"


def plain(name: str, does: str = "") -> Spec:
    """Return a step without a cursor."""
    return Spec(name, does)


def rows(name: str, does: str = "", cursor: str = "any") -> Spec:
    """Return a step with a cursor."""
    return Spec(name, does, cursor)


class Case(NamedTuple):
    """The steps of a job, what is stored before its attempt, and what is expected after it."""

    steps: list[Spec]
    then: str
    stored: dict[str, Any]
    ran: list[Any]
    """The names of the steps that ran, with the cursor if there was one."""
    left: dict[str, Any]
    error: str | None = FAILS

    @property
    def event(self) -> str:
        """The event of the end of the attempt."""
        if self.error is None:
            return "job_snoozed" if "snoozes" in self.left else "job_completed"
        return "job_cancelled" if self.error.startswith("JobCancelError") else "job_failed"


CASES = {
    # what is stored
    "no step": Case([plain("a", "fail")], "", {}, ["a"], {}),
    "one step": Case([plain("a"), plain("b", "fail")], "", {}, ["a", "b"], {STEP: "a"}),
    "success": Case([plain("a"), rows("b", "set=1")], "", {}, ["a", "b"], {}, None),
    "cursor": Case(
        [plain("a"), rows("b", 'set={"n":[1]} fail')],
        "",
        {},
        ["a", "b"],
        {STEP: "a", CURSOR: {"b": {"n": [1]}}},
    ),
    "cursor of the first step": Case([rows("a", "set=5 fail")], "", {}, ["a"], {CURSOR: {"a": 5}}),
    "used cursor": Case([rows("a", "set=5")], "fail", {}, ["a"], {STEP: "a", CURSOR: None}),
    "snooze": Case(
        [plain("a"), rows("b", "set=5 snooze-once")],
        "",
        {},
        ["a", "b"],
        {STEP: "a", CURSOR: {"b": 5}, "snoozes": 1},
        None,
    ),
    "cancel": Case(
        [plain("a"), rows("b", "set=5 cancel")],
        "",
        {},
        ["a", "b"],
        {STEP: "a", CURSOR: {"b": 5}},
        f"JobCancelError: {FAILS}",
    ),
    # what the next attempt does
    "stored step": Case(
        [plain("a"), plain("b"), plain("c")], "fail", {STEP: "b"}, ["c"], {STEP: "c"}
    ),
    "stored step with cursor": Case(
        [plain("a"), rows("b"), plain("c")],
        "fail",
        {STEP: "b", CURSOR: {"b": 5}},
        [["b", 5], "c"],
        {STEP: "c", CURSOR: None},
    ),
    "stored step without its cursor": Case(
        [rows("b"), plain("c")],
        "fail",
        {STEP: "b", CURSOR: {"x": 5}},
        ["c"],
        {STEP: "c", CURSOR: {"x": 5}},
    ),
    "cursor after the stored step": Case(
        [plain("a"), plain("b"), rows("c", "fail")],
        "",
        {STEP: "a", CURSOR: {"c": 5}},
        ["b", ["c", 5]],
        {STEP: "b", CURSOR: {"c": 5}},
    ),
    "cursor before the stored step": Case(
        [rows("a"), plain("b"), plain("c")],
        "fail",
        {STEP: "b", CURSOR: {"a": 5}},
        ["c"],
        {STEP: "c", CURSOR: {"a": 5}},
    ),
    "failure before the stored step": Case(
        [plain("a", "fail"), plain("b"), plain("c")], "", {STEP: "b"}, ["c"], {STEP: "b"}, None
    ),
    "cursor without a step": Case(
        [plain("a"), rows("b", "set=6 fail")],
        "",
        {CURSOR: {"b": 5}},
        ["a", ["b", 5]],
        {STEP: "a", CURSOR: {"b": 6}},
    ),
    "failure before the cursor without a step": Case(
        [plain("a"), plain("b", "fail"), rows("c")],
        "",
        {CURSOR: {"c": 5}},
        ["a", "b"],
        {CURSOR: {"c": 5}},
    ),
    "one of two cursors without a step": Case(
        [rows("a")], "fail", {CURSOR: {"a": 5, "b": 6}}, [["a", 5]], {CURSOR: {"a": 5, "b": 6}}
    ),
    "null as a cursor": Case(
        [rows("a")], "fail", {CURSOR: {"a": None}}, ["a"], {STEP: "a", CURSOR: None}
    ),
    # values of another form
    "empty step": Case([plain("a")], "fail", {STEP: ""}, ["a"], {STEP: "a"}),
    "step that is no text": Case([plain("a", "fail")], "", {STEP: 7}, ["a"], {STEP: 7}),
    "cursors that are a text": Case(
        [rows("a")], "fail", {CURSOR: "x"}, ["a"], {STEP: "a", CURSOR: "x"}
    ),
    "cursors that are null": Case(
        [rows("a")], "fail", {CURSOR: None}, ["a"], {STEP: "a", CURSOR: None}
    ),
    "no cursors": Case([rows("a")], "fail", {CURSOR: {}}, ["a"], {STEP: "a", CURSOR: {}}),
    "cursors that are a list": Case(
        [plain("a")], "", {CURSOR: [1]}, [], {CURSOR: [1]}, "river: unmarshal resumable cursors: "
    ),
    "cursor of another type": Case(
        [rows("a", cursor="int")],
        "",
        {CURSOR: {"a": "x"}},
        [],
        {CURSOR: {"a": "x"}},
        'river: unmarshal resumable cursor for step "a": ',
    ),
    # mistakes
    "same name": Case(
        [plain("a"), plain("b"), plain("a")],
        "",
        {},
        ["a", "b"],
        {STEP: "b"},
        'river: duplicate resumable step name "a"',
    ),
    "same name as a skipped step": Case(
        [plain("a"), plain("a")],
        "",
        {STEP: "a"},
        [],
        {STEP: "a"},
        'river: duplicate resumable step name "a"',
    ),
    "unknown stored step": Case(
        [plain("a")],
        "",
        {STEP: 'g"e'},
        [],
        {STEP: 'g"e'},
        'river: resumable step "g\\"e" not found in Worker',
    ),
    "unknown stored step and an error": Case(
        [plain("a")], "fail", {STEP: "gone"}, [], {STEP: "gone"}
    ),
    "unknown cursor": Case(
        [plain("a"), rows("b")],
        "",
        {CURSOR: {"y": 5, "x": 1}},
        ["a", "b"],
        {CURSOR: {"y": 5, "x": 1}},
        'river: resumable cursor step "x" not found in Worker',
    ),
    "unknown cursor after a step": Case(
        [plain("a"), rows("b")],
        "",
        {STEP: "a", CURSOR: {"y": 5}},
        ["b"],
        {STEP: "a", CURSOR: {"y": 5}},
        None,
    ),
    "cursor of a plain step": Case(
        [plain("a")],
        "",
        {CURSOR: {"a": 5}},
        [],
        {CURSOR: {"a": 5}},
        'river: resumable cursor step "a" requires a cursor step',
    ),
    "cursor of a plain step after a step": Case(
        [plain("a"), plain("b")],
        "fail",
        {STEP: "a", CURSOR: {"b": 5}},
        ["b"],
        {STEP: "b", CURSOR: {"b": 5}},
    ),
    "nested": Case(
        [rows("a", "set=1 nest")],
        "",
        {},
        ["a"],
        {CURSOR: {"a": 1}},
        "river: resumable steps cannot be nested",
    ),
    # stored in a transaction
    "committed step": Case(
        [plain("a"), plain("b", "tx=commit fail")], "", {}, ["a", "b"], {STEP: "b", CURSOR: None}
    ),
    "step that was rolled back": Case(
        [plain("a"), plain("b", "tx=rollback fail")], "", {STEP: "a"}, ["b"], {STEP: "a"}
    ),
    "rollback before the end of a step": Case(
        [plain("a"), plain("b", "tx=rollback")], "fail", {}, ["a", "b"], {STEP: "b"}
    ),
    "committed cursor": Case(
        [plain("a"), rows("b", "set=5 tx=commit fail")],
        "",
        {},
        ["a", "b"],
        {STEP: "b", CURSOR: {"b": 5}},
    ),
    "cursor that was rolled back": Case(
        [plain("a"), rows("b", "set=6 tx=rollback fail")],
        "",
        {STEP: "b", CURSOR: {"b": 5}},
        [["b", 5]],
        {STEP: "b", CURSOR: {"b": 5}},
    ),
    "cursor after the committed one": Case(
        [plain("a"), rows("b", "set=5 tx=commit set=6 fail")],
        "",
        {},
        ["a", "b"],
        {STEP: "b", CURSOR: {"b": 6}},
    ),
    "committed cursor of a completed step": Case(
        [rows("b", "set=5 tx=commit")], "fail", {}, ["b"], {STEP: "b", CURSOR: None}
    ),
    "transaction before a cursor without a step": Case(
        [plain("a", "tx=commit"), rows("b")],
        "",
        {CURSOR: {"b": 5}},
        ["a"],
        {CURSOR: {"b": 5}},
        'river: resumable checkpoint cannot precede saved cursor step "b"',
    ),
}


@EITHER
async def test_one_attempt(language: str, callers: Callers, fleet: Fleet, schema: Schema) -> None:
    """An attempt runs the steps that River would run, leaves the same keys in the metadata, and
    fails with the same texts: duplicate, unknown and nested steps, cursors of other types, and
    values of another form. Cursors that are a list fail it before its code runs (CF-053,
    resumable_validation)."""
    async with fleet.worker(language, queues={"default": 50}) as worker:
        ids = {
            name: (
                await callers["python"].insert(
                    steps(*case.steps, then=case.then, max_attempts=1, metadata=case.stored)
                )
            )["id"]
            for name, case in CASES.items()
        }
        for name, case in CASES.items():
            await worker.until(case.event, id=ids[name])
        found = {name: await _outcome(worker, schema, job_id) for name, job_id in ids.items()}
    expected = {name: (case.ran, case.left) for name, case in CASES.items()}
    assert {name: one[:2] for name, one in found.items()} == expected
    for name, case in CASES.items():
        error = found[name][2]
        assert (error is None) if case.error is None else (case.error in error), (name, error)


async def _outcome(
    worker: Worker, schema: Schema, job_id: int
) -> tuple[list[Any], dict[str, Any], str | None]:
    row = await schema.fetchrow("SELECT * FROM river_job WHERE id = $1", job_id)
    assert row is not None
    ran = [
        line["name"] if line["cursor"] is None else [line["name"], line["cursor"]]
        for line in worker.passed("step", id=job_id)
    ]
    errors = [msgspec.json.decode(text)["error"] for text in row["errors"] or ()]
    return ran, json.loads(row["metadata"]), errors[-1] if errors else None


@EITHER
async def test_retry(language: str, callers: Callers, fleet: Fleet, schema: Schema) -> None:
    """A step that completed at attempt 1 is not run at attempt 2, and its name stays in the row
    after the job has completed (CF-052, resumable_retry)."""
    async with fleet.worker(language, poll=0.2) as worker:
        job = await callers[OTHER[language]].insert(
            steps(plain("first"), plain("second", "fail@1"), max_attempts=2)
        )
        await worker.until("job_failed", id=job["id"])
        await worker.until("job_completed", id=job["id"])
    row = await same_row(callers, schema, job["id"])
    assert (row["state"], row["attempt"], len(row["errors"])) == ("completed", 2, 1)
    assert json.loads(row["metadata"]) == {STEP: "first"}
    ran = [(line["attempt"], line["name"]) for line in worker.passed("step", id=job["id"])]
    assert ran == [(1, "first"), (1, "second"), (2, "second")]


@EITHER
async def test_interruption(language: str, callers: Callers, fleet: Fleet, schema: Schema) -> None:
    """A job that is interrupted by a hard stop, cancelled or snoozed leaves its step and cursor,
    and the other language continues there. An exception leaves them too, but a panic of Go does
    not (CF-101)."""
    later = {"retry_ms": 3_600_000}
    words = {
        "stop": "signal",
        "cancel": "signal",
        "snooze": "snooze-once",
        "panic": "panic@1",
    }
    async with fleet.worker(language) as worker:
        ids = {
            name: (
                await callers[OTHER[language]].insert(
                    steps(plain("one"), rows("two", f"set=5 {word}"), message="go", metadata=later)
                )
            )["id"]
            for name, word in words.items()
        }
        for job_id in ids.values():
            await worker.until("step", id=job_id, name="two")
        await callers[OTHER[language]].cancel(ids["cancel"])
        await worker.until("job_cancelled", id=ids["cancel"])
        await worker.until("job_snoozed", id=ids["snooze"])
        await worker.until("job_failed", id=ids["panic"])
        worker.stop_hard()
        await worker.until("job_interrupted", id=ids["stop"])
        await worker.stopped()
    left = {STEP: "one", CURSOR: {"two": 5}} | later
    found = {name: await same_row(callers, schema, job_id) for name, job_id in ids.items()}
    metadata = {name: json.loads(row["metadata"]) for name, row in found.items()}
    metadata["cancel"].pop("cancel_attempted_at")
    assert metadata == {
        "stop": left,
        "cancel": left,
        "snooze": {"snoozes": 1} | left,
        "panic": later if language == "go" else left,
    }
    states = {name: (row["state"], row["attempt"], row["errors"]) for name, row in found.items()}
    assert states["stop"] == ("available", 0, [])
    assert states["snooze"] == ("scheduled", 0, [])
    assert (states["cancel"][0], states["panic"][0]) == ("cancelled", "retryable")
    async with fleet.worker(OTHER[language]) as other:
        other.release("go")
        for name, job_id in ids.items():
            if name != "stop":
                await callers["python"].retry(job_id)
            await other.until("job_completed", id=job_id)
            ran = [[line["name"], line["cursor"]] for line in other.passed("step", id=job_id)]
            begins_again = [["one", None], ["two", None]]
            is_lost = name == "panic" and language == "go"
            assert ran == (begins_again if is_lost else [["two", 5]]), name


async def test_attempts_that_go_round(callers: Callers, fleet: Fleet, schema: Schema) -> None:
    """The attempts of one job go round three processes, and one of them is in Go. Each step
    completes once, and each attempt gets the cursor that the last one has set (CF-088,
    multi_engine_resumable_cursor)."""
    async with (
        fleet.process("python", queues={"q0": 1}) as first,
        fleet.process("go", queues={"q1": 1}) as second,
        fleet.process("python", queues={"q2": 1}) as third,
    ):
        workers = (first, second, third)
        job = await callers["go"].insert(
            steps(
                plain("a", "fail@1"),
                rows("b", "set=1 fail@2"),
                rows("c", "set=2 fail@3", cursor="int"),
                plain("d", "fail@4"),
                queue="q0",
                metadata={"retry_ms": 3_600_000},
            )
        )
        ran: list[Any] = []
        for attempt in range(1, 6):
            worker = workers[(attempt - 1) % len(workers)]
            await worker.until("job_completed" if attempt == 5 else "job_failed", id=job["id"])
            ran += [
                (attempt, line["name"], line["cursor"])
                for line in worker.passed("step", id=job["id"], attempt=attempt)
            ]
            queue = f"q{attempt % len(workers)}"
            await schema.execute("UPDATE river_job SET queue = $1 WHERE state = 'retryable'", queue)
            if attempt < 5:
                await callers["python"].retry(job["id"])
    row = await same_row(callers, schema, job["id"])
    assert (row["state"], row["attempt"], len(row["errors"])) == ("completed", 5, 4)
    assert row["attempted_by"] == [one.id for one in (*workers, first, second)]
    assert ran == [
        (1, "a", None),
        (2, "a", None),
        (2, "b", None),
        (3, "b", 1),
        (3, "c", None),
        (4, "c", 2),
        (4, "d", None),
        (5, "d", None),
    ]
