"""The dashboard: an ASGI application with pages about jobs, queues and workers.

`page.py` defines what a page is, and `change.py` what a form is that changes something. Each page
has a module in `pages/` and a template. `changes/` has the forms, and `api/` has the JSON API.
`app.py` lists the pages and forms.
"""
