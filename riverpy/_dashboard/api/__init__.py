"""The JSON API of the dashboard: `application.py` serves the API. `jobs.py`, `queues.py` and
`status.py` define the endpoints."""
