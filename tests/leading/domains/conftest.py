"""Clients of leader domains on one schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.work.rig import Rig

if TYPE_CHECKING:
    from tests._database import Schema


@pytest.fixture
def rig(schema: Schema) -> Rig:
    """A rig with a job, for a client needs one."""
    rig = Rig(schema)

    @rig.job
    async def nothing(job: Any) -> None:
        pass

    return rig
