"""The dashboard: an ASGI application with pages about jobs, queues and workers.

`page.py` defines the class of pages. `change.py` defines the class of forms with which the user
changes something, such as a job or a queue. Each page has a module in `pages/` and a template.
`changes/` has the forms, and `api/` has the JSON API. `app.py` lists the pages and forms.
"""
