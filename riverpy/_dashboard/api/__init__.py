"""The JSON API of the dashboard: `application.py` serves it, `jobs.py`, `queues.py` and `status.py`
define its endpoints."""
