"""What a leader of `default` sends where no domain has a queue: what it sent before there could be
any, and one question."""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING

import anyio
import pytest

from riverpy._postgres.sql_files import blocks, query, sql_directory
from riverpy.migrate import Migrator
from tests._statements import record_statements
from tests.leading.domains.members import member
from tests.work.rig import PATIENCE

if TYPE_CHECKING:
    from tests._database import Schema
    from tests._statements import Sent
    from tests.work.rig import Rig

SENT = {
    "client_heartbeat",
    "client_set_slots",
    "client_heartbeats",
    "client_unregister",
    "client_register",
    "index_artifacts",
    "index_limits",
    "index_list",
    "index_lock",
    "job_claim",
    "job_due",
    "job_running_of",
    "job_states_to_clean",
    "job_stuck",
    "leader_elect",
    "election_status",
    "leader_renew",
    "leader_resign",
    "migration_list",
    "migration_place",
    "notification_schemas",
    "notify",
    "periodic_exists",
    "periodic_now",
    "periodic_unused",
    "queue_paused",
    "queue_touch",
    "queue_unused",
    "session_is_read_only",
    "session_limit",
}
"""The blocks that the start, a term and the stop of a leader used before there were domains."""
DIGEST = "1007ad23a6376d04ae7b6eb8425a41baa55a2985dfb950fa980ecd897b8f9d98"
"""Of their texts, then."""
SHORT = timedelta(seconds=6)
EXECUTIONS = {"exec_exists", "exec_expired"}


def texts() -> dict[str, str]:
    """All blocks by their names."""
    files = [
        entry.name.removesuffix(".sql") for entry in sql_directory().joinpath("queries").iterdir()
    ]
    return {name: text for file in files for name, text in blocks(file).items()}


def names_of(sent: list[Sent], schema: Schema) -> set[str]:
    """The blocks that were sent; of what is none the text, but for what begins and ends a
    transaction or listens."""
    known = {
        query(entry.name.removesuffix(".sql"), name, place).text: name
        for entry in sql_directory().joinpath("queries").iterdir()
        for name in blocks(entry.name.removesuffix(".sql"))
        for place in (schema.name, None)
    }
    plain = ("BEGIN", "COMMIT", "LISTEN")
    return {known.get(text, text) for _, text in sent if not text.startswith(plain)}


@pytest.mark.parametrize("version", [3, 7], ids=["before-domains", "with-domains"])
async def test_default_leader_is_as_it_was(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """Without a domain nothing changes, to the text of each statement, with and without the tables
    of domains. Where these are a client says once that it knows of them, and whether it is
    stopping, and the leader asks whose the queues are, once
    for all of its services, else whether the tables have come: while no domain has a queue, the
    answer serves for 5 minutes."""
    expected = SENT
    if version == 3:
        await Migrator(rig.url, schema=rig.schema.name, line="riverpy").down(target=3)
        expected = SENT | {"exec_exists", "owner_exists"}
    else:
        expected = SENT | EXECUTIONS | {"client_set_state", "member_mark_aware", "owner_read"}
    sent = record_statements(monkeypatch)
    async with member(rig, "a", None, "default", dead_after=SHORT) as a:
        await a.leads()
        with anyio.fail_after(PATIENCE, reason="the leader does not send what it did"):
            while not names_of(sent, rig.schema) >= expected - {
                "leader_resign",
                "client_unregister",
            }:
                await anyio.sleep(0.02)
    assert names_of(sent, rig.schema) == expected
    asked = [one for one in sent if "riverpy_queue_owner" in one.text]
    assert len(asked) == 1
    assert not any("riverpy_lease" in one.text for one in sent if "LISTEN" not in one.text)


def test_statements_of_a_leader_are_what_they_were() -> None:
    """Without a domain nothing changes: these texts are those of before there were domains. Who
    changes one on purpose takes over the new digest."""
    known = texts()
    told = "\n".join(f"{name}: {known[name]}" for name in sorted(SENT))
    assert hashlib.sha256(told.encode()).hexdigest() == DIGEST
