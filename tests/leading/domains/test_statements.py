"""The statements of the leader of `default` while no domain owns a queue."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING

import anyio
import pytest

from riverpy._postgres.sql_files import (
    get_query,
    get_query_with_conditional_parts,
    load_statements,
    sql_directory,
)
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
    "index_set_timeouts",
    "index_list",
    "index_lock",
    "job_claim",
    "job_due",
    "job_due_times",
    "job_expired",
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
    "session_now",
    "periodic_unused",
    "queue_paused",
    "queue_upsert",
    "queue_unused",
    "session_is_read_only",
    "session_limit",
}
"""The statements that a client of `default` sends from its start to its stop, as the leader. None
of them needs the tables of domains."""
SHORT = timedelta(seconds=6)
OWN_TABLES = {"exec_exists", "exec_expired", "job_count_exists", "job_count_old_periods"}


DOMAIN_WORDS = re.compile(r"\b(riverpy_queue_owner|domain|settings)\b")
"""The table and the columns that the migration for domains adds."""


def texts(place: str | None) -> dict[str, str]:
    """Return the text of each statement in a schema, by its name."""
    files = [
        entry.name.removesuffix(".sql") for entry in sql_directory().joinpath("queries").iterdir()
    ]
    return {
        name: get_query(file, name, place).text for file in files for name in load_statements(file)
    }


def names_of(sent: list[Sent], schema: Schema) -> set[str]:
    """Return the names of the statements that were sent. A statement without a name is returned as
    its text. BEGIN, COMMIT and LISTEN are left out."""
    known = {text: name for place in (schema.name, None) for name, text in texts(place).items()}
    for parts in (frozenset[str](), frozenset({"leases"})):
        beat = get_query_with_conditional_parts(
            "riverpy_client", "client_heartbeat", schema.name, parts
        )
        known[beat.text] = "client_heartbeat"
    plain = ("BEGIN", "COMMIT", "LISTEN")
    return {known.get(text, text) for _, text in sent if not text.startswith(plain)}


@pytest.mark.parametrize("version", [3, 7], ids=["before-domains", "with-domains"])
async def test_default_leader_needs_no_domains(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    """A leader of `default` sends the same statements with and without the tables of domains. If
    the tables exist, the client also records once that it supports domains, and records when it
    stops. The leader reads the owners of queues once for all of its services, because the result is
    used for 5 minutes. Before that, it checks once whether the table of owners exists."""
    expected = SENT
    if version == 3:
        await Migrator(rig.url, schema=rig.schema.name, line="riverpy").down(target=3)
        expected = SENT | {"exec_exists", "job_count_exists", "owner_exists"}
    else:
        own = {"client_set_state", "member_mark_supports_domains", "owner_exists", "owner_read"}
        expected = SENT | OWN_TABLES | own
    sent = record_statements(monkeypatch)
    async with member(rig, "a", None, "default", dead_after=SHORT) as a:
        await a.until_leader()
        with anyio.fail_after(PATIENCE, reason="the leader did not send all statements"):
            while not names_of(sent, rig.schema) >= expected - {
                "leader_resign",
                "client_unregister",
            }:
                await anyio.sleep(0.02)
    assert names_of(sent, rig.schema) == expected
    reads = [one for one in sent if "riverpy_queue_owner" in one.text]
    assert len(reads) == len(expected & {"owner_exists", "owner_read"})
    assert not any("riverpy_lease" in one.text for one in sent if "LISTEN" not in one.text)


def test_statements_of_a_leader_name_no_domain() -> None:
    """The statements of a leader of `default` name no table or column of domains, so domains that
    do not exist cannot change what it does. One statement reads the column of clients through
    `to_jsonb`, which gives null where the column is missing."""
    known = texts(None)
    assert {name for name in SENT if DOMAIN_WORDS.search(known[name])} == {"election_status"}
    assert "to_jsonb(client) ->> 'domain'" in known["election_status"]
    assert DOMAIN_WORDS.search(known["owner_read"])
    assert DOMAIN_WORDS.search(known["member_mark_supports_domains"])
