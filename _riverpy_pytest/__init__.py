"""The pytest plugin of riverpy: a database and a client for each test. See docs/testing.md.

pytest imports this package at the start of every run in an environment where riverpy is installed.
The package is not part of `riverpy`, because `import riverpy` takes longer than the start of
pytest. A fixture imports riverpy when a test first uses the fixture.

    hooks.py                the option --riverpy-url, and the number of the run
    databases.py            the server, the database of the tests, and what tests leave in it
    settings.py             the fixtures that users override
    async_fixtures.py       riverpy_connection, riverpy_session, riverpy_client, riverpy_jobs, …
    blocking_fixtures.py    riverpy_sync_session, riverpy_sync_client
    event_loops.py          finds the event loop of a test
"""

from __future__ import annotations

pytest_plugins = [
    "_riverpy_pytest.event_loops",
    "_riverpy_pytest.databases",
    "_riverpy_pytest.settings",
    "_riverpy_pytest.async_fixtures",
    "_riverpy_pytest.blocking_fixtures",
    "_riverpy_pytest.hooks",
]
