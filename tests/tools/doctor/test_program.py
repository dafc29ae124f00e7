"""What doctor reports of a given program."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tests.tools.doctor.conftest import (
    insert_job,
    run_text,
)

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests._database import Schema
    from tests.tools.doctor.conftest import Doctor

PROGRAM = """
from typing import ClassVar
import msgspec, riverpy

class Sell(msgspec.Struct):
    kind: ClassVar[str] = "sell"

workers = riverpy.Workers()

@workers.job
async def sell(job: riverpy.Job[Sell]) -> None: ...

queues = {"default": riverpy.QueueConfig(max_workers=1)}
client = riverpy.Client("postgres://nowhere.invalid/x", workers=workers, queues=queues)
everywhere = riverpy.Client("postgres://nowhere.invalid/x", workers=workers)
"""


async def test_kinds_that_a_program_lacks(
    schema: Schema, doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a given program, the kinds of waiting jobs that it lacks are reported, whatever the live
    clients have."""
    (tmp_path / "shop_of_doctor.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    await insert_job(schema, kind="sell")
    await insert_job(schema, kind="resize")
    await insert_job(schema, queue="images", kind="crop")
    report = await doctor("shop_of_doctor:client")
    assert "for example job 2" in report.one("code", "warn")["text"]
    assert 'shop_of_doctor:client lacks kind "resize"' in report.one("code", "warn")["text"]
    assert report.one("code", "ok")["data"] == {
        "kinds": ["sell"],
        "queues": ["default"],
        "missing_kinds": ["resize"],
    }
    report = await doctor("shop_of_doctor:everywhere")
    assert report.one("code", "ok")["data"]["missing_kinds"] == ["crop", "resize"]
    assert (await run_text("shop_of_doctor:nothing", "--database-url", schema.url))[0] == 2
    assert not (await doctor()).named("code")
