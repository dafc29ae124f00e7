"""Jobs for tests of handlers, without a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from riverpy import ArgsError, ClientStateError, ConfigError, InsertOpts, RawArgs
from riverpy.testing import make_job, resumable_after, resumable_at
from tests.testing.args import Invoice, Model, Payload, Welcome

if TYPE_CHECKING:
    from riverpy import Job


async def work(job: Job[Any]) -> None:
    """Record everything that a handler can record."""
    await job.save_output({"sent": False})
    job.record_output({"sent": True})
    job.set_metadata("provider", "smtp")
    job.progress(1, 2, "half")
    job.log.debug("attempt %d", job.attempt)


async def test_a_made_job_has_what_a_handler_uses() -> None:
    """The columns and the options of the args class are set, and what the handler records can be
    read."""
    job = make_job(Welcome(1), attempt=2, tags=["new"])
    assert (job.queue, job.max_attempts, job.attempt, job.tags) == ("mail", 7, 2, ["new"])
    await work(job)
    assert (job.saved_outputs, job.recorded_output) == ([{"sent": False}], {"sent": True})
    assert job.recorded_metadata == {"provider": "smtp"}
    assert str(job.recorded_progress) == "1 of 2 (50 %): half"
    assert "DEBUG attempt 2" in job.recorded_log


@pytest.mark.parametrize(
    ("args", "decoded"),
    [
        (Welcome(1), Welcome(1)),
        (Invoice(1), Invoice(1)),
        (Payload(n=[1]), Payload(n=[1])),
        (Model(user_id=1), Model(user_id=1)),
        (RawArgs("any", '{"n": 1}'), {"n": 1}),
    ],
)
def test_args_are_encoded_and_decoded(args: Any, decoded: object) -> None:
    """The handler gets the args as a worker would decode them, and not the same object."""
    job = make_job(args)
    assert job.args == decoded
    assert job.args is not args


async def copy(job: Job[Any]) -> list[str]:
    """Run steps, of which the last two fail in the first attempt. Return the steps that ran."""
    ran: list[str] = []

    async def fetch() -> str:
        ran.append("fetch")
        return "data"

    async def store(cursor: int | None, data: str) -> None:
        ran.append(f"store from {cursor}")
        job.set_cursor((cursor or 0) + 10)
        await job.checkpoint()
        if job.attempt == 1:
            raise OSError

    data = await job.step("fetch", fetch, keep=True)
    await job.step("store", store, data, cursor=int)
    return ran


async def test_steps_run_in_memory_and_continue() -> None:
    """Steps need no database. The next attempt continues, and so does a job that is made at a
    step."""
    job = make_job(Welcome(1))
    with pytest.raises(OSError):
        await copy(job)
    retry = job.make_next_attempt("OSError")
    assert (retry.attempt, [error.error for error in retry.errors]) == (2, ["OSError"])
    assert await copy(retry) == ["store from 10"]
    opts = InsertOpts(metadata={"a": 1}, queue="slow")
    at_cursor = make_job(Welcome(1), resumable_at(opts, "store", 40), attempt=2)
    assert (at_cursor.queue, at_cursor.metadata["a"]) == ("slow", 1)
    assert await copy(at_cursor) == ["fetch", "store from 40"]  # no result was kept
    after = make_job(Welcome(1), resumable_after(None, "store"), attempt=2)
    assert await copy(after) == ["fetch"]


@pytest.mark.parametrize(
    ("columns", "error", "text"),
    [
        ({"attempt": "2"}, TypeError, "attempt takes an int, got '2'"),
        ({"id": True}, TypeError, "id takes an int, got True"),
        ({"id": 0}, ConfigError, r"id is 1 to 2\^63 - 1, got 0"),
        ({"attempt": 0}, ConfigError, r"attempt is 1 to 7 \(max_attempts\) for .* running, got 0"),
        ({"attempt": 8, "state": "retryable"}, ConfigError, "attempt is 0 to 7 .* got 8"),
        ({"errors": "boom"}, TypeError, "errors takes a list of AttemptError or str, got 'boom'"),
        ({"attempted_by": [1]}, TypeError, r"attempted_by takes a list of str, got \[1\]"),
        ({"created_at": "now"}, TypeError, "created_at takes a datetime, got 'now'"),
        ({"state": "done"}, ValueError, "state is one of available, .* got 'done'"),
        ({"metadata": "x"}, ArgsError, "metadata: must be a JSON object"),
    ],
)
def test_wrong_columns(columns: dict[str, Any], error: type[Exception], text: str) -> None:
    """A column with a wrong type, a number out of its range or an unknown state is refused."""
    with pytest.raises(error, match=text):
        make_job(Welcome(1), **columns)


@pytest.mark.parametrize(
    ("state", "errors", "attempt"),
    [
        ("available", 2, 2),
        ("running", 2, 3),
        ("retryable", 2, 2),
        ("discarded", 2, 2),
        ("discarded", 0, 1),
        ("completed", 2, 3),
    ],
)
def test_attempt_fits_state(state: str, errors: int, attempt: int) -> None:
    """Without a given attempt a job has as many attempts as the same row would have in a table: the
    last error of a failed job is that of its last attempt."""
    job = make_job(Welcome(1), state=state, errors=["no"] * errors)  # type: ignore
    assert job.attempt == attempt


async def test_what_needs_a_database_says_so() -> None:
    """Calls with a transaction and wrong arguments are refused, and a test can cancel a job."""
    job = make_job(Welcome(1), errors=["first"], state="retryable")  # type: ignore
    assert (job.attempt, job.error_count) == (1, 1)
    for call in (job.complete_tx, job.checkpoint):
        with pytest.raises(ClientStateError, match=r"use riverpy.testing.TestWorker"):
            await call(object())  # type: ignore
    with pytest.raises(ClientStateError, match="attempt 7 of 7 is the last one"):
        make_job(Welcome(1), attempt=7).make_next_attempt()
    job.cancel()
    assert job.cancelled.is_set()
    with pytest.raises(TypeError, match=r"user_id is a field of the args"):
        make_job(Welcome(1), user_id=2)  # type: ignore
    with pytest.raises(TypeError, match=r"a job has no column 'attempts'"):
        make_job(Welcome(1), attempts=2)  # type: ignore
    with pytest.raises(ArgsError):
        make_job(Welcome("one"))  # type: ignore
