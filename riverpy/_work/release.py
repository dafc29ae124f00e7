"""Makes claimed jobs available again over a separate connection, when the process is about to
end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from riverpy._postgres.batch_sender import AdaptiveBatchSize, BatchSender, BatchStatement
from riverpy._postgres.driver import DATABASE_ERRORS, connect, use_raw_timestamps
from riverpy._postgres.jobs import ClaimKey, job_release
from riverpy._postgres.skipped_rows import SkippedRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._postgres.passwords import PasswordSource

RELEASE_TIMEOUT = 2.0
"""The timeout of the release, in seconds. It includes opening the connection and all statements."""
STATEMENT_TIMEOUT = "500ms"
"""The `statement_timeout` of the connection. It is short, so that one slow row does not use up
`RELEASE_TIMEOUT`."""


async def release_claims(
    url: str | None,
    schema: str | None,
    claim_keys: Sequence[ClaimKey],
    *,
    pooled: bool,
    password: PasswordSource | None = None,
) -> int:
    """Make claimed jobs available again, and return their number. Their attempts do not count
    towards `max_attempts`. If a row is slow or its update fails, the other rows are still released.

    Args:
        url: the URL of the database; None: the environment variables `PG*` are used.
        schema: the schema of River's tables; None: the search path decides.
        claim_keys: the claims to release.
        pooled: whether `url` is the address of a connection pooler.
        password: calls the user's function that returns the password; None: the password is in the
            URL or the environment.

    Raises:
        Exception: one of DATABASE_ERRORS, if no job was released.
    """
    if not claim_keys:
        return 0
    released = 0

    async def send_batch(batch: list[ClaimKey]) -> None:
        nonlocal released
        released += len(await job_release(connection, schema, batch))

    sender = BatchSender(
        BatchStatement(send_batch, get_row_id=lambda claim_key: claim_key),
        batch_size=AdaptiveBatchSize(len(claim_keys), RELEASE_TIMEOUT),
        skipped_rows=SkippedRows[ClaimKey](),
    )
    sender.add_missing_rows(claim_keys)
    try:
        with anyio.fail_after(RELEASE_TIMEOUT, reason="releasing jobs"):
            connection = await connect(
                url,
                application_name="riverpy release",
                session_settings={"lock_timeout": "500ms", "statement_timeout": STATEMENT_TIMEOUT},
                through_pooler=pooled,
                timeout=RELEASE_TIMEOUT,
                password=password,
            )
            try:
                await use_raw_timestamps(connection)
                try:
                    await sender.send_all_due_rows()
                except DATABASE_ERRORS:  # one row may have caused the error: try once more
                    await sender.send_all_due_rows()
            finally:
                connection.terminate()
    except DATABASE_ERRORS:
        if not released:
            raise
    return released
