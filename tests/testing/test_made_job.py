"""Jobs for tests of handlers, without a database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from riverpy import RawArgs
from riverpy.testing import make_job
from tests.testing.args import Invoice, Model, Payload, Welcome

if TYPE_CHECKING:
    from riverpy import Job


async def work(job: Job[Any]) -> None:
    """Record everything that a handler can record."""
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
    assert job.recorded_output == {"sent": True}
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
