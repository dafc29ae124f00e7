"""Options that make a test's job start as if an earlier attempt had completed some of its steps."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from riverpy import _json
from riverpy._names import CURSORS_METADATA_KEY, STEP_METADATA_KEY
from riverpy.insert_opts import InsertOpts


def resumable_after(opts: InsertOpts | None, step: str) -> InsertOpts:
    """Return options for a job that continues after the step `step`. The job skips this step and
    all steps before it, as if an earlier attempt had completed them.

        job = make_job(Import(file="a.csv"), resumable_after(None, "fetch"))

    Args:
        opts: other options to include in the result. None: no other options.
        step: the name of the step.
    """
    return _add_metadata_to_opts(opts, {STEP_METADATA_KEY: step})


def resumable_at(opts: InsertOpts | None, step: str, cursor: object) -> InsertOpts:
    """Return options for a job that continues in the step `step` with a cursor. The job skips all
    earlier steps and runs this step with the cursor, as if an earlier attempt had failed in it.

    Args:
        opts: other options to include in the result. None: no other options.
        step: the name of the step.
        cursor: the cursor that the earlier attempt set with `job.set_cursor`.

    Raises:
        ArgsError: the cursor cannot be stored as JSON.
    """
    value = json.loads(_json.encode(cursor))
    return _add_metadata_to_opts(
        opts, {STEP_METADATA_KEY: step, CURSORS_METADATA_KEY: {step: value}}
    )


def _add_metadata_to_opts(opts: InsertOpts | None, metadata: dict[str, Any]) -> InsertOpts:
    opts = opts or InsertOpts()
    return msgspec.structs.replace(opts, metadata={**(opts.metadata or {}), **metadata})
