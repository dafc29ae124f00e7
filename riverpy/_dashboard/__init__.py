"""The dashboard: an ASGI application with pages about jobs, queues and workers.

`page.py` says what a page is. Each page is a module `…_page.py` and a template; `app.py` lists the
pages."""
