"""Records of what a worker of `scripts/chaos work` and its child processes do, one line of a file
each."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec

import riverpy  # noqa: TC001 (a handler's annotation is read at run time)
from riverpy.job import JobColumn
from tests.kit.chaos_jobs import ChaosSettings, Processed
from tests.kit.fleet import SETTINGS_VARIABLE
from tests.kit.work_history import Act

ALIVE_INTERVAL = 0.05
"""Seconds between two records of a child process that runs a job."""

settings = msgspec.json.decode(os.environ[SETTINGS_VARIABLE], type=ChaosSettings)
_acts = os.open(settings.acts, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
# Child processes inherit the variable.
_worker_pid = os.environ.setdefault("CHAOS_WORKER_PID", str(os.getpid()))
_process = f"{settings.name}:{_worker_pid}"
_encoder = msgspec.json.Encoder()


def record(what: str, job: riverpy.JobRow | None = None, **values: Any) -> None:
    """Record an act with the current time."""
    if job is not None:
        claim = job.get_encoded_values()[JobColumn.ATTEMPTED_AT]
        values |= {"job_id": job.id, "attempt": job.attempt, "claim": claim, "kind": job.kind}
    act = Act(process=_process, what=what, at=time.time(), **values)
    os.write(_acts, _encoder.encode(act) + b"\n")


class Attempt:
    """Records the start and the end of an attempt."""

    def __init__(self, job: riverpy.Job[Any]) -> None:
        self._job = job

    def __enter__(self) -> None:
        record("begin", self._job, number=self._job.args.number)

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        how = "returned" if error_type is None else error_type.__name__
        record("end", self._job, number=self._job.args.number, how=how)


def work_in_process(job: riverpy.Job[Processed]) -> None:
    """Run for a while, and record again and again that the process is alive."""
    with Attempt(job):
        end = time.monotonic() + job.args.seconds
        while (now := time.monotonic()) < end:
            record("alive", job, monotonic=now)
            time.sleep(ALIVE_INTERVAL)
