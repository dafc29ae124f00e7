"""Options to insert a job as if an earlier attempt had already completed some of its steps."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from riverpy import _json
from riverpy._names import CURSORS_METADATA_KEY, STEP_METADATA_KEY
from riverpy.insert_opts import InsertOpts


def resumable_after(opts: InsertOpts | None, step: str) -> InsertOpts:
    """Return options for a job whose earlier attempt has completed this step. The job skips it and
    all steps before it.

        job = make_job(Import(file="a.csv"), resumable_after(None, "fetch"))

    Args:
        opts: other options. They are not changed. None: no other options.
        step: the name of the step.
    """
    return _add_metadata(opts, {STEP_METADATA_KEY: step})


def resumable_at(opts: InsertOpts | None, step: str, cursor: object) -> InsertOpts:
    """Return options for a job whose earlier attempt failed in this step, after it set a cursor.
    The job skips the steps before, and runs this step with the cursor.

    Args:
        opts: other options. They are not changed. None: no other options.
        step: the name of the step.
        cursor: the cursor, as for `job.set_cursor`.

    Raises:
        ArgsError: the cursor has no JSON form.
    """
    value = json.loads(_json.encode(cursor))
    return _add_metadata(opts, {STEP_METADATA_KEY: step, CURSORS_METADATA_KEY: {step: value}})


def _add_metadata(opts: InsertOpts | None, metadata: dict[str, Any]) -> InsertOpts:
    opts = opts or InsertOpts()
    return msgspec.structs.replace(opts, metadata={**(opts.metadata or {}), **metadata})
