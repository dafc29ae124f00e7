"""The dashboard: an ASGI application with pages about jobs, queues and workers.

`page.py` defines what a page is. Each page has a module `…_page.py` and a template. `app.py` lists
the pages.
"""
