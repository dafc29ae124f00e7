"""The dashboard: an ASGI application with pages about jobs, queues and workers.

`page.py` defines the class `Page`. Each page has a module in `pages/` and a template. `change.py`
defines the class `ChangeRoute`, for forms with which the user changes something, such as a job or a
queue. `changes/` has these forms, and `api/` has the JSON API. `app.py` lists the pages and forms.
"""
